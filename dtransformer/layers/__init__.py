"""Transformer layers. Without a mesh they are ordinary Keras layers."""

import dtransformer.start  # noqa: F401 (imported first to silence start-up logs)
from dtransformer.layers.attention import MultiHeadAttention
from dtransformer.layers.attention_mask import AttentionMask
from dtransformer.layers.base import Layer
from dtransformer.layers.block import BlockStack, TransformerBlock, spread_evenly
from dtransformer.layers.decoder import TransformerDecoder, TransformerDecoderLayer
from dtransformer.layers.distillation import DistillationLoss
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.embedding import VocabEmbedding, VocabHead
from dtransformer.layers.encoder import TransformerEncoder, TransformerEncoderLayer
from dtransformer.layers.feed_forward import FeedForward
from dtransformer.layers.fixed_sparse_attention import FixedSparseAttention
from dtransformer.layers.heads import MaskedLMHead, PoolingHead, SequenceHead, TokenHead
from dtransformer.layers.latent_attention import LatentAttention
from dtransformer.layers.linear import Linear
from dtransformer.layers.loss import CrossEntropyLoss
from dtransformer.layers.moe import MoE
from dtransformer.layers.norm import LayerNorm, QKNorm, RMSNorm
from dtransformer.layers.position import PositionEmbedding, TokenTypeEmbedding
from dtransformer.layers.rotary import Rotary
from dtransformer.layers.router import Router
from dtransformer.layers.transformer import Transformer
from dtransformer.parallel.tracing.dropout_seed import dropout_seed

__all__ = [
    "AttentionMask",
    "BlockStack",
    "CrossEntropyLoss",
    "DistillationLoss",
    "Dropout",
    "FeedForward",
    "FixedSparseAttention",
    "LatentAttention",
    "Layer",
    "LayerNorm",
    "Linear",
    "MaskedLMHead",
    "MoE",
    "MultiHeadAttention",
    "PoolingHead",
    "PositionEmbedding",
    "QKNorm",
    "RMSNorm",
    "Rotary",
    "Router",
    "SequenceHead",
    "TokenHead",
    "TokenTypeEmbedding",
    "Transformer",
    "TransformerBlock",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "VocabEmbedding",
    "VocabHead",
    "dropout_seed",
    "spread_evenly",
]
