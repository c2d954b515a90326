"""Layers whose kernels may have low-rank additions: factors that are added, and taken away."""

import functools
import types
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.initializers import FlattenedInitializer
from dtransformer.parallel.ops.low_rank import LowRank, low_rank_of
from dtransformer.parallel.ops.training_noise import InputDropout
from dtransformer.parallel.pipeline_parallel import stage_weights


class TakesLowRank(keras.layers.Layer):
    """A mixin of layers: a kernel is a weight with the attribute `num_inputs`.

    A subclass has `add_weight` with logical axes. Factors are weights of the layer, sharded as
    the kernel is; the dimension of the rank is replicated.
    """

    # Name of a kernel -> arguments of its addition; configs keep it.
    low_rank = types.MappingProxyType({})

    def add_low_rank(
        self, name: str, rank: int, alpha: float, dropout: float = 0.0, kind: str = "lora"
    ) -> None:
        """Add factors to a kernel of this layer. If another stage has it, keep their shapes.

        A is drawn from U(−1/√n, 1/√n), n being the number of inputs, B is 0, and magnitudes are
        the norms of the kernel's columns, so that outputs are at first as they were.

        Args:
            name: the kernel's.
            rank: size r of the dimension between the factors.
            alpha: α; the product of the factors is multiplied with α / r.
            dropout: the share of the inputs that the factors do not see in training.
            kind: `"lora"`, or `"dora"`, which adds magnitudes.
        """
        options = {"rank": rank, "alpha": alpha}
        if dropout:
            options["dropout"] = dropout
        if kind != "lora":
            options["kind"] = kind
        self.low_rank = {**self.low_rank, name: options}
        _compat.take_weights(self)
        self.add_factors()

    @stage_weights.built_on_its_stage
    def add_factors(self) -> None:
        """Add the missing factors of `low_rank`, after all other weights."""
        kernels = {kernel.name: kernel for kernel in stage_weights.own_weights(self)}
        for name, asked in self.low_rank.items():
            if name in kernels and low_rank_of(kernels[name]) is None:
                self._add_factors_of(kernels[name], asked)

    def _add_factors_of(self, kernel, asked):
        rank, number, axes = asked["rank"], kernel.num_inputs, kernel.logical_axes
        shape = tuple(kernel.shape)
        true_shape = tuple(getattr(kernel, "true_shape", shape))

        def add(letter, initializer, part, **options):
            return self.add_weight(
                part(shape, rank),
                initializer,
                axes=part(axes, None),
                true_shape=part(true_shape, rank),
                name=f"{kernel.name}_lora_{letter}",
                dtype="float32",
                **options,
            )

        uniform = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
        a = add("a", FlattenedInitializer(uniform, number), lambda x, r: (*x[:number], r))
        b = add("b", "zeros", lambda x, r: (r, *x[number:]))
        m, rate = None, asked.get("dropout")
        if asked.get("kind") == "dora":
            begin = "ones"
            # Other stages of a pipeline do not have the kernel's value.
            if _compat.makes_values() and not stage_weights.left_weights(self):
                norms = np.linalg.norm(np.float32(kernel.numpy()), axis=tuple(range(number)))
                begin = lambda shape, dtype: tf.constant(norms, dtype)
            m = add("m", begin, lambda x, _: x[number:], autocast=False)
        dropout = InputDropout(rate, kernel.path) if rate else None
        kernel.low_rank = LowRank(a, b, asked["alpha"] / rank, dropout, m)

    @property
    def mask_drawers(self) -> list[InputDropout]:
        """The dropouts of its kernels' additions."""
        found = [low_rank_of(variable) for variable in _compat.own_variables(self)]
        return [x.dropout for x in found if x is not None and x.dropout is not None]

    def remove_low_rank(self, name: str) -> None:
        """Remove the factors of a kernel."""
        self.low_rank = {key: asked for key, asked in self.low_rank.items() if key != name}
        for kernel in stage_weights.own_weights(self):
            if kernel.name == name:
                for factor in kernel.low_rank.factors.values():
                    stage_weights.forget_weight(self, factor)
                del kernel.low_rank


def built_with_factors(build: Callable) -> Callable:
    """Return a layer's method `build`, which adds the factors that its config asks for."""

    @functools.wraps(build)
    def build_all(layer, *args, **kwargs):
        build(layer, *args, **kwargs)
        layer.add_factors()

    return build_all
