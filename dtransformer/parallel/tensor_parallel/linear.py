"""Products with kernels that are sharded by columns or by rows over the mesh.

A product with a column-sharded kernel needs no collective in the forward pass and reduces the input
gradient over the mesh axis. A row-sharded kernel needs the opposite
([Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053), section 3).

With sequence parallelism the residual stream `[b, s, h]` is sharded along s over the model axis.
Inputs of a product are all-gathered, and partial sums are reduce-scattered
([Korthikanti et al., 2022](https://arxiv.org/abs/2205.05198), section 4.2). Otherwise the stream
has the layout of products, replicated or sharded over the context axis, and sums are all-reduced.

Features that are sharded over the mesh axis form a dimension f, and DTensor reduces over it. With
sequence parallelism they form two dimensions: t shards, and f features per shard. The partial sums
of the shards are then exchanged explicitly. Other letters in shapes: b batch, s length, h
replicated features.
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
from dtransformer.parallel.ops.low_rank import get_low_rank
from dtransformer.parallel.ops.split_backward import is_split, product
from dtransformer.parallel.recompute.recompute import keep_for_recompute
from dtransformer.parallel.tensor_parallel.quantized_kernel import (
    is_quantized,
    multiply_dequantized,
)
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape
from dtransformer.parallel.zero.units import is_unit, run_product


def get_length_axis(shape: Iterable[int | None]) -> str | None:
    """Return the mesh axis that shards the sequence between products but not in them, or `None`.

    Args:
        shape: Shape `[b, s, ...]`.
    """
    axis = activation_specs(("batch", "length"), shape[:2])[1]
    return None if axis == get_inner_length_axis(shape) else axis


def get_inner_length_axis(shape: Iterable[int | None]) -> str | None:
    """Return the mesh axis that also shards the sequence in products, or `None`.

    Args:
        shape: Shape `[b, s, ...]`.
    """
    return activation_specs(("batch", "inner_length"), shape[:2])[1]


def all_gather_length(x: tf.Tensor, axis: str, length_axis: str | None) -> tf.Tensor:
    """All-gather a sequence, so every device has all positions.

    The all-gather is an all-to-all that sends every shard to each device. DTensor's all-gather on
    CPUs is an all-reduce of the full tensor, which sends twice as much.

    Args:
        x: Tensor of shape `[b, s, h]`.
        axis: Mesh axis.
        length_axis: `axis` if it shards s, otherwise `None`.

    Returns:
        The tensor `[b, s, h]` if s is not sharded, otherwise `[t, b, s, h]`: one copy per device.
    """
    if length_axis is None:
        return constrain(x, ("batch", "inner_length", None))
    batch = activation_specs(("batch",), x.shape[:1])[0]
    x = relayout(x, (batch, length_axis, None))
    # [b, s, h] -> [t, b, s, h]
    copies = relayout(tf.stack([x] * axis_size(axis)), (None, batch, length_axis, None))
    return relayout(copies, (axis, batch, None, None))


def sum_partial(partial: tf.Tensor, axis: str, length_axis: str | None) -> tf.Tensor:
    """Sum the partial sums of all devices.

    This is an all-reduce. For sharded sequences it is a reduce-scatter: an all-to-all of the
    summands, followed by a local sum.

    Args:
        partial: Tensor of shape `[t, b, s, h]`, one summand per device.
        axis: Mesh axis.
        length_axis: `axis` if the result is sharded along s, otherwise `None`.

    Returns:
        A tensor of shape `[b, s, h]`.
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
    """Multiply the last dimensions of x by the first dimensions of a kernel.

    Args:
        x: Tensor of shape `[..., *inputs]`.
        kernel: Tensor or variable of shape `[*inputs, *outputs]`, or `[outputs, inputs]` with
            `transpose_kernel`.
        num_inputs: Integer. Number of dimensions to sum over. Defaults to `1`.
        transpose_kernel: Boolean, whether to transpose a kernel of two dimensions. Defaults to
            `False`.

    Returns:
        A tensor of shape `[..., *outputs]`.
    """
    if is_split(kernel) and not transpose_kernel:
        batch = static_or_dynamic_shape(x)[: len(x.shape) - num_inputs]
        rows = tf.reshape(x, [-1, math.prod(kernel.shape[:num_inputs])])
        return tf.reshape(product(rows, kernel, num_inputs), [*batch, *kernel.shape[num_inputs:]])

    def multiply(x, kernel):
        return _matmul(x, kernel, num_inputs, transpose_kernel)

    return run_product(multiply, x, kernel)


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
    """Multiply x by kernels that are sharded along their first output dimension.

    Includes the kernels' low-rank adapters. Without a mesh these are ordinary products.

    Args:
        x: Tensor of shape `[b, ..., h]`, such as `[b, s, h]`.
        kernels: List of tensors or variables of shape `[h, *outputs]`.
        axes: Tuple with the logical axis of each output dimension, or `None`.

    Returns:
        A list of tensors of shape `[b, ..., *outputs]`, with s in the layout of "inner_length".
    """
    check_axes(axes, len(kernels[0].shape) - 1, "a product's outputs")

    def multiply(x, kernel):
        return _columns(x, [kernel], axes)[0]

    return [
        _with_low_rank(y, x, kernel, (None,), multiply, multiply)
        for y, kernel in zip(_columns(x, kernels, axes), kernels)
    ]


