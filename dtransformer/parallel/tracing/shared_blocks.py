"""Functions that are traced once for all equal blocks of a stack.

A function takes a block's weights and random ids as arguments. Its gradient is also traced once.

- In a small stack, TensorFlow inlines a copy for each block, because calls take 3 to 5 % more time
  to compute. In a large stack, optimizing the copies would take minutes.
- On a mesh TensorFlow always inlines copies, because DTensor does not compile calls.
- Under XLA, blocks do not share functions. XLA would treat all arguments of a function with a
  gradient as constants, including the weights, and compile the function again in every step.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.auxiliary_metrics import is_collecting
from dtransformer.parallel.tracing.dropout_seed import current_dropout_seed, dropout_seed
from dtransformer.parallel.tracing.equal_layers import EqualLayers, is_from_package
from dtransformer.parallel.tracing.trace import Scoped
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use

_MAX_COPIES = 12
"""Number of blocks up to which TensorFlow inlines the functions of a stack."""

_scope_ids = itertools.count()
_calls = Scoped("block_calls")


def recording_block_calls(calls: dict[str, list[str]]) -> contextlib.AbstractContextManager:
    """Record where shared functions of blocks are called inside the `with` block.

    Args:
        calls: Dict to fill. Keys are name scopes inside shared functions, values are lists of the
            name scopes of the calls.
    """
    return _calls.set(calls)


class SharedBlocks:
    """Functions of the equal blocks of one stack.

    Args:
        num_blocks: Integer. Number of blocks in the stack.
    """

    def __init__(self, num_blocks: int):
        self._num_blocks = num_blocks
        # Maps a signature to the function, the layers that were traced and the name scope.
        self._functions = {}

    def __reduce__(self):  # A copy of a stack traces its functions again.
        return SharedBlocks, (self._num_blocks,)

    def __call__(self, block, compute: Callable, tensors: Sequence, training: bool) -> tf.Tensor:
        """Return `compute(*tensors)`, computed by the shared function of equal blocks.

        Blocks that cannot share a function call `compute` directly. See `can_share`.

        Args:
            block: Layer that `compute` calls.
            compute: Function of tensors. Its result must depend only on the tensors and on the
                weights and random ids of the block.
            tensors: Sequence of nested tensors or `None`. The first one has the result's shape.
            training: Boolean, whether to apply dropout.
        """
        layers = EqualLayers([block])
        if not can_share(layers) or any(map(is_unsharded_for_use, layers.weights)):
            return compute(*tensors)
        key = training, is_collecting(), layers.signature()
        if key not in self._functions:
            is_called = self._num_blocks > _MAX_COPIES and not trace.is_on_mesh()
            scope = f"equal_{next(_scope_ids)}"
            self._functions[key] = _make_function(layers, compute, is_called, scope), layers, scope
        function, traced_layers, scope = self._functions[key]
        if _calls.get() is not None:
            _calls.get().setdefault(scope, []).append(tf.get_current_name_scope())
        values = layers.weight_values()
        seed = current_dropout_seed() if training else None
        ids = pack_ids(layers.random_ids())
        stops_gradients = _should_stop_gradients(tensors, values)
        result, losses, metrics = function(list(tensors), values, seed, ids, stops_gradients)
        layers.report(traced_layers, losses, metrics)
        return result


def _make_function(layers, compute, is_called, name_scope):
    """Return the `tf.function` for blocks that are equal to `layers`.

    With `is_called`, TensorFlow does not inline it.
    """

    def run(tensors, values, seed, ids, stops_gradients):
        if stops_gradients:
            tensors = tf.nest.map_structure(
                lambda x: None if x is None else tf.stop_gradient(x), tensors
            )
        with tf.name_scope(name_scope), dropout_seed(seed):
            return layers.compute_with(lambda: compute(*tensors), values, ids)

    attributes = {"_noinline": True} if is_called else None
    return tf.function(run, autograph=False, experimental_attributes=attributes)


def pack_ids(ids: list[int | tf.Tensor]) -> tf.Tensor:
    """Return the ids of random layers as an int32 tensor."""
    if any(map(tf.is_tensor, ids)):
        return tf.stack(ids)
    # TensorFlow would specialize and optimize a function for each constant argument.
    ids = tf.constant(ids, "int32")
    return tf.raw_ops.PlaceholderWithDefault(input=ids, shape=ids.shape)


def _should_stop_gradients(tensors, values):
    """Return whether the step's tape watches weights of a block but no inputs.

    The function would otherwise also compute, and reduce, gradients of the inputs.
    """
    if trace.tape_graph() is not tf.compat.v1.get_default_graph():
        return False
    inputs = [x for x in tf.nest.flatten(tensors) if x is not None]
    return _compat.is_on_a_tape(values) and not _compat.is_on_a_tape(inputs)


def can_share(layers: EqualLayers) -> bool:
    """Return whether a block can share a function with equal blocks.

    All its layers must come from this package, because other layers may change states. The block
    must not communicate, because names of collectives differ between blocks. Functions are shared
    only in graphs that compute values, and not under XLA.
    """
    (block,) = layers.layers
    return (
        block.built
        and not _compat.in_symbolic_scope()
        and not tf.executing_eagerly()
        and not _compat.is_compiled_by_xla()
        and all(map(is_from_package, layers.inner))
        and not any(getattr(layer, "exchanges_counts", False) for layer in layers.inner)
    )
