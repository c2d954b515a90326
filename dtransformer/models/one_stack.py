"""Base class of networks with a single stack of blocks, and task heads for them."""

import functools

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.arguments import KEY, apply_settings
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.heads import PoolingHead, SequenceHead, TokenHead
from dtransformer.models import weight_shapes
from dtransformer.models.base import TokenModel


class OneStackModel(TokenModel):
    """Token model with a single stack of blocks, the attribute `blocks`."""

    @property
    def has_task_head(self) -> bool:
        """True if the head labels sequences or tokens; see `with_task_head`."""
        return isinstance(self.head, (PoolingHead, SequenceHead, TokenHead))

    def labels(
        self, x: tf.Tensor, ids: tf.Tensor, mask: Segments | tf.Tensor | None, training: bool
    ) -> tf.Tensor:
        """Apply the task head to the last block's outputs [b, s, h].

        Args:
            x: Outputs of the last block.
            ids: Int tensor [b, s] of token ids.
            mask: Attention mask of the blocks, or `None`. Positions in segment 0 are padding.
                Positions with the head's `pad_id` are padding as well.
            training: Boolean. Whether to apply dropout.
        """
        mask = mask.queries if isinstance(mask, Segments) else mask
        pad_id = getattr(self.head, "pad_id", None)
        masks = [] if mask is None else [tf.cast(mask, "bool")]
        masks += [] if pad_id is None else [ids != pad_id]
        mask_args = [functools.reduce(tf.logical_and, masks)] if masks else []
        return self.head(x, *mask_args, training=training)

    def logits_vocab_size(self) -> int:
        return self.head.num_labels if self.has_task_head else self.vocab_size

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().weight_shapes()
        if not self.has_task_head:
            return shapes
        shapes = {k: x for k, x in shapes.items() if not k.startswith(("head/", "sentence_head/"))}
        head_shapes = weight_shapes.layer_shapes(self.head, (None, None, self.config.hidden_size))
        return {**shapes, **{f"head/{path}": shape for path, shape in head_shapes.items()}}

    def get_config(self):
        config = super().get_config()
        if self.has_task_head:
            config["task_head"] = keras.saving.serialize_keras_object(self.head)
            # The network builds its head.
            config["task_head"].pop("build_config", None)
        return config

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        head = config.pop("task_head", None)
        settings = config.pop(KEY, None)
        network = super().from_config(config)
        if head is not None:
            with_task_head(network, keras.saving.deserialize_keras_object(head))
        # Settings refer to layers by index, and the head's layers count.
        apply_settings(network, settings)
        return network

    def stream_shapes(self, input_shapes: tuple[int, int]) -> dict[str, tuple[int, int, int]]:
        """Return the shape of the residual stream in the stack of blocks.

        Args:
            input_shapes: Shape (b, s) of `call`'s inputs, or a dict of shapes.

        Returns:
            A dict with the stack's name and its shape (b, s, h).
        """
        ids = self.named_inputs(input_shapes)["tokens"]
        return {"blocks": (*ids, self.config.hidden_size)}


def with_task_head(network: OneStackModel, head: SequenceHead | TokenHead) -> OneStackModel:
    """Replace a network's head by a head that labels sequences or tokens.

    The weights of the old head are dropped. If the network was pretrained on next-sentence
    prediction and the new head has a pooler, as in BERT, the pooler's weights are kept.

    Args:
        network: A `CausalLM` or a `MaskedLM`. It is changed in place.
        head: `SequenceHead`, `TokenHead` or `PoolingHead` that is not built.

    Returns:
        The network.

    Raises:
        ValueError: If `network` is of another class.

    Example:

    >>> from dtransformer.models import CausalLM
    >>> network = CausalLM(50, hidden_size=8, num_heads=2, num_layers=1)
    >>> network.build()
    >>> with_task_head(network, SequenceHead(3, "last"))(keras.ops.ones((2, 5), "int32")).shape
    TensorShape([2, 3])
    """
    if not isinstance(network, OneStackModel):
        raise ValueError(
            f"{type(network).__name__} does not support task heads. Use a CausalLM or a MaskedLM."
        )
    sentences = getattr(network, "sentence_head", None)
    head.name = "head"
    if network.built:
        with keras.name_scope(network.name, caller=network):
            head.build((None, None, network.config.hidden_size))
    if network.built and sentences is not None and getattr(head, "pooler", None) is not None:
        for weight, pretrained in zip(head.pooler.weights, sentences.pooler.weights, strict=True):
            weight.assign(pretrained)
    _compat.replace_layer(network, "head", head)
    if sentences is not None:
        _compat.replace_layer(network, "sentence_head", None)
    return network
