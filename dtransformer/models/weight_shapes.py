"""The shapes of networks' weights: pure functions of the networks' arguments.

Each returns a dict of weights' paths, without the network's name, and their shapes, whatever the
layout is: without a vocabulary's padding. Arguments are those of `experts.with_experts`.
"""

from collections.abc import Iterable

from dtransformer.block_forms import arguments_of_block, ends_with_norm, placement_of
from dtransformer.models.experts import experts_of, moe_shapes

Shapes = dict[str, tuple[int, ...]]


def causal_lm(arguments: dict) -> Shapes:
    """Return the shapes of a `CausalLM`'s weights."""
    h, vocab_size = arguments["hidden_size"], arguments["vocab_size"]
    shapes = {"embedding/table": (vocab_size, h)}
    if arguments["positions"] == "learned":
        shapes["positions/table"] = (arguments["max_length"], h)
    return {**shapes, **_stack("blocks", arguments), **_head(vocab_size, arguments)}


def masked_lm(arguments: dict) -> Shapes:
    """Return the shapes of a `MaskedLM`'s weights."""
    h, vocab_size = arguments["hidden_size"], arguments["vocab_size"]
    shapes = {
        "embedding/table": (vocab_size, h),
        **_norm("embedding_norm", arguments),
        **_stack("blocks", arguments),
        **_dense("head/dense", h, h, arguments["use_bias"]),
        **_norm("head/norm", arguments),
        "head/logits/bias": (vocab_size,),
    }
    if arguments["positions"] == "learned":
        shapes["positions/table"] = (arguments["max_length"] + arguments["position_offset"], h)
    if types := arguments["num_token_types"]:
        shapes["token_types/table"] = (types, h)
    if not arguments["tied_head"]:
        shapes["head/logits/kernel"] = (h, vocab_size)
    if arguments["next_sentence"]:
        shapes |= _dense("sentence_head/pooler", h, h) | _dense("sentence_head/classifier", h, 2)
    return shapes


def translation_transformer(arguments: dict) -> Shapes:
    """Return the shapes of a `TranslationTransformer`'s weights."""
    sizes = {side: arguments[f"{side}_vocab_size"] for side in ("source", "target")}
    tables = dict(list(sizes.items())[: 1 if arguments["shared_embeddings"] else 2])
    lengths = {side: arguments[f"max_{side}_length"] for side in sizes}
    return _encoder_decoder(tables, lengths, sizes["target"], arguments)


def encoder_decoder_lm(arguments: dict) -> Shapes:
    """Return the shapes of an `EncoderDecoderLM`'s weights."""
    vocab_size = arguments["vocab_size"]
    length = arguments["max_length"] + arguments["position_offset"]
    lengths = dict.fromkeys(("source", "target"), length)
    return _encoder_decoder({"source": vocab_size}, lengths, vocab_size, arguments)


def _encoder_decoder(tables, lengths, vocab_size, arguments):
    """Return the shapes of a network, of the tables' entries and the numbers of positions."""
    h, shapes = arguments["hidden_size"], {}
    for side, entries in tables.items():
        shapes[f"{side}_embedding/table"] = (entries, h)
    for side, length in lengths.items():
        if arguments["positions"] == "learned":
            shapes[f"{side}_positions/table"] = (length, h)
        if arguments.get("embedding_norm"):
            shapes |= _norm(f"{side}_norm", arguments)
    attentions = ("self_attention", "cross_attention")
    for stack, names in {"encoder": ("attention",), "decoder": attentions}.items():
        number = arguments[f"{stack}_layers"]
        shapes |= _stack(f"transformer/{stack}", arguments, number, names)
    return {**shapes, **_head(vocab_size, arguments)}


def _head(vocab_size, arguments):
    kernel = {"head/kernel": (arguments["hidden_size"], vocab_size)}
    bias = {"head/bias": (vocab_size,)}
    return {
        **({} if arguments["tied_head"] else kernel),
        **(bias if arguments["head_bias"] else {}),
    }


