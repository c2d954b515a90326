"""Transformer decoder: a block and a stack of blocks."""

from typing import NamedTuple

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, mask_or_keras_mask
from dtransformer.layers.base import decoding_method, register
from dtransformer.layers.block import BlockStack
from dtransformer.layers.encoder import TransformerEncoderLayer
from dtransformer.parallel.decoding.cache import KVCache
from dtransformer.parallel.pipeline_parallel.stage_dispatch import dispatch
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape
from dtransformer.parallel.zero.units import start_unit


class DecoderCache(NamedTuple):
    """Cache of a decoder block.

    Args:
        targets: `KVCache` of the target positions, for self-attention.
        memory: `KVCache` of the memory, for cross-attention.
    """

    targets: KVCache
    memory: KVCache


@register
class TransformerDecoderLayer(TransformerEncoderLayer):
    """Transformer decoder block: self-attention, cross-attention, then a feed-forward layer.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.1

    Args:
        hidden_size: Integer. Size h of the input, the memory and the output.
        num_heads: Integer. Number of attention heads.
        ffn_hidden_size: Integer. Inner size of the feed-forward layer.
        attention_dropout_rate: Float in [0, 1). Dropout of attention probabilities. Defaults to
            `0.1`.
        hidden_dropout_rate: Float in [0, 1). Dropout of each sublayer's output. Defaults to `0.1`.
        hidden_act: Name of an activation, a callable, or a Keras layer class. Defaults to `"gelu"`.
        post_layernorm_residual: Boolean, whether to normalize the sum. Defaults to `False`.
        layernorm_compute_type: Type that norms compute in. Defaults to `"float32"`.
        softmax_compute_type: Type of the softmax. Defaults to `"float32"`.
        **kwargs: See `TransformerEncoderLayer`.

    Call arguments:
        inputs: Tensor of shape `[b, t, h]`.
        decoder_mask: Boolean or 0/1 tensor of shape `[b, t, t]`, 1 where a position may attend to
            another; or `Segments`. Unless the layer is `causal`, use a mask from `AttentionMask`.
            Defaults to the Keras mask of `inputs`.
        encoder_output: Memory tensor of shape `[b, s, h]`.
        memory_mask: Boolean or 0/1 tensor of shape `[b, s]`, `[b, 1, s]` or `[b, t, s]`, 1 for
            visible positions of the memory; or `Segments`. Defaults to the Keras mask of
            `encoder_output`.
        position_table: See `TransformerEncoderLayer`.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, t, h]`

    Raises:
        ValueError: If `encoder_output` is missing, or `norm_placement` is a parallel one.
    """

    def add_sublayers(self) -> None:
        if self.placement.is_parallel:
            raise ValueError(
                f"Decoder blocks do not support norm_placement={self.arguments['norm_placement']!r}."
            )
        self.add_norms("self_attention", self.arguments["attention_norm"])
        self.self_attention = self.make_attention("self_attention")
        self.add_norms("cross_attention")
        self.cross_attention = self.make_attention("cross_attention", to_itself=False)
        self.add_norms("feed_forward")
        self.add_feed_forward()

    def call(
        self,
        inputs: tf.Tensor,
        decoder_mask: tf.Tensor | Segments | None = None,
        encoder_output: tf.Tensor | None = None,
        memory_mask: tf.Tensor | Segments | None = None,
        position_table: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        if encoder_output is None:
            raise ValueError("`encoder_output` is missing. Pass the memory, a [b, s, h] tensor.")
        decoder_mask = mask_or_keras_mask(decoder_mask, inputs)
        memory_mask = mask_or_keras_mask(memory_mask, encoder_output)

        def compute(inputs, memory, *rest):
            *tables, self_mask, cross_mask = rest
            x = self.sublayer_input("self_attention", inputs)
            x = self.self_attention(x, x, x, self_mask, *tables, training=training)
            x = self.add_residual("self_attention", inputs, x)
            y = self.sublayer_input("cross_attention", x)
            y = self.cross_attention(y, memory, memory, cross_mask, training=training)
            x = self.add_residual("cross_attention", x, y)
            y = self.sublayer_input("feed_forward", x)
            y = self.feed(y, self_mask, training)
            return self.add_residual("feed_forward", x, y)

        tensors = [inputs, encoder_output]
        if position_table is not None:
            tensors.append(position_table)
        return self.run_block(compute, tensors, [decoder_mask, memory_mask], training)

    @decoding_method
    def decode_step(
        self,
        inputs: tf.Tensor,
        cache: DecoderCache,
        mask: tf.Tensor | None = None,
        memory_mask: tf.Tensor | None = None,
        position_table: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, DecoderCache]:
        """Compute the next position of each target.

        Args:
            inputs: Tensor of shape `[b·k, 1, h]`.
            cache: `DecoderCache` from `init_cache` or the previous step.
            mask: Mask of the cache's entries, see `MultiHeadAttention.decode_step`.
            memory_mask, position_table: See the call arguments.

        Returns:
            An `(output, cache)` tuple: a tensor of shape `[b·k, 1, h]` and the next cache.
        """
        start_unit(inputs, self.variables)
        x = self.sublayer_input("self_attention", inputs)
        x, targets = self.self_attention.decode_step(
            x, cache.targets, mask, position_table=position_table
        )
        x = self.add_residual("self_attention", inputs, x)
        y = self.sublayer_input("cross_attention", x)
        y = self.cross_attention.attend_to_memory(y, cache.memory, memory_mask)
        x = self.add_residual("cross_attention", x, y)
        y = self.feed(self.sublayer_input("feed_forward", x), drops=False)
        return self.add_residual("feed_forward", x, y), cache._replace(targets=targets)

    def init_cache(
        self, memory: tf.Tensor, capacity: int | tf.Tensor, num_hypotheses: int = 1
    ) -> DecoderCache | tuple[()]:
        """Return a cache without targets, or `()` if another pipeline stage has the block.

        Args:
            memory: Tensor of shape `[b, s, h]`.
            capacity, num_hypotheses: See `MultiHeadAttention.init_cache`.
        """
        arguments = (memory, capacity, num_hypotheses)
        return dispatch(self, self._init_cache, arguments, {}, placeholder=lambda *_: ())

    def _init_cache(self, memory, capacity, num_hypotheses):
        batch_size = static_or_dynamic_shape(memory)[0]
        targets = self.self_attention.init_cache(batch_size, capacity, num_hypotheses)
        return DecoderCache(targets, self.cross_attention.project_memory(memory))


@register
class TransformerDecoder(BlockStack):
    """Stack of `TransformerDecoderLayer` blocks.

    Args:
        num_layers: Integer. Number of blocks.
        hidden_size, num_heads, ffn_hidden_size: See `TransformerDecoderLayer`.
        lambda_func: Function that places each block on a pipeline stage. Called as
            `lambda_func(network=, layer_id=, offset=, parallel_config=, layers=)`. Defaults to
            `spread_evenly`.
        offset: Integer. Number of blocks in the network before this stack. Defaults to `0`.
        network_layers: Integer. Number of blocks in the network. Defaults to `offset + num_layers`.
        **layer_arguments: Other arguments of `BlockStack` and `TransformerDecoderLayer`.

    Call arguments:
        inputs: Tensor of shape `[b, t, h]`.
        decoder_mask, encoder_output, memory_mask: See `TransformerDecoderLayer`.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, t, h]`
    """

    layer_class = TransformerDecoderLayer

    def call(
        self,
        inputs: tf.Tensor,
        decoder_mask: tf.Tensor | Segments | None = None,
        encoder_output: tf.Tensor | None = None,
        memory_mask: tf.Tensor | Segments | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        masks = decoder_mask, encoder_output, memory_mask
        return self.run_blocks(inputs, *masks, training=training)

    def init_cache(
        self, memory: tf.Tensor, capacity: int | tf.Tensor, num_hypotheses: int = 1
    ) -> list[DecoderCache]:
        """Return a list with an empty cache for each block.

        See `TransformerDecoderLayer.init_cache` for the arguments.
        """
        return [block.init_cache(memory, capacity, num_hypotheses) for block in self.blocks]
