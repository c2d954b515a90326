"""Options of attention: what it is told besides queries, keys and values, for every implementation."""

import dataclasses

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, is_near
from dtransformer.layers.dropout import DropoutMasks
from dtransformer.layers.elementwise import soft_capped
from dtransformer.layers.online_softmax import block_context, by_heads, scores_of
from dtransformer.layers.position_bias import PositionBias


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The options of one attention.

    Args:
        mask, bias, causal, window, soft_cap, dropout, softmax_compute_type, sinks: see
            `attention_core.attention`; a bias may be said to be there.
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
        """The type of sums over blocks of keys: float32 at least."""
        return "float64" if self.softmax_compute_type == "float64" else "float32"

    @property
    def reach(self) -> tuple[bool, int | None]:
        """Causal and window, see `is_near`, by which no query attends beyond.

        Where there is a prefix, queries may attend to all of it.
        """
        has_prefix = isinstance(self.mask, Segments) and self.mask.prefix is not None
        return (False, None) if has_prefix else (self.causal, self.window)

    @property
    def differentiated(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The sinks, a list of one tensor [1, n, 1, 1] or none, and the tensors of the bias."""
        sinks = [] if self.sinks is None else [tf.cast(by_heads(self.sinks), self.compute_type)]
        return sinks, [] if self.bias is None else self.bias.tensors

    def near(self, queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor | None:
        """Return which keys are within reach of queries by their positions; see `is_near`."""
        return is_near(queries, keys, self.causal, self.window)

    def scores(self, q: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        """Return the scores of queries and keys in the compute type, before they are masked."""
        scores = tf.cast(scores_of(q, k), self.compute_type)
        return scores if self.soft_cap is None else soft_capped(scores, self.soft_cap)

    def kept(self, known: tf.Tensor, part: int, sizes: list[int]) -> list[tf.Tensor | None]:
        """Return dropout's masks of blocks of keys of some sizes, not drawn before `known` is."""
        if self.dropout is None or not sizes:
            return [None] * len(sizes)
        kept = self.dropout.kept(known, part, width=sum(sizes), known=known)
        return [kept] if len(sizes) == 1 else tf.split(kept, sizes, axis=-1)

    def context(self, probabilities: tf.Tensor, v: tf.Tensor, kept: tf.Tensor | None) -> tf.Tensor:
        """Return what a block adds to the context; see `block_context`."""
        return block_context(probabilities, v, kept, self.dropout, self.compute_type)
