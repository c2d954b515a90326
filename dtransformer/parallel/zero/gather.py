"""All-gathers of weights that are stored as flat shards (`optimizer_shard=3`).

A product all-gathers its weight before the forward computation and again for the gradient. The
full value occupies no memory in between. The gradient is reduce-scattered to the local shard.

All-gathers run at most one block ahead. In the forward pass, they wait for the input of the
previous block. In the backward pass, they wait for the gradient of the next block's output, and
until the gradients of the block after the next one are reduced.

Reference:
    - [Rajbhandari et al., 2020, §5.3](https://arxiv.org/abs/1910.02054)
    - [Zhao et al., 2023, §3.3](https://arxiv.org/abs/2304.11277), for prefetching
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
    """Return the full value of a variable from the shards of all ranks.

    Args:
        variable: Keras variable. Only its shape is used.
        shard: Flat tensor. Local shard of the value.
        name: String. Name of the collective, identical on all ranks.
    """
    (value,) = flat_shards.all_gather(
        [shard], [tuple(variable.shape)], job.data_parallel_group(), name
    )
    return value


def reduce_scatter(gradient: tf.Tensor, name: str) -> tf.Tensor:
    """Return the flat local shard of a gradient's sum over the ranks in float32."""
    dtype = get_parallel_config().gradient_dtype
    gradient = tf.cast(tf.convert_to_tensor(gradient), "float32")
    (shard,) = flat_shards.reduce_scatter([gradient], job.data_parallel_group(), name, dtype)
    return shard


