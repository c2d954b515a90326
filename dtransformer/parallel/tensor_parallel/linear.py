"""Products with kernels, cut by columns or by rows over the mesh.

The product with a kernel that is cut by columns needs no communication forward, and
sums the inputs' gradient over the mesh axis; one that is cut by rows is the other way
around (Shoeybi et al., 2019, arXiv 1909.08053, §3). Under sequence parallelism the sum
leaves each device its slice of the sequence, and the inputs are gathered before
(Korthikanti et al., 2022, arXiv 2205.05198, §4.2).

Features that are cut over the mesh axis are a dimension f, over which DTensor sums by
itself. Under sequence parallelism they are two: t slices, and f features of a slice;
what the slices add up to is then sent as this module says. Other shapes: b batch, s
length, h whole features.
"""

import contextlib
import math

import tensorflow as tf

from dtransformer.parallel import trace
from dtransformer.parallel.axis_rules import activation_specs, constrain, mesh_axis
from dtransformer.parallel.custom_gradient import custom_gradient
from dtransformer.parallel.dtensor.layouts import axis_size, relayout
from dtransformer.parallel.shapes import static_or_dynamic_shape
from dtransformer.parallel.zero.gather import apply_unsharded


def matmul(x, kernel, num_inputs=1, transpose_kernel=False):
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


def column_parallel(x, kernels, axes):
    """Multiply `x` with kernels that are cut along their first dimension of outputs.

    Args:
        x: tensor [b, s, h].
        kernels: list of tensors [h, *outputs].
        axes: tuple with the logical name of each dimension of the outputs.

    Returns:
        A list of tensors [b, s, *outputs], whole along s.
    """
    axis = _sharding_axis(axes)
    if axis is None:
        x = constrain(x, ("batch", None, None))
        return [constrain(matmul(x, kernel), ("batch", None, *axes)) for kernel in kernels]
    kernels = [tf.cast(kernel, x.dtype) for kernel in kernels]
    cut = _FeatureShards(axis, x)

    @custom_gradient
    def products(x, *kernels):
        x = all_gather_length(x, axis, cut.length_axis)
        flat = [cut.features(kernel, 1) for kernel in kernels]

        def gradient(*upstream):
            dys = [cut.features(dy, 2) for dy in upstream]
            dks = [cut.product("bsh,bsf->hf", x, dy) for dy in dys]
            dks = [tf.reshape(dk, kernel.shape) for dk, kernel in zip(dks, kernels)]
            # One sum, and one message, for all kernels.
            return cut.product("bsf,hf->bsh", cut.join(dys), cut.join(flat)), *dks

        ys = [cut.product("bsh,hf->bsf", x, kernel) for kernel in flat]
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
    axis = _sharding_axis(axes)
    if axis is None:
        return constrain(matmul(x, kernel, num_inputs=len(axes)), ("batch", "length", None))
    kernel = tf.cast(kernel, x.dtype)
    cut = _FeatureShards(axis, x)

    @custom_gradient
    def product(x, kernel):
        inputs = cut.features(constrain(x, ("batch", None, *axes)), 2)
        rows = cut.rows(kernel)

        def gradient(dy):
            dy = all_gather_length(dy, axis, cut.length_axis)
            dx = cut.product("bsh,fh->bsf", dy, rows)
            dk = cut.product("bsf,bsh->fh", inputs, dy)
            return tf.reshape(dx, x.shape), tf.reshape(dk, kernel.shape)

        return _kept(lambda: cut.product("bsf,fh->bsh", inputs, rows)), gradient

    return product(x, kernel)


@contextlib.contextmanager
def keep_sums(sums, replay):
    """Keep the sums over the mesh axis that row-parallel products inside the block give.

    Args:
        sums: list, to which they are added; or from which they are taken, in the same
            order, instead of being computed and sent again.
        replay: whether they are taken.
    """
    with trace.scope(kept_sums=(sums, replay)):
        yield


