"""The Transformer's decoder: its layer and the stack."""

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments, own_or_keras_mask
from dtransformer.layers.base import register
from dtransformer.layers.block import BlockStack
from dtransformer.layers.encoder import TransformerEncoderLayer
from dtransformer.parallel.zero.gather import unsharding_ahead


@register
class TransformerDecoderLayer(TransformerEncoderLayer):
    """Attention of a sequence to itself, to a memory, then a feed-forward layer.

    Reference: Vaswani et al., 2017, "Attention is all you need", §3.1.

    Args:
        hidden_size: size h of the input, the memory and the output.
        num_heads: number of attention heads.
        ffn_hidden_size: inner size of the feed-forward layer.
        attention_dropout_rate: dropout of attention probabilities, in [0, 1).
        hidden_dropout_rate: dropout of each sublayer's output, in [0, 1).
        hidden_act: a Keras activation's name, a callable, or the class of a Keras layer.
        post_layernorm_residual: whether to normalize after the residual.
        layernorm_compute_type: type that norms are computed in.
        softmax_compute_type: type that the softmax is computed in.
        **kwargs: as `TransformerEncoderLayer`'s.

    Call arguments:
        inputs: tensor [b, t, h].
        decoder_mask: what each position may attend to in the sequence: [b, t, t] of
            0 and 1, or `Segments`; None for everything. Causal masks come from `AttentionMask`,
            where the layer is not `causal`.
        encoder_output: the memory, tensor [b, s, h]; not read where
            there is a cache.
        memory_mask: what each position may attend to in the memory: [b, s],
            [b, 1, s] or [b, t, s] of 0 and 1, or `Segments`; None for everything.
        cache: what earlier calls computed, from `init_cache`.
        position_table: as `TransformerEncoderLayer`'s.
        training: whether dropout applies.

    Output shape:
        The inputs'; with a cache, a pair of this and the cache for the next call.
    """

    def add_sublayers(self) -> None:
        if self.placement.is_parallel:
            raise ValueError(
                f"norm_placement={self.arguments['norm_placement']!r} is not of blocks with a memory"
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
            with unsharding_ahead([inputs]):
                return self._compute(inputs, encoder_output, position_table, *masks, cache)
        if encoder_output is None:
            raise ValueError("encoder_output is missing: a decoder attends to a memory [b, s, h]")
        decoder_mask = own_or_keras_mask(decoder_mask, inputs)
        memory_mask = own_or_keras_mask(memory_mask, encoder_output)

        def compute(x, memory, *others):
            *tables, own_mask, mask_of_memory = others
            table = tables[0] if tables else None
            return self._compute(x, memory, table, own_mask, mask_of_memory, training=training)

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
    """A stack of `TransformerDecoderLayer`s.

    Args:
        num_layers: number of blocks.
        hidden_size, num_heads, ffn_hidden_size: as the layer's.
        lambda_func: places each block; by default they are spread evenly over the
            pipeline's stages. Called as `lambda_func(network=, layer_id=, offset=,
            parallel_config=, layers=)`.
        offset: number of blocks of the network before this stack.
        network_layers: number of blocks of the network.
        **layer_arguments: other arguments of `TransformerDecoderLayer`.

    Call arguments:
        inputs: tensor [b, t, h].
        decoder_mask, encoder_output, memory_mask: as the layer's.
        cache: what earlier calls computed, from `init_cache`.
        training: whether dropout applies.

    Output shape:
        The inputs'; with a cache, a pair of this and the cache for the next call.
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
