"""Units: functions whose sharded weights are all-gathered, used and freed together.

A unit is a block, or a single product outside of blocks. Its weights are all-gathered before the
forward pass, and again before the backward pass. In between, they occupy no memory: the two passes
are separate graphs, and the backward pass takes the weights as arguments (`TwoPasses`). Gradients
are reduce-scattered to the local shards.

All-gathers run at most one unit ahead, and overlap with the computation of the neighboring unit:

| pass | the all-gathers of unit k wait for |
|---|---|
| forward | the input of unit k - 1 |
| backward | the gradient of unit k + 1's output, and the reduced gradients of unit k + 2 |

The last unit's all-gathers in the backward pass wait for the gradient of its output.

Reference:
    - [Rajbhandari et al., 2020, §5.3](https://arxiv.org/abs/1910.02054)
    - [Zhao et al., 2023, §3.3](https://arxiv.org/abs/2304.11277), for prefetching
"""

import itertools
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.ops.custom_gradient import after, custom_gradient, seed_after
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.auxiliary_metrics import collecting, is_collecting, report_all
from dtransformer.parallel.tracing.dropout_seed import current_dropout_seed, dropout_seed
from dtransformer.parallel.tracing.state_scope import StateScope
from dtransformer.parallel.tracing.two_passes import TwoPasses
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use
from dtransformer.parallel.zero.gather import (
    all_gather,
    current_unsharding,
    full_trained_value,
    inside_unit,
    local_shard,
    reduce_scatter,
)


def is_unit(weights: list[keras.Variable]) -> bool:
    """Return whether a function that reads these weights is a unit of the traced computation."""
    unsharding = current_unsharding()
    return (
        unsharding is not None
        and not unsharding.keeps
        and not tf.executing_eagerly()
        and any(map(is_unsharded_for_use, weights))
    )


def start_unit(x: tf.Tensor, weights: list[keras.Variable]) -> None:
    """Start a unit without gradients, whose weights are all-gathered when they are read.

    Args:
        x: Input of the unit.
        weights: List of the Keras variables that the unit reads.
    """
    if is_unit(weights):
        current_unsharding().start_unit(x)


def run_product(function: Callable, x: tf.Tensor, kernel: tf.Tensor | keras.Variable) -> tf.Tensor:
    """Return `function(x, kernel)`. In a training step, a product outside of blocks is a unit.

    Args:
        function: Function of two tensors.
        x: Tensor.
        kernel: Tensor or Keras variable.
    """
    if not trace.is_training_step() or not is_unit([kernel]):
        return function(x, kernel)
    weights = UnitWeights([kernel], {id(kernel): local_shard(kernel)})
    return run_unit(lambda x: function(x, kernel), [x], weights)


