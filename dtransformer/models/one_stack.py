"""Networks of one stack of blocks: what they have in common."""

import tensorflow as tf

from dtransformer.block_forms import Latent
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.heads import PoolingHead, SequenceHead, TokenHead
from dtransformer.models import weight_shapes
from dtransformer.models.base import TokenModel, first_given
from dtransformer.models.experts import feed_forward_products, with_experts


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

    def arguments_and_experts(self) -> dict:
        return with_experts(self.arguments, blocks=self.blocks)

    def flops_per_step(self, inputs: tf.Tensor | dict[str, tf.Tensor]) -> tf.Tensor:
        """Return the floating-point operations of one training step without recompute.

        Six for each position and each weight in a product (of experts: of those that a position
        is sent to), and those of the attention cores; what is masked or padded is computed too, and
        counts. The backward pass counts as two forward ones.

        Args:
            inputs: as `call`'s.

        Returns:
            A float32 scalar tensor.
        """
        options = self.arguments
        h, n = options["hidden_size"], options["num_heads"]
        queries = n * first_given(options.get("head_dim"), h // n)
        shared = queries * first_given(options.get("num_kv_heads"), n) // n
        b, s = tf.unstack(tf.cast(tf.shape(self.named_inputs(inputs)["tokens"]), "float32"))
        kernels, latent = 2 * h * (queries + shared), Latent.of(options.get("latent"))
        if latent is not None:
            kernels = latent.products(h, n, queries // n)
        block = s * kernels + 2 * queries * s * s
        blocks = options["num_layers"] * block
        blocks += s * feed_forward_products(self.arguments_and_experts(), "blocks")
        return 6.0 * b * (blocks + self._head_products(s))

    def _head_products(self, length):
        """Return how many numbers are multiplied in the head, for a sequence of some length."""
        if self.has_task_head:
            return self.arguments["hidden_size"] * self.head.num_labels
        return length * self.arguments["hidden_size"] * self.vocab_size

    def stream_shapes(self, input_shapes: tuple[int, int]) -> dict[str, tuple[int, int, int]]:
        """Return the shape of the residual stream in the stack of blocks.

        Args:
            input_shapes: the shape (b, s) of `call`'s inputs.

        Returns:
            A dict of the stack's name and (b, s, h).
        """
        ids = self.named_inputs(input_shapes)["tokens"]
        return {"blocks": (*ids, self.arguments["hidden_size"])}
