"""The embedding of a vocabulary, positions, and the head that gives logits."""

import numpy as np
import tensorflow as tf

from dtransformer.layers.base import Layer, WrappedInitializer, check_size, register
from dtransformer.parallel.axis_rules import constrain
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.shapes import static_or_dynamic_shape
from dtransformer.parallel.tensor_parallel.embedding import look_up
from dtransformer.parallel.tensor_parallel.linear import column_parallel, matmul
from dtransformer.parallel.trace import is_on_mesh


def padded_vocab_size(vocab_size):
    """Return the size of the table: the next multiple of model_parallel."""
    model_parallel = get_parallel_config().model_parallel
    return -(-vocab_size // model_parallel) * model_parallel


class _VocabLayer(Layer):
    """A layer with one weight that has a row or a column for each vocabulary entry.

    The weight is padded to a multiple of model_parallel; files hold the true size,
    so that they fit every layout.
    """

    vocab_axis = 0
    _load_error = None

    def _vocab_weight(self, shape, initializer, axes, name):
        """Add a weight whose dimension `vocab_axis` is the padded vocabulary's."""
        padded = list(shape)
        padded[self._axis_of(shape)] = padded_vocab_size(self.vocab_size)
        initializer = (
            PaddedInitializer(initializer, shape) if padded != list(shape) else initializer
        )
        weight = self.add_weight(tuple(padded), initializer, axes=axes, name=name, autocast=False)
        weight.true_shape = tuple(shape)  # what checkpoints hold
        return weight

    def save_own_variables(self, store):
        super().save_own_variables(store)
        for key in list(store.keys()):
            rows = np.asarray(store[key])
            del store[key]
            store[key] = np.take(rows, range(self.vocab_size), axis=self._axis_of(rows.shape))

    def _load_variables(self, store):
        if not store.keys() and self._load_error is not None:
            raise self._load_error  # Keras tries a layer that failed again, where it finds nothing
        padded = {}
        for key, variable in zip(store.keys(), self._trainable_variables, strict=True):
            rows = np.asarray(store[key])
            axis = self._axis_of(rows.shape)
            if rows.shape[axis] != self.vocab_size:
                self._load_error = ValueError(
                    f"{variable.path} has vocab_size={self.vocab_size}, but the file holds "
                    f"{rows.shape[axis]} entries: load it into a model of the same vocabulary"
                )
                raise self._load_error
            pad = [(0, 0)] * rows.ndim
            pad[axis] = (0, variable.shape[axis] - rows.shape[axis])
            padded[key] = np.pad(rows, pad)
        super()._load_variables(padded)
        self._load_error = None

    def _axis_of(self, shape):
        """Return the vocabulary's dimension of a weight; a bias has that one only."""
        return min(self.vocab_axis, len(shape) - 1)


@register
class PaddedInitializer(WrappedInitializer):
    """Draw the true weight, and zeros around it, whatever the padding is."""

    def __init__(self, initializer, true_shape):
        super().__init__(initializer)
        self.true_shape = tuple(true_shape)

    def __call__(self, shape, dtype=None):
        values = self.initializer(self.true_shape, dtype=dtype)
        return tf.pad(values, [(0, size - true) for size, true in zip(shape, self.true_shape)])

    def get_config(self):
        return {**super().get_config(), "true_shape": self.true_shape}


@register
class VocabEmbedding(_VocabLayer):
    """Look ids up in a table of embeddings.

    With `vocab_emb_dp=True` in the parallel config every rank holds the whole
    table, otherwise row slices of it over the model axis.

    Args:
        vocab_size: number V of entries.
        embedding_size: size h of an embedding.
        initializer: a Keras initializer, or its name.

    Input shape:
        [b, s] of ints in [0, V)

    Output shape:
        A pair: embeddings [b, s, h], and the table [V', h], where V' is V padded
        to a multiple of model_parallel, for a head that shares it.

    Example:

    >>> embeddings, table = VocabEmbedding(100, 8)(tf.constant([[1, 2, 3]]))
    >>> embeddings.shape, table.shape
    (TensorShape([1, 3, 8]), TensorShape([100, 8]))
    """

    pipeline_stage = 0
    results_that_are_weights = (1,)

    def __init__(self, vocab_size, embedding_size, initializer="normal", **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = check_size("vocab_size", vocab_size)
        self.embedding_size = check_size("embedding_size", embedding_size)
        self.initializer = initializer

    def build(self, input_shape=None):
        self.table = self._vocab_weight(
            (self.vocab_size, self.embedding_size),
            self.initializer,
            ("vocab_rows", "embed"),
            "table",
        )
        self.built = True

    def call(self, ids):
        # The look-up comes before the cast to 16 bits: its gradient stays row slices.
        rows = look_up(self.table.value, tf.cast(ids, "int32"))
        return tf.cast(rows, self.compute_dtype), tf.convert_to_tensor(self.table)

    def stand_in(self, ids):
        rows = [*static_or_dynamic_shape(ids), self.embedding_size]
        table = [padded_vocab_size(self.vocab_size), self.embedding_size]
        return tf.zeros(rows, self.compute_dtype), tf.zeros(table, self.variable_dtype)

    def copies(self):
        return {1: tf.convert_to_tensor(self.table)}

    def compute_output_shape(self, input_shape):
        table_shape = (padded_vocab_size(self.vocab_size), self.embedding_size)
        return (*input_shape, self.embedding_size), table_shape

    def get_config(self):
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "embedding_size": self.embedding_size,
            "initializer": self.initializer,
        }


@register
class VocabHead(_VocabLayer):
    """Give every vocabulary entry a logit.

    Args:
        vocab_size: number V of entries.
        use_bias: whether to add a bias.
        tied: whether the kernel is an embedding's table, given in the call, instead
            of a weight of its own.
        kernel_initializer: a Keras initializer, or its name.

    Call arguments:
        inputs: tensor [b, s, h].
        table: tensor [V', h], where tied.

    Output shape:
        [b, s, V'], V padded to a multiple of model_parallel. Padded logits are the
        type's lowest number: they never win and their probability is 0.
    """

    vocab_axis = 1
    pipeline_stage = -1

    def __init__(
        self,
        vocab_size,
        use_bias=False,
        tied=False,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.vocab_size = check_size("vocab_size", vocab_size)
        self.use_bias = use_bias
        self.tied = tied
        self.kernel_initializer = kernel_initializer

    def build(self, inputs_shape, table_shape=None):
        if not self.tied:
            shape = (inputs_shape[-1], self.vocab_size)
            self.kernel = self._vocab_weight(
                shape, self.kernel_initializer, ("embed", "vocab"), "kernel"
            )
        if self.use_bias:
            self.bias = self._vocab_weight((self.vocab_size,), "zeros", ("vocab",), "bias")
        self.built = True

    def call(self, inputs, table=None):
        if self.tied and not is_on_mesh():
            logits = matmul(inputs, table, transpose_kernel=True)
        else:
            # A table that is whole is cut first: DTensor cannot do both at once.
            kernel = (
                tf.transpose(constrain(table, ("vocab", "embed"))) if self.tied else self.kernel
            )
            (logits,) = column_parallel(inputs, [kernel], ("vocab",))
        if self.use_bias:
            logits += tf.cast(self.bias, logits.dtype)
        width = logits.shape[-1]
        if width != self.vocab_size:
            is_entry = tf.range(width) < self.vocab_size
            logits = tf.where(is_entry, logits, tf.constant(logits.dtype.min, logits.dtype))
        return logits

    def stand_in(self, inputs, table=None):
        shape = static_or_dynamic_shape(inputs)[:-1]
        return tf.zeros([*shape, padded_vocab_size(self.vocab_size)], self.compute_dtype)

    def needed_inputs(self, inputs, table=None):
        return [inputs, table] if self.tied else [inputs]

    def compute_output_shape(self, inputs_shape, table_shape=None):
        return (*inputs_shape[:-1], padded_vocab_size(self.vocab_size))

    def get_config(self):
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "use_bias": self.use_bias,
            "tied": self.tied,
            "kernel_initializer": self.kernel_initializer,
        }


@register
class PositionEmbedding(Layer):
    """Add an embedding of the position.

    Reference: Vaswani et al., 2017, "Attention is all you need", §3.5, for the
    sinusoidal kind.

    Args:
        max_length: number of positions of the learned kind; the sinusoidal kind has
            no limit.
        kind: `"learned"` or `"sinusoidal"`.
        initializer: a Keras initializer, or its name, of the learned kind.

    Call arguments:
        inputs: tensor [b, s, h]; s ≤ max_length for the learned kind.
        start: position of the first input.

    Output shape:
        [b, s, h]
    """

    pipeline_stage = 0

    def __init__(self, max_length, kind="sinusoidal", initializer="normal", **kwargs):
        super().__init__(**kwargs)
        if kind not in ("learned", "sinusoidal"):
            raise ValueError(f"positions must be 'learned' or 'sinusoidal', got {kind!r}")
        self.max_length = check_size("max_length", max_length)
        self.kind = kind
        self.initializer = initializer

    def build(self, input_shape):
        if self.kind == "learned":
            self.table = self.add_weight(
                (self.max_length, input_shape[-1]),
                self.initializer,
                axes=("position", "embed"),
                name="table",
            )
        self.built = True

    def call(self, inputs, start=0):
        if self.kind == "learned" and (inputs.shape[1] or 0) > self.max_length:
            raise ValueError(
                f"the sequence has {inputs.shape[1]} positions, but the learned positions end at "
                f"max_length={self.max_length}"
            )
        positions = start + tf.range(static_or_dynamic_shape(inputs)[1])
        if self.kind == "learned":
            rows = tf.gather(tf.convert_to_tensor(self.table), positions)
        else:
            rows = sinusoidal_positions(positions, inputs.shape[-1])
        return inputs + tf.cast(rows, inputs.dtype)

    def compute_output_shape(self, input_shape, start=0):
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "max_length": self.max_length,
            "kind": self.kind,
            "initializer": self.initializer,
        }


def sinusoidal_positions(positions, hidden_size):
    """Return sin and cos of positions at wavelengths from 2π to 10000·2π.

    Args:
        positions: int tensor [s].
        hidden_size: number h of features; the first half are sines, the second
            cosines.

    Returns:
        A float32 tensor [s, h].
    """
    half = (hidden_size + 1) // 2
    frequencies = 10000.0 ** (-np.arange(half) / max(half - 1, 1))
    angles = tf.cast(positions, "float32")[:, None] * frequencies.astype("float32")
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)[:, :hidden_size]
