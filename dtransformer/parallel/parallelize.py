"""The order of parallelism techniques applied to a network.

1. Create a weight (`variable_factory`): shard it over the mesh by its logical axes (tensor and
expert
   parallelism), then over the data-parallel group (zero).
2. Build a layer: only on its pipeline stage. Other stages keep its shapes.
3. Call a layer: only on its stage. Other stages get placeholders or received tensors.
   Run the layer again in the backward pass if configured (recompute).
4. Call a block: all-gather its weights one block ahead (zero). Otherwise trace equal blocks once
   (`shared_blocks`). Run it again in the backward pass if configured (recompute).
5. Within a block, `tensor_parallel`, `context_parallel` and `expert_parallel` compute products,
   attention and experts. Without a mesh, these are plain operations.

Keras only allows steps 2 and 3 in methods of a layer's class. Therefore
`dtransformer.layers.base.Layer` passes these methods to `build_method` and `call_method`.
"""

from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel.ops.split_backward import is_splitting_backward
from dtransformer.parallel.pipeline_parallel.stage_dispatch import dispatched
from dtransformer.parallel.pipeline_parallel.stage_weights import built_on_its_stage
from dtransformer.parallel.recompute.recompute import recomputed, sum_gradients_first
from dtransformer.parallel.zero import units
from dtransformer.parallel.zero.units import is_unit, start_unit

# Wrap a layer's `build`, and its `call` after Keras has built, cast and masked.
build_method = built_on_its_stage
call_method = dispatched


def run_block(
    block, function: Callable, inputs: list[tf.Tensor], masks: list, training: bool
) -> tf.Tensor:
    """Run a block of a stack with unsharding, recomputation and shared traces.

    Args:
        block: `TransformerBlock`.
        function: Function of the inputs and masks that reads the block's weights.
        inputs: List of tensors `[b, s, h]`.
        masks: List of tensors or `None` values.
        training: Whether dropout is active and gradients are computed.

    Returns:
        The result of `function(*inputs, *masks)`.
    """
    if training and is_unit(block.variables):
        return units.run_block(block, function, inputs, masks, block.recompute_config)
    start_unit(inputs[0], block.variables)

    def compute(*tensors):
        block_inputs = tensors[: len(inputs)]
        mask_tensors = tensors[len(inputs) :]
        if not training:
            return function(*block_inputs, *mask_tensors)
        if block.is_recomputed:

            def compute_block(*block_inputs):
                return function(*block_inputs, *mask_tensors)

            config = block.recompute_config
            return recomputed(compute_block, block_inputs, block.variables, config, block.add_loss)
        return function(*sum_gradients_first(block_inputs), *mask_tensors)

    if block.shared is None or is_splitting_backward():
        return compute(*inputs, *masks)
    return block.shared(block, compute, [*inputs, *masks], training)
