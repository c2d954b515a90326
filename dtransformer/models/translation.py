"""Encoder–decoder Transformer for translation."""

from dtransformer.layers.base import register
from dtransformer.models.encoder_decoder import EncoderDecoderModel


@register
class TranslationTransformer(EncoderDecoderModel):
    """Encoder–decoder Transformer that returns next-token logits of translations.

    Reference:
        [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)

    Args:
        config: `TransformerConfig` with this `network`, or an integer: the
            size of the source vocabulary, and of the target vocabulary by default.
        **arguments: Fields of the config and its groups instead of a `config`, and the arguments
            of `TokenModel`.

    Call arguments:
        inputs: Dict of int tensors `"source"` [b, s] and `"target"` [b, t], padded with
            `pad_id`. Targets begin with the start token. Packed pairs
            (`TranslationBatches(packed_length=…)`) need `"source_segments"` and
            `"target_segments"`; see `EncoderDecoderModel`.
        training: Boolean. Whether to apply dropout.

    Output shape:
        [b, t, V'], with V' the target vocabulary size padded to a multiple of
        `model_parallel`.

    Raises:
        TypeError: If an argument is unknown or has a wrong type.
        ValueError: If an argument is out of range, does not apply to the network or contradicts
            another one, or a text is longer than the learned positions.

    Example:

    >>> model = TranslationTransformer(
    ...     100, hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1)
    >>> source, target = tf.ones((2, 5), "int32"), tf.ones((2, 4), "int32")
    >>> model({"source": source, "target": target}).shape
    TensorShape([2, 4, 100])
    >>> model.generate(source, beam_size=4, max_length=7).shape[0]
    2
    """

    network_class = "TranslationTransformer"
    default_name = "translation_transformer"
    vocab_argument = "source_vocab_size"
    loops_on_mesh = True  # DTensor can compile this model's decoding loop
