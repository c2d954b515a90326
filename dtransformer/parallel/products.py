"""Products with kernels, cut by columns or by rows over the mesh.

The product with a kernel that is cut by columns needs no communication forward, and
sums the inputs' gradient over the mesh axis; one that is cut by rows is the other way
around (Shoeybi et al., 2019, arXiv 1909.08053, §3). Under sequence parallelism the sum
leaves each device its slice of the sequence, and the inputs are gathered before
(Korthikanti et al., 2022, arXiv 2205.05198, §4.2).

A sum over the mesh axis is written down as such: partial products have a dimension of
their own, cut over the mesh axis, so that several of them are added first and are sent
once. Shapes: b batch, s length, h whole features, t slices of the mesh axis, f features
of a slice.
"""

import math

import tensorflow as tf

from dtransformer.parallel import layout
from dtransformer.parallel.layout import constrain, pin


def matmul(x, kernel, num_inputs=1, transpose_kernel=False):
    """Multiply the last dimensions of `x` with the first ones of `kernel`.

    Args:
        x: tensor [..., *inputs].
        kernel: tensor [*inputs, *outputs], or [outputs, inputs] with
            `transpose_kernel`.
        num_inputs: number of dimensions that are summed over.
        transpose_kernel: whether the kernel's two dimensions are swapped.

    Returns:
        A tensor [..., *outputs].
    """
    kernel = tf.cast(kernel, x.dtype)
    outputs = [kernel.shape[0]] if transpose_kernel else kernel.shape[num_inputs:].as_list()
    inner = kernel.shape[1] if transpose_kernel else math.prod(kernel.shape[:num_inputs])
    if not transpose_kernel:
        kernel = tf.reshape(kernel, [inner, math.prod(outputs)])
    batch = static_or_dynamic_shape(x)[: len(x.shape) - num_inputs]
    y = tf.matmul(tf.reshape(x, [-1, inner]), kernel, transpose_b=transpose_kernel)
    return tf.reshape(y, [*batch, *outputs])


def column_parallel(x, kernels, axes):
    """Multiply `x` with kernels that are cut along their first dimension of outputs.

    Args:
        x: tensor [b, s, h].
        kernels: list of tensors [h, *outputs].
        axes: tuple with the logical name of each dimension of the outputs.

    Returns:
        A list of tensors [b, s, *outputs], whole along s.
    """
    kernels = [tf.cast(kernel, x.dtype) for kernel in kernels]
    axis = _cutting_axis(axes)
    if axis is None:
        x = constrain(x, ("batch", None, None))
        return [constrain(matmul(x, kernel), ("batch", None, *axes)) for kernel in kernels]
    length_axis = length_axis_of(x.shape)

    @layout.custom_gradient
    def products(x, *kernels):
        x, dims = gather_length(x, axis, length_axis)
        split = [_split(_flat(kernel, 1), axis) for kernel in kernels]
        ys = [tf.einsum(f"{dims},htf->bstf", x, kernel) for kernel in split]

        def gradient(*upstream):
            partial, kernel_gradients = 0.0, []
            for dy, flat, kernel in zip(upstream, split, kernels):
                dy = _split(_flat(dy, 2), axis)
                dk = pin(tf.einsum(f"{dims},bstf->htf", x, dy), (None, axis, None))
                kernel_gradients.append(tf.reshape(dk, kernel.shape))
                partial += tf.einsum("bstf,htf->tbsh", dy, flat)
            return sum_partial(partial, axis, length_axis), *kernel_gradients

        outputs = [kernel.shape[1:].as_list() for kernel in kernels]
        ys = [tf.reshape(y, [*y.shape[:2], *shape]) for y, shape in zip(ys, outputs)]
        return [constrain(y, ("batch", None, *axes)) for y in ys], gradient

    return products(x, *kernels)


