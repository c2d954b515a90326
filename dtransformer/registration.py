"""The classes that `.keras` files name: Keras knows them from the import of `dtransformer` on.

Keras and the classes themselves are imported when they are first needed.
"""

import importlib
import sys

import wrapt

# Those with `@register`.
CLASSES = """
    AllHeadsRMSNorm AttentionMask CausalLM CrossEntropyLoss Dropout EncoderDecoderLM FeedForward
    FixedSparseAttention FlattenedInitializer LatentAttention LayerNorm Linear Masked MaskedLM
    MaskedLMHead MoE MultiHeadAttention PaddedInitializer PoolingHead
    PositionEmbedding RMSNorm RelativePositionTable Router SequenceHead
    StackedInitializer TokenHead TokenTypeEmbedding Trainer Transformer TransformerDecoder
    TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer TranslationTransformer
    VocabEmbedding VocabHead WarmupConstant WarmupCosine WarmupInverseSquareRoot WarmupLinear
    WarmupRestarts WarmupStableDecay
""".split()


class _Later:
    """Stands for a class until a file has one."""

    def __init__(self, name):
        self._name = name

    def from_config(self, config):
        for room in ("layers", "models", "trainers", "trainers.lr_schedules"):
            importlib.import_module(f"dtransformer.{room}")  # which registers the class itself
        known = sys.modules["keras"].saving.get_custom_objects()
        return known[self._name].from_config(config)


def _tell(keras):
    known = keras.saving.get_custom_objects()
    for name in CLASSES:
        known.setdefault(f"dtransformer>{name}", _Later(f"dtransformer>{name}"))


def register_with_keras() -> None:
    """Let Keras know the classes: now, where it is imported, else when it is."""
    wrapt.register_post_import_hook(_tell, "keras")
