"""Names of the tensors of blocks in files, and the paths of ours: what several families share."""

# Ours of products within a block, whose tensors follow each other in one of theirs.
QUERY_KEY_VALUE = "attention/query", "attention/key", "attention/value"
OUTPUT = ("attention/output",)
GATE_MAPPING = "feed_forward/gate", "feed_forward/mapping"
MAPPING, PROJECTION = ("feed_forward/mapping",), ("feed_forward/projection",)


def attention(pattern: str, *theirs: str, ours: str = "attention") -> dict[str, tuple[str]]:
    """Return their names of an attention's four products, and ours.

    Args:
        pattern: of their names.
        *theirs: what `{}` in it is, of queries, keys, values and the output.
        ours: our attention's name.

    Example:

    >>> attention("self_attn.{}_proj", *"qkvo")["self_attn.q_proj"]
    ('attention/query',)
    """
    names = zip(theirs, ("query", "key", "value", "output"), strict=True)
    return {pattern.format(x): (f"{ours}/{y}",) for x, y in names}


# Their names of products within a block -> ours.
ATTENTION = attention("self_attn.{}_proj", *"qkvo")
FUSED_ATTENTION = {"self_attn.qkv_proj": QUERY_KEY_VALUE, "self_attn.o_proj": OUTPUT}
FUSED_GATED = {"mlp.gate_up_proj": GATE_MAPPING, "mlp.down_proj": PROJECTION}
_GATED = {"gate_proj": "gate", "up_proj": "mapping", "down_proj": "projection"}.items()
GATED = {f"mlp.{x}": (f"feed_forward/{y}",) for x, y in _GATED}
SHARED = {f"mlp.shared_experts.{x}": (f"feed_forward/shared_experts/{y}",) for x, y in _GATED}
# Their names of the tensors of experts: `{}` is the expert's number.
EXPERTS = {f"mlp.experts.{{}}.{x}": f"feed_forward/{y}" for x, y in _GATED}
PRE = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "self_attn.q_norm": "attention/query_norm",
    "self_attn.k_norm": "attention/key_norm",
}
