"""Encoder-decoder Transformer."""

from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.base import Layer, register
from dtransformer.layers.block import check_stages
from dtransformer.layers.decoder import TransformerDecoder
from dtransformer.layers.encoder import TransformerEncoder
from dtransformer.parallel.config.config import get_parallel_config


@register
class Transformer(Layer):
    """Encoder-decoder Transformer: an encoder stack and a decoder stack.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)

    Args:
        encoder_layers: Integer. Number of encoder blocks. With 0, the decoder attends to
            `encoder_inputs`.
        decoder_layers: Integer. Number of decoder blocks. With 0, the layer returns the encoder's
            output.
        hidden_size: Integer. Size h of the inputs and the output.
        num_heads: Integer. Number of attention heads.
        ffn_hidden_size: Integer. Inner size of the feed-forward layers.
        lambda_func: Function that places each block on a pipeline stage, see `BlockStack`. Defaults
            to `spread_evenly`. Decoder blocks follow the encoder's.
        causal: Boolean, whether the decoder hides later positions. Defaults to `False`.
        **layer_arguments: Other arguments of `TransformerEncoderLayer`, for both stacks.

    Call arguments:
        encoder_inputs: Tensor of shape `[b, s, h]`.
        encoder_mask: 0/1 tensor of shape `[b, s]`, `[b, 1, s]` or `[b, s, s]`, `Segments`, or
            `None`.
        decoder_inputs: Tensor of shape `[b, t, h]`, or `None` without a decoder.
        decoder_mask: 0/1 tensor of shape `[b, t, t]`, `Segments`, or `None`.
        memory_mask: 0/1 tensor of shape `[b, s]`, `[b, 1, s]` or `[b, t, s]`, `Segments`, or
            `None`.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, t, h]`, or `[b, s, h]` without a decoder.

    Example:

    >>> x = tf.zeros((2, 5, 16))
    >>> Transformer(1, 1, 16, 4, 32)(x, None, x, None, None).shape
    TensorShape([2, 5, 16])
    """

    def __init__(
        self,
        encoder_layers: int,
        decoder_layers: int,
        hidden_size: int,
        num_heads: int,
        ffn_hidden_size: int,
        lambda_func: Callable | None = None,
        name: str | None = None,
        dtype: str | keras.DTypePolicy | None = None,
        trainable: bool = True,
        causal: bool = False,
        **layer_arguments,
    ):
        super().__init__(name=name, dtype=dtype, trainable=trainable)
        check_int("encoder_layers", encoder_layers, minimum=0)
        check_int("decoder_layers", decoder_layers, minimum=0)
        check_int("encoder_layers + decoder_layers", encoder_layers + decoder_layers)
        shared = {
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "ffn_hidden_size": ffn_hidden_size,
            **layer_arguments,
            **({} if lambda_func is None else {"lambda_func": lambda_func}),
        }
        sizes = {
            "encoder_layers": encoder_layers,
            "decoder_layers": decoder_layers,
            "causal": causal,
        }
        self.arguments = {**sizes, **shared}
        shared |= {"network_layers": encoder_layers + decoder_layers, "dtype": self.dtype_policy}
        self.encoder = TransformerEncoder(encoder_layers, name="encoder", **shared)
        self.decoder = None
        if decoder_layers:
            self.decoder = TransformerDecoder(
                decoder_layers, name="decoder", offset=encoder_layers, causal=causal, **shared
            )
        blocks = [*self.encoder.blocks, *(self.decoder.blocks if decoder_layers else [])]
        check_stages(blocks, get_parallel_config().placement.num_chunks)

    def build(self, encoder_inputs_shape: tuple, *args) -> None:
        self.encoder.build(encoder_inputs_shape)
        if self.decoder is not None:
            self.decoder.build(encoder_inputs_shape)

    def call(
        self,
        encoder_inputs: tf.Tensor,
        encoder_mask: tf.Tensor | None = None,
        decoder_inputs: tf.Tensor | None = None,
        decoder_mask: tf.Tensor | None = None,
        memory_mask: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        memory = self.encoder(encoder_inputs, encoder_mask, training=training)
        if self.decoder is None:
            return memory
        if decoder_inputs is None:
            raise ValueError(
                "`decoder_inputs` is missing. Set `decoder_layers=0` to omit the decoder."
            )
        return self.decoder(decoder_inputs, decoder_mask, memory, memory_mask, training=training)

    def compute_output_shape(
        self,
        encoder_inputs_shape: tuple,
        encoder_mask_shape: tuple | None = None,
        decoder_inputs_shape: tuple | None = None,
        *args,
        **kwargs,
    ) -> tuple:
        if self.decoder is None or decoder_inputs_shape is None:
            return encoder_inputs_shape
        return decoder_inputs_shape
