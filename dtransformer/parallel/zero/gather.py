"""Weights of which each rank of the data group holds a flat slice, gathered where used.

A product with such a weight gathers it just before, and once more for its gradient, so
that between the two it takes no memory. The gradient leaves as the sum of this rank's
slice. Gathers wait for the input of the block before the one that uses them, and for the
gradient of the output of the block after it: they are one block ahead, not more. Those of
the backward pass also wait until the gradients of the block after that one have left.

Reference: Rajbhandari et al., 2020, arXiv 1910.02054, §5.3; Zhao et al., 2023, "PyTorch
FSDP", arXiv 2304.11277, §3.3, for what is fetched ahead.
"""

import collections
import contextlib

import tensorflow as tf

from dtransformer.parallel import job, trace
from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.sharded_variable import is_unsharded_for_use


def gather(variable, part, name):
    """Return the whole of a variable from this rank's slice of it."""
    (whole,) = flat_shards.all_gather(
        [part], [tuple(variable.shape)], job.data_parallel_group(), name
    )
    return whole


def reduce_scatter(gradient, name):
    """Return this rank's slice of a gradient's sum, in float32."""
    dtype = get_parallel_config().gradient_dtype
    gradient = tf.cast(tf.convert_to_tensor(gradient), "float32")
    (part,) = flat_shards.reduce_scatter([gradient], job.data_parallel_group(), name, dtype)
    return part


class _Unsharding:
    """One computation of the network: what was gathered, and what gathers wait for.

    Args:
        name: prefix of its messages.
        parts: dict of the id of a variable and its slice, a tensor; the variables' own
            slices where there is none.
        keeps: whether what was gathered is kept until the pass is over.
        gate: a tensor that gathers wait for, or None.
    """

    def __init__(self, name, parts=None, keeps=False, gate=None):
        self.name, self.keeps = name, keeps
        self._parts = parts or {}
        self._wholes, self._uses = {}, collections.Counter()
        self.before_block, self.this_block = gate, None  # inputs
        self.number, self.after_block = 0, {}  # gradients of outputs
        self.sent = collections.defaultdict(list)  # a block's gradients, once they are slices

    def part(self, variable):
        """Return this rank's slice of a variable, in the type that is computed with."""
        part = self._parts.get(id(variable))
        if part is None:
            part = tf.convert_to_tensor(variable.shards[0].value)
        return variable._maybe_autocast(part)

    def message(self, path):
        """Return a name for the next use of a variable or layer, the same on every rank."""
        self._uses[path] += 1
        return f"{self.name}/{path}/{self._uses[path]}"

    def fetch(self, variables):
        """Gather variables now, in the type that they are stored in."""
        for variable in variables:
            if is_unsharded_for_use(variable):
                part = tf.convert_to_tensor(variable.shards[0].value)
                self._wholes[id(variable)] = gather(variable, part, self.message(variable.path))

    def whole(self, variable):
        """Return a variable's whole, which is kept as long as anything needs it."""
        if id(variable) in self._wholes:
            return variable._maybe_autocast(self._wholes[id(variable)])
        part = self.part(variable)
        key = id(variable), part.dtype
        if key not in self._wholes:
            name, gate = self.message(variable.path), self.before_block

            @tf.custom_gradient
            def run(part):
                whole = gather(variable, _when(part, gate), name)
                dtype = part.dtype
                return whole, lambda dw: tf.cast(reduce_scatter(dw, f"{name}/gradient"), dtype)

            self._wholes[key] = run(part)
        return self._wholes[key]

    def use(self, function, x, variable):
        """Return function(x, whole); the whole is gathered again for its gradient."""
        if self.keeps:
            return function(x, self.whole(variable))
        name, gate, number = self.message(variable.path), self.before_block, self.number

        @tf.custom_gradient
        def run(x, part):
            def gradient(dy):
                gates = [self.after_block.get(number + 1, dy), *self.sent[number + 2]]
                whole = gather(variable, _when(part, *gates), f"{name}/again")
                with tf.GradientTape() as tape:
                    tape.watch([x, whole])
                    y = function(x, whole)
                dx, dw = tape.gradient(y, [x, whole], dy)
                self.sent[number].append(reduce_scatter(dw, f"{name}/gradient"))
                return dx, tf.cast(self.sent[number][-1], part.dtype)

            return function(x, gather(variable, _when(part, gate), name)), gradient

        return run(x, self.part(variable))


@contextlib.contextmanager
def unsharding(name, **options):
    """Weights that are read in the `with` block are gathered for it."""
    unsharding = _Unsharding(name, **options)
    with trace.scope(unsharding=unsharding):
        yield unsharding


def current_unsharding():
    """Return the computation of the network that is being traced, or None."""
    return trace.current().unsharding


def apply_unsharded(function, x, variable):
    """Return function(x, weight) for any weight, a tensor or a Keras variable."""
    if current_unsharding() is None or not is_unsharded_for_use(variable):
        return function(x, variable)
    return current_unsharding().use(function, x, variable)


@contextlib.contextmanager
def unsharding_ahead(inputs):
    """What is read in the `with` block is gathered one block ahead.

    Args:
        inputs: list of the block's inputs, tensors.

    Yields:
        A function that the block's output has to go through.
    """
    if current_unsharding() is None:
        yield lambda y: y
        return
    here = current_unsharding()
    here.before_block, here.this_block = here.this_block, inputs[0]
    here.number += 1
    number = here.number

    @tf.custom_gradient
    def output(y):
        def gradient(dy):
            here.after_block[number] = dy
            return dy

        return tf.identity(y), gradient

    yield output


def _when(part, *tensors):
    """Return `part` once tensors are known; None is."""
    with tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
        return tf.identity(part)
