"""Vocabulary embedding, and the head that returns logits."""

import types

import keras
import numpy as np
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.arguments import check_floating
from dtransformer.layers.base import Layer, register
from dtransformer.layers.elementwise import apply_soft_cap, check_soft_cap
from dtransformer.layers.initializers import WrappedInitializer
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tensor_parallel.chunked_cross_entropy import attach_product
from dtransformer.parallel.tensor_parallel.embedding import (
    look_up,
    mask_padding,
    padded_vocab_size,
    tied_logits,
)
from dtransformer.parallel.tensor_parallel.linear import column_parallel


class _VocabLayer(Layer):
    """Base class of layers whose weights have a row or a column per vocabulary entry.

    Weights are padded to a multiple of `model_parallel`. Files store them without padding, so they
    can be loaded under every layout.
    """

    vocab_axis = 0
    _load_error = None

    def _add_vocab_weight(self, shape, initializer, axes, name, **options):
        """Add a weight with the dimension `vocab_axis` padded to `padded_vocab_size`."""
        padded = list(shape)
        padded[self._axis_of(shape)] = padded_vocab_size(self.vocab_size)
        initializer = (
            PaddedInitializer(initializer, shape) if padded != list(shape) else initializer
        )
        options = {"axes": axes, "name": name, "autocast": False, **options}
        return self.add_weight(tuple(padded), initializer, true_shape=tuple(shape), **options)

    def save_own_variables(self, store):
        super().save_own_variables(store)
        for key, variable in zip(list(store.keys()), self._trainable_variables, strict=True):
            value = np.asarray(store[key])
            del store[key]
            store[key] = value[tuple(slice(size) for size in variable.true_shape)]

    def load_own_variables(self, store):
        if not store.keys() and self._load_error is not None:
            # Keras calls again after an error, with an empty store. Raise the original error.
            raise self._load_error
        padded = {}
        for key, variable in zip(store.keys(), self._trainable_variables, strict=True):
            rows = np.asarray(store[key])
            axis = self._axis_of(rows.shape)
            if variable.true_shape[axis] == self.vocab_size != rows.shape[axis]:
                self._load_error = ValueError(
                    f"{variable.path} has `vocab_size={self.vocab_size}`, but the file has "
                    f"{rows.shape[axis]} entries. Load it into a model with this vocabulary size."
                )
                raise self._load_error
            missing = [
                max(size - file_size, 0) for size, file_size in zip(variable.shape, rows.shape)
            ]
            padded[key] = np.pad(rows, [(0, count) for count in missing])
        super().load_own_variables(padded)
        self._load_error = None

    def _axis_of(self, shape):
        """Return the vocabulary dimension of a shape. A bias has only one dimension."""
        return min(self.vocab_axis, len(shape) - 1)