class UnitWeights:
    """Weights of a unit, and their all-gathers.

    Args:
        variables: List of Keras variables.
        shards: Dict from ids of the sharded variables to local shards in the compute dtype.

    Attributes:
        variables: List of Keras variables.
        stored: List of tensors, one per variable: the local shard, or the value if it is not
            sharded.
        trainable: List of Booleans.
    """

    def __init__(self, variables: list[keras.Variable], shards: dict[int, tf.Tensor]):
        self.variables = variables
        self.trainable = [variable.trainable for variable in variables]
        self._is_sharded = [id(variable) in shards for variable in variables]
        self.stored = [
            shards[id(variable)] if is_sharded else full_trained_value(variable)
            for variable, is_sharded in zip(variables, self._is_sharded)
        ]
        self._names = [
            current_unsharding().next_name(variable.path) if is_sharded else None
            for variable, is_sharded in zip(variables, self._is_sharded)
        ]

    @classmethod
    def of_layer(cls, layer: keras.layers.Layer) -> "UnitWeights":
        """Return the weights of a layer and its sublayers, each in its layer's compute dtype."""
        shards = {}
        for sublayer in _compat.flat_layers(layer):  # Sublayers follow the layer.
            with _compat.autocast_scope(sublayer):
                for variable in filter(is_unsharded_for_use, sublayer.variables):
                    shards[id(variable)] = local_shard(variable)
        return cls(layer.variables, shards)

    def specs(self) -> list[tf.TensorSpec]:
        """Return the specs of the full values."""
        return [
            tf.TensorSpec(variable.shape, stored.dtype)
            for variable, stored in zip(self.variables, self.stored)
        ]

    def gather(
        self, stored: list[tf.Tensor], wait_for: list[tf.Tensor], suffix: str = ""
    ) -> list[tf.Tensor]:
        """Return the full values after the tensors `wait_for` are computed.

        Args:
            stored: List of tensors in the form of `self.stored`.
            wait_for: List of tensors.
            suffix: String. End of the collectives' names. Defaults to `""`.
        """
        return [
            all_gather(variable, x, f"{name}{suffix}", wait_for) if is_sharded else x
            for variable, x, name, is_sharded in zip(
                self.variables, stored, self._names, self._is_sharded
            )
        ]

    def reduce(self, gradients: list[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Return the gradients of `self.stored` from the gradients of the full values."""
        reduced = []
        for gradient, stored, name, is_sharded in zip(
            gradients, self.stored, self._names, self._is_sharded
        ):
            if gradient is not None and is_sharded:
                gradient = tf.cast(reduce_scatter(gradient, f"{name}/gradient"), stored.dtype)
            reduced.append(gradient)
        return reduced


def run_unit(
    function: Callable,
    inputs: list[tf.Tensor],
    weights: UnitWeights,
    recompute: bool = False,
    gathers_after_recompute: bool = False,
    add_loss: Callable | None = None,
) -> tf.Tensor:
    """Return `function(*inputs)`, with gradients of the inputs and weights.

    Args:
        function: Function of tensors that returns a tensor and reads the weights.
        inputs: List of float tensors.
        weights: `UnitWeights`.
        recompute: Boolean. Whether the backward pass runs the forward pass again and only the
            inputs are stored. Defaults to `False`.
        gathers_after_recompute: Boolean. Whether the weights are freed between the repeated forward
            pass and the backward pass, and all-gathered a third time. Defaults to `False`.
        add_loss: Function that takes the list of losses that layers add inside `function`. By
            default they are discarded.
    """
    unsharding = current_unsharding()
    unit = unsharding.start_unit(inputs[0])
    forward_gate = unsharding.forward_gate
    seed = current_dropout_seed()
    traced = _TracedFunction(function, weights.variables)
    passes = TwoPasses(traced, inputs, [seed], weights.specs(), weights.trainable)
    num_inputs = len(inputs)

    @custom_gradient
    def forward(*arguments):
        inputs = list(arguments[:num_inputs])
        stored = list(arguments[num_inputs:])
        values = weights.gather(stored, forward_gate)
        results, saved = passes.forward(inputs, [seed], values)

        def gradient(*upstream):
            upstream = list(upstream[: 1 + traced.num_losses])
            dy = upstream[0]
            unsharding.output_gradients[unit] = dy
            gate = [unsharding.output_gradients.get(unit + 1, dy)]
            gate += unsharding.scattered_gradients.get(unit + 2, [])
            values = weights.gather(stored, gate, "/again")
            saved_activations = saved
            if recompute:
                inputs_after = [after(x, dy) for x in inputs]
                seeds = [seed_after(seed, dy)]
                repeated, saved_activations = passes.forward(inputs_after, seeds, values)
                if gathers_after_recompute:
                    values = weights.gather(stored, repeated[:1], "/third")
            gradients = passes.backward(upstream, saved_activations, values)
            input_gradients, weight_gradients = gradients
            reduced = weights.reduce(weight_gradients)
            unsharding.scattered_gradients[unit] = [x for x in reduced if x is not None]
            return [*input_gradients, *reduced]

        return results, gradient

    return traced.publish(forward(*inputs, *weights.stored), add_loss)


class _TracedFunction:
    """Function of a unit in the form that `TwoPasses` takes, without side effects.

    Args:
        function: Function of tensors that returns a tensor.
        variables: List of the Keras variables that it reads.

    Attributes:
        num_losses: Integer. Number of losses that layers add.
    """

    def __init__(self, function, variables):
        self.num_losses = 0
        self._function = function
        self._variables = variables
        self._metric_names = []
        self._states = []

    def __call__(self, inputs, constants, values):
        (seed,) = constants
        scope = StateScope(collect_losses=True, records_seeds=True)
        for variable, value in zip(self._variables, values):
            scope.state_mapping[id(variable)] = value  # Keras would cast it to the storage dtype.
        with (
            inside_unit(),
            dropout_seed(seed),
            scope,
            collecting(is_collecting()) as metrics,
        ):
            result = self._function(*inputs)
            self._metric_names = list(metrics)
            self._states = list(scope.states.values())
            states = [scope.get_current_value(variable) for variable in self._states]
        self.num_losses = len(scope.losses)
        return [result, *scope.losses], [*metrics.values(), *states]

    def publish(self, results, add_loss):
        """Add losses, report metrics and assign states. Return the function's result."""
        result, *results = results
        remaining = iter(results)
        losses = list(itertools.islice(remaining, self.num_losses))
        if add_loss is not None:
            add_loss(losses)
        report_all({name: next(remaining) for name in self._metric_names})
        for variable in self._states:
            variable.assign(next(remaining))
        return result
