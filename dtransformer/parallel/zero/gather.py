"""Weights of which each rank of the data-parallel group holds a flat shard, unsharded for use.

A product with such a weight unshards it just before, and once more for its gradient, so
that between the two it takes no memory. The gradient leaves as this rank's shard of the sum.
All-gathers wait for the input of the block before the one that uses them, and for the
gradient of the output of the block after it: they are one block ahead, not more. Those of
the backward pass also wait until the gradients of the block after that one have left.

Reference: Rajbhandari et al., 2020, arXiv 1910.02054, §5.3; Zhao et al., 2023, "PyTorch
FSDP", arXiv 2304.11277, §3.3, for what is fetched ahead.
"""

import collections
import contextlib
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.scoped import Scoped
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use

_unsharding = Scoped("unsharding")


def all_gather(variable: keras.Variable, shard: tf.Tensor, name: str) -> tf.Tensor:
    """Return the full value of a variable, from the shards of all ranks.

    Args:
        variable: the variable, for its shape.
        shard: this rank's shard of the value, a flat tensor.
        name: name of the collective, the same on every rank.
    """
    (value,) = flat_shards.all_gather(
        [shard], [tuple(variable.shape)], job.data_parallel_group(), name
    )
    return value


def reduce_scatter(gradient: tf.Tensor, name: str) -> tf.Tensor:
    """Return this rank's shard of a gradient's sum over the ranks, flat and in float32."""
    dtype = get_parallel_config().gradient_dtype
    gradient = tf.cast(tf.convert_to_tensor(gradient), "float32")
    (shard,) = flat_shards.reduce_scatter([gradient], job.data_parallel_group(), name, dtype)
    return shard


