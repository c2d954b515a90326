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
import functools

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel import runtime, slices
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.variables import MeshVariable, PartedVariable, whole_box


class SlicedVariable(PartedVariable):
    """A Keras variable of which each rank of the data group holds a flat slice.

    Args:
        initializer: a function of (shape, dtype) that returns the whole value; it is
            in the memory of the host until it is cut.
        **kwargs: as `keras.Variable` has them.
    """

    def _initialize_with_initializer(self, initializer):
        with tf.device("CPU:0"):
            whole = tf.convert_to_tensor(initializer(self._shape, dtype=self._dtype))
        self._keep(whole)
        self._value = None

    def _keep(self, whole):
        """Make what this rank holds of the whole."""
        self.shards = [keras.Variable(_copy_of_slice(whole), dtype=self._dtype, name=self.name)]

    @property
    def places(self):
        own = slices.own_range(self.shards[0].shape[0], runtime.data_group())
        return [(whole_box(self.shape), own)]

    def _direct_assign(self, value):
        self.shards[0].assign(_copy_of_slice(tf.constant(value)))

    def numpy(self):
        """Return the whole. All ranks of the data group have to call, as each holds a part."""
        if self._gathered is not None:
            return self._gathered
        return gather(self, self.shards[0].value, f"read/{self.path}").numpy()


class CopiedVariable(SlicedVariable):
    """A variable in slices, with a whole copy in 16 bits, which computations use.

    The slices are what an optimizer updates: the master weights of mixed precision
    (Micikevicius et al., 2018, arXiv 1710.03740, §3.1). It takes their sum of gradients in
    slices, and gathers what it made of them in 16 bits.

    Args:
        initializer: as of `SlicedVariable`.
        copy_dtype: name of the copy's type.
        **kwargs: as `keras.Variable` has them.

    Attributes:
        copy: a `tf.Variable`.
    """

    def __init__(self, initializer, *, copy_dtype, **kwargs):
        self._copy_dtype = copy_dtype
        super().__init__(initializer, **kwargs)

    def _keep(self, whole):
        super()._keep(whole)
        self.copy = tf.Variable(tf.cast(whole, self._copy_dtype), name=self.name)

    def _read(self):
        return self._maybe_autocast(tf.convert_to_tensor(self.copy))

    def _direct_assign(self, value):
        super()._direct_assign(value)
        self.copy.assign(tf.cast(value, self._copy_dtype))


class GatheredVariable(SlicedVariable):
    """A variable in slices that is gathered where it is used.

    All ranks of the data group have to read it together.
    """

    def _read(self):
        if _pass is not None:
            return _pass.whole(self)
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self.path} is cut over the ranks (optimizer_shard=3) and can be read by its "
                "Trainer (fit, evaluate, predict) and by generate only"
            )
        return self._maybe_autocast(gather(self, self.shards[0].value, f"read/{self.path}"))


def _copy_of_slice(whole):
    """Return this rank's slice as a copy: TensorFlow's own would keep the whole in memory."""
    return np.array(slices.own_slice(whole, runtime.data_group()))


def kind_of(path, shape, dtype, trainable, constraint, compute_dtype):
    """Return how a weight is kept under the current config.

    Args:
        path, shape, dtype, trainable, constraint: the weight's.
        compute_dtype: name of the type that it is computed with.

    Returns:
        A function that makes the variable; None for an ordinary one.
    """
    config, size = get_parallel_config(), tf.as_dtype(dtype).size
    if not config.optimizer_shard or not trainable or runtime.data_group().size == 1:
        return None
    if config.why_whole(path, shape, size, constraint is not None):
        return None
    if config.optimizer_shard == 3:
        return GatheredVariable
    if tf.as_dtype(compute_dtype).size < size:
        return functools.partial(CopiedVariable, copy_dtype=compute_dtype)
    return None


def gather(variable, part, name):
    """Return the whole of a variable from this rank's slice of it."""
    (whole,) = slices.all_gather([part], [tuple(variable.shape)], runtime.data_group(), name)
    return whole


def reduce_scatter(gradient, name):
    """Return this rank's slice of a gradient's sum, in float32."""
    dtype = get_parallel_config().gradient_dtype
    gradient = tf.cast(tf.convert_to_tensor(gradient), "float32")
    (part,) = slices.reduce_scatter([gradient], runtime.data_group(), name, dtype)
    return part


class _Pass:
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
            if isinstance(variable, GatheredVariable):
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


_pass = None


@contextlib.contextmanager
def reading(name, **options):
    """Weights that are read in the `with` block are gathered for it."""
    global _pass
    outer, _pass = _pass, _Pass(name, **options)
    try:
        yield _pass
    finally:
        _pass = outer


def current_pass():
    """Return the computation of the network that is being traced, or None."""
    return _pass


def used(function, x, variable):
    """Return function(x, weight) for any weight, a tensor or a Keras variable."""
    if _pass is None or not isinstance(variable, GatheredVariable):
        return function(x, variable)
    return _pass.use(function, x, variable)


@contextlib.contextmanager
def block(inputs):
    """What is read in the `with` block is gathered one block ahead.

    Args:
        inputs: list of the block's inputs, tensors.

    Yields:
        A function that the block's output has to go through.
    """
    if _pass is None:
        yield lambda y: y
        return
    here = _pass
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


def source(variable):
    """Return what gradients of a variable are taken of: its value, or what is stored of it."""
    if isinstance(variable, GatheredVariable):
        return variable.shards[0].value
    if isinstance(variable, CopiedVariable):
        return variable.copy
    return variable.stored if isinstance(variable, MeshVariable) else variable.value


def _when(part, *tensors):
    """Return `part` once tensors are known; None is."""
    with tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
        return tf.identity(part)