def _stack(name, arguments, number=None, attentions: Iterable[str] = ("attention",)):
    """Return the shapes of a stack of a number of blocks, which have these attentions."""
    number = arguments["num_layers"] if number is None else number
    has_experts, shapes = arguments["has_experts"][name.split("/")[-1]], {}
    for i in range(number):
        own = _experts(arguments) if has_experts[i] else _feed_forward(arguments)
        has_norm = not placement_of(arguments).shares_norm
        block = {**_sublayer("feed_forward", own, arguments, has_norm)}
        for attention in attentions:
            is_normed = arguments_of_block(arguments, i).get("attention_norm", True)
            is_normed |= attention != attentions[0]
            block |= _sublayer(attention, _attention(arguments), arguments, is_normed)
        shapes |= {f"{name}/block_{i}/{path}": shape for path, shape in block.items()}
    if number and arguments.get("positions") == "relative":
        table = (arguments["relative_ranges"], arguments["num_heads"])
        shapes[f"{name}/relative_positions/table"] = table
    if number and ends_with_norm(arguments):
        shapes |= _norm(f"{name}/final_norm", arguments)
    return shapes


def _sublayer(name, shapes, arguments, is_normed=True):
    """Return the shapes of a sublayer and its norms, by their paths in the block."""
    found, placement = {f"{name}/{path}": s for path, s in shapes.items()}, placement_of(arguments)
    if is_normed or not placement.of_input:
        found |= _norm(f"{name}_norm", arguments)
    return found | (_norm(f"{name}_output_norm", arguments) if placement.number > 1 else {})


def _attention(arguments):
    h, n = arguments["hidden_size"], arguments["num_heads"]
    d, m = arguments.get("head_dim") or h // n, arguments.get("num_kv_heads") or n
    use_bias, shapes = arguments.get("use_bias", True), {"output_kernel": (n, d, h)}
    qkv_bias = arguments.get("qkv_bias")
    for name, heads in {"query": n, "key": m, "value": m}.items():
        shapes[f"{name}_kernel"] = (h, heads, d)
        if use_bias if qkv_bias is None else qkv_bias:
            shapes[f"{name}_bias"] = (heads, d)
    kind = arguments.get("qk_norm")
    for name, heads in {"query": n, "key": m}.items() if kind else ():
        shapes |= _norm(f"{name}_norm", {"hidden_size": d, "norm": kind})
        if kind == "rms_norm_all_heads":
            shapes[f"{name}_norm/gamma"] = (heads, 1, d)
    return {**shapes, "output_bias": (h,)} if use_bias else shapes


def _feed_forward(arguments):
    h, f = arguments["hidden_size"], arguments["ffn_hidden_size"]
    mappings = ("mapping", "gate") if arguments.get("gated") else ("mapping",)
    shapes = {f"{name}_kernel": (h, f) for name in mappings} | {"projection_kernel": (f, h)}
    if not arguments.get("use_bias", True):
        return shapes
    return {**shapes, **{f"{name}_bias": (f,) for name in mappings}, "projection_bias": (h,)}


def _experts(arguments):
    size = experts_of(arguments).ffn_hidden_size or arguments["ffn_hidden_size"]
    return moe_shapes(arguments, _feed_forward({**arguments, "ffn_hidden_size": size}))


def _norm(name, arguments):
    h = arguments["hidden_size"]
    has_beta = arguments.get("norm", "layer_norm") in ("layer_norm", "layer_norm_unit_offset")
    return {f"{name}/gamma": (h,), **({f"{name}/beta": (h,)} if has_beta else {})}


def _dense(name, inputs, outputs, use_bias=True):
    bias = {f"{name}/bias": (outputs,)} if use_bias else {}
    return {f"{name}/kernel": (inputs, outputs), **bias}
