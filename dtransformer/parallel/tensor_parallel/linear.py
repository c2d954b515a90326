"""Products with kernels that are sharded by columns or by rows over the mesh.

The product with a kernel that is sharded by columns needs no collective forward, and
sums the inputs' gradient over the mesh axis; one that is sharded by rows is the other way
around (Shoeybi et al., 2019, arXiv 1909.08053, §3).

Under sequence parallelism the residual stream [b, s, h] is sharded along s over the model
axis: inputs of a product are all-gathered, and its partial sums are reduce-scattered
(Korthikanti et al., 2022, arXiv 2205.05198, §4.2). Otherwise the stream is laid out as inside of
products, replicated or sharded over the context axis, and the sums are all-reduced.

Features that are sharded over the mesh axis are a dimension f, over which DTensor sums by
itself. Under sequence parallelism they are two: t shards, and the f features of each; what
the shards add up to is then sent. Other shapes: b batch, s length, h features that are
replicated.
"""

import math
from collections.abc import Iterable

import keras
import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import (
    activation_specs,
    axis_size,
    check_axes,
    constrain,
    mesh_axis,
    relayout,
)
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.ops.low_rank import low_rank_of
from dtransformer.parallel.ops.split_backward import is_split, product
from dtransformer.parallel.recompute.recompute import keep_for_recompute
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use
from dtransformer.parallel.zero.gather import apply_unsharded


def length_axis_of(shape: Iterable[int | None]) -> str | None:
    """Return the mesh axis that shards the sequence of [b, s, ...] between products only, or None."""
    axis = activation_specs(("batch", "length"), shape[:2])[1]
    return None if axis == inner_length_axis_of(shape) else axis


def inner_length_axis_of(shape: Iterable[int | None]) -> str | None:
    """Return the mesh axis that shards the sequence of [b, s, ...] in products, too, or None."""
    return activation_specs(("batch", "inner_length"), shape[:2])[1]


def all_gather_length(x: tf.Tensor, axis: str, length_axis: str | None) -> tf.Tensor:
    """Let every device have the full sequence.

    The all-gather is an all-to-all that sends every device's shard to each. (DTensor's own
    is an all-reduce of the full tensor on CPUs, which sends twice as much.)

    Args:
        x: tensor [b, s, h].
        axis: the mesh axis.
        length_axis: the same, where s is sharded over it; None where it is not.

    Returns:
        [b, s, h] as it is where s is not; otherwise [t, b, s, h]: a copy for each of
        the t devices.
    """
    if length_axis is None:
        return constrain(x, ("batch", "inner_length", None))
    batch = activation_specs(("batch",), x.shape[:1])[0]
    x = relayout(x, (batch, length_axis, None))
    # [b, s, h] -> [t, b, s, h]
    copies = relayout(tf.stack([x] * axis_size(axis)), (None, batch, length_axis, None))
    return relayout(copies, (axis, batch, None, None))


def sum_partial(partial: tf.Tensor, axis: str, length_axis: str | None) -> tf.Tensor:
    """Add up what each device has of a sum.

    An all-reduce; where the sequence is sharded a reduce-scatter, as an all-to-all of the
    summands and their local sum.

    Args:
        partial: tensor [t, b, s, h], a summand of each of the t devices.
        axis: the mesh axis.
        length_axis: the same, where s is to be sharded over it; None where it is not.

    Returns:
        A tensor [b, s, h].
    """
    batch, inner = activation_specs(("batch", "inner_length"), partial.shape[1:3])
    partial = relayout(partial, (axis, batch, inner, None))
    if length_axis is not None:
        partial = relayout(partial, (None, batch, length_axis, None))
    # [t, b, s, h] -> [b, s, h]
    return relayout(tf.reduce_sum(partial, axis=0), (batch, length_axis or inner, None))


Weight = tf.Tensor | keras.Variable


def matmul(
    x: tf.Tensor, kernel: Weight, num_inputs: int = 1, transpose_kernel: bool = False
) -> tf.Tensor:
    """Multiply the last dimensions of `x` with the first ones of `kernel`.

    Args:
        x: tensor [..., *inputs].
        kernel: tensor or variable [*inputs, *outputs], or [outputs, inputs] with
            `transpose_kernel`.
        num_inputs: number of dimensions that are summed over.
        transpose_kernel: whether the kernel's two dimensions are swapped.

    Returns:
        A tensor [..., *outputs].
    """
    if is_split(kernel) and not transpose_kernel and not is_unsharded_for_use(kernel):
        batch = static_or_dynamic_shape(x)[: len(x.shape) - num_inputs]
        rows = tf.reshape(x, [-1, math.prod(kernel.shape[:num_inputs])])
        return tf.reshape(product(rows, kernel, num_inputs), [*batch, *kernel.shape[num_inputs:]])
    return apply_unsharded(
        lambda x, kernel: _matmul(x, kernel, num_inputs, transpose_kernel), x, kernel
    )


