"""The classes that `.keras` files name: Keras knows them from the import of `dtransformer` on.

Keras and the classes themselves are imported when they are first needed.
"""

import importlib.abc
import importlib.util
import sys

# Those with `@register`.
CLASSES = """
    AllHeadsRMSNorm AttentionMask CausalLM CrossEntropyLoss Dropout EncoderDecoderLM FeedForward
    FixedSparseAttention FlattenedInitializer LatentAttention LayerNorm Linear Masked MaskedLM
    MaskedLMHead MoE MultiHeadAttention PaddedInitializer PoolingHead
    PositionEmbedding RMSNorm RelativePositionTable Router SentenceHead SequenceHead
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


class _WithKeras(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports Keras as without it, and tells it the classes then."""

    def find_spec(self, name, path=None, target=None):
        if name != "keras":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        _tell(module)


def _tell(keras):
    known = keras.saving.get_custom_objects()
    for name in CLASSES:
        known.setdefault(f"dtransformer>{name}", _Later(f"dtransformer>{name}"))


def register_with_keras() -> None:
    """Let Keras know the classes: now, where it is imported, else when it is."""
    keras = sys.modules.get("keras")
    if hasattr(keras, "saving"):
        _tell(keras)
    else:
        sys.meta_path.insert(0, _WithKeras())