def _kept(compute):
    if trace.current().kept_sums is None:
        return compute()
    sums, replay = trace.current().kept_sums
    if not replay:
        sums.append(compute())
        return sums[-1]
    return sums.pop(0)


class _FeatureShards:
    """How features are cut over a mesh axis: as f, or as t and f where the sequence is cut too.

    Args:
        axis: the mesh axis.
        x: tensor [b, s, ...].
    """

    def __init__(self, axis, x):
        self.axis, self.num_slices = axis, axis_size(axis)
        self.batch = activation_specs(("batch",), x.shape[:1])[0]
        self.length_axis = length_axis_of(x.shape)

    def features(self, x, num_leading):
        """[..., *features] -> [..., f] or [..., t, f], after one or two leading dimensions"""
        leading = x.shape[:num_leading].as_list()
        x = tf.reshape(x, [*leading, math.prod(x.shape[num_leading:])])
        return self._split(x) if self.length_axis else self._pin(x)

    def rows(self, kernel):
        """[*features, h] -> [f, h] or [t, f, h]"""
        slices = [self.num_slices] if self.length_axis else []
        kernel = tf.reshape(kernel, [*slices, -1, kernel.shape[-1]])
        return relayout(kernel, (self.axis, *[None] * (len(kernel.shape) - 1)))

    def join(self, parts):
        """[..., f] of each part -> [..., f] of all; the order is that of the slices"""
        if len(parts) == 1:
            return parts[0]
        joint = parts if self.length_axis else [self._split(part) for part in parts]
        joint = tf.concat(joint, -1)
        if not self.length_axis:
            joint = self._pin(tf.reshape(joint, [*joint.shape[:-2], -1]))
        return joint

    def product(self, equation, a, b):
        """Return a product of features, whose equation is the one of sequences that are whole."""
        result = equation.split("->")[1]
        specs = {"b": self.batch, "f": self.axis}
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
        x = tf.reshape(x, [*x.shape[:-1], self.num_slices, -1])
        return relayout(x, (*self._leading(x, 2), self.axis, None))

    def _pin(self, x):
        return relayout(x, (*self._leading(x, 1), self.axis))

    def _leading(self, x, num_last):
        """The layout of [h], or of [b, s] where the sequence is whole."""
        num_leading = len(x.shape) - num_last
        return (self.batch, None) if num_leading == 2 else (None,)


def _sharding_axis(axes):
    return mesh_axis(axes[0]) if trace.is_on_mesh() else None


def length_axis_of(shape):
    """Return the mesh axis that cuts the sequence of [b, s, ...] between products, or None."""
    return activation_specs(("batch", "length"), shape[:2])[1]


def all_gather_length(x, axis, length_axis):
    """Return x with its whole sequence on every device.

    [b, s, h] as it is where the sequence is not cut; otherwise a copy for each device,
    [t, b, s, h]: an all-to-all that sends every device's slice to each. (DTensor's own
    all-gather is an all-reduce of the whole on CPUs, which sends twice as much.)
    """
    if length_axis is None:
        return constrain(x, ("batch", None, None))
    batch = activation_specs(("batch",), x.shape[:1])[0]
    x = relayout(x, (batch, length_axis, None))
    copies = relayout(tf.stack([x] * axis_size(axis)), (None, batch, length_axis, None))
    return relayout(copies, (axis, batch, None, None))


def sum_partial(partial, axis, length_axis):
    """[t, b, s, h], a summand a device -> [b, s, h]

    An all-reduce; where the sequence is cut a reduce-scatter, as an all-to-all of the
    summands and their local sum.
    """
    batch = activation_specs(("batch",), partial.shape[1:2])[0]
    partial = relayout(partial, (axis, batch, None, None))
    if length_axis is not None:
        partial = relayout(partial, (None, batch, length_axis, None))
    return relayout(tf.reduce_sum(partial, axis=0), (batch, length_axis, None))