def _columns(x, kernels, axes):
    """Return the products without low-rank adapters. See `column_parallel`."""
    if any(map(is_quantized, kernels)):
        if not all(map(is_quantized, kernels)):
            return [_columns(x, [kernel], axes)[0] for kernel in kernels]
        return multiply_dequantized(lambda xs, values: _columns(*xs, values, axes), [x], kernels)
    if not trace.is_on_mesh():
        return [matmul(x, kernel) for kernel in kernels]
    sequences = _as_sequences(x, 1)

    def multiply(x, kernel):
        return _column_parallel(x, [kernel], axes)[0]

    if is_unit(kernels):
        ys = [run_product(multiply, sequences, kernel) for kernel in kernels]
    else:
        ys = _column_parallel(sequences, kernels, axes)
    return [_like_inputs(y, x, 1) for y in ys]


def _column_parallel(x, kernels, axes):
    axis = mesh_axis(axes[0])
    if axis is None and get_inner_length_axis(x.shape) is None:
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
            # One sum and one collective for all kernels.
            return shards.product("bsf,hf->bsh", shards.join(dys), shards.join(flat)), *dks

        ys = [shards.product("bsh,hf->bsf", x, kernel) for kernel in flat]
        outputs = [kernel.shape[1:].as_list() for kernel in kernels]
        ys = [tf.reshape(y, [*y.shape[:2], *shape]) for y, shape in zip(ys, outputs)]
        return [constrain(y, ("batch", "inner_length", *axes)) for y in ys], gradient

    return products(x, *kernels)


def row_parallel(x: tf.Tensor, kernel: Weight, axes: tuple) -> tf.Tensor:
    """Multiply x by a kernel that is sharded along its first dimension.

    Includes the kernel's low-rank adapter. Without a mesh this is an ordinary product.

    Args:
        x: Tensor of shape `[b, ..., *inputs]`, such as `[b, s, *inputs]`.
        kernel: Tensor or variable of shape `[*inputs, h]`.
        axes: Tuple with the logical axis of each input dimension, or `None`.

    Returns:
        A tensor of shape `[b, ..., h]`, sharded along s with sequence parallelism.
    """
    check_axes(axes, len(kernel.shape) - 1, "a product's inputs")

    def multiply(x, b):
        return _rows(x, b, (None,))

    def multiply_kernel(x, kernel):
        return _rows(x, kernel, axes)

    y = multiply_kernel(x, kernel)
    return _with_low_rank(y, x, kernel, axes, multiply, multiply_kernel)


def _rows(x, kernel, axes):
    """Return the product without a low-rank adapter. See `row_parallel`."""
    if is_quantized(kernel):
        return multiply_dequantized(lambda xs, values: [_rows(*xs, *values, axes)], [x], [kernel])[
            0
        ]
    if not trace.is_on_mesh():
        return matmul(x, kernel, len(axes))

    def multiply(x, kernel):
        return _row_parallel(x, kernel, axes)

    y = run_product(multiply, _as_sequences(x, len(axes)), kernel)
    return _like_inputs(y, x, len(axes))


def _with_low_rank(y, x, kernel, axes, multiply, multiply_kernel):
    """Add the low-rank adapter of a kernel to the product y = x · kernel.

    Args:
        y, x: Tensors.
        kernel: Tensor or variable with the adapter.
        axes: Tuple with the logical axis of each input dimension.
        multiply: Function of x · A, `[b, ..., r]`, and B that returns their product in the layout
            of y.
        multiply_kernel: Function of inputs and the kernel that returns their product.
    """
    adapter = get_low_rank(kernel)
    if adapter is None:
        return y
    # The smallest of the products; it has the sharding of the residual stream.
    dropped_x = x if adapter.dropout is None else adapter.dropout(x)
    inner = _rows(dropped_x, adapter.a, axes)
    adapter_output = multiply(inner * tf.cast(adapter.scale, inner.dtype), adapter.b)
    if adapter.m is None:
        return y + adapter_output
    # [*outputs]. Norms are reduced over the mesh axis if inputs are sharded.
    norms = keep_for_recompute(lambda: tf.stop_gradient(adapter.norms(kernel)))
    gain = tf.cast(tf.math.divide_no_nan(tf.cast(adapter.m, "float32"), norms), y.dtype)
    if dropped_x is x:
        return gain * (y + adapter_output)
    return y + (gain - 1) * multiply_kernel(dropped_x, kernel) + gain * adapter_output