@register
class PaddedInitializer(WrappedInitializer):
    """Initialize a weight without padding, then pad it with zeros.

    The values therefore do not depend on the layout.
    """

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
    """Embedding of token ids.

    The table is replicated with `vocab_emb_dp=True` in the parallel config. Otherwise its rows are
    sharded over the model axis.

    Args:
        vocab_size: Integer. Number V of entries.
        embedding_size: Integer. Size h of an embedding.
        initializer: Keras initializer or its name. Defaults to `"normal"`.

    Input shape:
        `[b, s]`, integers in [0, V)

    Output shape:
        A tuple: embeddings `[b, s, h]`, and the table `[V', h]` for a tied head. V' is V padded to
            a multiple of `model_parallel`.

    Example:

    >>> embeddings, table = VocabEmbedding(100, 8)(tf.constant([[1, 2, 3]]))
    >>> embeddings.shape, table.shape
    (TensorShape([1, 3, 8]), TensorShape([100, 8]))
    """

    pipeline_stage = 0
    weight_outputs = types.MappingProxyType({1: "table"})

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        initializer: str | keras.initializers.Initializer = "normal",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.vocab_size = check_int("vocab_size", vocab_size)
        self.embedding_size = check_int("embedding_size", embedding_size)
        self.initializer = initializer

    def build(self, input_shape: tuple | None = None) -> None:
        self.table = self._add_vocab_weight(
            (self.vocab_size, self.embedding_size),
            self.initializer,
            ("vocab_rows", "embed"),
            "table",
        )

    def call(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Look up before casting to 16 bits, so the gradient remains sparse rows.
        rows = look_up(self.table.value, self._shift_padding_ids(tf.cast(ids, "int32")))
        return tf.cast(rows, self.compute_dtype), tf.convert_to_tensor(self.table)

    def _shift_padding_ids(self, ids):
        """Move ids of padded rows beyond the table, so they match no row."""
        padding = self.table.shape[0] - self.vocab_size
        return tf.where(ids < self.vocab_size, ids, ids + padding) if padding else ids

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        table_shape = (padded_vocab_size(self.vocab_size), self.embedding_size)
        return (*input_shape, self.embedding_size), table_shape

    def compute_output_spec(self, ids: tf.Tensor) -> tuple:
        rows, table = super().compute_output_spec(ids)
        return rows, keras.KerasTensor(table.shape, self.variable_dtype)


@register
class VocabHead(_VocabLayer):
    """Dense layer that returns a logit for every vocabulary entry.

    Args:
        vocab_size: Integer. Number V of entries.
        use_bias: Boolean, whether to add a bias. Defaults to `False`.
        tied: Boolean, whether the kernel is an embedding table passed to the call. Defaults to
            `False`.
        kernel_initializer: Keras initializer or its name. Defaults to `"glorot_uniform"`.
        keeps_padding: Boolean, whether to return padded logits `[b, s, V']`, which stay sharded.
            `CrossEntropyLoss(vocab_size=V)` accepts them. With `False`, logits are unsharded first
            if `model_parallel` does not divide V. Defaults to `False`.
        scale: Float. Factor of the logits. Defaults to `1.0`.
        soft_cap: Float c. Replaces a scaled logit x by c·tanh(x / c)
            ([Gemma Team, 2024](https://arxiv.org/abs/2408.00118), section 2). `None` disables it
            (default).

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        table: Tensor of shape `[V', h]`, required if `tied`.

    Output shape:
        `[b, s, V]`, or `[b, s, V']` with `keeps_padding`. V' is V padded to a multiple of
        `model_parallel`. Padded logits are the lowest number of their type, so their probability is
        0.

    Raises:
        ValueError: If the head is tied and `table` is missing or has another hidden size.
    """

    vocab_axis = 1
    pipeline_stage = -1

    def __init__(
        self,
        vocab_size: int,
        use_bias: bool = False,
        tied: bool = False,
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        keeps_padding: bool = False,
        scale: float = 1.0,
        soft_cap: float | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.vocab_size = check_int("vocab_size", vocab_size)
        self.use_bias = use_bias
        self.tied = tied
        self.scale = scale
        self.soft_cap = check_soft_cap(soft_cap)
        self.kernel_initializer = kernel_initializer
        self.keeps_padding = keeps_padding

    def build(self, inputs_shape: tuple, table_shape: tuple | None = None) -> None:
        self.require_features(inputs_shape[-1])
        if not self.tied:
            shape = (inputs_shape[-1], self.vocab_size)
            self.kernel = self._add_vocab_weight(
                shape, self.kernel_initializer, ("embed", "vocab"), "kernel", num_inputs=1
            )
        if self.use_bias:
            self.bias = self._add_vocab_weight((self.vocab_size,), "zeros", ("vocab",), "bias")

    def __call__(self, inputs, table=None, **kwargs):
        # Do not pass an unused table. A pipeline copies all inputs between stages.
        return super().__call__(inputs, *([table] if self.tied else []), **kwargs)

    def call(self, inputs: tf.Tensor, table: tf.Tensor | None = None) -> tf.Tensor:
        check_floating("inputs", inputs)
        # [b, s, h] -> [b, s, V']
        if self.tied and (table is None or table.shape[-1] != inputs.shape[-1]):
            received = "no table" if table is None else f"a table of shape {list(table.shape)}"
            raise ValueError(
                f"A tied head received {received}, expected an embedding table of shape "
                f"[V', {inputs.shape[-1]}] for inputs of shape {list(inputs.shape)}."
            )
        if self.tied:
            logits = tied_logits(inputs, table)
        else:
            (logits,) = column_parallel(inputs, [self.kernel], ("vocab",))
        biases = [tf.convert_to_tensor(self.bias)] if self.use_bias else []
        logits = self._finish(logits, *biases)
        if self.keeps_padding or logits.shape[-1] == self.vocab_size:
            kernel = table if self.tied else self.kernel
            return attach_product(logits, inputs, kernel, biases, self.tied, self._finish)
        axes = ("batch", "length", None) if len(logits.shape) == 3 else ("batch", None)
        return constrain(logits, axes)[..., : self.vocab_size]

    def _finish(self, logits, bias=None):
        """Return the logits of a product with the kernel."""
        if bias is not None:
            logits += tf.cast(bias, logits.dtype)
        if self.scale != 1:
            logits *= tf.cast(self.scale, logits.dtype)
        if self.soft_cap is not None:
            logits = apply_soft_cap(logits, self.soft_cap)
        return mask_padding(logits, self.vocab_size)

    def compute_output_shape(self, inputs_shape: tuple, table_shape: tuple | None = None) -> tuple:
        size = padded_vocab_size(self.vocab_size) if self.keeps_padding else self.vocab_size
        return (*inputs_shape[:-1], size)
