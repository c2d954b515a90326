"""Low-rank adapters: what frozen kernels learn is a product of two small factors beside them.

Reference: Hu et al., 2021, "LoRA: Low-rank adaptation of large language models", arXiv
2106.09685; Liu et al., 2024, "DoRA: Weight-decomposed low-rank adaptation", arXiv 2402.09353.
"""

import math
from collections.abc import Iterable, Mapping

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import check_int
from dtransformer.layers.base import check_rate
from dtransformer.layers.low_rank import TakesLowRank
from dtransformer.models.generation.generator import Generator
from dtransformer.models.weight_paths import matching_paths, path_in
from dtransformer.parallel.collectives.objects import all_gather_json, together
from dtransformer.parallel.ops.low_rank import KINDS, low_rank_of


def add_lora(
    network: keras.Model,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Iterable[str] = "*attention/(query|value)_kernel",
    freeze_others: bool = True,
    dropout: float = 0.0,
    kind: str = "lora",
) -> list[str]:
    """Give kernels low-rank adapters, and freeze all that is none.

    A product with a kernel W becomes x · W + α/r · (x · A) · B, with A [inputs, r] drawn from
    U(−1/√inputs, 1/√inputs), by the job's seed and the kernel's path, and B [r, outputs] zeros:
    the first outputs are those without adapters. The factors are float32 weights of the kernel's
    layer, `KERNEL_lora_a` and `KERNEL_lora_b`, sharded as the kernel is; the dimension of the
    rank is replicated. Call it before `compile`, on all ranks, and with the kernels' values there.

    Of kind `"dora"` the product is multiplied with m / ‖W + α/r · A · B‖ besides, a number for each
    output: the norm is a constant to gradients, and the magnitudes m, `KERNEL_lora_m` [*outputs],
    begin as ‖W‖. That norm reads the kernel, and takes its size in float32, in each forward pass.

    Args:
        network: a `keras.Model` of this library's layers, built. Of Keras' own layers `Dense` and
            others have an `enable_lora`.
        rank: size r of the dimension between the factors.
        alpha: α.
        targets: patterns of the paths of kernels without the network's name, as of `freeze`: of
            attention, feed-forward layers, `Linear` and the head, `"*_kernel"` or `"head/kernel"`.
        freeze_others: whether all weights but those of adapters are frozen.
        dropout: the share of a kernel's inputs that its factors do not see in a trainer's training
            steps, in [0, 1); the kernel sees all of them. Of `"dora"` it is multiplied with what
            the factors see once more, for what magnitudes change (as the package `peft` does).
        kind: `"lora"` or `"dora"`.

    Returns:
        A list of the paths of the kernels, on all stages of a pipeline.

    Raises:
        ValueError: a pattern matches no weight, or one that is no kernel or has an adapter; or
            rank or alpha is not more than 0, dropout no rate, or kind another one.

    Example:

    >>> from dtransformer.models import CausalLM
    >>> network = CausalLM(50, hidden_size=8, num_heads=2, num_layers=1)
    >>> network.build()
    >>> add_lora(network, rank=2, alpha=4)
    ['blocks/block_0/attention/query_kernel', 'blocks/block_0/attention/value_kernel']
    >>> [weight.name for weight in network.trainable_variables][:2]
    ['query_kernel_lora_a', 'query_kernel_lora_b']
    """
    check_int("rank", rank)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be a number of more than 0, got {alpha!r}")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    asked = {"rank": rank, "alpha": alpha, "dropout": check_rate("dropout", dropout), "kind": kind}
    paths = matching_paths(network, targets)
    give_adapters(network, dict.fromkeys(paths, asked), freeze_others)
    return paths


