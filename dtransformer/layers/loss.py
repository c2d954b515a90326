"""Cross-entropy loss, averaged over weighted tokens."""

import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import check_int
from dtransformer.layers.base import Layer, check_rate, register
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tensor_parallel.chunked_cross_entropy import (
    get_product,
    head_nll,
    weighted_nll_sum,
)
from dtransformer.parallel.tensor_parallel.cross_entropy import is_most_likely


@register
class CrossEntropyLoss(Layer):
    """Mean negative log-likelihood of the labels over weighted tokens.

    With label smoothing ε, the target distribution assigns 1 − ε to the label and ε evenly to the V
    entries ([Szegedy et al., 2016](https://arxiv.org/abs/1512.00567), section 7). The loss is
    computed in float32 or wider.

    The layer can also be passed to `keras.Model.compile` as a loss. It then takes
    `(labels, logits)` and returns the loss of each token with a Keras mask, and Keras computes the
    mean.

    Args:
        label_smoothing: Float in [0, 1). The ε above. Defaults to `0.0`.
        ignore_id: Integer. Label without weight, such as the padding id. Defaults to `None`.
        vocab_size: Integer. Number V of entries, if logits are padded. Defaults to the width of the
            logits.
        z_loss: Float in [0, 1). Factor of logsumexp(logits)², which is added to each token's loss
            and keeps the normalizer of the logits near 1
            ([Chowdhery et al., 2022](https://arxiv.org/abs/2204.02311), section 5). Defaults to
            `0.0`.
        chunk_tokens: Integer. Maximum number of tokens whose logits a device computes together, in
            training and evaluation of networks with a `VocabHead` head. Defaults to `"auto"`: at most
            256 MiB of float32 logits, or 2,048 tokens if they need more. `None` disables chunks. See
            "Large vocabularies" in docs/memory.md.

    Call arguments:
        logits: Tensor of shape `[N, V]` or `[b, s, V]`.
        labels: Integer tensor of shape `[N]` or `[b, s]`, or with an additional last dimension of
            1, as in Keras.
        mask: Tensor of the labels' shape with the weight of each token. Defaults to 1.

    Returns:
        A scalar, Σ nll · mask / Σ mask, or 0 if all weights are 0.

    Raises:
        ValueError: If labels or the mask do not have the logits' leading dimensions.

    Example:

    >>> loss = CrossEntropyLoss(ignore_id=0)
    >>> float(loss(tf.zeros((2, 4)), tf.constant([1, 0]))) == float(tf.math.log(4.0))
    True
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        ignore_id: int | None = None,
        vocab_size: int | None = None,
        z_loss: float = 0.0,
        chunk_tokens: int | str | None = "auto",
        **kwargs,
    ):
        super().__init__(autocast=False, **kwargs)
        self.label_smoothing = check_rate("label_smoothing", label_smoothing)
        self.ignore_id = ignore_id
        self.vocab_size = None if vocab_size is None else check_int("vocab_size", vocab_size)
        self.z_loss = check_rate("z_loss", z_loss)
        self.chunk_tokens = chunk_tokens
        if chunk_tokens not in ("auto", None):
            check_int("chunk_tokens", chunk_tokens)

    def call(
        self, logits: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        if _has_labels_first(logits, labels):  # Keras passes labels first.
            return self._keras_losses(logits, labels)
        total, weights = self.weighted_sum(logits, labels, mask)
        return tf.math.divide_no_nan(total, tf.cast(tf.reduce_sum(weights), total.dtype))

    def _keras_losses(self, labels, logits):
        """Return each token's loss with a Keras mask of the weighted tokens."""
        values, weights = self.per_token(logits, tf.cast(tf.math.rint(labels), INDEX_TYPE))
        return _compat.with_mask(values, weights > 0)

    def per_token(
        self, logits: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the loss and the weight of each token, a tuple of tensors of the labels' shape.

        Takes the arguments of the call. Both tensors are float32 or wider.
        """
        labels, weights = self._checked(logits, labels, mask)
        values = self._values(logits, labels, **self._options(logits))
        return values, tf.cast(weights, values.dtype)

    def weighted_sum(
        self, logits: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return Σ loss · weight, and the weight of each token.

        Takes the arguments of the call. Logits in chunks are computed only once, while the gradient
        of `per_token` computes them a second time. Subclasses with other losses use `per_token`.
        """
        kind = type(self)
        if kind.per_token != CrossEntropyLoss.per_token or kind._values != CrossEntropyLoss._values:
            values, weights = self.per_token(logits, labels, mask)
            return tf.reduce_sum(values * tf.cast(weights, values.dtype)), weights
        labels, weights = self._checked(logits, labels, mask)
        total = weighted_nll_sum(
            logits, labels, weights, self.chunk_tokens, **self._options(logits)
        )
        return total, weights

    def _checked(self, logits, labels, mask):
        """Return int labels `[...]`, 0 instead of `ignore_id`, and their weights."""
        labels = tf.cast(squeeze_labels(labels, logits), INDEX_TYPE)
        mask = None if mask is None else squeeze_labels(mask, logits)
        self._check_shapes(logits, labels, mask)
        weights = self.token_weights(labels, mask)
        if self.ignore_id is not None:  # `ignore_id` may be outside of the vocabulary.
            labels = tf.where(labels == self.ignore_id, tf.zeros_like(labels), labels)
        return labels, weights

    def _options(self, logits):
        """Return the arguments of `token_nll`."""
        return {
            "label_smoothing": self.label_smoothing,
            "vocab_size": self.vocab_size or logits.shape[-1],
            "z_loss": self.z_loss,
        }

    def _values(self, logits, labels, **options):
        """Return the loss of each token. Takes the arguments of `token_nll`."""
        return head_nll(logits, labels, self.chunk_tokens, **options)

    def with_vocab_size(self, vocab_size: int) -> "CrossEntropyLoss":
        """Return this loss with `vocab_size` set, or the loss itself if it already has one."""
        if self.vocab_size is not None:
            return self
        return type(self).from_config({**self.get_config(), "vocab_size": vocab_size})

    def token_weights(self, labels: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
        """Return the weight of each token, float32 in the labels' shape.

        The weight is 0 for `ignore_id`, otherwise taken from `mask`, or 1 without a mask.

        Args:
            labels: Integer tensor of shape `[N]` or `[b, s]`.
            mask: Tensor of the labels' shape, or of shape `[b]`: one weight per row. Defaults to
                `None`.
        """
        weights = tf.ones_like(labels, "float32")
        if mask is not None:
            weights *= expand_to_rank(tf.cast(mask, "float32"), len(labels.shape))
        if self.ignore_id is not None:
            weights = tf.where(labels == self.ignore_id, tf.zeros_like(weights), weights)
        return weights

    def _check_shapes(self, logits, labels, mask):
        for name, tensor in (("labels", labels), ("mask", mask)):
            if tensor is None:
                continue
            leading = logits.shape[: -1 if name == "labels" else len(tensor.shape)]
            if len(tensor.shape) >= len(logits.shape) or not leading.is_compatible_with(
                tensor.shape
            ):
                raise ValueError(
                    f"`{name}` has shape {tensor.shape}, expected {logits.shape[:-1]} for logits of "
                    f"shape {logits.shape}."
                )

    def compute_output_shape(self, *args, **kwargs) -> tuple:
        return ()


def _has_labels_first(first, second):
    """Return whether the first argument has the shape of labels for logits in the second."""
    return len(squeeze_labels(first, second).shape) < len(second.shape)


def squeeze_labels(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Remove the last dimension of labels `[..., 1]` for logits `[..., V]`.

    Labels of other shapes, and labels for V = 1, are returned as they are.

    Example:

    >>> squeeze_labels(tf.zeros((2, 1)), tf.zeros((2, 3))).shape
    TensorShape([2])
    """
    same_rank = len(labels.shape) == len(logits.shape)
    extra = same_rank and labels.shape[-1] == 1 != logits.shape[-1]
    return tf.squeeze(labels, -1) if extra else labels


def expand_to_rank(weights: tf.Tensor, rank: int) -> tf.Tensor:
    """Append dimensions of size 1 to weights until they have at least `rank` dimensions."""
    extra = rank - len(weights.shape)
    return weights[(..., *[None] * extra)] if extra > 0 else weights


def correct_predictions(outputs, labels) -> tf.Tensor | None:
    """Return 1 where the label is the most likely class, otherwise 0.

    Args:
        outputs: Tensor of shape `[..., V]`.
        labels: Integer tensor of shape `[...]`.

    Returns:
        A float32 tensor of shape `[...]`, or `None` if labels are not integers or their rank does
        not match.
    """
    is_class = tf.as_dtype(labels.dtype).is_integer and len(outputs.shape) == len(labels.shape) + 1
    if not is_class:
        return None
    product = get_product(outputs)
    if product is not None and product.correct is not None:
        return product.correct
    return is_most_likely(outputs, tf.maximum(labels, 0))
