"""Networks made of the layers."""

from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.translation import TranslationTransformer

__all__ = ["CausalLM", "TranslationTransformer"]