class Unsharding:
    """One computation of the network: what is unsharded for it, and what all-gathers wait for.

    Args:
        name: prefix of the names of its collectives.
        shards: dict of the id of a variable and its shard, a tensor; the variables' own
            shards where there is none.
        keeps: whether what was unsharded is kept until the backward pass is over.
        gate: a tensor that all-gathers wait for, or None.

    Attributes:
        block: the number of the block that is computed, from 1; 0 before the first.
        forward_gate: what its all-gathers wait for: the input of the block before it, or None.
    """

    def __init__(self, name: str, shards: dict | None = None, keeps: bool = False, gate=None):
        self.name, self.keeps, self.block = name, keeps, 0
        self._shards = shards or {}
        self._values, self._uses = {}, collections.Counter()
        self.forward_gate, self._input = gate, None
        self._output_gradients = {}  # block -> gradient of its output
        self._scattered = collections.defaultdict(list)  # block -> its gradients' shards

    def shard(self, variable: keras.Variable) -> tf.Tensor:
        """Return this rank's shard of a variable, in the type that is computed with."""
        shard = self._shards.get(id(variable))
        if shard is None:
            shard = tf.convert_to_tensor(variable.shards[0].value)
        return _compat.autocast(variable, shard)

    def next_name(self, path: str) -> str:
        """Return a name for the next use of a variable or layer, the same on every rank."""
        self._uses[path] += 1
        return f"{self.name}/{path}/{self._uses[path]}"

    def unshard_now(self, variables: Iterable[keras.Variable]):
        """Unshard variables in the type that they are stored in, and keep them."""
        for variable in variables:
            if is_unsharded_for_use(variable):
                shard = tf.convert_to_tensor(variable.shards[0].value)
                name = self.next_name(variable.path)
                self._values[id(variable)] = all_gather(variable, shard, name)

    def unsharded(self, variable: keras.Variable) -> tf.Tensor:
        """Return a variable's full value, which is kept as long as anything needs it."""
        if id(variable) in self._values:
            return _compat.autocast(variable, self._values[id(variable)])
        shard = self.shard(variable)
        key = id(variable), shard.dtype
        if key not in self._values:
            name, gate = self.next_name(variable.path), self.forward_gate
            if not variable.trainable:
                value = all_gather(variable, _after(shard, gate), name)
                self._values[key] = tf.stop_gradient(value)  # recompute watches all shards
                return self._values[key]

            @tf.custom_gradient
            def unshard(shard):
                value = all_gather(variable, _after(shard, gate), name)
                dtype = shard.dtype
                return value, lambda dw: tf.cast(reduce_scatter(dw, f"{name}/gradient"), dtype)

            self._values[key] = unshard(shard)
        return self._values[key]

    def apply(self, function: Callable, x: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        """Return function(x, full value); the value is unsharded again for its gradient."""
        if self.keeps:
            return function(x, self.unsharded(variable))
        name, gate, block = self.next_name(variable.path), self.forward_gate, self.block

        @tf.custom_gradient
        def run(x, shard):
            def gradient(dy):
                gates = [self.backward_gate(block, dy), *self._scattered[block + 2]]
                value = all_gather(variable, _after(shard, *gates), f"{name}/again")
                sources = [x, value] if variable.trainable else [x]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(sources)
                    y = function(x, value)
                dx, *dw = tape.gradient(y, sources, dy)
                if not dw:
                    return dx, None
                self._scattered[block].append(reduce_scatter(dw[0], f"{name}/gradient"))
                return dx, tf.cast(self._scattered[block][-1], shard.dtype)

            return function(x, all_gather(variable, _after(shard, gate), name)), gradient

        return run(x, self.shard(variable))

    def backward_gate(self, block: int, dy: tf.Tensor) -> tf.Tensor:
        """Return what the all-gathers for a block's gradients wait for.

        Args:
            block: the number of the block.
            dy: a gradient in the block, for a block that is the last one.
        """
        return self._output_gradients.get(block + 1, dy)

    def enter_block(self, x: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
        """Begin the next block, of input x; return what its output has to go through."""
        self.forward_gate, self._input = self._input, x
        self.block += 1
        block = self.block

        @tf.custom_gradient
        def output(y):
            def gradient(dy):
                self._output_gradients[block] = dy
                return dy

            return tf.identity(y), gradient

        return output


@contextlib.contextmanager
def unsharding(name: str, **options):
    """Weights that are read in the `with` block are unsharded for it; see `Unsharding`."""
    computation = Unsharding(name, **options)
    with _unsharding.set(computation):
        yield computation


def current_unsharding() -> Unsharding | None:
    """Return the computation of the network that is being traced, or None."""
    return _unsharding.get()


def apply_unsharded(function: Callable, x: tf.Tensor, variable) -> tf.Tensor:
    """Return function(x, weight) for any weight, a tensor or a Keras variable."""
    if current_unsharding() is None or not is_unsharded_for_use(variable):
        return function(x, variable)
    return current_unsharding().apply(function, x, variable)


@contextlib.contextmanager
def unsharding_ahead(inputs: list[tf.Tensor]):
    """What is read in the `with` block is unsharded one block ahead.

    Args:
        inputs: list of the block's inputs, tensors.

    Yields:
        A function that the block's output has to go through.
    """
    if current_unsharding() is None:
        yield lambda y: y
    else:
        yield current_unsharding().enter_block(inputs[0])


class RecomputedUnsharding:
    """What is unsharded for a function that is computed twice; see `recompute.recomputed`.

    Args:
        weights: list of the Keras variables that the function reads.
        keeps: whether what is unsharded the second time is kept for the gradients.

    Attributes:
        variables: list of those weights that are unsharded; the others are read as they are.
        others: list of the other weights.
    """

    def __init__(self, weights: list[keras.Variable], keeps: bool):
        outer = self._outer = current_unsharding()
        is_unsharded = lambda w: outer is not None and is_unsharded_for_use(w)
        self.variables = [weight for weight in weights if is_unsharded(weight)]
        self.others = [weight for weight in weights if not is_unsharded(weight)]
        self._keeps = keeps
        if self.variables:
            self._name, self._block = outer.next_name("recomputed"), outer.block

    def shards(self) -> list[tf.Tensor]:
        """Return this rank's shards of the variables, which gradients are taken of."""
        return [self._outer.shard(variable) for variable in self.variables]

    def scope(self, shards: list[tf.Tensor], dy: tf.Tensor | None):
        """Return what the function is computed in: a context manager.

        Args:
            shards: those that `shards` returned, or the tensors that stand for them.
            dy: the gradient of the result, the second time; None the first time.
        """
        if not self.variables:
            return contextlib.nullcontext()
        by_id = {id(variable): shard for variable, shard in zip(self.variables, shards)}
        if dy is None:
            return unsharding(self._name, shards=by_id, gate=self._outer.forward_gate)
        gate = self._outer.backward_gate(self._block, dy)
        return unsharding(f"{self._name}/again", shards=by_id, keeps=self._keeps, gate=gate)


def _after(shard, *tensors):
    """Return `shard` once tensors are known; None is."""
    with tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
        return tf.identity(shard)
