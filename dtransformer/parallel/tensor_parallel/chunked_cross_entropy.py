"""Cross entropy that computes logits for one chunk of tokens at a time.

The logits of a large vocabulary and their gradient often need more memory than all blocks. A head
therefore attaches the factors of its logits to them. The loss multiplies the factors chunk by chunk,
and TensorFlow removes the unused product of all tokens from the graph. The product of all tokens is
computed as before if anything else reads it. `weighted_nll_sum` computes the gradients of a chunk
together with its logits, other losses compute the logits again in the backward pass.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.limits import max_chunk_tokens
from dtransformer.parallel.mesh.axis_rules import activation_specs, axis_size, constrain
from dtransformer.parallel.ops.custom_gradient import custom_gradient, depend_on
from dtransformer.parallel.ops.low_rank import get_low_rank
from dtransformer.parallel.ops.split_backward import is_split
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tensor_parallel.cross_entropy import (
    is_most_likely,
    logits_axes,
    token_nll,
)
from dtransformer.parallel.tensor_parallel.embedding import tied_kernel
from dtransformer.parallel.tensor_parallel.linear import matmul
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape
from dtransformer.parallel.zero.gather import copied_variable
from dtransformer.parallel.zero.units import is_training_unit, run_unit

# Assumed number of tokens of a batch with an unknown size.
_UNKNOWN_SIZE = 8192


@dataclasses.dataclass(eq=False)
class HeadProduct:
    """Factors of logits, which are `finish(inputs · kernel, *biases)`.

    Args:
        inputs: Tensor of shape `[b, s, h]`. Off the mesh the leading dimensions are arbitrary.
        kernel: Tensor of shape `[h, V']`, or `[V', h]` with `is_transposed`. It is a Keras variable
            if a training step all-gathers it (`optimizer_shard=3`).
        biases: List of at most one tensor of shape `[V']`.
        is_transposed: Whether the kernel is an embedding table.
        finish: Function of the product and the biases that returns the logits.
        correct: Float32 tensor in the labels' shape, 1 where the label is the most likely entry.
            `None` until `head_nll` computes it.
    """

    inputs: tf.Tensor
    kernel: tf.Tensor | keras.Variable
    biases: list[tf.Tensor]
    is_transposed: bool
    finish: Callable
    correct: tf.Tensor | None = None


def attach_product(
    logits: tf.Tensor,
    inputs: tf.Tensor,
    kernel: tf.Tensor | keras.Variable,
    biases: list[tf.Tensor],
    is_tied: bool,
    finish: Callable,
) -> tf.Tensor:
    """Return the logits with their `HeadProduct`, if they can be computed in chunks.

    They cannot in eager mode, or if the kernel has a low-rank adapter or a deferred gradient.

    Args:
        logits: Tensor of shape `[..., V']`.
        inputs, biases, finish: See `HeadProduct`.
        kernel: Tensor or variable of shape `[h, V']`, or `[V', h]` if `is_tied`.
        is_tied: Boolean, whether the kernel is an embedding table.
    """
    is_special = is_split(kernel) or get_low_rank(kernel)
    is_flat = trace.is_on_mesh() and len(inputs.shape) != 3
    if tf.executing_eagerly() or is_special or is_flat:
        return logits
    variable = copied_variable(kernel)
    kernel = variable if is_training_unit([variable]) else tf.convert_to_tensor(kernel)
    logits.head_product = HeadProduct(inputs, kernel, biases, is_tied, finish)
    return logits


def get_product(logits: tf.Tensor) -> HeadProduct | None:
    """Return the `HeadProduct` of logits, or `None`."""
    return getattr(logits, "head_product", None)


def head_nll(
    logits: tf.Tensor, labels: tf.Tensor, chunk_tokens: int | str | None = "auto", **options
) -> tf.Tensor:
    """Return `token_nll(logits, labels, **options)`, computed in chunks if the logits are large.

    Args:
        logits: Tensor of shape `[..., V']`, the result of a head.
        labels: Integer tensor of shape `[...]`.
        chunk_tokens: Maximum number of tokens per chunk on a device. `"auto"` (default) limits the
            float32 logits of a chunk to the larger of 256 MiB and 2,048 tokens. `None`
            disables chunks.
        **options: Other arguments of `token_nll`.
    """
    nll = functools.partial(token_nll, **options)
    (values,) = head_losses(lambda *chunk: [nll(*chunk)], logits, labels, chunk_tokens)
    return values


def head_losses(
    compute: Callable,
    logits: tf.Tensor,
    labels: tf.Tensor,
    chunk_tokens: int | str | None = "auto",
    teacher_logits: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Return the losses of each token, computed in chunks if the logits are large.

    Args:
        compute: Function of logits, labels and, if passed, teacher logits. It returns a list of
            float tensors in the labels' shape: one loss, or two losses with teacher logits.
        logits: Tensor of shape `[..., V']`, the result of a head.
        labels: Integer tensor of shape `[...]`.
        chunk_tokens: As in `head_nll`.
        teacher_logits: Tensor of shape `[..., V']`, the result of another head. They have no
            gradient. Defaults to `None`.

    Returns:
        The list of losses.
    """
    product = get_product(logits)
    teachers = [] if teacher_logits is None else [teacher_logits]
    teacher_products = [get_product(x) for x in teachers]
    size = chunk_size(logits, chunk_tokens)
    _record_bytes(logits, size)
    if size is None or None in teacher_products:
        return compute(logits, labels, *map(tf.stop_gradient, teachers))
    *losses, product.correct = _chunked_losses(product, labels, size, compute, teacher_products)
    return losses