class Unsharding:
    """Full values and all-gathers of one computation of the network.

    Args:
        name: String. Prefix of the collectives' names.
        shards: Dict from ids of variables to tensors that replace the stored shards. Defaults to the
            stored shards.
        keeps: Boolean. Whether to keep full values until the end of the backward pass. Defaults to
            `False`.
        gate: Tensor that the first all-gathers wait for. `None` disables waiting.

    Attributes:
        block: Integer. Index of the current block, counted from 1. 0 before the first block.
        forward_gate: Tensor that all-gathers of the current block wait for: the input of the
            previous block, or `None`.
    """

    def __init__(self, name: str, shards: dict | None = None, keeps: bool = False, gate=None):
        self.name = name
        self.keeps = keeps
        self.block = 0
        self.forward_gate = gate
        self._input = None
        self._shards = shards or {}
        self._values = {}
        self._uses = collections.Counter()
        self._output_gradients = {}  # block -> gradient of the block's output
        self._scattered = collections.defaultdict(list)  # block -> reduced shards of gradients

    def shard(self, variable: keras.Variable) -> tf.Tensor:
        """Return the local shard of a variable in the compute dtype."""
        shard = self._shards.get(id(variable))
        if shard is None:
            shard = tf.convert_to_tensor(variable.shards[0].value)
        return _compat.autocast(variable, shard)

    def next_name(self, path: str) -> str:
        """Return a name for the next use of a variable or layer, identical on all ranks."""
        self._uses[path] += 1
        return f"{self.name}/{path}/{self._uses[path]}"

    def unshard_now(self, variables: Iterable[keras.Variable]):
        """All-gather variables in their storage dtype and keep the full values."""
        for variable in variables:
            if is_unsharded_for_use(variable):
                shard = tf.convert_to_tensor(variable.shards[0].value)
                name = self.next_name(variable.path)
                self._values[id(variable)] = all_gather(variable, shard, name)

    def unsharded(self, variable: keras.Variable) -> tf.Tensor:
        """Return the full value of a variable. Later calls return the same tensor."""
        if id(variable) in self._values:
            return _compat.autocast(variable, self._values[id(variable)])
        shard = self.shard(variable)
        key = id(variable), shard.dtype
        if key not in self._values:
            name = self.next_name(variable.path)
            gate = self.forward_gate
            if not variable.trainable:
                value = all_gather(variable, _after(shard, gate), name)
                self._values[key] = tf.stop_gradient(value)  # Recompute watches all shards.
                return self._values[key]

            @tf.custom_gradient
            def unshard(shard):
                value = all_gather(variable, _after(shard, gate), name)
                dtype = shard.dtype
                return value, lambda dw: tf.cast(reduce_scatter(dw, f"{name}/gradient"), dtype)

            self._values[key] = unshard(shard)
        return self._values[key]

    def apply(self, function: Callable, x: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        """Return `function(x, full_value)`. The gradient all-gathers the value again."""
        if self.keeps:
            return function(x, self.unsharded(variable))
        name = self.next_name(variable.path)
        gate = self.forward_gate
        block = self.block

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
        """Return the tensor that all-gathers wait for in the backward pass of a block.

        Args:
            block: Integer. Index of the block.
            dy: Tensor to return for the last block: a gradient inside of the block.
        """
        return self._output_gradients.get(block + 1, dy)

    def enter_block(self, x: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
        """Start the next block with input `x`. Return a function to apply to the block's output."""
        self.forward_gate = self._input
        self._input = x
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
    """Unshard the weights that the `with` block reads; see `Unsharding` for the options."""
    computation = Unsharding(name, **options)
    with _unsharding.set(computation):
        yield computation


def current_unsharding() -> Unsharding | None:
    """Return the `Unsharding` of the current computation, or `None`."""
    return _unsharding.get()


def apply_unsharded(function: Callable, x: tf.Tensor, variable) -> tf.Tensor:
    """Return `function(x, weight)` with the full value of a tensor or Keras variable."""
    if current_unsharding() is None or not is_unsharded_for_use(variable):
        return function(x, variable)
    return current_unsharding().apply(function, x, variable)


@contextlib.contextmanager
def unsharding_ahead(inputs: list[tf.Tensor]):
    """Start a block whose weights are all-gathered one block ahead.

    Args:
        inputs: List of tensors. Inputs of the block.

    Yields:
        A function to apply to the block's output.
    """
    if current_unsharding() is None:
        yield lambda y: y
    else:
        yield current_unsharding().enter_block(inputs[0])


class RecomputedUnsharding:
    """Unsharding of a function that the backward pass computes again; see `recompute.recomputed`.

    Args:
        weights: List of Keras variables that the function reads.
        keeps: Boolean. Whether to keep the full values of the second computation for the gradients.

    Attributes:
        variables: List of the weights that are unsharded for use.
        others: List of all other weights.
    """

    def __init__(self, weights: list[keras.Variable], keeps: bool):
        self._outer = current_unsharding()
        self._keeps = keeps
        self.variables = []
        self.others = []
        for weight in weights:
            if self._outer is not None and is_unsharded_for_use(weight):
                self.variables.append(weight)
            else:
                self.others.append(weight)
        if self.variables:
            self._name = self._outer.next_name("recomputed")
            self._block = self._outer.block

    def shards(self) -> list[tf.Tensor]:
        """Return the local shards of `variables`, for gradients."""
        return [self._outer.shard(variable) for variable in self.variables]

    def scope(self, shards: list[tf.Tensor], dy: tf.Tensor | None):
        """Return a context manager for one computation of the function.

        Args:
            shards: List of tensors. Result of `shards()`, or replacements.
            dy: Gradient of the result in the second computation. `None` in the first.
        """
        if not self.variables:
            return contextlib.nullcontext()
        by_id = {id(variable): shard for variable, shard in zip(self.variables, shards)}
        if dy is None:
            return unsharding(self._name, shards=by_id, gate=self._outer.forward_gate)
        gate = self._outer.backward_gate(self._block, dy)
        return unsharding(f"{self._name}/again", shards=by_id, keeps=self._keeps, gate=gate)


def _after(shard, *tensors):
    """Return `shard` after the given tensors, each a tensor or `None`, are computed."""
    with tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
        return tf.identity(shard)