def give_adapters(network: keras.Model, asked: Mapping[str, dict], freeze_others: bool) -> None:
    """Give some kernels new adapters; see `add_lora`.

    Args:
        network: a `keras.Model`, built.
        asked: arguments of `TakesLowRank.add_low_rank` by the kernels' paths without the network's
            name.
        freeze_others: whether all weights but those of adapters are frozen.
    """
    layers = {path_in(network, layer): layer for layer in _layers(network)}
    kernels = {path_in(network, variable): variable for variable in network.variables}

    def check():
        for path in asked:
            layer, kernel = layers.get(path.rpartition("/")[0]), kernels.get(path)
            if layer is None or (kernel is not None and not hasattr(kernel, "num_inputs")):
                raise ValueError(f"{path} is no kernel that can have a low-rank adapter")
            if path.rpartition("/")[2] in layer.low_rank:
                raise ValueError(f"{path} has an adapter already: merge_lora adds it to the kernel")

    together(check, "lora/check")
    for path, options in asked.items():
        layer, _, name = path.rpartition("/")
        layers[layer].add_low_rank(name, **options)
    if freeze_others:
        factors = _factors(network)
        for variable in network.variables:
            if id(variable) not in factors:
                variable.trainable = False
    _forget_functions(network)


def merge_lora(network: keras.Model) -> list[str]:
    """Add all adapters to their kernels, and take them away: W becomes W + α/r · A · B.

    With magnitudes it becomes m · (W + α/r · A · B) / ‖W + α/r · A · B‖.

    Outputs stay what they were, but for rounding to the type that the kernels are stored in. The
    kernels stay frozen. All ranks have to call.

    Returns:
        A list of the paths of this rank's kernels, without the network's name.

    Raises:
        ValueError: the network has no adapters.
    """
    check_adapted(network, "merge_lora")
    merged = adapted_kernels(network)
    for kernel in merged.values() if _compat.makes_values() else ():
        kernel.assign(tf.cast(_with_addition(kernel), kernel.dtype))
    for layer in _layers(network):
        for name in list(layer.low_rank):
            layer.remove_low_rank(name)
    _forget_functions(network)
    return list(merged)


def adapted_kernels(network: keras.Model) -> dict[str, keras.Variable]:
    """Return this rank's kernels that have adapters, by their paths without the network's name."""
    return {
        path_in(network, variable): variable
        for variable in network.variables
        if low_rank_of(variable) is not None
    }


def adapters_of(network: keras.Model) -> dict[str, dict]:
    """Return `"rank"`, `"alpha"` and `"kind"` of all adapters, by the paths of their kernels.

    They are those of all stages.
    """
    return {
        f"{path_in(network, layer)}/{name}": {
            "rank": asked["rank"],
            "alpha": float(asked["alpha"]),
            "kind": asked.get("kind", "lora"),
        }
        for layer in _layers(network)
        for name, asked in layer.low_rank.items()
    }


def only_adapters_are_trained(network: keras.Model) -> bool:
    """Return whether adapters alone are trained, on all stages; all ranks call."""
    if not adapters_of(network):
        return False
    own = {id(weight) for weight in network.trainable_variables} <= _factors(network)
    return all(all_gather_json(own, "lora/only"))


def check_adapted(network: keras.Model, function: str) -> None:
    """Check that a network has adapters.

    Raises:
        ValueError: it has none.
    """
    if not adapters_of(network):
        raise ValueError(f"the network has no adapters for {function}: add_lora gives it some")


def _factors(network):
    """Return the ids of the variables of this rank's adapters."""
    kernels = adapted_kernels(network).values()
    return {id(x) for kernel in kernels for x in kernel.low_rank.factors.values()}


def _with_addition(kernel):
    """Return a kernel's full value with its addition, float32."""
    a, b, *m = (np.float32(x.numpy()) for x in kernel.low_rank.factors.values())
    full = np.float32(kernel.numpy()) + np.tensordot(a, b * np.float32(kernel.low_rank.scale), 1)
    if m:
        norms = np.linalg.norm(full, axis=tuple(range(len(a.shape) - 1)))
        full *= np.divide(m[0], norms, out=np.zeros_like(norms), where=norms > 0)
    return full


def _layers(network):
    """Return the layers of a network that take adapters; those without weights have no path."""
    layers = _compat.flat_layers(network)
    return [layer for layer in layers if isinstance(layer, TakesLowRank) and layer.path]


def _forget_functions(network):
    """Let networks that generate compile it anew: their weights are other ones."""
    for layer in _compat.flat_layers(network):
        generator = getattr(layer, "_generator", None)
        if isinstance(generator, Generator):
            generator.forget_functions()