def _row_parallel(x, kernel, axes):
    axis = mesh_axis(axes[0])
    if axis is None and get_inner_length_axis(x.shape) is None:
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

        # Recompute can store this sum, since sending it again takes long.
        y = keep_for_recompute(lambda: shards.product("bsf,fh->bsh", inputs, rows))
        return y, gradient

    return product(x, kernel)


def _as_sequences(x, num_features):
    """Reshape `[b, ..., *features]` to `[b, s, *features]`, as products on the mesh require."""
    num_leading = len(x.shape) - num_features
    if num_leading == 2:
        return x
    shape = static_or_dynamic_shape(x)
    return tf.reshape(x, [shape[0], -1, *shape[num_leading:]])


def _like_inputs(y, x, num_features):
    """Reshape `[b, s, *outputs]` to `[b, ..., *outputs]` with the leading dimensions of x."""
    num_leading = len(x.shape) - num_features
    if num_leading == 2:
        return y
    return tf.reshape(y, [*static_or_dynamic_shape(x)[:num_leading], *y.shape[2:]])


class _FeatureShards:
    """Sharding of features over a mesh axis: f, or t and f for sharded sequences.

    Args:
        axis: Mesh axis, or `None` for replicated features.
        x: Tensor of shape `[b, s, ...]`.
    """

    def __init__(self, axis, x):
        self.axis = axis
        self.num_shards = axis_size(axis)
        self.batch = activation_specs(("batch",), x.shape[:1])[0]
        self.length_axis = get_length_axis(x.shape)
        self.inner_length = get_inner_length_axis(x.shape)

    def features(self, x, num_leading):
        """Flatten features to `[..., f]` or `[..., t, f]`, after `num_leading` dimensions."""
        leading = x.shape[:num_leading].as_list()
        x = tf.reshape(x, [*leading, math.prod(x.shape[num_leading:])])
        return self._split(x) if self.length_axis else self._relayout(x)

    def rows(self, kernel):
        """Reshape a kernel `[*features, h]` to `[f, h]`, sharded over its rows.

        If the length is also sharded, the result is `[t, f / t, h]` with one slice per shard.
        """
        shards = [self.num_shards] if self.length_axis else []
        kernel = tf.reshape(kernel, [*shards, -1, kernel.shape[-1]])
        return relayout(kernel, (self.axis, *[None] * (len(kernel.shape) - 1)))

    def join(self, tensors):
        """Concatenate tensors `[..., f]` along f, shard by shard."""
        if len(tensors) == 1:
            return tensors[0]
        joined = tensors if self.length_axis else [self._split(x) for x in tensors]
        joined = tf.concat(joined, -1)
        if not self.length_axis:
            joined = self._relayout(tf.reshape(joined, [*joined.shape[:-2], -1]))
        return joined

    def product(self, equation, a, b):
        """Return an `einsum` over features.

        Args:
            equation: Equation for replicated sequences. For sharded sequences the dimension t is
                added.
            a, b: Tensors in the form of `features` or `rows`.
        """
        output = equation.split("->")[1]
        specs = {"b": self.batch, "s": self.inner_length, "f": self.axis}
        if not self.length_axis:
            return relayout(tf.einsum(equation, a, b), [specs.get(name) for name in output])
        for name, names in (("bsh", "tbsh"), ("f", "tf")):
            equation = equation.replace(name, names)
        y = tf.einsum(equation, a, b)
        if output == "bsh":
            return sum_partial(y, self.axis, self.length_axis)
        specs = {"b": self.batch, "t": self.axis}
        return relayout(y, [specs.get(name) for name in equation.split("->")[1]])

    def _split(self, x):
        """Reshape `[..., t·f]` to `[..., t, f]`."""
        x = tf.reshape(x, [*x.shape[:-1], self.num_shards, -1])
        return relayout(x, (*self._leading(x, 2), self.axis, None))

    def _relayout(self, x):
        return relayout(x, (*self._leading(x, 1), self.axis))

    def _leading(self, x, num_last):
        """Return the specs of the leading dimensions: `[h]`, or `[b, s]` in products."""
        num_leading = len(x.shape) - num_last
        return (self.batch, self.inner_length) if num_leading == 2 else (None,)
