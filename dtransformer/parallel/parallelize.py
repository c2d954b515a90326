"""In which order techniques apply to a network: all that layers go through, on one screen.

1. A weight is made (`variable_factory`): sharded over the mesh by its logical axes (tensor and expert
   parallel), then over the data-parallel group (zero).
2. A layer is built: on the pipeline stage that has it; others keep its shapes.
3. A layer is called: on its stage; others get placeholders, or what they received.
4. A block is called: its weights are unsharded one block ahead (zero), one of equal blocks is traced
   (`shared_blocks`), and the backward pass computes it again (recompute).
5. Within a block, products, attention and experts are those of `tensor_parallel`, `context_parallel`
   and `expert_parallel`: where there is no mesh, the plain operations.

Keras has no other place for 2 and 3 than the methods that a layer's class has, which
`dtransformer.layers.base.Layer` therefore hands to `build_method` and `call_method`.
"""

from collections.abc import Callable

import tensorflow as tf

from dtransformer.parallel.ops.split_backward import is_splitting_backward
from dtransformer.parallel.pipeline_parallel.stage_dispatch import dispatched
from dtransformer.parallel.pipeline_parallel.stage_weights import built_on_its_stage
from dtransformer.parallel.recompute.recompute import recomputed, sum_gradients_first
from dtransformer.parallel.zero.gather import unsharding_ahead

# What a layer's methods become: its `build`, and its `call` after Keras has built, cast and masked.
build_method, call_method = built_on_its_stage, dispatched


def run_block(
    block, function: Callable, inputs: list[tf.Tensor], masks: list, training: bool
) -> tf.Tensor:
    """Return function(*inputs, *masks), as a block of a stack computes it.

    Args:
        block: the `TransformerBlock`.
        function: a function of tensors that reads the block's weights.
        inputs: list of tensors [b, s, h].
        masks: list of tensors, or None.
        training: whether dropout applies, and gradients are taken.
    """

    def compute(*tensors):
        own, given = tensors[: len(inputs)], tensors[len(inputs) :]
        if not training:
            return function(*own, *given)
        if block.recomputes:
            of_inputs = lambda *own: function(*own, *given)
            config = block.recompute_config
            return recomputed(of_inputs, own, block.variables, config, block.add_loss)
        return function(*sum_gradients_first(own), *given)

    with unsharding_ahead(inputs) as output:
        if block.shared is None or is_splitting_backward():
            result = compute(*inputs, *masks)
        else:
            result = block.shared(block, compute, [*inputs, *masks], training)
        return output(result) if training else result