def _matmul(x, kernel, num_inputs, transpose_kernel):
    kernel = tf.cast(kernel, x.dtype)
    outputs = [kernel.shape[0]] if transpose_kernel else kernel.shape[num_inputs:].as_list()
    inner = kernel.shape[1] if transpose_kernel else math.prod(kernel.shape[:num_inputs])
    if not transpose_kernel:
        kernel = tf.reshape(kernel, [inner, math.prod(outputs)])
    batch = static_or_dynamic_shape(x)[: len(x.shape) - num_inputs]
    y = tf.matmul(tf.reshape(x, [-1, inner]), kernel, transpose_b=transpose_kernel)
    return tf.reshape(y, [*batch, *outputs])


def column_parallel(x: tf.Tensor, kernels: list[Weight], axes: tuple) -> list[tf.Tensor]:
    """Multiply `x` with kernels that are sharded along their first dimension of outputs.

    Without a mesh these are plain products.

    Args:
        x: tensor [b, ..., h], such as [b, s, h].
        kernels: list of tensors or variables [h, *outputs].
        axes: tuple with the logical name, or None, of each dimension of the outputs.

    Returns:
        A list of tensors [b, ..., *outputs], laid out along s as "inner_length".
    """
    check_axes(axes, len(kernels[0].shape) - 1, "a product's outputs")
    by_axes = lambda x, kernel: _columns(x, [kernel], axes)[0]
    return [
        _with_low_rank(y, x, kernel, (None,), by_axes, by_axes)
        for y, kernel in zip(_columns(x, kernels, axes), kernels)
    ]


def _columns(x, kernels, axes):
    """Return the products without low-rank additions; see `column_parallel`."""
    if not trace.is_on_mesh():
        return [matmul(x, kernel) for kernel in kernels]
    ys = _column_parallel(_as_sequences(x, 1), kernels, axes)
    return [_like_inputs(y, x, 1) for y in ys]


def _column_parallel(x, kernels, axes):
    axis = mesh_axis(axes[0])
    if axis is None and inner_length_axis_of(x.shape) is None:
        x = constrain(x, ("batch", None, None))
        return [constrain(matmul(x, kernel), ("batch", None, *axes)) for kernel in kernels]
    kernels = [tf.cast(kernel, x.dtype) for kernel in kernels]
    shards = _FeatureShards(axis, x)

    @custom_gradient
    def products(x, *kernels):
        x = all_gather_length(x, axis, shards.length_axis)
        flat = [shards.features(kernel, 1) for kernel in kernels]

        def gradient(*upstream):
            dys = [shards.features(dy, 2) for dy in upstream]
            dks = [shards.product("bsh,bsf->hf", x, dy) for dy in dys]
            dks = [tf.reshape(dk, kernel.shape) for dk, kernel in zip(dks, kernels)]
            # One sum, and one collective, for all kernels.
            return shards.product("bsf,hf->bsh", shards.join(dys), shards.join(flat)), *dks

        ys = [shards.product("bsh,hf->bsf", x, kernel) for kernel in flat]
        outputs = [kernel.shape[1:].as_list() for kernel in kernels]
        ys = [tf.reshape(y, [*y.shape[:2], *shape]) for y, shape in zip(ys, outputs)]
        return [constrain(y, ("batch", "inner_length", *axes)) for y in ys], gradient

    return products(x, *kernels)


def row_parallel(x: tf.Tensor, kernel: Weight, axes: tuple) -> tf.Tensor:
    """Multiply `x` with a kernel that is sharded along its first dimension.

    Without a mesh this is the plain product.

    Args:
        x: tensor [b, ..., *inputs], such as [b, s, *inputs].
        kernel: tensor or variable [*inputs, h].
        axes: tuple with the logical name, or None, of each dimension of the inputs.

    Returns:
        A tensor [b, ..., h], sharded along s under sequence parallelism.
    """
    check_axes(axes, len(kernel.shape) - 1, "a product's inputs")
    by_axes = lambda x, kernel: _rows(x, kernel, axes)
    multiply = lambda x, b: _rows(x, b, (None,))
    return _with_low_rank(by_axes(x, kernel), x, kernel, axes, multiply, by_axes)


def _rows(x, kernel, axes):
    """Return the product without a low-rank addition; see `row_parallel`."""
    if not trace.is_on_mesh():
        return matmul(x, kernel, len(axes))
    y = _row_parallel(_as_sequences(x, len(axes)), kernel, axes)
    return _like_inputs(y, x, len(axes))


def _with_low_rank(y, x, kernel, axes, multiply, multiply_kernel):
    """Return the product y of x with a kernel, and what its low-rank addition adds to it.

    Args:
        y, x, kernel: tensors, and the kernel as the layer has it.
        axes: logical names of the dimensions of the inputs.
        multiply: a function of x · A [b, ..., r] and B that returns their product like y.
        multiply_kernel: a function of other inputs and the kernel that returns their product.
    """
    addition = low_rank_of(kernel)
    if addition is None:
        return y
    # Of the products this one is the smallest, and is sharded as the residual stream is.
    seen = x if addition.dropout is None else addition.dropout(x)
    inner = _rows(seen, addition.a, axes)
    added = multiply(inner * tf.cast(addition.scale, inner.dtype), addition.b)
    if addition.m is None:
        return y + added
    # [*outputs]; its norms are summed over the mesh axis where inputs are sharded
    norms = keep_for_recompute(lambda: tf.stop_gradient(addition.norms(kernel)))
    gain = tf.cast(tf.math.divide_no_nan(tf.cast(addition.m, "float32"), norms), y.dtype)
    if seen is x:
        return gain * (y + added)
    return y + (gain - 1) * multiply_kernel(seen, kernel) + gain * added


