"""Cross entropy that computes logits for one chunk of tokens at a time.

The logits of a large vocabulary and their gradient often need more memory than all blocks. A head
therefore attaches the factors of its logits to them. The loss multiplies the factors chunk by chunk,
in the forward pass and again in the backward pass, and TensorFlow removes the unused product of all
tokens from the graph. The product of all tokens is computed as before if anything else reads it.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.limits import MAX_LOGIT_BYTES
from dtransformer.parallel.mesh.axis_rules import activation_specs, axis_size, constrain
from dtransformer.parallel.ops.custom_gradient import custom_gradient, depend_on
from dtransformer.parallel.ops.low_rank import get_low_rank
from dtransformer.parallel.ops.split_backward import is_split
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tensor_parallel.cross_entropy import is_most_likely, token_nll
from dtransformer.parallel.tensor_parallel.embedding import tied_kernel
from dtransformer.parallel.tensor_parallel.linear import get_inner_length_axis, matmul
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape
from dtransformer.parallel.zero.gather import copied_variable
from dtransformer.parallel.zero.units import is_gathered

# Assumed number of tokens of a batch with an unknown size.
_UNKNOWN_SIZE = 8192


@dataclasses.dataclass(eq=False)
class HeadProduct:
    """Factors of logits, which are `finish(inputs · kernel, *biases)`.

    Args:
        inputs: Tensor of shape `[b, s, h]`. Off the mesh the leading dimensions are arbitrary.
        kernel: Tensor of shape `[h, V']`, or `[V', h]` with `is_transposed`.
        biases: List of at most one tensor of shape `[V']`.
        is_transposed: Whether the kernel is an embedding table.
        finish: Function of the product and the biases that returns the logits.
        correct: Float32 tensor in the labels' shape, 1 where the label is the most likely entry.
            `None` until `head_nll` computes it.
    """

    inputs: tf.Tensor
    kernel: tf.Tensor
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

    They cannot in eager mode, if the sequence is sharded in products (context parallelism), or if
    the kernel has a low-rank adapter, is all-gathered for use, or has a deferred gradient.

    Args:
        logits: Tensor of shape `[..., V']`.
        inputs, biases, finish: See `HeadProduct`.
        kernel: Tensor or variable of shape `[h, V']`, or `[V', h]` if `is_tied`.
        is_tied: Boolean, whether the kernel is an embedding table.
    """
    is_special = is_gathered(copied_variable(kernel)) or is_split(kernel) or get_low_rank(kernel)
    if tf.executing_eagerly() or is_special:
        return logits
    kernel = tf.convert_to_tensor(kernel)
    if trace.is_on_mesh():
        if len(inputs.shape) != 3 or get_inner_length_axis(inputs.shape) is not None:
            return logits
        kernel = tied_kernel(kernel) if is_tied else constrain(kernel, ("embed", "vocab"))
        is_tied = False
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
            float32 logits of a chunk to 256 MiB. `None` disables chunks.
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
        chunk_tokens = max(1, MAX_LOGIT_BYTES // (4 * shape[-1]))
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
    specs = activation_specs(("batch", "length", "vocab"), shape)
    return tf.TensorShape([n // axis_size(axis) for n, axis in zip(shape, specs)])


def _chunked_losses(product, labels, size, compute, teacher_products):
    """Return the losses of each token, and 1 where the label is the most likely entry, else 0.

    Args:
        product: `HeadProduct` of the logits.
        labels: Integer tensor of shape `[...]`.
        size: Maximum number of tokens per chunk.
        compute: As in `head_losses`.
        teacher_products: List of the `HeadProduct`s of the teacher logits, if any.
    """
    label_shape = static_or_dynamic_shape(labels)
    if not trace.is_on_mesh():
        labels = tf.reshape(labels, [1, -1])
    chunks = _Chunks(labels, size)
    chunk_labels = chunks.split(labels)
    is_transposed = product.is_transposed
    in_tape_graph = trace.tape_graph() is tf.compat.v1.get_default_graph()
    is_trained = not in_tape_graph or _compat.is_on_a_tape([product.kernel])
    teachers = [(x, chunks.split(_rows(x.inputs))) for x in teacher_products]

    def compute_losses(i, done, logits):
        teacher_logits = []
        for teacher, rows in teachers:
            kernel = tf.cast(teacher.kernel, rows.dtype)
            chunk_rows = _after(rows[:, i], done)
            y = matmul(chunk_rows, kernel, transpose_kernel=teacher.is_transposed)
            teacher_logits.append(tf.stop_gradient(teacher.finish(y, *teacher.biases)))
        return compute(logits, chunk_labels[:, i], *teacher_logits)

    @custom_gradient
    def losses(inputs, kernel, *biases):
        x = chunks.split(inputs)
        weights = tf.cast(kernel, x.dtype)

        def forward(i, sums, done):
            y = matmul(_after(x[:, i], done), weights, transpose_kernel=is_transposed)
            logits = product.finish(y, *biases)
            correct = is_most_likely(logits, chunk_labels[:, i])
            return [*compute_losses(i, done, logits), correct], sums

        def gradient(*upstream):
            chunk_upstream = [chunks.split(dy) for dy in upstream[:-1]]

            def backward(i, sums, done):
                rows = _after(x[:, i], done)
                y = matmul(rows, weights, transpose_kernel=is_transposed)
                with tf.GradientTape() as tape:
                    tape.watch([y, *biases])
                    values = compute_losses(i, done, product.finish(y, *biases))
                chunk = [dy[:, i] for dy in chunk_upstream]
                dy, *gradients = tape.gradient(values, [y, *biases], chunk)
                if is_trained:
                    factors = (dy, rows) if is_transposed else (rows, dy)
                    gradients.append(tf.matmul(*factors, transpose_a=True))
                sums = [total + tf.cast(x, total.dtype) for total, x in zip(sums, gradients)]
                return [matmul(dy, weights, transpose_kernel=not is_transposed)], sums

            sums = [_zeros(bias) for bias in biases]
            # The first dimension has one sum per data shard. They are added up after the last chunk.
            sums += [_zeros(kernel)[None]] if is_trained else []
            (dx,), sums = _iterate(backward, chunks.count, sums, [x.dtype])
            dkernel = None
            if is_trained:
                total = constrain(tf.reduce_sum(sums.pop(), axis=0), (None, "vocab"))
                dkernel = tf.cast(total, kernel.dtype)
            biases_gradients = [tf.cast(dy, bias.dtype) for dy, bias in zip(sums, biases)]
            return chunks.join(dx), dkernel, *biases_gradients

        value_type = "float64" if x.dtype == "float64" else "float32"
        dtypes = [value_type] * (1 + len(teachers)) + ["float32"]
        results, _ = _iterate(forward, chunks.count, [], dtypes)
        return [chunks.join(result) for result in results], gradient

    results = losses(_rows(product.inputs), product.kernel, *product.biases)
    return [tf.reshape(result, label_shape) for result in results]


def _rows(inputs):
    """Return the inputs of a head in the shape `[b, s, h]`, with one row off the mesh."""
    if not trace.is_on_mesh():
        inputs = tf.reshape(inputs, [1, -1, inputs.shape[-1]])
    return constrain(inputs, ("batch", None, None))


def _zeros(weight):
    """Return zeros for sums of a weight's gradients, in float32 or wider."""
    return tf.zeros_like(weight, weight.dtype if weight.dtype.size >= 4 else "float32")


def _after(x, done):
    return x if done is None else depend_on(x, done)


def _iterate(body, count, sums, dtypes):
    """Call a function for each chunk in turn. Return its results `[d, n, r, ...]` and the last sums.

    Args:
        body: Function of the index of a chunk, the sums, and a tensor that must be computed first
            (or `None`). Returns `(results, sums)`, two lists of tensors. Results are `[d, r, ...]`.
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
        return [tf.stack(parts, axis=1) for parts in zip(*all_results)], sums

    def step(i, arrays, sums):
        results, sums = body(i, sums, None)
        return i + 1, [array.write(i, x) for array, x in zip(arrays, results)], sums

    arrays = [tf.TensorArray(dtype, count) for dtype in dtypes]
    _, arrays, sums = tf.while_loop(
        lambda i, *_: i < count, step, (0, arrays, sums), parallel_iterations=1
    )
    return [tf.squeeze(array.stack(), 1)[None] for array in arrays], sums  # [n, 1, ...]


class _Chunks:
    """Division of tensors `[b, s, ...]` into chunks `[d, r, ...]` of r tokens on d data shards.

    Args:
        labels: Tensor of shape `[b, s]`.
        size: Maximum number r of tokens.

    Attributes:
        count: Number n of chunks.
    """

    def __init__(self, labels, size):
        batch, self._length = static_or_dynamic_shape(labels)
        self._shards = axis_size(activation_specs(("batch",), [batch])[0])
        self._rows = batch // self._shards
        self.count = -(-self._length // max(1, size // self._rows))
        if tf.is_tensor(self.count):  # A batch of unknown size may be empty.
            self.count = tf.maximum(self.count, 1)
        self._size = -(-self._length // self.count)

    def split(self, x):
        """Return the chunks `[d, n, r, ...]` of a tensor `[b, s, ...]`."""
        features = x.shape[2:].as_list()
        padding = self.count * self._size - self._length
        x = tf.pad(x, [[0, 0], [0, padding], *[[0, 0]] * len(features)])
        x = tf.reshape(x, [self._shards, self._rows, self.count, self._size, *features])
        x = self._swap(x)
        x = tf.reshape(x, [self._shards, self.count, self._rows * self._size, *features])
        return constrain(x, ("batch", *[None] * (len(x.shape) - 1)))

    def join(self, x):
        """Return the tensor `[b, s, ...]` with the chunks `[d, n, r, ...]`."""
        features = x.shape[3:].as_list()
        x = tf.reshape(x, [self._shards, self.count, self._rows, self._size, *features])
        x = self._swap(x)
        x = tf.reshape(x, [self._shards * self._rows, self.count * self._size, *features])
        return constrain(x[:, : self._length], ("batch", *[None] * (len(x.shape) - 1)))

    @staticmethod
    def _swap(x):
        """Swap the dimensions of rows and chunks."""
        return tf.transpose(x, [0, 2, 1, *range(3, len(x.shape))])
