"""The embedding of a vocabulary, and the head that gives logits."""

import types

import keras
import numpy as np
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.arguments import check_floating
from dtransformer.layers.base import Layer, register
from dtransformer.layers.elementwise import check_soft_cap, soft_capped
from dtransformer.layers.initializers import WrappedInitializer
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tensor_parallel.embedding import (
    look_up,
    mask_padding,
    padded_vocab_size,
    tied_logits,
)
from dtransformer.parallel.tensor_parallel.linear import column_parallel


class _VocabLayer(Layer):
    """A layer with one weight that has a row or a column for each vocabulary entry.

    The weight is padded to a multiple of model_parallel; files hold the true size,
    so that they fit every layout.
    """

    vocab_axis = 0
    _load_error = None

    def _vocab_weight(self, shape, initializer, axes, name, **options):
        """Add a weight whose dimension `vocab_axis` is the padded vocabulary's."""
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
            raise self._load_error  # Keras tries a layer that failed again, where it finds nothing
        padded = {}
        for key, variable in zip(store.keys(), self._trainable_variables, strict=True):
            rows = np.asarray(store[key])
            axis = self._axis_of(rows.shape)
            if variable.true_shape[axis] == self.vocab_size != rows.shape[axis]:
                self._load_error = ValueError(
                    f"{variable.path} has vocab_size={self.vocab_size}, but the file holds "
                    f"{rows.shape[axis]} entries: load it into a model of the same vocabulary"
                )
                raise self._load_error
            missing = [max(own - n, 0) for own, n in zip(variable.shape, rows.shape)]
            padded[key] = np.pad(rows, [(0, number) for number in missing])
        super().load_own_variables(padded)
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

    With `vocab_emb_dp=True` in the parallel config the table is replicated, otherwise
    it is sharded by rows over the model axis.

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
    results_that_are_weights = types.MappingProxyType({1: "table"})

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
        self.table = self._vocab_weight(
            (self.vocab_size, self.embedding_size),
            self.initializer,
            ("vocab_rows", "embed"),
            "table",
        )

    def call(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # The look-up comes before the cast to 16 bits: its gradient stays a few rows.
        rows = look_up(self.table.value, self._not_of_padding(tf.cast(ids, "int32")))
        return tf.cast(rows, self.compute_dtype), tf.convert_to_tensor(self.table)

    def _not_of_padding(self, ids):
        """Return the ids, where those of padded rows are beyond them: in no row."""
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
    """Give every vocabulary entry a logit.

    Args:
        vocab_size: number V of entries.
        use_bias: whether to add a bias.
        tied: whether the kernel is an embedding's table, given in the call, instead
            of a weight of its own.
        kernel_initializer: a Keras initializer, or its name.
        scale: what logits are multiplied with.
        soft_cap: logits x become c·tanh(x / c) after that (Gemma Team, 2024, arXiv 2408.00118,
            §2); None for not.
        keeps_padding: whether logits stay padded to a multiple of model_parallel, and so
            sharded, where it does not divide V; `CrossEntropyLoss(vocab_size=V)` takes them.
            By default they have V entries, for which padded ones are made whole first.

    Call arguments:
        inputs: tensor [b, s, h].
        table: tensor [V', h], where tied.

    Output shape:
        [b, s, V]; where padding is kept [b, s, V'], V padded to a multiple of
        model_parallel. Padded logits are the type's lowest number: they never win and
        their probability is 0.
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
        self.scale, self.soft_cap = scale, check_soft_cap(soft_cap)
        self.kernel_initializer = kernel_initializer
        self.keeps_padding = keeps_padding

    def build(self, inputs_shape: tuple, table_shape: tuple | None = None) -> None:
        self.takes(inputs_shape[-1])
        if not self.tied:
            shape = (inputs_shape[-1], self.vocab_size)
            self.kernel = self._vocab_weight(
                shape, self.kernel_initializer, ("embed", "vocab"), "kernel", num_inputs=1
            )
        if self.use_bias:
            self.bias = self._vocab_weight((self.vocab_size,), "zeros", ("vocab",), "bias")

    def __call__(self, inputs, table=None, **kwargs):
        # Where it is not tied it depends on no table: a pipeline copies what is depended on.
        return super().__call__(inputs, *([table] if self.tied else []), **kwargs)

    def call(self, inputs: tf.Tensor, table: tf.Tensor | None = None) -> tf.Tensor:
        check_floating("inputs", inputs)
        # [b, s, h] -> [b, s, V']
        if self.tied and (table is None or table.shape[-1] != inputs.shape[-1]):
            given = "no table" if table is None else f"a table of the shape {list(table.shape)}"
            raise ValueError(
                f"a tied head got {given}, expected an embedding's [V', {inputs.shape[-1]}], as "
                f"inputs have the shape {list(inputs.shape)}"
            )
        if self.tied:
            logits = tied_logits(inputs, table)
        else:
            (logits,) = column_parallel(inputs, [self.kernel], ("vocab",))
        if self.use_bias:
            logits += tf.cast(self.bias, logits.dtype)
        if self.scale != 1:
            logits *= tf.cast(self.scale, logits.dtype)
        if self.soft_cap is not None:
            logits = soft_capped(logits, self.soft_cap)
        logits = mask_padding(logits, self.vocab_size)
        if self.keeps_padding or logits.shape[-1] == self.vocab_size:
            return logits
        axes = ("batch", "length", None) if len(logits.shape) == 3 else ("batch", None)
        return constrain(logits, axes)[..., : self.vocab_size]

    def compute_output_shape(self, inputs_shape: tuple, table_shape: tuple | None = None) -> tuple:
        size = padded_vocab_size(self.vocab_size) if self.keeps_padding else self.vocab_size
        return (*inputs_shape[:-1], size)