def weighted_nll_sum(
    logits: tf.Tensor,
    labels: tf.Tensor,
    weights: tf.Tensor,
    chunk_tokens: int | str | None = "auto",
    **options,
) -> tf.Tensor:
    """Return Σ `token_nll(logits, labels, **options)` · weight over all tokens, a scalar.

    If gradients are required, the forward pass of a chunk also computes them.

    Args:
        logits, labels, chunk_tokens, **options: As in `head_nll`.
        weights: Float tensor in the labels' shape.
    """
    size = chunk_size(logits, chunk_tokens)
    has_gradients = trace.is_training_step() or _compat.is_on_a_tape([logits])
    if size is None or not has_gradients:
        losses = head_nll(logits, labels, chunk_tokens, **options)
        return tf.reduce_sum(losses * tf.cast(weights, losses.dtype))
    _record_bytes(logits, size)

    def compute(*chunk):
        return [token_nll(*chunk, **options)]

    product = get_product(logits)
    total, product.correct = _chunked_losses(product, labels, size, compute, weights=weights)
    return total


def chunk_size(logits: tf.Tensor, chunk_tokens: int | str | None = "auto") -> int | None:
    """Return the maximum number of tokens per chunk, or `None` if all tokens are computed together.

    Args:
        logits: Tensor of shape `[..., V']`.
        chunk_tokens: As in `head_nll`.
    """
    if chunk_tokens is None or get_product(logits) is None:
        return None
    shape = _local_shape(logits)
    num_tokens = shape[:-1].num_elements()
    if chunk_tokens == "auto":
        chunk_tokens = int(max_chunk_tokens(shape[-1]))
        num_tokens = _UNKNOWN_SIZE if num_tokens is None else num_tokens
    return chunk_tokens if num_tokens is None or num_tokens > chunk_tokens else None


