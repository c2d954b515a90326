"""Transformer decoder: a block and a stack of blocks."""

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, mask_or_keras_mask
from dtransformer.layers.base import register
from dtransformer.layers.block import BlockStack
from dtransformer.layers.encoder import TransformerEncoderLayer
from dtransformer.parallel.zero.units import start_unit


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
        encoder_output: Memory tensor of shape `[b, s, h]`. Ignored with a cache.
        memory_mask: Boolean or 0/1 tensor of shape `[b, s]`, `[b, 1, s]` or `[b, t, s]`, 1 for
            visible positions of the memory; or `Segments`. Defaults to the Keras mask of
            `encoder_output`.
        cache: Dictionary from `init_cache`.
        position_table: See `TransformerEncoderLayer`.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, t, h]`. With a cache, an `(output, cache)` tuple with the cache for the next call.

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
        cache: dict | None = None,
        position_table: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor | tuple[tf.Tensor, dict]:
        if cache is not None:
            masks = decoder_mask, memory_mask
            start_unit(inputs, self.variables)
            return self._compute(inputs, encoder_output, position_table, *masks, cache)
        if encoder_output is None:
            raise ValueError("`encoder_output` is missing. Pass the memory, a [b, s, h] tensor.")
        decoder_mask = mask_or_keras_mask(decoder_mask, inputs)
        memory_mask = mask_or_keras_mask(memory_mask, encoder_output)

        def compute(x, memory, *rest):
            *tables, self_mask, cross_mask = rest
            table = tables[0] if tables else None
            return self._compute(x, memory, table, self_mask, cross_mask, training=training)

        tensors = [inputs, encoder_output]
        tensors += [] if position_table is None else [position_table]
        return self.run_block(compute, tensors, [decoder_mask, memory_mask], training)

    def _compute(
        self, inputs, encoder_output, table, decoder_mask, memory_mask, cache=None, training=False
    ):
        new_cache = {}

        def attend(name, attention, x, memory, mask, **options):
            if cache is None:
                return attention(x, memory, memory, mask, training=training, **options)
            options |= {"cache": cache[name], "training": training}
            output, new_cache[name] = attention(x, memory, memory, mask, **options)
            return output

        def attend_to_itself(x):
            return attend("self", self.self_attention, x, x, decoder_mask, position_table=table)

        def attend_to_memory(x):
            return attend("memory", self.cross_attention, x, encoder_output, memory_mask)

        x = self.residual("self_attention", attend_to_itself, inputs)
        x = self.residual("cross_attention", attend_to_memory, x)
        feed = self._feed(training, decoder_mask, drops=cache is None)
        x = self.residual("feed_forward", feed, x)
        return x if cache is None else (x, new_cache)

    def _init_cache(self, encoder_output, max_length, num_hypotheses):
        batch_size = encoder_output.shape[0] or tf.shape(encoder_output)[0]
        return {
            "self": self.self_attention.init_cache(batch_size, max_length, num_hypotheses),
            "memory": self.cross_attention.project_memory(encoder_output),
        }


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
        cache: List with the cache of each block, from `init_cache`.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, t, h]`. With a cache, an `(output, caches)` tuple with the caches for the next call.
    """

    layer_class = TransformerDecoderLayer

    def call(
        self,
        inputs: tf.Tensor,
        decoder_mask: tf.Tensor | Segments | None = None,
        encoder_output: tf.Tensor | None = None,
        memory_mask: tf.Tensor | Segments | None = None,
        cache: list[dict] | None = None,
        training: bool = False,
    ) -> tf.Tensor | tuple[tf.Tensor, list[dict]]:
        others = [decoder_mask, encoder_output, memory_mask]
        return self.run_blocks(inputs, others, cache, training=training)
