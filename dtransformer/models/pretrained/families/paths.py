"""Mappings from weight names of `transformers` to paths in a block that several families share."""

# Paths of products that are parts of one fused tensor.
QUERY_KEY_VALUE = "attention/query", "attention/key", "attention/value"
OUTPUT = ("attention/output",)
GATE_MAPPING = "feed_forward/gate", "feed_forward/mapping"
MAPPING = ("feed_forward/mapping",)
PROJECTION = ("feed_forward/projection",)


def attention(pattern: str, *hf_names: str, path: str = "attention") -> dict[str, tuple[str]]:
    """Return a dict from the names of an attention's four products to tuples of paths.

    Args:
        pattern: Pattern of the names in `transformers`.
        *hf_names: Texts for `{}` in the pattern: queries, keys, values and output.
        path: Path of the attention layer.

    Example:

    >>> attention("self_attn.{}_proj", *"qkvo")["self_attn.q_proj"]
    ('attention/query',)
    """
    names = zip(hf_names, ("query", "key", "value", "output"), strict=True)
    return {pattern.format(x): (f"{path}/{y}",) for x, y in names}


# Names of products in a block of `transformers` -> paths here.
ATTENTION = attention("self_attn.{}_proj", *"qkvo")
FUSED_ATTENTION = {"self_attn.qkv_proj": QUERY_KEY_VALUE, "self_attn.o_proj": OUTPUT}
FUSED_GATED = {"mlp.gate_up_proj": GATE_MAPPING, "mlp.down_proj": PROJECTION}
_GATED = {"gate_proj": "gate", "up_proj": "mapping", "down_proj": "projection"}.items()
GATED = {f"mlp.{x}": (f"feed_forward/{y}",) for x, y in _GATED}
SHARED = {f"mlp.shared_experts.{x}": (f"feed_forward/shared_experts/{y}",) for x, y in _GATED}
# Names of expert kernels. `{}` is the expert index.
EXPERTS = {f"mlp.experts.{{}}.{x}": f"feed_forward/{y}" for x, y in _GATED}
PRE = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "self_attn.q_norm": "attention/query_norm",
    "self_attn.k_norm": "attention/key_norm",
}
