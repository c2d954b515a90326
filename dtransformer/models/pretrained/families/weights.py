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


Table = Mapping[str, Weights]


def read_table(table: Mapping, in_stacks: bool = False) -> dict[str, Weights]:
    """Return the table of weight names of an entry of `families.yaml`.

    Args:
        table: Dict from names to a path, a list of paths, or a dict `{layout: paths}`. A name that
            ends with a dot is the prefix of the names in block `{i}`, and its value their dict.
        in_stacks: Boolean. Whether the network has an encoder and a decoder. Defaults to `False`.
    """
    result = {}
    for name, value in table.items():
        if not name.endswith("."):
            result[name] = _read_weights(value)
            continue
        stack = f"transformer/{name.partition('.')[0]}" if in_stacks else "blocks"
        for inner_name, inner_value in value.items():
            weights = _read_weights(inner_value)
            paths = tuple(f"{stack}/block_{{i}}/{path}" for path in weights.paths)
            result[name + inner_name] = dataclasses.replace(weights, paths=paths)
    return result


def _read_weights(value):
    layout = "outputs_first"
    if isinstance(value, Mapping):
        ((layout, value),) = value.items()
    return Weights((value,) if isinstance(value, str) else tuple(value), layout)


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
    for name, weights in table.items():
        stack = weights.paths[0].partition("{i}")[0]
        indices = range(num_blocks.get(stack, 0)) if "{i}" in name else range(1)
        for index in map(str, indices):
            paths = tuple(path.replace("{i}", index) for path in weights.paths)
            expanded = dataclasses.replace(weights, paths=paths)
            rows.append((name.replace("{i}", index), expanded))
    return rows


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
