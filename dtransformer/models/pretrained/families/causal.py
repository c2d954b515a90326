"""Base of the families of language models."""

from dtransformer.models.pretrained.families.family import linear
from dtransformer.models.pretrained.stored_tensor import StoredTensor

# What no config of theirs can say otherwise.
PLAIN = {
    "embedding_scale": 1.0,
    "head_bias": False,
    "post_layernorm_residual": False,
    "norm_placement": None,
    "residual_scale": 1.0,
    "logits_scale": 1.0,
    "logits_soft_cap": None,
    "query_scale": None,
    "soft_cap": None,
    "qk_norm": None,
    "prefix": False,
    "moe_config": None,
    "block_pattern": None,
}


def head(arguments: dict) -> list[StoredTensor]:
    """Return the tensors of a language model's head: none where it is tied."""
    return [] if arguments["tied_head"] else [linear("lm_head.weight", "head/kernel")]
