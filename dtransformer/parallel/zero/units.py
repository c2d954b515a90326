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

from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.config.config import TransformerRecomputeConfig
from dtransformer.parallel.ops.custom_gradient import custom_gradient, delay_seed, depend_on
from dtransformer.parallel.ops.split_backward import not_splitting_backward
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.auxiliary_metrics import is_collecting
from dtransformer.parallel.tracing.dropout_seed import current_dropout_seed, dropout_seed
from dtransformer.parallel.tracing.equal_layers import EqualLayers
from dtransformer.parallel.tracing.shared_blocks import can_share, pack_ids
from dtransformer.parallel.tracing.state_scope import SideEffects, StateScope
from dtransformer.parallel.tracing.two_passes import TwoPasses
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use
from dtransformer.parallel.zero.gather import (
    all_gather,
    copied_variable,
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
        and any(map(is_gathered, weights))
    )


def is_gathered(weight: tf.Tensor | keras.Variable) -> bool:
    """Return whether a computation all-gathers a weight over data ranks, itself or on its mesh."""
    specs = getattr(weight, "specs", None)
    return is_unsharded_for_use(weight) or specs != getattr(weight, "specs_in_use", None)


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
    variable = copied_variable(kernel)
    if not trace.is_training_step() or not is_unit([variable]):
        return function(x, kernel)
    is_flat = is_unsharded_for_use(variable)
    weights = UnitWeights(
        [variable], {id(variable): local_shard(variable).dtype} if is_flat else {}
    )
    seed = current_dropout_seed()
    unit = Unit(lambda inputs, _: function(*inputs, variable), [x], [seed], weights)
    (result,) = unit.run([x], [seed], weights)
    return result


def run_block(
    block: keras.layers.Layer,
    function: Callable,
    inputs: list[tf.Tensor],
    masks: list,
    recompute: TransformerRecomputeConfig,
) -> tf.Tensor:
    """Return `function(*inputs, *masks)`, with gradients of the inputs and the block's weights.

    Equal blocks are traced once, see `shared_blocks`.

    Args:
        block: `TransformerBlock`.
        function: Function of the inputs and masks that returns a tensor and reads the weights.
        inputs: List of float tensors.
        masks: List of nested tensors and `None`.
        recompute: `TransformerRecomputeConfig` of the block.
    """
    layers = EqualLayers([block])
    weights = UnitWeights.from_layer(block)
    leaves = tf.nest.flatten(masks)
    constants = [current_dropout_seed(), pack_ids(layers.random_ids())]
    constants += [x for x in leaves if x is not None]

    def compute(inputs, constants):
        ids, *tensors = constants
        remaining = iter(tensors)
        replaced = [None if x is None else next(remaining) for x in leaves]
        with layers.use_random_ids(tf.unstack(ids)):
            return function(*inputs, *tf.nest.pack_sequence_as(masks, replaced))

    units = current_unsharding().units
    key = id(block)
    if can_share(layers):
        specs = [(x.shape, x.dtype) for x in [*inputs, *constants, *weights.specs]]
        key = repr((layers.signature(), is_collecting(), [x is None for x in leaves], specs))
    if key not in units:
        units[key] = Unit(compute, inputs, constants, weights), layers
    unit, traced_layers = units[key]
    results = unit.run(inputs, constants, weights, recompute)

    def report(losses, metrics):
        layers.report(traced_layers, losses, metrics)

    return unit.effects.publish(results, report)


