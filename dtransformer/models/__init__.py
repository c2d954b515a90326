"""Networks made of the layers."""

from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.generation_options import GenerationOptions
from dtransformer.models.interleaved import MicroBatchInterleaved
from dtransformer.models.masked_lm import MaskedLM
from dtransformer.models.pretrained import from_pretrained, save_pretrained
from dtransformer.models.translation import TranslationTransformer

__all__ = [
    "CausalLM",
    "GenerationOptions",
    "MaskedLM",
    "MicroBatchInterleaved",
    "TranslationTransformer",
    "from_pretrained",
    "save_pretrained",
]