def use_all_logits(outputs, losses: list) -> None:
    """Compute losses of these outputs from all logits, because metrics read them.

    Warns if the logits are large.

    Args:
        outputs: Nested tensors, the outputs of a network.
        losses: List of the losses, which may have an attribute `chunk_tokens`.
    """
    for x in tf.nest.flatten(outputs):
        if get_product(x) is None:
            continue
        sizes = {chunk_size(x, getattr(loss, "chunk_tokens", None)) for loss in losses}
        if sizes - {None} and job.is_chief():
            warnings.warn(
                f"Metrics read all logits of shape {tuple(x.shape)}, so the loss is not computed "
                "in chunks. To save memory, call `compile` without `metrics`. The logs then "
                "contain the loss and the accuracy.",
                stacklevel=2,
            )
        x.head_product = None


def _record_bytes(logits, size):
    """Record the logits that are computed together, their float32 copy and its gradient.

    The planner counts the same bytes.
    """
    shape = _local_shape(logits)
    num_tokens = size or shape[:-1].num_elements()
    if num_tokens is not None:
        trace.record_bytes("logits", num_tokens * shape[-1] * (logits.dtype.size + 2 * 4))


def _local_shape(logits):
    """Return the shape of a device's shard of logits."""
    shape = logits.shape
    if not trace.is_on_mesh() or len(shape) != 3:
        return shape
    specs = activation_specs(logits_axes(logits), shape)
    return tf.TensorShape([n // axis_size(axis) for n, axis in zip(shape, specs)])


def _chunked_losses(product, labels, size, compute, teacher_products=(), weights=None):
    """Return the losses of each token, and 1 where the label is the most likely entry, else 0.

    Args:
        product: `HeadProduct` of the logits.
        labels: Integer tensor of shape `[...]`.
        size: Maximum number of tokens per chunk.
        compute: As in `head_losses`.
        teacher_products: List of the `HeadProduct`s of the teacher logits, if any.
        weights: Float tensor in the labels' shape. If passed, the weighted sum of the loss is
            returned instead of the losses. Defaults to `None`.
    """
    label_shape = static_or_dynamic_shape(labels)
    tokens = [labels]
    if weights is not None:
        tokens.append(tf.cast(weights, _loss_type(product.inputs)))
    if not trace.is_on_mesh():
        tokens = [tf.reshape(x, [1, -1]) for x in tokens]
    chunks = _Chunks(tokens[0], size)
    chunk_labels, *chunk_weights = map(chunks.split, tokens)
    kernel = product.kernel
    tensors = [product.inputs, *product.biases]
    if isinstance(kernel, keras.Variable):
        is_trained = kernel.trainable
    else:
        in_tape_graph = trace.tape_graph() is tf.compat.v1.get_default_graph()
        is_trained = not in_tape_graph or _compat.is_on_a_tape([kernel])
        tensors.append(kernel)

    def compute_chunks(inputs, *others):
        biases = others[: len(product.biases)]
        (matrix,) = others[len(biases) :] or [kernel]
        matrix = _matrix(product, matrix)
        teachers = []
        for teacher in teacher_products:
            teacher_rows = chunks.split(_rows(teacher.inputs))
            teacher_weights = tf.cast(_matrix(teacher, teacher.kernel), teacher_rows.dtype)
            teachers.append((teacher, teacher_rows, teacher_weights))

        def chunk_losses(i, done, logits):
            teacher_logits = []
            for teacher, rows, teacher_weights in teachers:
                y = _multiply(_after(rows[:, :, i], done), teacher_weights, teacher)
                teacher_logits.append(tf.stop_gradient(teacher.finish(y, *teacher.biases)))
            return compute(logits, chunk_labels[:, :, i], *teacher_logits)

        head = _ChunkedHead(product, chunks, chunk_labels, chunk_losses, is_trained)
        if chunk_weights:
            return head.weighted_sum(_rows(inputs), matrix, biases, *chunk_weights)
        return head.losses(_rows(inputs), matrix, biases, 1 + len(teachers))

    kernels = [x.kernel for x in [product, *teacher_products]]
    *results, correct = run_unit(compute_chunks, tensors, kernels)
    if weights is None:
        results = [tf.reshape(result, label_shape) for result in results]
    return [*results, tf.reshape(correct, label_shape)]


@dataclasses.dataclass(frozen=True)
class _ChunkedHead:
    """Forward and backward pass of a head and its losses, one chunk at a time.

    Args:
        product: `HeadProduct` of the logits.
        chunks: `_Chunks` of the labels.
        labels: Labels of all chunks.
        compute: Function of the index of a chunk, a tensor to wait for, and the logits. It returns
            a list of losses in the shape of the chunk's labels.
        is_trained: Boolean, whether to compute the gradient of the kernel.
    """

    product: HeadProduct
    chunks: "_Chunks"
    labels: tf.Tensor
    compute: Callable
    is_trained: bool

    def losses(self, inputs, kernel, biases, num_losses):
        """Return `num_losses` losses of each token, and 1 or 0 for correct tokens.

        The backward pass computes the logits again.

        Args:
            inputs: Tensor of shape `[b, s, h]`.
            kernel: Tensor, see `_matrix`.
            biases: List of tensors of shape `[V']`.
            num_losses: Number of losses that `compute` returns.
        """

        @custom_gradient
        def losses(inputs, kernel, *biases):
            x = self.chunks.split(inputs)
            weights = tf.cast(kernel, x.dtype)

            def forward(i, sums, done):
                y = _multiply(_after(x[:, :, i], done), weights, self.product)
                logits = self.product.finish(y, *biases)
                correct = is_most_likely(logits, self.labels[:, :, i])
                return [*self.compute(i, done, logits), correct], sums

            def gradient(*upstream):
                chunk_upstream = [self.chunks.split(dy) for dy in upstream[:-1]]

                def backward(i, sums, done):
                    dlosses = [dy[:, :, i] for dy in chunk_upstream]
                    rows = _after(x[:, :, i], done)
                    *_, dx, sums = self._backward(i, rows, weights, biases, dlosses, sums, done)
                    return [dx], sums

                sums = self._zero_sums(kernel, biases)
                (dx,), sums = _iterate(backward, self.chunks.count, sums, [x.dtype])
                return self._gradients(dx, sums, kernel, biases)

            dtypes = [_loss_type(x)] * num_losses + ["float32"]
            results, _ = _iterate(forward, self.chunks.count, [], dtypes)
            return [self.chunks.join(result) for result in results], gradient

        return losses(inputs, kernel, *biases)

    def weighted_sum(self, inputs, kernel, biases, token_weights):
        """Return the weighted sum of the loss, and 1 or 0 for correct tokens.

        The gradient of the sum is known except for a factor, so the forward pass computes it as
        well, and logits are computed only once
        ([Hsu et al., 2024](https://arxiv.org/abs/2410.10989), "FusedLinearCrossEntropy").

        Args:
            inputs, kernel, biases: As in `losses`.
            token_weights: Weights of all chunks, in the labels' shape.
        """

        @custom_gradient
        def weighted_sum(inputs, kernel, *biases):
            x = self.chunks.split(inputs)
            weights = tf.cast(kernel, x.dtype)

            def both_passes(i, sums, done):
                dlosses = [token_weights[:, :, i]]
                rows = _after(x[:, :, i], done)
                logits, (losses,), dx, sums = self._backward(
                    i, rows, weights, biases, dlosses, sums, done
                )
                return [losses, is_most_likely(logits, self.labels[:, :, i]), dx], sums

            sums = self._zero_sums(kernel, biases)
            dtypes = [_loss_type(x), "float32", x.dtype]
            results, sums = _iterate(both_passes, self.chunks.count, sums, dtypes)
            (losses, correct, dx) = results
            gradients = self._gradients(dx, sums, kernel, biases)

            def gradient(factor, _):
                return [dy if dy is None else _scale(dy, factor) for dy in gradients]

            total = tf.reduce_sum(losses * token_weights)
            return [total, self.chunks.join(correct)], gradient

        return weighted_sum(inputs, kernel, *biases)

    def _backward(self, i, rows, weights, biases, dlosses, sums, done):
        """Compute the losses of a chunk and their gradients.

        Args:
            i: Index of the chunk.
            rows: Inputs of the chunk.
            weights: Kernel in the type of the rows.
            biases: List of tensors.
            dlosses: List of the losses' gradients.
            sums: List of sums of gradients, see `_zero_sums`.
            done: Tensor to wait for.

        Returns:
            A `(logits, losses, dx, sums)` tuple with the gradient of the rows and the new sums.
        """
        y = _multiply(rows, weights, self.product)
        with tf.GradientTape() as tape:
            tape.watch([y, *biases])
            logits = self.product.finish(y, *biases)
            losses = self.compute(i, done, logits)
        dy, *gradients = tape.gradient(losses, [y, *biases], dlosses)
        if self.is_trained:
            factors = (dy, rows) if _is_transposed(self.product) else (rows, dy)
            gradients.append(tf.matmul(*factors, transpose_a=True))
        sums = [total + tf.cast(x, total.dtype) for total, x in zip(sums, gradients)]
        return logits, losses, _multiply(dy, weights, self.product, is_backward=True), sums

    def _zero_sums(self, kernel, biases):
        """Return zeros for the sums of the chunks' gradients of the biases and the kernel."""
        sums = [_zeros(bias) for bias in biases]
        # The first dimensions have one sum per shard of tokens. They are added up at the end.
        return [*sums, _zeros(kernel)[None, None]] if self.is_trained else sums

    def _gradients(self, dx, sums, kernel, biases):
        """Return the gradients of inputs, kernel (or `None`) and biases."""
        dkernel = None
        if self.is_trained:
            total = constrain(tf.reduce_sum(sums[-1], axis=[0, 1]), (None, "vocab"))
            dkernel = tf.cast(total, kernel.dtype)
        dbiases = [tf.cast(dy, bias.dtype) for dy, bias in zip(sums, biases)]
        return [self.chunks.join(dx), dkernel, *dbiases]


def _loss_type(x):
    return "float64" if x.dtype == "float64" else "float32"


def _scale(dy, factor):
    """Multiply a gradient by a scalar of a wider type."""
    return tf.cast(tf.cast(dy, factor.dtype) * factor, dy.dtype)


def _rows(inputs):
    """Return the inputs of a head in the shape `[b, s, h]`, with one row off the mesh."""
    if not trace.is_on_mesh():
        inputs = tf.reshape(inputs, [1, -1, inputs.shape[-1]])
    return constrain(inputs, ("batch", "inner_length", None))


def _is_transposed(product):
    """Return whether the kernel of `_matrix` is `[V', h]`."""
    return product.is_transposed and not trace.is_on_mesh()


def _matrix(product, kernel):
    """Return the kernel as a tensor, `[h, V']` on a mesh."""
    kernel = tf.convert_to_tensor(kernel)
    if not trace.is_on_mesh():
        return kernel
    return tied_kernel(kernel) if product.is_transposed else constrain(kernel, ("embed", "vocab"))


def _multiply(x, kernel, product, is_backward=False):
    """Multiply `[d, c, r, h]` by a kernel, or `[d, c, r, V']` by its transpose with `is_backward`."""
    transpose = _is_transposed(product) != is_backward
    if not trace.is_on_mesh():
        return matmul(x, kernel, transpose_kernel=transpose)
    y = tf.einsum("dcrf,of->dcro" if transpose else "dcrf,fo->dcro", x, kernel)
    return constrain(y, ("batch", "inner_length", None, None if is_backward else "vocab"))


def _zeros(weight):
    """Return zeros for sums of a weight's gradients, in float32 or wider."""
    return tf.zeros_like(weight, weight.dtype if weight.dtype.size >= 4 else "float32")


def _after(x, done):
    return x if done is None else depend_on(x, done)


def _iterate(body, count, sums, dtypes):
    """Call a function for each chunk in turn. Return its results `[d, c, n, r, ...]` and the last sums.

    Args:
        body: Function of the index of a chunk, the sums, and a tensor that must be computed first
            (or `None`). Returns `(results, sums)`, two lists of tensors. Results are
            `[d, c, r, ...]`.
        count: Number of chunks.
        sums: List of tensors.
        dtypes: List of the results' types.
    """
    if trace.is_on_mesh():  # DTensor compiles few kinds of operations in loops.
        all_results = []
        done = None
        for i in range(count):
            results, sums = body(i, sums, done)
            all_results.append(results)
            done = (sums or results)[-1]
        return [tf.stack(parts, axis=2) for parts in zip(*all_results)], sums

    def step(i, arrays, sums):
        results, sums = body(i, sums, None)
        return i + 1, [array.write(i, x) for array, x in zip(arrays, results)], sums

    arrays = [tf.TensorArray(dtype, count) for dtype in dtypes]
    _, arrays, sums = tf.while_loop(
        lambda i, *_: i < count, step, (0, arrays, sums), parallel_iterations=1
    )
    # [n, 1, 1, r, ...] -> [1, 1, n, r, ...]
    return [tf.squeeze(array.stack(), [1, 2])[None, None] for array in arrays], sums


class _Chunks:
    """Division of tensors `[b, s, ...]` into chunks `[d, c, r, ...]` of r tokens on each shard.

    A sequence has c shards with context parallelism, and a batch has d shards.

    Args:
        labels: Tensor of shape `[b, s]`.
        size: Maximum number r of tokens.

    Attributes:
        count: Number n of chunks.
    """

    def __init__(self, labels, size):
        shape = static_or_dynamic_shape(labels)
        specs = activation_specs(("batch", "inner_length"), labels.shape)
        self._data, self._context = map(axis_size, specs)
        self._rows = shape[0] // self._data
        self._length = shape[1] // self._context
        self.count = -(-self._length // max(1, size // self._rows))
        if tf.is_tensor(self.count):  # A batch of unknown size may be empty.
            self.count = tf.maximum(self.count, 1)
        self._size = -(-self._length // self.count)

    def split(self, x):
        """Return the chunks `[d, c, n, r, ...]` of a tensor `[b, s, ...]`."""
        features = x.shape[2:].as_list()
        x = _sharded(x, ("batch", "inner_length"))
        x = tf.reshape(x, [self._data, self._rows, self._context, self._length, *features])
        padding = self.count * self._size - self._length
        x = tf.pad(x, [*[[0, 0]] * 3, [0, padding], *[[0, 0]] * len(features)])
        shape = [self._data, self._rows, self._context, self.count, self._size, *features]
        x = tf.transpose(tf.reshape(x, shape), [0, 2, 3, 1, *range(4, len(shape))])
        rows = self._rows * self._size
        x = tf.reshape(x, [self._data, self._context, self.count, rows, *features])
        return _sharded(x, ("batch", "inner_length"))

    def join(self, x):
        """Return the tensor `[b, s, ...]` with the chunks `[d, c, n, r, ...]`."""
        features = x.shape[4:].as_list()
        shape = [self._data, self._context, self.count, self._rows, self._size, *features]
        x = tf.transpose(tf.reshape(x, shape), [0, 3, 1, 2, *range(4, len(shape))])
        padded = self.count * self._size
        x = tf.reshape(x, [self._data, self._rows, self._context, padded, *features])
        x = x[:, :, :, : self._length]
        shape = [self._data * self._rows, self._context * self._length, *features]
        return _sharded(tf.reshape(x, shape), ("batch", "inner_length"))


def _sharded(x, axes):
    return constrain(x, (*axes, *[None] * (len(x.shape) - len(axes))))
