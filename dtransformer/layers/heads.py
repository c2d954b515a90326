"""Task heads: labels of sequences and of tokens from the last block's results."""

import tensorflow as tf

from dtransformer.layers.activations import get_activation
from dtransformer.layers.base import Layer, check_size, register
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.linear import Linear
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

POOLINGS = ("first", "mean", "last")


def pooled(inputs: tf.Tensor, mask: tf.Tensor | None, pooling: str) -> tf.Tensor:
    """Return one vector of each sequence, [b, h]; zeros where a mask has no position.

    Args:
        inputs: tensor [b, s, h].
        mask: bool tensor [b, s], where there is a token; None where there is one everywhere.
        pooling: `"first"` and `"last"` of the positions with a token, or their `"mean"`.

    Example:

    >>> x = tf.reshape(tf.range(6.0), (1, 3, 2))
    >>> mask = tf.constant([[False, True, True]])
    >>> [pooled(x, mask, name).numpy().tolist() for name in POOLINGS]
    [[[2.0, 3.0]], [[3.0, 4.0]], [[4.0, 5.0]]]
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    x = constrain(inputs, ("batch", None, None))
    if mask is None and pooling == "first":
        return x[:, 0]
    b, s, _ = static_or_dynamic_shape(x)
    mask = tf.ones((b, s), "bool") if mask is None else tf.cast(mask, "bool")
    mask = constrain(mask, ("batch", None))
    if pooling == "mean":
        weights = tf.cast(mask, "float32")
        weights = tf.math.divide_no_nan(weights, tf.reduce_sum(weights, axis=1, keepdims=True))
    elif pooling == "first":
        weights = tf.one_hot(tf.reduce_min(tf.where(mask, tf.range(s), s), axis=1), s)
    else:
        weights = tf.one_hot(tf.reduce_max(tf.where(mask, tf.range(s), -1), axis=1), s)
    # [b, s, h], [b, s] -> [b, h]
    return tf.cast(tf.einsum("bsh,bs->bh", tf.cast(x, "float32"), weights), x.dtype)


@register
class SequenceHead(Layer):
    """Give each sequence the logits of its labels: pooling, a dense layer where asked for, logits.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §4, which is `pooling="first",
    hidden_act="tanh"`; decoders take `pooling="last", use_bias=False`.

    Args:
        num_labels: number of logits; 1 for a number, such as a reward.
        pooling: `"first"`, `"mean"` or `"last"` of the positions that a mask has.
        hidden_act: activation of a dense layer of the inputs' size before the logits; None for no
            such layer.
        use_bias: whether the logits have a bias.
        dropout_rate: dropout of what the logits are made of, in [0, 1).

    Call arguments:
        inputs: tensor [b, s, h].
        mask: bool tensor [b, s], where there is a token; None for everywhere.
        training: whether dropout applies.

    Output shape:
        [b, num_labels]

    Raises:
        ValueError: the pooling or a size is none.

    Example:

    >>> SequenceHead(3, pooling="mean")(tf.zeros((2, 5, 8)), tf.ones((2, 5), "bool")).shape
    TensorShape([2, 3])
    """

    pipeline_stage = -1

    def __init__(
        self,
        num_labels: int,
        pooling: str = "first",
        hidden_act: str | None = None,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        self.num_labels, self.pooling = check_size("num_labels", num_labels), pooling
        self.hidden_act, self.use_bias = hidden_act, use_bias
        policy = self.dtype_policy
        self.dropout = Dropout(dropout_rate, dtype=policy, name="dropout")
        self.classifier = Linear(
            num_labels, use_bias, parallel=None, dtype=policy, name="classifier"
        )
        self.pooler = None

    def build(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> None:
        h = inputs_shape[-1]
        self.takes(h)
        if self.hidden_act is not None:
            self.pooler = Linear(h, parallel=None, dtype=self.dtype_policy, name="pooler")
            self.pooler.build((None, h))
        self.classifier.build((None, h))
        self.built = True

    def call(
        self, inputs: tf.Tensor, mask: tf.Tensor | None = None, training: bool = False
    ) -> tf.Tensor:
        # [b, s, h] -> [b, h]
        x = pooled(inputs, mask, self.pooling)
        if self.pooler is not None:
            x = get_activation(self.hidden_act)(self.pooler(x))
        return self.classifier(self.dropout(x, training=training))

    def compute_mask(self, *args) -> None:
        return None  # of a label there is none

    def compute_output_shape(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> tuple:
        return inputs_shape[0], self.num_labels

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "num_labels": self.num_labels,
            "pooling": self.pooling,
            "hidden_act": self.hidden_act,
            "use_bias": self.use_bias,
            "dropout_rate": self.dropout.rate,
        }


@register
class TokenHead(Layer):
    """Give each token the logits of its labels.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §5.3.

    Args:
        num_labels: number of logits.
        use_bias: whether the logits have a bias.
        dropout_rate: dropout of the inputs, in [0, 1).

    Call arguments:
        inputs: tensor [b, s, h].
        mask: taken, as of `SequenceHead`, and not needed.
        training: whether dropout applies.

    Output shape:
        [b, s, num_labels]

    Example:

    >>> TokenHead(3)(tf.zeros((2, 5, 8))).shape
    TensorShape([2, 5, 3])
    """

    pipeline_stage = -1

    def __init__(self, num_labels: int, use_bias: bool = True, dropout_rate: float = 0.0, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_labels, self.use_bias = check_size("num_labels", num_labels), use_bias
        policy = self.dtype_policy
        self.dropout = Dropout(dropout_rate, dtype=policy, name="dropout")
        self.classifier = Linear(
            num_labels, use_bias, parallel=None, dtype=policy, name="classifier"
        )

    def build(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> None:
        self.takes(inputs_shape[-1])
        self.classifier.build(inputs_shape)
        self.built = True

    def call(
        self, inputs: tf.Tensor, mask: tf.Tensor | None = None, training: bool = False
    ) -> tf.Tensor:
        # [b, s, h] -> [b, s, num_labels]
        return self.classifier(self.dropout(inputs, training=training))

    def compute_output_shape(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> tuple:
        return (*inputs_shape[:-1], self.num_labels)

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "num_labels": self.num_labels,
            "use_bias": self.use_bias,
            "dropout_rate": self.dropout.rate,
        }


@register
class PoolingHead(Layer):
    """Give each sequence a vector of length 1: what it is pooled to, divided by its norm.

    Args:
        pooling: as of `SequenceHead`.

    Call arguments:
        inputs, mask, training: as of `SequenceHead`.

    Output shape:
        [b, h], float32.

    Example:

    >>> PoolingHead("mean")(tf.ones((2, 5, 4)))[0].numpy().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """

    pipeline_stage = -1

    def __init__(self, pooling: str = "mean", **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        self.pooling = pooling

    def build(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> None:
        self.num_labels = inputs_shape[-1]
        self.built = True

    def call(
        self, inputs: tf.Tensor, mask: tf.Tensor | None = None, training: bool = False
    ) -> tf.Tensor:
        x = tf.cast(pooled(inputs, mask, self.pooling), "float32")
        return x * tf.math.rsqrt(tf.reduce_sum(x * x, axis=-1, keepdims=True) + 1e-12)

    def compute_mask(self, *args) -> None:
        return None  # of a vector there is none

    def compute_output_shape(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> tuple:
        return inputs_shape[0], inputs_shape[-1]

    def get_config(self) -> dict:
        return {**super().get_config(), "pooling": self.pooling}
