"""Select weights by patterns of their paths, and freeze or unfreeze them."""

import difflib
import fnmatch
import re
from collections.abc import Iterable

import keras

from dtransformer import _compat
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.tensor_parallel.quantized_kernel import (
    QuantizedKernel,
    get_quantized_kernels,
)


def weights_by_path(network: keras.Model) -> dict[str, keras.Variable | QuantizedKernel]:
    """Return a dict from paths, without the network's name, to this rank's weights.

    A quantized kernel replaces its codes and scales.
    """
    kernels = get_quantized_kernels(network)
    parts = {id(part) for kernel in kernels for part in kernel.parts.values()}
    weights = [variable for variable in network.variables if id(variable) not in parts]
    return {path_in(network, weight): weight for weight in [*weights, *kernels]}


def path_in(
    network: keras.Model, part: keras.Variable | keras.layers.Layer | QuantizedKernel
) -> str:
    """Return the path of a weight or layer without the network's name."""
    return part.path.removeprefix(f"{network.name}/")


# Names in published models and `peft` adapters -> pattern of the same weights here.
_PUBLISHED = {
    **{f"{name[0]}_proj": f"*attention/{name}_kernel" for name in ("query", "key", "value")},
    "o_proj": "*attention/output_kernel",
    "c_attn": "*attention/(query|key|value)_kernel",
    "gate_proj": "*feed_forward/gate_kernel",
    "up_proj": "*feed_forward/mapping_kernel",
    "down_proj": "*feed_forward/projection_kernel",
    "all-linear": "*_kernel",
    "lm_head": "head/kernel",
    "embed_tokens": "embedding/table",
}


def matching_paths(network: keras.Model, patterns: str | Iterable[str]) -> list[str]:
    """Return the paths of the weights that match at least one pattern.

    In a pipeline, the result covers all stages. Call it on all ranks.

    Args:
        network: Built `keras.Model`.
        patterns: String or iterable of strings. Patterns of paths without the network's
            name. `*` matches any text including `/`, `?` one character, `[0-3]` one of these
            characters, and `(query|value)` one of these words.

    Returns:
        A list of paths without the network's name.

    Raises:
        ValueError: If the network is not built, or a pattern matches no weight. The message
            lists similar paths.
    """
    if not network.built:
        raise ValueError("The network has no weights yet. Build it, or call it on a batch.")
    local_paths = list(weights_by_path(network))
    everywhere = all_gather_json(local_paths, "weight_paths")
    paths = list(dict.fromkeys(path for rank_paths in everywhere for path in rank_paths))
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    selected = set()
    for pattern in patterns:
        matches = _expression(pattern).fullmatch
        new_paths = [path for path in paths if matches(path)]
        if not new_paths:
            module = pattern.removesuffix("/weight").rpartition(".")[2]
            if module in _PUBLISHED:
                raise ValueError(
                    f"The pattern {pattern!r} matches no weight. In this library, use "
                    f"{_PUBLISHED[module]!r}."
                )
            suffixes = dict.fromkeys("/".join(path.split("/")[-2:]) for path in paths)
            similar = difflib.get_close_matches(pattern, suffixes, n=12, cutoff=0.0)
            examples = ", ".join(f"*{kind}" for kind in similar)
            raise ValueError(
                f"The pattern {pattern!r} matches no weight. Existing weights are {examples}."
            )
        selected.update(new_paths)
    return [path for path in paths if path in selected]


def is_matched(path: str, patterns: str | Iterable[str]) -> bool:
    """Return whether a path matches at least one pattern; see `matching_paths`."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(_expression(pattern).fullmatch(path) for pattern in patterns)


def _expression(pattern):
    text = fnmatch.translate(pattern)
    for sign in "(|)":
        text = text.replace("\\" + sign, sign)
    return re.compile(text)


def freeze(network: keras.Model, patterns: str | Iterable[str]) -> list[str]:
    """Freeze weights: they stay in the model and in saved files, but are not trained.

    Frozen weights have no gradients, no optimizer states and no communication for either.
    Backpropagation stops at the first trained layer, so pipeline stages with only frozen
    layers before it skip the backward pass. Call it on all ranks, before `compile`.

    Args:
        network: Built `keras.Model`.
        patterns: String or iterable of strings. Patterns of weight paths without the
            network's name, such as `"blocks/block_[0-3]/*"`. `*` matches any text including
            `/`, `?` one character, `[0-3]` one of these characters, and `(query|value)` one
            of these words.

    Returns:
        A list of the matching paths, on all stages of a pipeline.

    Raises:
        ValueError: If the network is not built, or a pattern matches no weight.

    Example:

    >>> from dtransformer.models import CausalLM
    >>> network = CausalLM(50, hidden_size=8, num_heads=2, num_layers=2)
    >>> network.build()
    >>> len(freeze(network, ["embedding/*", "positions/*", "blocks/block_0/*"]))
    18
    >>> sorted({weight.path.split("/")[2] for weight in network.trainable_variables})
    ['block_1', 'final_norm']
    """
    return _set_trainable(network, patterns, False)


def unfreeze(network: keras.Model, patterns: str | Iterable[str] = "*") -> list[str]:
    """Make frozen weights trainable again. The opposite of `freeze`.

    Args:
        network: Built `keras.Model`.
        patterns: String or iterable of strings; see `freeze`. Defaults to `"*"`, all weights.

    Returns:
        A list of the matching paths, on all stages of a pipeline.

    Raises:
        ValueError: If the network is not built, or a pattern matches no weight.
    """
    return _set_trainable(network, patterns, True)


def _set_trainable(network, patterns, trainable):
    paths = matching_paths(network, patterns)
    chosen = set(paths)
    for layer in _compat.flat_layers(network):
        for variable in _compat.direct_trainable_variables(layer):
            if path_in(network, variable) in chosen:
                variable.trainable = trainable
    return paths
