"""Networks of one stack of blocks: what they have in common."""

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.heads import PoolingHead, SequenceHead, TokenHead
from dtransformer.models import weight_shapes
from dtransformer.models.base import TokenModel


class OneStackModel(TokenModel):
    """A network of tokens with one stack of blocks, `blocks`."""

    @property
    def has_task_head(self) -> bool:
        """Whether it labels sequences or tokens; see `with_task_head`."""
        return isinstance(self.head, (PoolingHead, SequenceHead, TokenHead))

    def labels(self, x: tf.Tensor, mask: Segments | tf.Tensor | None, training: bool) -> tf.Tensor:
        """Return what the head of a task makes of the last block's results [b, s, h].

        Args:
            x: the results.
            mask: what the blocks were given; positions of segment 0 are padding.
            training: whether dropout applies.
        """
        mask = mask.queries if isinstance(mask, Segments) else mask
        mask = None if mask is None else tf.cast(mask, "bool")
        return self.head(x, mask, training=training)

    def logits_vocab_size(self) -> int:
        return self.head.num_labels if self.has_task_head else self.vocab_size

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().weight_shapes()
        if not self.has_task_head:
            return shapes
        shapes = {k: x for k, x in shapes.items() if not k.startswith(("head/", "sentence_head/"))}
        own = weight_shapes.of_layer(self.head, (None, None, self.arguments["hidden_size"]))
        return {**shapes, **{f"head/{path}": shape for path, shape in own.items()}}

    def stream_shapes(self, input_shapes: tuple[int, int]) -> dict[str, tuple[int, int, int]]:
        """Return the shape of the residual stream in the stack of blocks.

        Args:
            input_shapes: the shape (b, s) of `call`'s inputs.

        Returns:
            A dict of the stack's name and (b, s, h).
        """
        ids = self.named_inputs(input_shapes)["tokens"]
        return {"blocks": (*ids, self.arguments["hidden_size"])}
