"""Low-rank adapters (LoRA and DoRA) for the kernels of layers."""

import functools
import types
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.initializers import FlattenedInitializer
from dtransformer.layers.quantized import QuantizedMixin
from dtransformer.parallel.mesh.training_noise import InputDropout
from dtransformer.parallel.ops.low_rank import LowRank, get_low_rank
from dtransformer.parallel.pipeline_parallel import stage_weights


class LowRankMixin(QuantizedMixin):
    """Mixin of layers whose kernels can have low-rank adapters.

    A kernel is a weight with the attribute `num_inputs`. The factors are weights of the layer with
    the kernel's sharding; the rank dimension is replicated. Subclasses need an `add_weight` with
    logical axes.
    """

    # Name of a kernel -> options of its adapter. Configs store it.
    low_rank = types.MappingProxyType({})

    def add_low_rank(
        self,
        name: str,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        kind: str = "lora",
        dtype: str = "float32",
    ) -> None:
        """Add a low-rank adapter to a kernel of this layer.

        A is drawn from U(−1/√n, 1/√n) for n inputs and B is 0. DoRA's magnitudes are the column
        norms of the kernel. The outputs are therefore unchanged at first. If another pipeline stage
        stores the kernel, only the shapes of the factors are recorded.

        Args:
            name: String. Name of the kernel.
            rank: Integer. Size r of the dimension between the factors.
            alpha: Float. α: the product of the factors is multiplied by α / r.
            dropout: Float. Fraction of the adapter's inputs to drop in training. Defaults to `0.0`.
            kind: `"lora"`, or `"dora"`, which also learns magnitudes. Defaults to `"lora"`.
            dtype: `"float32"` or `"bfloat16"`, the type of the factors. Defaults to `"float32"`.
        """
        defaults = {"dropout": 0.0, "kind": "lora", "dtype": "float32"}
        options = {"dropout": dropout, "kind": kind, "dtype": dtype}
        options = {key: value for key, value in options.items() if value != defaults[key]}
        options = {"rank": rank, "alpha": alpha, **options}
        self.low_rank = {**self.low_rank, name: options}
        _compat.unlock_layer(self)
        self.add_factors()

    @stage_weights.built_on_its_stage
    def add_factors(self) -> None:
        """Add the adapters in `low_rank` that have no factors yet.

        Call it after all other weights have been added.
        """
        kernels = {kernel.name: kernel for kernel in self._possible_kernels()}
        for name, options in self.low_rank.items():
            if name in kernels and get_low_rank(kernels[name]) is None:
                self._add_adapter(kernels[name], options)

    def _possible_kernels(self):
        return [*stage_weights.get_direct_weights(self), *self.quantized_kernels.values()]

    def _add_adapter(self, kernel, adapter):
        rank = adapter["rank"]
        num_inputs = kernel.num_inputs
        axes = kernel.logical_axes
        shape = tuple(kernel.shape)
        true_shape = tuple(getattr(kernel, "true_shape", shape))
        dtype = adapter.get("dtype", "float32")

        def add(suffix, initializer, shape_of, **options):
            factor = self.add_weight(
                shape_of(shape, rank),
                initializer,
                axes=shape_of(axes, None),
                true_shape=shape_of(true_shape, rank),
                name=f"{kernel.name}_lora_{suffix}",
                dtype=dtype,
                **options,
            )
            factor.rounds_updates = dtype == "bfloat16"
            return factor

        uniform = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
        a = add("a", FlattenedInitializer(uniform, num_inputs), lambda x, r: (*x[:num_inputs], r))
        b = add("b", "zeros", lambda x, r: (r, *x[num_inputs:]))
        m = None
        rate = adapter.get("dropout")
        if adapter.get("kind") == "dora":
            magnitudes = "ones"
            # Other pipeline stages do not have the kernel's value.
            if _compat.initializes_variables() and not stage_weights.left_weights(self):
                norms = np.linalg.norm(np.float32(kernel.numpy()), axis=tuple(range(num_inputs)))

                def magnitudes(shape, dtype):
                    return tf.constant(norms, dtype)

            m = add("m", magnitudes, lambda x, _: x[num_inputs:], autocast=False)
        dropout = InputDropout(rate, kernel.path) if rate else None
        kernel.low_rank = LowRank(a, b, adapter["alpha"] / rank, dropout, m)

    @property
    def random_layers(self) -> list[InputDropout]:
        """Input dropouts of the adapters, a list."""
        kernels = [*_compat.direct_variables(self), *self.quantized_kernels.values()]
        adapters = list(map(get_low_rank, kernels))
        return [x.dropout for x in adapters if x is not None and x.dropout is not None]

    def remove_low_rank(self, name: str) -> None:
        """Remove the adapter of the kernel `name`."""
        self.low_rank = {key: options for key, options in self.low_rank.items() if key != name}
        for kernel in self._possible_kernels():
            if kernel.name == name:
                for factor in kernel.low_rank.factors.values():
                    stage_weights.forget_weight(self, factor)
                del kernel.low_rank


def build_with_adapters(build: Callable) -> Callable:
    """Return a `build` method that also adds the adapters in the layer's config."""

    @functools.wraps(build)
    def build_all(layer, *args, **kwargs):
        build(layer, *args, **kwargs)
        layer.add_factors()

    return build_all
