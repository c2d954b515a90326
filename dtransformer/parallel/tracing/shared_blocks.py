"""Blocks that are alike are traced once: one function is called for each of them.

It is given the weights of the block, and the numbers that its dropout masks are drawn by. Its
gradient is traced once, too. In a stack of few blocks TensorFlow puts a copy where each is, as
computing calls takes 3 to 5 % more time; copies of many would take minutes to be optimized. On a
mesh there are copies always: DTensor compiles no calls. Under XLA blocks are traced where they are:
it would take all that is given to a function with a gradient, the weights too, for constants, and
compile anew in every step.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.auxiliary_metrics import collecting, is_collecting, report_all
from dtransformer.parallel.tracing.dropout_seed import (
    current_dropout_seed,
    current_random_id,
    dropout_seed,
    random_layers,
    use_random_ids,
)
from dtransformer.parallel.tracing.scoped import Scoped, context_signature
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use, trained_value

# Stacks of more blocks call their function where each block is.
_MOST_COPIES = 12

_numbers = itertools.count()
_calls = Scoped("block_calls")
_tape_graph = Scoped("tape_graph")


def recording_block_calls(calls: dict[str, list[str]]) -> contextlib.AbstractContextManager:
    """Record where shared functions of blocks are called inside the `with` block.

    Args:
        calls: Dict that is filled: name scope inside a shared function -> list of the name scopes
            of its calls.
    """
    return _calls.set(calls)


def tape_opened_here() -> contextlib.AbstractContextManager:
    """Mark the current graph as the one in which a step opens its gradient tape.

    Only in this graph TensorFlow can report which tensors the tape watches.
    """
    return _tape_graph.set(tf.compat.v1.get_default_graph())


class SharedBlocks:
    """The functions of the blocks of one stack.

    Args:
        num_blocks: number of blocks of the stack.
    """

    def __init__(self, num_blocks: int):
        self._num_blocks = num_blocks
        self._functions = {}  # signature -> function, scope of its names

    def __reduce__(self):  # a copy traces its own
        return SharedBlocks, (self._num_blocks,)

    def __call__(self, block, compute: Callable, tensors: Sequence, training: bool) -> tf.Tensor:
        """Return compute(*tensors), the result of a block, by the function of those alike.

        Args:
            block: the block, a layer.
            compute: a function of tensors that reads the block's weights, and nothing else.
            tensors: list of tensors, nested ones, or None; the first is like the result.
            training: whether dropout applies.
        """
        layers = _compat.flat_layers(block)
        if not _can_be_shared(block, layers):
            return compute(*tensors)
        key, drawers = _key(layers, training), random_layers(layers)
        if key not in self._functions:
            is_called = self._num_blocks > _MOST_COPIES and not trace.is_on_mesh()
            scope = f"alike_{next(_numbers)}"
            function = _function(block, compute, drawers, is_called, scope)
            self._functions[key] = function, scope
        function, scope = self._functions[key]
        if _calls.get() is not None:
            _calls.get().setdefault(scope, []).append(tf.get_current_name_scope())
        with _compat.without_autocast():  # gradients are taken of the type that is stored
            values = [tf.convert_to_tensor(trained_value(weight)) for weight in block.variables]
        seed = current_dropout_seed() if training else None
        numbers = _numbers_of(drawers)
        ends_gradients = _ends_gradients(tensors, values)
        result, losses, metrics = function(list(tensors), values, seed, numbers, ends_gradients)
        block.add_loss(losses)
        report_all({f"{block.path}{name}": value for name, value in metrics.items()})
        return result


def _function(block, compute, dropouts, is_called, name_scope):
    """Return the function of the blocks that are like one, which may be called or copied."""
    weights = block.variables

    def run(tensors, values, seed, numbers, ends_gradients):
        if ends_gradients:
            tensors = tf.nest.map_structure(
                lambda x: None if x is None else tf.stop_gradient(x), tensors
            )
        own = {id(layer): numbers[i] for i, layer in enumerate(dropouts)}
        scope = keras.StatelessScope(zip(weights, values), collect_losses=True)
        named, drawn = tf.name_scope(name_scope), use_random_ids(own)
        reports = collecting(is_collecting())
        with named, dropout_seed(seed), drawn, scope, reports as metrics:
            result = compute(*tensors)
        # The layers that report are those of the block that was traced.
        metrics = {name.removeprefix(block.path): value for name, value in metrics.items()}
        return result, scope.losses, metrics

    attributes = {"_noinline": True} if is_called else None
    return tf.function(run, autograph=False, experimental_attributes=attributes)


def _numbers_of(drawers):
    """Return the numbers that the masks of dropout are drawn by, an int32 tensor."""
    numbers = [current_random_id(layer) for layer in drawers]
    if any(map(tf.is_tensor, numbers)):
        return tf.stack(numbers)
    # TensorFlow would make, and optimize, a function for each constant that one is given.
    numbers = tf.constant(numbers, "int32")
    return tf.raw_ops.PlaceholderWithDefault(input=numbers, shape=numbers.shape)


def _ends_gradients(tensors, values):
    """Return whether the step's tape watches weights of a block, and none of its inputs.

    The function would compute gradients of these, too, and send for them.
    """
    if _tape_graph.get() is not tf.compat.v1.get_default_graph():
        return False
    inputs = [x for x in tf.nest.flatten(tensors) if x is not None]
    return _compat.is_on_a_tape(values) and not _compat.is_on_a_tape(inputs)


def _can_be_shared(block, layers):
    """Return whether the block's result is a function of its inputs and weights alone.

    Its layers have to be this package's, which change no state, and to send nothing: what ranks
    send each other has a name for each block. Besides its result it gives what layers add to the
    loss, and what they tell.
    """
    return (
        block.built
        and not _compat.in_symbolic_scope()  # shapes alone are asked for
        and not tf.executing_eagerly()
        and not _compat.is_compiled_by_xla()
        and all(type(layer).__module__.startswith("dtransformer.") for layer in layers)
        and not any(getattr(layer, "sends", False) for layer in layers)
        and not any(is_unsharded_for_use(weight) for weight in block.variables)
    )


def _key(layers, training):
    """Return the signature of a block, and of what it is traced for."""
    configs = [{**layer.get_config(), "name": None} for layer in layers]
    return (
        training,
        *context_signature(),
        is_collecting(),
        tuple(type(layer) for layer in layers),
        repr(configs),
        tuple((tuple(w.shape), w.dtype, w.trainable) for w in layers[0].variables),
    )
