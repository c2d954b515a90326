"""Heads for sequence and token classification, embeddings and masked language modeling."""

from collections.abc import Callable

import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.activations import get_activation
from dtransformer.layers.arguments import get_init_arguments
from dtransformer.layers.base import Layer, register
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.embedding import VocabHead
from dtransformer.layers.linear import Linear
from dtransformer.layers.norm import make_norm
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

POOLINGS = ("first", "mean", "last")


def check_pooling(pooling: str) -> str:
    """Return the name of a pooling unchanged.

    Raises:
        ValueError: If it is not in `POOLINGS`.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"`pooling` must be one of {', '.join(POOLINGS)}, got {pooling!r}.")
    return pooling


def pool(inputs: tf.Tensor, mask: tf.Tensor | None, pooling: str) -> tf.Tensor:
    """Reduce each sequence to one vector.

    Args:
        inputs: Tensor of shape `[b, s, h]`.
        mask: Bool tensor of shape `[b, s]`, True for tokens, or `None` if all positions are tokens.
        pooling: `"first"` or `"last"` to select a token, or `"mean"` over all tokens.

    Returns:
        A tensor of shape `[b, h]`, zeros for a sequence without tokens.

    Example:

    >>> x = tf.reshape(tf.range(6.0), (1, 3, 2))
    >>> mask = tf.constant([[False, True, True]])
    >>> [pool(x, mask, name).numpy().tolist() for name in POOLINGS]
    [[[2.0, 3.0]], [[3.0, 4.0]], [[4.0, 5.0]]]
    """
    check_pooling(pooling)
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


class LabelHead(Layer):
    """Base class of classification heads: optional dense layer and norm, dropout, logits.

    Args:
        num_labels: Integer. Number of logits. Use 1 for a score, such as a reward.
        hidden_act: Activation of a dense layer of the inputs' size before the logits. `None` omits
            the dense layer (default).
        use_bias: Boolean, whether logits have a bias. Defaults to `True`.
        dropout_rate: Float in [0, 1). Dropout before the logits. Defaults to `0.0`.
        hidden_bias: Boolean, whether the dense layer has a bias. Defaults to `True`.
        norm: Name of a norm after the dense layer, see `make_norm`. Defaults to `None`, no norm.
        norm_epsilon: Float. Epsilon of the norm. Defaults to `1e-5`.
    """

    pipeline_stage = -1

    def __init__(
        self,
        num_labels: int,
        hidden_act: str | None = None,
        use_bias: bool = True,
        dropout_rate: float = 0.0,
        hidden_bias: bool = True,
        norm: str | None = None,
        norm_epsilon: float = 1e-5,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_labels = check_int("num_labels", num_labels)
        self.use_bias = use_bias
        self.hidden_act = hidden_act
        self.hidden_bias = hidden_bias
        self.dropout_rate = dropout_rate
        self.norm = norm
        self.norm_epsilon = norm_epsilon
        dense_options = {"parallel": None, "dtype": self.dtype_policy}
        self.dropout = Dropout(dropout_rate, dtype=self.dtype_policy, name="dropout")
        self.classifier = Linear(num_labels, use_bias, name="classifier", **dense_options)
        self.pooler = self.pooler_norm = None
        if norm is not None:
            self.pooler_norm = make_norm(
                norm, norm_epsilon, dtype=dense_options["dtype"], name="norm"
            )
        if hidden_act is not None:  # `build` sets the size to the inputs' size.
            self.pooler = Linear(1, hidden_bias, name="pooler", **dense_options)

    def build(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> None:
        h = inputs_shape[-1]
        self.require_features(h)
        if self.pooler is not None:
            self.pooler.units = h
            self.pooler.build((None, h))
        if self.pooler_norm is not None:
            self.pooler_norm.build((None, h))
        self.classifier.build((None, h))
        self.classifier.kernel.is_head = True  # Muon updates it with AdamW.

    def logits(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        """Return the logits `[..., num_labels]` of vectors `[..., h]`."""
        if self.pooler is not None:
            x = get_activation(self.hidden_act)(self.pooler(x))
        if self.pooler_norm is not None:
            x = self.pooler_norm(x)
        return self.classifier(self.dropout(x, training=training))


@register
class SequenceHead(LabelHead):
    """Sequence classification head: pooling, then the layers of `LabelHead`.

    Encoders usually have `pooling="first", hidden_act="tanh"`
    ([Devlin et al., 2019](https://arxiv.org/abs/1810.04805), section 4), decoders
    `pooling="last", use_bias=False`.

    Args:
        num_labels: Integer. Number of logits. Use 1 for a score, such as a reward.
        pooling: `"first"`, `"mean"` or `"last"`, see `pool`. Defaults to `"first"`.
        pad_id: Integer. Token id that the network excludes from pooling although its blocks attend
            to it, if padding is also the end token. Defaults to `None`.
        **kwargs: Other arguments of `LabelHead`.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        mask: Bool tensor of shape `[b, s]`, True for tokens. Defaults to all positions.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, num_labels]`

    Raises:
        ValueError: If `pooling` is unknown or a size is below 1.

    Example:

    >>> SequenceHead(3, pooling="mean")(tf.zeros((2, 5, 8)), tf.ones((2, 5), "bool")).shape
    TensorShape([2, 3])
    """

    def __init__(
        self, num_labels: int, pooling: str = "first", pad_id: int | None = None, **kwargs
    ):
        super().__init__(num_labels, **kwargs)
        self.pooling = check_pooling(pooling)
        self.pad_id = pad_id

    def call(
        self, inputs: tf.Tensor, mask: tf.Tensor | None = None, training: bool = False
    ) -> tf.Tensor:
        # [b, s, h] -> [b, h]
        return self.logits(pool(inputs, mask, self.pooling), training)

    def compute_mask(self, *args) -> None:
        return None  # The output has no sequence dimension.

    def compute_output_shape(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> tuple:
        return inputs_shape[0], self.num_labels


@register
class TokenHead(LabelHead):
    """Token classification head with the layers of `LabelHead`.

    Reference: [Devlin et al., 2019](https://arxiv.org/abs/1810.04805), section 5.3

    Args:
        num_labels: Integer. Number of logits.
        **kwargs: Other arguments of `LabelHead`.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        mask: Ignored. It makes calls compatible with `SequenceHead`.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, s, num_labels]`

    Example:

    >>> TokenHead(3)(tf.zeros((2, 5, 8))).shape
    TensorShape([2, 5, 3])
    """

    def call(
        self, inputs: tf.Tensor, mask: tf.Tensor | None = None, training: bool = False
    ) -> tf.Tensor:
        return self.logits(inputs, training)

    def compute_output_shape(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> tuple:
        return (*inputs_shape[:-1], self.num_labels)


@register
class PoolingHead(Layer):
    """Embedding head: pool each sequence to a vector and normalize its length to 1.

    Args:
        pooling: `"first"`, `"mean"` or `"last"`, see `pool`. Defaults to `"mean"`.
        normalize: Boolean, whether to normalize vectors. Defaults to `True`.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        mask: Bool tensor of shape `[b, s]`, True for tokens. Defaults to all positions.
        training: Ignored.

    Output shape:
        `[b, h]`, float32

    Example:

    >>> PoolingHead("mean")(tf.ones((2, 5, 4)))[0].numpy().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """

    pipeline_stage = -1

    def __init__(self, pooling: str = "mean", normalize: bool = True, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.pooling = check_pooling(pooling)
        self.normalize = normalize

    def build(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> None:
        self.num_labels = inputs_shape[-1]

    def call(
        self, inputs: tf.Tensor, mask: tf.Tensor | None = None, training: bool = False
    ) -> tf.Tensor:
        x = tf.cast(pool(inputs, mask, self.pooling), "float32")
        if not self.normalize:
            return x
        return x * tf.math.rsqrt(tf.reduce_sum(x * x, axis=-1, keepdims=True) + 1e-12)

    def compute_mask(self, *args) -> None:
        return None  # The output has no sequence dimension.

    def compute_output_shape(self, inputs_shape: tuple, mask_shape: tuple | None = None) -> tuple:
        return inputs_shape[0], inputs_shape[-1]


@register
class MaskedLMHead(Layer):
    """Masked language modeling head of BERT: dense layer, activation, norm, vocabulary logits.

    Reference: [Devlin et al., 2019](https://arxiv.org/abs/1810.04805) and its published code

    Args:
        vocab_size: Integer. Number V of entries.
        hidden_size: Integer. Size h of the inputs.
        hidden_act: Name of an activation or a callable. Defaults to `"gelu"`.
        norm_epsilon: Float. Epsilon of the norm. Defaults to `1e-5`.
        use_bias: Boolean, whether logits have a bias. Defaults to `True`.
        tied: Boolean, whether the kernel is an embedding table passed to the call. Defaults to
            `True`.
        norm: Name of the norm, see `make_norm`. Defaults to `"layer_norm"`.
        dense_bias: Boolean, whether the dense layer has a bias. Defaults to `True`.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        table: Tensor of shape `[V', h]`, required if `tied`.

    Output shape:
        `[b, s, V']`, where V' is V padded to a multiple of `model_parallel`. See `VocabHead`.
    """

    pipeline_stage = -1

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        hidden_act: str | Callable = "gelu",
        norm_epsilon: float = 1e-5,
        use_bias: bool = True,
        tied: bool = True,
        norm: str = "layer_norm",
        dense_bias: bool = True,
        **kwargs,
    ):
        init_arguments = get_init_arguments(locals())
        super().__init__(**kwargs)
        self.supports_masking = True
        check_int("hidden_size", hidden_size)
        self.arguments = init_arguments
        self.require_features(hidden_size)
        self.activation = get_activation(hidden_act)
        self.dense = Linear(
            hidden_size, dense_bias, parallel=None, dtype=self.dtype_policy, name="dense"
        )
        self.norm = make_norm(norm, norm_epsilon, dtype=self.dtype_policy, name="norm")
        self.logits = VocabHead(
            vocab_size,
            use_bias=use_bias,
            tied=tied,
            keeps_padding=True,
            dtype=self.dtype_policy,
            name="logits",
        )

    def build(self, inputs_shape: tuple, table_shape: tuple | None = None) -> None:
        for layer in (self.dense, self.norm, self.logits):
            layer.build(inputs_shape)

    def __call__(self, inputs, table=None, **kwargs):
        # Do not pass an unused table. A pipeline copies all inputs between stages.
        return super().__call__(inputs, *([table] if self.arguments["tied"] else []), **kwargs)

    def call(self, inputs: tf.Tensor, table: tf.Tensor | None = None) -> tf.Tensor:
        return self.logits(self.norm(self.activation(self.dense(inputs))), table)

    def compute_output_shape(self, inputs_shape: tuple, table_shape: tuple | None = None) -> tuple:
        return self.logits.compute_output_shape(inputs_shape, table_shape)
