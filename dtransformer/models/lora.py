"""Low-rank adapters (LoRA and DoRA) for fine-tuning with frozen kernels.

Reference:
    - [Hu et al., 2021, LoRA](https://arxiv.org/abs/2106.09685)
    - [Liu et al., 2024, DoRA](https://arxiv.org/abs/2402.09353)
"""

import math
from collections.abc import Iterable, Mapping

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import check_int
from dtransformer.layers.base import check_rate
from dtransformer.layers.low_rank import LowRankMixin
from dtransformer.models.generation.generator import Generator
from dtransformer.models.weight_paths import matching_paths, path_in, weights_by_path
from dtransformer.parallel.collectives.objects import all_gather_json, call_on_all
from dtransformer.parallel.ops.low_rank import DTYPES, KINDS, get_low_rank
from dtransformer.parallel.tensor_parallel.quantized_kernel import QuantizedKernel, is_quantized


def add_lora(
    network: keras.Model,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | Iterable[str] = "*attention/(query|value)_kernel",
    freeze_others: bool = True,
    dropout: float = 0.0,
    kind: str = "lora",
    dtype: str = "float32",
) -> list[str]:
    """Add low-rank adapters to kernels and freeze all other weights.

    A product with kernel W becomes x · W + α/r · (x · A) · B. The factor A [inputs, r] is
    drawn from U(−1/√inputs, 1/√inputs) with the job's seed and the kernel's path, and B
    [r, outputs] is zero, so the outputs do not change at first. The factors are weights of the
    kernel's layer, `KERNEL_lora_a` and `KERNEL_lora_b`. They are sharded like the kernel; the
    rank dimension is replicated. Call it on all ranks, after the kernels are loaded and before
    `compile`.

    `kind="dora"` also multiplies each output by m / ‖W + α/r · A · B‖. The magnitudes m,
    `KERNEL_lora_m` [*outputs], start as ‖W‖, and gradients treat the norm as a constant. Each
    forward pass computes the norm of the full kernel in float32.

    Args:
        network: Built `keras.Model` with layers of this library. Keras' own layers, such as
            `Dense`, have a method `enable_lora` instead.
        rank: Integer. Size r of the dimension between the factors.
        alpha: Float. Scale α of the adapters.
        targets: String or iterable of strings. Patterns of kernel paths without the
            network's name; see `freeze`. Kernels of attention, feed-forward layers, `Linear`
            and the head qualify. Examples: `"*_kernel"`, `"head/kernel"`.
        freeze_others: Boolean. Whether to freeze all weights except adapters.
        dropout: Float in [0, 1). Fraction of the kernel's inputs that are zero for the
            factors in training steps. The kernel itself receives all inputs. With DoRA, the
            difference that magnitudes make is also computed from the reduced inputs, as in
            the `peft` package.
        kind: `"lora"` or `"dora"`.
        dtype: `"float32"` or `"bfloat16"`, the type of the factors. Updates of bfloat16 factors
            are computed in float32 and rounded stochastically.

    Returns:
        A list of the kernels' paths, on all stages of a pipeline.

    Raises:
        TypeError: If `rank` is not an integer, or `dropout` is not a number.
        ValueError: If a pattern matches no weight, or matches a weight that is not a kernel
            or already has an adapter; or if `rank`, `alpha`, `dropout`, `kind` or `dtype` is
            out of range.

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
        raise ValueError(f"`alpha` must be a positive number, got {alpha!r}.")
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {kind!r}.")
    settings = {
        "rank": rank,
        "alpha": alpha,
        "dropout": check_rate("dropout", dropout),
        "kind": kind,
        "dtype": dtype,
    }
    paths = matching_paths(network, targets)
    add_adapters(network, dict.fromkeys(paths, settings), freeze_others)
    return paths


def add_adapters(network: keras.Model, settings: Mapping[str, dict], freeze_others: bool) -> None:
    """Add adapters with individual settings to kernels; see `add_lora`.

    Args:
        network: Built `keras.Model`.
        settings: Dict from kernel paths, without the network's name, to dicts of arguments of
            `LowRankMixin.add_low_rank`.
        freeze_others: Boolean. Whether to freeze all weights except adapters.

    Raises:
        ValueError: If a path is not a kernel, its kernel already has an adapter, or a dtype is
            unknown.
    """
    layers = {path_in(network, layer): layer for layer in _layers(network)}
    kernels = weights_by_path(network)

    def check():
        for path, options in settings.items():
            dtype = options.get("dtype", "float32")
            if dtype not in DTYPES:
                raise ValueError(
                    f"The `dtype` of adapters must be one of {', '.join(DTYPES)}, got {dtype!r}."
                )
            layer = layers.get(path.rpartition("/")[0])
            kernel = kernels.get(path)
            if layer is None or (kernel is not None and not hasattr(kernel, "num_inputs")):
                raise ValueError(
                    f"{path} cannot have a low-rank adapter. Choose kernels of attention, "
                    "feed-forward layers, `Linear` or the head."
                )
            if path.rpartition("/")[2] in layer.low_rank:
                raise ValueError(
                    f"{path} has an adapter already. Call `merge_lora` to add it to the kernel."
                )

    call_on_all(check, "lora/check")
    for path, options in settings.items():
        layer, _, name = path.rpartition("/")
        layers[layer].add_low_rank(name, **options)
    if freeze_others:
        factors = _factors(network)
        for variable in network.variables:
            if id(variable) not in factors:
                variable.trainable = False
    _forget_functions(network)


def merge_lora(network: keras.Model) -> list[str]:
    """Add all adapters to their kernels and remove them: W becomes W + α/r · A · B.

    DoRA kernels become m · (W + α/r · A · B) / ‖W + α/r · A · B‖. Outputs do not change,
    except for rounding to the kernels' storage type. Kernels stay frozen. An adapted kernel that
    is quantized becomes an ordinary weight. Call it on all ranks.

    Args:
        network: Network with adapters.

    Returns:
        A list of the paths of this rank's merged kernels, without the network's name.

    Raises:
        ValueError: If the network has no adapters.
    """
    check_has_adapters(network, "merge_lora")
    merged = adapted_kernels(network)
    full_values = {}
    for path, kernel in merged.items() if _compat.initializes_variables() else ():
        value = _merged_value(kernel)
        if is_quantized(kernel):
            full_values[path] = value
        else:
            kernel.assign(tf.cast(value, kernel.dtype))
    for layer in _layers(network):
        for name in list(layer.low_rank):
            layer.remove_low_rank(name)
            if name in layer.quantized_kernels:
                path = f"{path_in(network, layer)}/{name}"
                layer.replace_quantized(name, full_values.pop(path, None))
    _forget_functions(network)
    return list(merged)


def adapted_kernels(network: keras.Model) -> dict[str, keras.Variable | QuantizedKernel]:
    """Return a dict from paths, without the network's name, to this rank's adapted kernels."""
    weights = weights_by_path(network)
    return {path: weight for path, weight in weights.items() if get_low_rank(weight) is not None}


def get_adapters(network: keras.Model) -> dict[str, dict]:
    """Return the settings of all adapters, on all pipeline stages.

    Returns:
        A dict from kernel paths to dicts of `"rank"`, `"alpha"` and `"kind"`.
    """
    return {
        f"{path_in(network, layer)}/{name}": {
            "rank": settings["rank"],
            "alpha": float(settings["alpha"]),
            "kind": settings.get("kind", "lora"),
        }
        for layer in _layers(network)
        for name, settings in layer.low_rank.items()
    }


def only_adapters_are_trained(network: keras.Model) -> bool:
    """Return whether all trainable weights, on all stages, belong to adapters.

    Call it on all ranks. A network without adapters returns False.
    """
    if not get_adapters(network):
        return False
    only_local_adapters = {id(weight) for weight in network.trainable_variables} <= _factors(
        network
    )
    return all(all_gather_json(only_local_adapters, "lora/only"))


def check_has_adapters(network: keras.Model, function: str) -> None:
    """Check that a network has adapters.

    Args:
        network: The network.
        function: Name of the calling function, for the message.

    Raises:
        ValueError: If the network has no adapters.
    """
    if not get_adapters(network):
        raise ValueError(f"`{function}` needs a network with adapters. Call `add_lora` first.")


def _factors(network):
    """Return the Python ids of this rank's adapter variables."""
    kernels = adapted_kernels(network).values()
    return {id(x) for kernel in kernels for x in kernel.low_rank.factors.values()}


def _merged_value(kernel):
    """Return a kernel's full float32 value with its adapter applied."""
    a, b, *m = (np.float32(x.numpy()) for x in kernel.low_rank.factors.values())
    full = np.float32(kernel.numpy()) + np.tensordot(a, b * np.float32(kernel.low_rank.scale), 1)
    if m:
        norms = np.linalg.norm(full, axis=tuple(range(len(a.shape) - 1)))
        full *= np.divide(m[0], norms, out=np.zeros_like(norms), where=norms > 0)
    return full


def _layers(network):
    """Return the layers that can have adapters. A layer without a path has no weights."""
    layers = _compat.flat_layers(network)
    return [layer for layer in layers if isinstance(layer, LowRankMixin) and layer.path]


def _forget_functions(network):
    """Drop compiled generation functions, which refer to the previous weights."""
    for layer in _compat.flat_layers(network):
        generator = getattr(layer, "_generator", None)
        if isinstance(generator, Generator):
            generator.forget_functions()
