"""Transformer models for language modeling, masked language modeling and translation."""

import dtransformer.start  # noqa: F401 (Must come first: it silences TensorFlow's startup notes.)
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.generation.options import GenerationOptions
from dtransformer.models.generation.text_generator import TextGenerator
from dtransformer.models.lora import add_lora, merge_lora
from dtransformer.models.lora_folder import load_lora, save_lora
from dtransformer.models.masked_lm import MaskedLM
from dtransformer.models.presets import from_preset
from dtransformer.models.pretrained import from_pretrained, save_pretrained
from dtransformer.models.quantized_base import quantize
from dtransformer.models.targets import check_target
from dtransformer.models.translation import TranslationTransformer
from dtransformer.models.weight_paths import freeze, unfreeze
from dtransformer.transformer_config import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    HeadConfig,
    TransformerConfig,
)

__all__ = [
    "AttentionConfig",
    "BlockConfig",
    "CausalLM",
    "EmbeddingConfig",
    "EncoderDecoderLM",
    "GenerationOptions",
    "HeadConfig",
    "MaskedLM",
    "TextGenerator",
    "TransformerConfig",
    "TranslationTransformer",
    "add_lora",
    "check_target",
    "freeze",
    "from_preset",
    "from_pretrained",
    "load_lora",
    "merge_lora",
    "quantize",
    "save_lora",
    "save_pretrained",
    "unfreeze",
]