class UnitWeights:
    """Weights of a unit, and their all-gathers.

    Args:
        variables: List of Keras variables.
        dtypes: Dict from ids of the sharded variables to the dtypes of computations.

    Attributes:
        variables: List of Keras variables.
        stored: List of tensors, one per variable: the local shard, or the value if it is not
            sharded. They share the memory of the variable.
        specs: List of the `tf.TensorSpec`s of the full values.
    """

    def __init__(self, variables: list[keras.Variable], dtypes: dict[int, tf.DType]):
        self.variables = variables
        self.stored = []
        self.specs = []
        self._names = []  # Names of the collectives, or None.
        for variable in variables:
            is_sharded = id(variable) in dtypes
            if is_sharded:
                stored = tf.convert_to_tensor(variable.shards[0].value)
            else:
                stored = full_trained_value(variable)
            self.stored.append(stored)
            dtype = dtypes.get(id(variable), stored.dtype)
            self.specs.append(tf.TensorSpec(variable.shape, dtype))
            unsharding = current_unsharding()
            self._names.append(unsharding.next_name(variable.path) if is_sharded else None)

    @classmethod
    def from_layer(cls, layer: keras.layers.Layer) -> "UnitWeights":
        """Return the weights of a layer and its sublayers, each in its layer's compute dtype."""
        dtypes = {}
        for sublayer in _compat.flat_layers(layer):  # Sublayers follow the layer.
            with _compat.autocast_scope(sublayer):
                for variable in filter(is_unsharded_for_use, sublayer.variables):
                    dtypes[id(variable)] = local_shard(variable).dtype
        return cls(layer.variables, dtypes)

    def gather(
        self, stored: list[tf.Tensor], wait_for: list[tf.Tensor], suffix: str = ""
    ) -> list[tf.Tensor]:
        """Return the full values after the tensors `wait_for` are computed.

        Args:
            stored: List of tensors in the form of `self.stored`.
            wait_for: List of tensors.
            suffix: String. End of the collectives' names. Defaults to `""`.
        """
        values = []
        for variable, value, name, spec in zip(self.variables, stored, self._names, self.specs):
            if name is not None:
                shard = tf.cast(value, spec.dtype)
                value = all_gather(variable, shard, f"{name}{suffix}", wait_for)
            values.append(value)
        return values

    def reduce(self, gradients: list[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Return the gradients of `self.stored` from the gradients of the full values."""
        reduced = []
        for gradient, stored, name in zip(gradients, self.stored, self._names):
            if gradient is not None and name is not None:
                gradient = tf.cast(reduce_scatter(gradient, f"{name}/gradient"), stored.dtype)
            reduced.append(gradient)
        return reduced


class Unit:
    """A traced unit, which equal blocks share.

    Args:
        function: Function of `inputs` and all `constants` after the first one. Returns a tensor.
        inputs: List of float tensors.
        constants: List of tensors without gradients. The first one is the dropout seed.
        weights: `UnitWeights` that the function reads.

    Attributes:
        effects: `SideEffects` of the function.
    """

    def __init__(
        self,
        function: Callable,
        inputs: list[tf.Tensor],
        constants: list[tf.Tensor],
        weights: UnitWeights,
    ):
        self.effects = SideEffects()

        def compute(inputs, constants, values):
            seed, *others = constants
            scope = StateScope(collect_losses=True)
            for variable, value in zip(weights.variables, values):
                scope.state_mapping[id(variable)] = value  # Keras would cast to the storage dtype.
            with dropout_seed(seed), not_splitting_backward():
                return self.effects.trace(lambda: function(inputs, others), scope)

        trainable = [variable.trainable for variable in weights.variables]
        with inside_unit():
            self._passes = TwoPasses(compute, inputs, constants, weights.specs, trainable)

    def run(
        self,
        inputs: list[tf.Tensor],
        constants: list[tf.Tensor],
        weights: UnitWeights,
        recompute: TransformerRecomputeConfig | None = None,
    ) -> list[tf.Tensor]:
        """Compute the unit with the weights of an equal block.

        Args:
            inputs, constants, weights: See the constructor.
            recompute: `TransformerRecomputeConfig`. With `recompute=True` only the inputs are
                stored, and the backward pass runs the forward pass again. Defaults to `None`.

        Returns:
            The results of `effects.trace`.
        """
        passes = self._passes
        recompute = recompute or TransformerRecomputeConfig()
        unsharding = current_unsharding()
        unit = unsharding.start_unit(inputs[0])
        forward_gate = unsharding.forward_gate
        seed, *others = constants

        @custom_gradient
        def forward(*arguments):
            inputs_now = list(arguments[: len(inputs)])
            stored = list(arguments[len(inputs) :])
            values = weights.gather(stored, forward_gate)
            results, saved = passes.forward(inputs_now, constants, values)

            def gradient(*upstream):
                upstream = list(upstream[: self.effects.num_differentiable])
                dy = upstream[0]
                unsharding.output_gradients[unit] = dy
                gate = [unsharding.output_gradients.get(unit + 1, dy)]
                gate += unsharding.scattered_gradients.get(unit + 2, [])
                values = weights.gather(stored, gate, "/again")
                activations = saved
                if recompute.recompute:
                    late_inputs = [depend_on(x, dy) for x in inputs_now]
                    late_constants = [delay_seed(seed, dy), *others]
                    repeated, activations = passes.forward(late_inputs, late_constants, values)
                    if recompute.parallel_optimizer_comm_recompute:
                        values = weights.gather(stored, repeated[:1], "/third")
                input_gradients, gradients = passes.backward(upstream, activations, values)
                reduced = weights.reduce(gradients)
                unsharding.scattered_gradients[unit] = [x for x in reduced if x is not None]
                return [*input_gradients, *reduced]

            return results, gradient

        return forward(*inputs, *weights.stored)