def _row_parallel(x, kernel, axes):
    axis = mesh_axis(axes[0])
    if axis is None and inner_length_axis_of(x.shape) is None:
        return constrain(matmul(x, kernel, len(axes)), ("batch", "length", None))
    kernel = tf.cast(kernel, x.dtype)
    shards = _FeatureShards(axis, x)

    @custom_gradient
    def product(x, kernel):
        inputs = shards.features(constrain(x, ("batch", "inner_length", *axes)), 2)
        rows = shards.rows(kernel)

        def gradient(dy):
            dy = all_gather_length(dy, axis, shards.length_axis)
            dx = shards.product("bsh,fh->bsf", dy, rows)
            dk = shards.product("bsf,bsh->fh", inputs, dy)
            return tf.reshape(dx, x.shape), tf.reshape(dk, kernel.shape)

        # The sum over the mesh axis can be kept: to send it again takes long.
        y = keep_for_recompute(lambda: shards.product("bsf,fh->bsh", inputs, rows))
        return y, gradient

    return product(x, kernel)


def _as_sequences(x, num_features):
    """[b, ..., *features] -> [b, s, *features]: on the mesh one dimension is between them."""
    num_leading = len(x.shape) - num_features
    if num_leading == 2:
        return x
    shape = static_or_dynamic_shape(x)
    return tf.reshape(x, [shape[0], -1, *shape[num_leading:]])


def _like_inputs(y, x, num_features):
    """[b, s, *outputs] -> [b, ..., *outputs], with the dimensions that `x` has."""
    num_leading = len(x.shape) - num_features
    if num_leading == 2:
        return y
    return tf.reshape(y, [*static_or_dynamic_shape(x)[:num_leading], *y.shape[2:]])


class _FeatureShards:
    """How features are sharded over a mesh axis: f, or t and f where the sequence is, too.

    Args:
        axis: the mesh axis; None where features are replicated.
        x: tensor [b, s, ...].
    """

    def __init__(self, axis, x):
        self.axis, self.num_shards = axis, axis_size(axis)
        self.batch = activation_specs(("batch",), x.shape[:1])[0]
        self.length_axis = length_axis_of(x.shape)
        self.inner_length = inner_length_axis_of(x.shape)

    def features(self, x, num_leading):
        """[..., *features] -> [..., f] or [..., t, f], after one or two leading dimensions"""
        leading = x.shape[:num_leading].as_list()
        x = tf.reshape(x, [*leading, math.prod(x.shape[num_leading:])])
        return self._split(x) if self.length_axis else self._relayout(x)

    def rows(self, kernel):
        """[*features, h] -> [f, h] or [t, f, h]"""
        shards = [self.num_shards] if self.length_axis else []
        kernel = tf.reshape(kernel, [*shards, -1, kernel.shape[-1]])
        return relayout(kernel, (self.axis, *[None] * (len(kernel.shape) - 1)))

    def join(self, tensors):
        """[..., f] of each tensor -> [..., f] of all; the order is that of the shards"""
        if len(tensors) == 1:
            return tensors[0]
        joint = tensors if self.length_axis else [self._split(x) for x in tensors]
        joint = tf.concat(joint, -1)
        if not self.length_axis:
            joint = self._relayout(tf.reshape(joint, [*joint.shape[:-2], -1]))
        return joint

    def product(self, equation, a, b):
        """Return a product of features; the equation is that of replicated sequences."""
        result = equation.split("->")[1]
        specs = {"b": self.batch, "s": self.inner_length, "f": self.axis}
        if not self.length_axis:
            return relayout(tf.einsum(equation, a, b), [specs.get(name) for name in result])
        for name, names in (("bsh", "tbsh"), ("f", "tf")):
            equation = equation.replace(name, names)
        y = tf.einsum(equation, a, b)
        if result == "bsh":
            return sum_partial(y, self.axis, self.length_axis)
        specs = {"b": self.batch, "t": self.axis}
        return relayout(y, [specs.get(name) for name in equation.split("->")[1]])

    def _split(self, x):
        """[..., t·f] -> [..., t, f]"""
        x = tf.reshape(x, [*x.shape[:-1], self.num_shards, -1])
        return relayout(x, (*self._leading(x, 2), self.axis, None))

    def _relayout(self, x):
        return relayout(x, (*self._leading(x, 1), self.axis))

    def _leading(self, x, num_last):
        """The layout of [h], or of [b, s] in products."""
        num_leading = len(x.shape) - num_last
        return (self.batch, self.inner_length) if num_leading == 2 else (None,)
