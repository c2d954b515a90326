"""Options of an attention, shared by all implementations."""

import dataclasses

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, is_near
from dtransformer.layers.dropout import DropoutMasks
from dtransformer.layers.elementwise import apply_soft_cap
from dtransformer.layers.online_softmax import attention_scores, block_context, per_head
from dtransformer.layers.position_bias import PositionBias


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention.

    Args:
        mask: Boolean or 0/1 tensor of shape `[b, t]`, `[b, s, t]`, `[b, 1, t]` or
            `[b, n or 1, s, t]`, 1 where a query may attend; or `Segments`. `None` masks nothing
            (default).
        bias: `PositionBias`, or for the reference implementation a tensor of shape
            `[n or 1, s or 1, t]`, added to scores. To choose an implementation, a boolean: whether
            there is a bias. Defaults to `None`.
        causal: Boolean, whether to hide later positions. Queries and keys start at the same
            position. Defaults to `False`.
        window: Integer. Sliding-window size, see `is_near`. `None` disables it (default).
        soft_cap: Float c. Replaces a score x by c·tanh(x / c) before masking
            ([Gemma Team, 2024](https://arxiv.org/abs/2408.00118), section 2). `None` disables it
            (default).
        dropout: `DropoutMasks` of the probabilities, see `AttentionDropout`. `None` disables dropout
            (default).
        softmax_compute_type: Type of the softmax. Defaults to `"float32"`.
        sinks: Tensor of shape `[n]` with one extra score per head. It takes part in the softmax and
            adds nothing to the output ([Xiao et al., 2023](https://arxiv.org/abs/2309.17453),
            section 3.3; gpt-oss). Defaults to `None`.
    """

    mask: tf.Tensor | Segments | None = None
    bias: tf.Tensor | PositionBias | bool | None = None
    causal: bool = False
    window: int | None = None
    soft_cap: float | None = None
    dropout: DropoutMasks | None = None
    softmax_compute_type: str = "float32"
    sinks: tf.Tensor | None = None

    @property
    def compute_type(self) -> str:
        """Type of sums over blocks of keys: float64 for a float64 softmax, otherwise float32."""
        return "float64" if self.softmax_compute_type == "float64" else "float32"

    @property
    def reach(self) -> tuple[bool, int | None]:
        """The `(causal, window)` limits of all queries, or `(False, None)` if there is a prefix.

        See `is_near`.
        """
        has_prefix = isinstance(self.mask, Segments) and self.mask.prefix is not None
        return (False, None) if has_prefix else (self.causal, self.window)

    @property
    def differentiated(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Tensors with gradients: a `(sinks, bias tensors)` tuple of lists.

        Sinks are one tensor of shape `[1, n, 1, 1]`, or an empty list.
        """
        sinks = [] if self.sinks is None else [tf.cast(per_head(self.sinks), self.compute_type)]
        return sinks, [] if self.bias is None else self.bias.tensors

    def near(self, queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor | None:
        """Return a bool mask of the keys in reach of queries at these positions. See `is_near`."""
        return is_near(queries, keys, self.causal, self.window)

    def scores(self, q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        """Return unmasked scores in the compute type, after the soft cap."""
        scores = tf.cast(attention_scores(q, k), self.compute_type)
        return scores if self.soft_cap is None else apply_soft_cap(scores, self.soft_cap)

    def context(
        self, probabilities: tf.Tensor, v: tf.Tensor, dropout_mask: tf.Tensor | None
    ) -> tf.Tensor:
        """Return the contribution of a block of keys to the context. See `block_context`."""
        return block_context(probabilities, v, dropout_mask, self.dropout, self.compute_type)
