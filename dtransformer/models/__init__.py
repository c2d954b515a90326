"""Networks made of the layers."""

from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.interleaved import MicroBatchInterleaved
from dtransformer.models.pretrained import from_pretrained, save_pretrained
from dtransformer.models.translation import TranslationTransformer

__all__ = [
    "CausalLM",
    "MicroBatchInterleaved",
    "TranslationTransformer",
    "from_pretrained",
    "save_pretrained",
]
