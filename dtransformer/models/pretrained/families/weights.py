"""Tables of weight names: names of modules or tensors in `transformers` -> weight paths here.

A row names a module, such as `"model.norm"`, or a full tensor, such as `"wte.weight"`. `{i}` is
the block index and `{e}` the expert index. A value is a path, a tuple of the paths of a fused
tensor, or a `Weights` for another layout. A path is a weight, or its beginning: a norm's
`"blocks/final_norm"` or a kernel's `"attention/query"`. Rows without a weight in the network are
skipped. The first row is the embedding table.
"""

import dataclasses
import re
from collections.abc import Mapping

from dtransformer.block_forms import Latent
from dtransformer.models.pretrained.stored_tensor import StoredTensor

# Paths of fused tensors.
QUERY_KEY_VALUE = "attention/query", "attention/key", "attention/value"
GATE_MAPPING = "feed_forward/gate", "feed_forward/mapping"


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights that one published tensor stores.

    Args:
        paths: Tuple of paths.
        layout: Layout of the tensor. `"outputs_first"` is [outputs, inputs], as in PyTorch's
            `Linear`. `"inputs_first"` is [inputs, outputs]. `"head_groups"` stores one group of
            heads after another. `"stacked_experts"` is [experts, inputs, outputs], and the
            outputs of two weights alternate. `"row"` is a vector [1, features].
    """

    paths: tuple[str, ...]
    layout: str = "outputs_first"


Table = Mapping[str, str | tuple[str, ...] | Weights]


def products(pattern: str, *hf_names: str, path: str = "attention") -> dict[str, str]:
    """Return the table of an attention layer's four products.

    Args:
        pattern: Pattern of the names in `transformers`.
        *hf_names: Texts for `{}` in the pattern: queries, keys, values and output.
        path: Path of the attention layer.

    Example:

    >>> products("self_attn.{}_proj", *"qkvo")["self_attn.q_proj"]
    'attention/query'
    """
    names = zip(hf_names, ("query", "key", "value", "output"), strict=True)
    return {pattern.format(hf_name): f"{path}/{name}" for hf_name, name in names}


def blocks(hf_prefix: str, *tables: Table, path: str = "blocks/block_{i}/") -> dict[str, Weights]:
    """Return the table of all blocks.

    Args:
        hf_prefix: Prefix of the names in a block, with `{i}`.
        *tables: Tables of names and paths in a block.
        path: Prefix of the paths in a block.
    """
    result = {}
    for table in tables:
        for name, value in table.items():
            weights = _as_weights(value)
            paths = tuple(path + x for x in weights.paths)
            result[hf_prefix + name] = dataclasses.replace(weights, paths=paths)
    return result


ATTENTION = products("self_attn.{}_proj", *"qkvo")
FUSED_ATTENTION = {"self_attn.qkv_proj": QUERY_KEY_VALUE, "self_attn.o_proj": "attention/output"}
GATED = {
    "mlp.gate_proj": "feed_forward/gate",
    "mlp.up_proj": "feed_forward/mapping",
    "mlp.down_proj": "feed_forward/projection",
}
FUSED_GATED = {"mlp.gate_up_proj": GATE_MAPPING, "mlp.down_proj": "feed_forward/projection"}
EXPERTS = {
    "mlp.gate": "feed_forward/router",
    "mlp.experts.{e}.gate_proj": "feed_forward/gate",
    "mlp.experts.{e}.up_proj": "feed_forward/mapping",
    "mlp.experts.{e}.down_proj": "feed_forward/projection",
}
DEEPSEEK_EXPERTS = {
    **GATED,
    **EXPERTS,
    "mlp.gate.e_score_correction_bias": "feed_forward/router/bias",
    "mlp.shared_experts.gate_proj": "feed_forward/shared_experts/gate",
    "mlp.shared_experts.up_proj": "feed_forward/shared_experts/mapping",
    "mlp.shared_experts.down_proj": "feed_forward/shared_experts/projection",
}
NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "self_attn.q_norm": "attention/query_norm",
    "self_attn.k_norm": "attention/key_norm",
}


def llama_weights(
    norms: Table = NORMS, attention: Table = ATTENTION, feed_forward: Table = GATED
) -> dict[str, str | Weights]:
    """Return the table of a family with Llama's names.

    Args:
        norms: Table of the norms in a block.
        attention: Table of the other weights of attention.
        feed_forward: Table of the feed-forward layer or the experts.
    """
    return {
        "model.embed_tokens.weight": "embedding/table",
        "model.norm": "blocks/final_norm",
        "lm_head": "head",
        **blocks("model.layers.{i}.", norms, attention, feed_forward),
    }


# Endings of a path -> endings of the tensor's name.
_ENDINGS = {
    "": "",
    "/gamma": ".weight",
    "/beta": ".bias",
    "/kernel": ".weight",
    "/bias": ".bias",
    "_kernel": ".weight",
    "_bias": ".bias",
}


def stored_tensors(table: Table, shapes: Mapping[str, tuple]) -> list[StoredTensor]:
    """Return the tensors in a file of a network.

    Args:
        table: Table of weight names.
        shapes: Dict from weight paths to shapes.
    """
    rows = _expand_blocks(table, shapes)
    named_paths = {path for _, weights in rows for path in weights.paths}
    tensors = []
    for name, weights in rows:
        for ending in _ENDINGS:
            paths = tuple(path + ending for path in weights.paths)
            # A row with the full path of a bias replaces the bias of its module.
            is_named = ending and paths[0] in named_paths
            if paths[0] in shapes and not is_named:
                tensors += _tensors(name, ending, paths, weights.layout, shapes)
    return tensors


def _expand_blocks(table, shapes):
    """Return a table as a list of rows, with one row per block for names with `{i}`."""
    num_blocks = _count_blocks(shapes)
    rows = []
    for name, value in table.items():
        weights = _as_weights(value)
        stack = weights.paths[0].partition("{i}")[0]
        indices = range(num_blocks.get(stack, 0)) if "{i}" in name else range(1)
        for index in map(str, indices):
            paths = tuple(path.replace("{i}", index) for path in weights.paths)
            expanded = dataclasses.replace(weights, paths=paths)
            rows.append((name.replace("{i}", index), expanded))
    return rows


def _as_weights(value):
    if isinstance(value, Weights):
        return value
    return Weights((value,) if isinstance(value, str) else tuple(value))


def _count_blocks(shapes):
    """Return a dict from the beginning of block paths to the number of blocks."""
    matches = [re.match(r"(.*/block_)(\d+)/", path) for path in shapes]
    blocks = {match.groups() for match in matches if match}
    stacks = [stack for stack, _ in blocks]
    return {stack: stacks.count(stack) for stack in stacks}


def _tensors(name, ending, paths, layout, shapes):
    """Return the tensor of a row, or one tensor per expert if its name contains `{e}`."""
    shape = shapes[paths[0]]
    is_kernel = ending.endswith("kernel")
    is_stacked = layout == "stacked_experts"
    has_experts = f"{paths[0].rpartition('/')[0]}/router/kernel" in shapes
    if ending.startswith("_") and has_experts != (is_stacked or "{e}" in name):
        return []
    if "{e}" in name:
        full_name = name + _ENDINGS[ending]
        return [
            StoredTensor(full_name.replace("{e}", str(i)), paths, is_transposed=True, expert=i)
            for i in range(shape[0])
        ]
    if is_stacked:
        num_groups = shape[-1] if len(paths) > 1 else 1
        full_name = name if is_kernel else f"{name}_bias"
        num_inputs = 2 if is_kernel else 1
        return [
            StoredTensor(
                full_name, paths, num_inputs=num_inputs, groups=num_groups, is_stacked=True
            )
        ]
    if is_kernel:
        num_inputs = 2 if paths[0].endswith("attention/output_kernel") else 1
    else:
        num_inputs = len(shape) - 1 if not ending else 0
    # The heads of keys are the second to last dimension of kernels and biases.
    groups = shapes[paths[1]][-2] if layout == "head_groups" else 1
    return [
        StoredTensor(
            name + _ENDINGS[ending],
            paths,
            is_transposed=is_kernel and layout != "inputs_first",
            num_inputs=num_inputs,
            is_row=layout == "row",
            groups=groups,
        )
    ]


def with_rotary_order(
    tensor: StoredTensor, shapes: Mapping[str, tuple], arguments: Mapping
) -> StoredTensor:
    """Return a tensor with the feature order of interleaved rotary pairs.

    This library stores the first features of all pairs, then the second features.

    Args:
        tensor: Tensor without an order.
        shapes: Dict from weight paths to shapes.
        arguments: Dict of the network's arguments.
    """
    path = re.sub("_(kernel|bias)$", "", tensor.weights[0])
    features = shapes[tensor.weights[0]][-1]
    latent = Latent.from_sizes(arguments.get("latent"))
    order = None
    if latent is not None:
        num_plain = features - latent.rotary_dim
        plain = range(num_plain)
        rotated = _evens_first(range(num_plain, features))
        if path.endswith("attention/latent"):
            order = (*plain, *rotated)
        elif path.endswith(("attention/query", "attention/query_up")):
            order = (*rotated, *plain)
    elif path.endswith(("attention/query", "attention/key")):
        num_rotated = int(features * arguments["rotary_fraction"])
        order = (*_evens_first(range(num_rotated)), *range(num_rotated, features))
    return dataclasses.replace(tensor, order=order)


def _evens_first(indices):
    return (*indices[::2], *indices[1::2])
