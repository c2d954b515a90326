"""Embeddings of the types of tokens, such as which of two sentences they are of."""

import keras
import tensorflow as tf

from dtransformer.layers.arguments import check_floating
from dtransformer.layers.base import Layer, check_size, register
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tensor_parallel.linear import column_parallel
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


@register
class TokenTypeEmbedding(Layer):
    """Add an embedding of each token's type.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §3.

    Args:
        num_types: number of types, few.
        initializer: a Keras initializer, or its name.

    Call arguments:
        inputs: tensor [b, s, h].
        token_types: int tensor [b, s], in [0, num_types); None for all of type 0.

    Output shape:
        [b, s, h]

    Example:

    >>> TokenTypeEmbedding(2)(tf.zeros((1, 3, 8)), tf.constant([[0, 0, 1]])).shape
    TensorShape([1, 3, 8])
    """

    pipeline_stage = 0

    def __init__(
        self,
        num_types: int,
        initializer: str | keras.initializers.Initializer = "normal",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_types = check_size("num_types", num_types)
        self.initializer = initializer

    def build(self, input_shape: tuple, *args) -> None:
        self.takes(input_shape[-1])
        self.table = self.add_weight(
            (self.num_types, input_shape[-1]), self.initializer, axes=(None, "embed"), name="table"
        )
        self.built = True

    def call(self, inputs: tf.Tensor, token_types: tf.Tensor | None = None) -> tf.Tensor:
        check_floating("inputs", inputs)
        if token_types is None:
            token_types = tf.zeros(static_or_dynamic_shape(inputs)[:2], "int32")
        # As a product: its gradient is summed to the table's few rows before it is sent.
        is_type = tf.one_hot(tf.cast(token_types, "int32"), self.num_types, dtype=inputs.dtype)
        (rows,) = column_parallel(is_type, [self.table], ("embed",))
        return inputs + constrain(rows, ("batch", "length", None))

    def compute_output_shape(self, input_shape: tuple, *args) -> tuple:
        return input_shape
