"""Networks made of the layers."""

from dtransformer.models.translation import TranslationTransformer

__all__ = ["TranslationTransformer"]
