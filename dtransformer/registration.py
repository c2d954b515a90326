"""Register the classes in `.keras` files with Keras when `dtransformer` is imported.

Keras and the classes are imported only when they are needed.
"""

import importlib
import sys

import wrapt

# All classes with the decorator `@register`.
CLASSES = """
    AllHeadsRMSNorm AttentionMask CausalLM CrossEntropyLoss DistillationLoss Dropout
    EncoderDecoderLM FeedForward FixedSparseAttention FlattenedInitializer LatentAttention LayerNorm
    Linear Masked MaskedLM MaskedLMHead MoE MultiHeadAttention Muon PaddedInitializer PoolingHead
    PositionEmbedding RMSNorm RelativePositionTable Router SequenceHead
    StackedInitializer TokenHead TokenTypeEmbedding Trainer Transformer TransformerDecoder
    TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer TranslationTransformer
    VocabEmbedding VocabHead WarmupConstant WarmupCosine WarmupInverseSquareRoot WarmupLinear
    WarmupRestarts WarmupStableDecay
""".split()


class _Placeholder:
    """Placeholder for a class that is imported when a file contains it."""

    def __init__(self, name):
        self._name = name

    def from_config(self, config):
        for room in ("layers", "models", "trainers", "trainers.lr_schedules"):
            importlib.import_module(f"dtransformer.{room}")  # The import registers the class.
        custom_objects = sys.modules["keras"].saving.get_custom_objects()
        return custom_objects[self._name].from_config(config)


def _register(keras):
    custom_objects = keras.saving.get_custom_objects()
    for name in CLASSES:
        custom_objects.setdefault(f"dtransformer>{name}", _Placeholder(f"dtransformer>{name}"))


def register_with_keras() -> None:
    """Register the classes now if Keras is imported, otherwise when it is."""
    wrapt.register_post_import_hook(_register, "keras")
