"""Encoder–decoder networks with one vocabulary, such as BART, Marian and T5."""

from dtransformer.layers.base import register
from dtransformer.models.encoder_decoder import EncoderDecoderModel


@register
class EncoderDecoderLM(EncoderDecoderModel):
    """Encoder–decoder that returns next-token logits at each target position.

    Source and target share the vocabulary and the embedding table.

    Published models use these arguments:
        BART: `positions="learned", position_offset=2, embedding_norm=True, pad_id=1,
        start_id=2, end_id=2`.
        Marian: `positions="sinusoidal_paper", hidden_act="silu", embedding_scale=None`. The
        start token is the padding token, whose embedding is not trained.
        T5: `positions="relative", norm="rms_norm", use_bias=False,
        post_layernorm_residual=False, query_scale=1.0, scales_output=True`.
        T5 1.1: as T5, with `gated=True, hidden_act="gelu_tanh", tied_head=False,
        scales_output=False`.

    Reference:
        - [Lewis et al., 2020, BART](https://arxiv.org/abs/1910.13461)
        - [Junczys-Dowmunt et al., 2018, Marian](https://arxiv.org/abs/1804.00344)
        - [Raffel et al., 2019, T5](https://arxiv.org/abs/1910.10683)

    Args:
        config: `TransformerConfig` with this `network`, or an integer: the size of the vocabulary.
        **arguments: Fields of the config and its groups instead of a `config`, and the arguments
            of `TokenModel`.

    Call arguments:
        inputs: Dict of int tensors `"source"` [b, s] and `"target"` [b, t], padded at the
            end with `pad_id`. Targets begin with the start token. Packed pairs need
            `"source_segments"` and `"target_segments"`; see `EncoderDecoderModel`.
        training: Boolean. Whether to apply dropout.

    Output shape:
        [b, t, V'], with V' the vocabulary size padded to a multiple of `model_parallel`.

    Raises:
        TypeError: If an argument is unknown or has a wrong type.
        ValueError: If an argument is out of range, does not apply to the network or contradicts
            another one, or a text is longer than the learned positions.

    Example:

    >>> model = EncoderDecoderLM(
    ...     100, hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1)
    >>> source, target = tf.ones((2, 5), "int32"), tf.ones((2, 4), "int32")
    >>> model({"source": source, "target": target}).shape
    TensorShape([2, 4, 100])
    >>> model.generate(source, beam_size=4, max_length=7).shape[0]
    2
    """

    network_class = "EncoderDecoderLM"
    default_name = "encoder_decoder_lm"