def row_parallel(x, kernel, axes):
    """Multiply `x` with a kernel that is cut along its first dimension.

    Args:
        x: tensor [b, s, *inputs].
        kernel: tensor [*inputs, h].
        axes: tuple with the logical name of each dimension of the inputs.

    Returns:
        A tensor [b, s, h], cut along s under sequence parallelism.
    """
    kernel = tf.cast(kernel, x.dtype)
    axis = _cutting_axis(axes)
    if axis is None:
        return constrain(matmul(x, kernel, num_inputs=len(axes)), ("batch", "length", None))
    length_axis = length_axis_of(x.shape)

    @layout.custom_gradient
    def product(x, kernel):
        inputs = _split(_flat(constrain(x, ("batch", None, *axes)), 2), axis)
        num_slices, features = inputs.shape[-2:]
        split = tf.reshape(kernel, [num_slices, features, kernel.shape[-1]])
        split = pin(split, (axis, None, None))

        def gradient(dy):
            dy, dims = gather_length(dy, axis, length_axis)
            dx = pin(tf.einsum(f"{dims},tfh->bstf", dy, split), (*_batch_specs(x), axis, None))
            dk = pin(tf.einsum(f"bstf,{dims}->tfh", inputs, dy), (axis, None, None))
            return tf.reshape(dx, x.shape), tf.reshape(dk, kernel.shape)

        partial = tf.einsum("bstf,tfh->tbsh", inputs, split)
        return sum_partial(partial, axis, length_axis), gradient

    return product(x, kernel)


def _cutting_axis(axes):
    return layout.mesh_axis(axes[0]) if layout.is_on_mesh() else None


def _batch_specs(x):
    """The layout of [b, s] where the sequence is whole."""
    return layout.activation_specs(("batch", None), x.shape[:2])


def length_axis_of(shape):
    """Return the mesh axis that cuts the sequence of [b, s, ...] between products, or None."""
    return layout.activation_specs(("batch", "length"), shape[:2])[1]


def _flat(x, num_leading):
    """Merge all but the leading dimensions, of which the first is cut."""
    return tf.reshape(x, [*x.shape[:num_leading], math.prod(x.shape[num_leading:])])


def _split(x, axis):
    """[..., t·f], cut over the mesh axis -> [..., t, f]"""
    num_slices = layout.axis_size(axis)
    leading = x.shape[:-1].as_list()
    x = tf.reshape(x, [*leading, num_slices, x.shape[-1] // num_slices])
    batch = _batch_specs(x) if len(leading) == 2 else (None,) * len(leading)
    return pin(x, (*batch, axis, None))


def gather_length(x, axis, length_axis):
    """Return x with its whole sequence on every device, and the names of its dimensions.

    [b, s, h] as it is, where the sequence is not cut. Otherwise a copy for each device,
    [t, b, s, h]: an all-to-all that sends every device's slice to each. (DTensor's own
    all-gather is an all-reduce of the whole on CPUs, which sends twice as much.)
    """
    if length_axis is None:
        return constrain(x, ("batch", None, None)), "bsh"
    batch = _batch_specs(x)[0]
    x = pin(x, (batch, length_axis, None))
    copies = pin(tf.stack([x] * layout.axis_size(axis)), (None, batch, length_axis, None))
    return pin(copies, (axis, batch, None, None)), "tbsh"


def sum_partial(partial, axis, length_axis):
    """[t, b, s, h], a summand a device -> [b, s, h]

    An all-reduce; where the sequence is cut a reduce-scatter, as an all-to-all of the
    summands and their local sum.
    """
    batch = layout.activation_specs(("batch",), partial.shape[1:2])[0]
    partial = pin(partial, (axis, batch, None, None))
    if length_axis is not None:
        partial = pin(partial, (None, batch, length_axis, None))
    return pin(tf.reduce_sum(partial, axis=0), (batch, length_axis, None))


def static_or_dynamic_shape(x):
    """Return the dimensions of `x`: ints where they are known, scalars elsewhere."""
    if x.shape.is_fully_defined():
        return x.shape.as_list()
    dynamic = tf.shape(x)
    return [dynamic[i] if size is None else size for i, size in enumerate(x.shape)]
