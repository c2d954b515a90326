"""Encoder–decoder Transformer for translation."""

from collections.abc import Callable

from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.base import register
from dtransformer.models.base import complete_arguments, first_given
from dtransformer.models.encoder_decoder import EncoderDecoderModel
from dtransformer.parallel.config.config import MoEConfig


@register
class TranslationTransformer(EncoderDecoderModel):
    """Encoder–decoder Transformer that returns next-token logits of translations.

    Reference:
        [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)

    Args:
        source_vocab_size: Integer. Size of the source vocabulary.
        target_vocab_size: Integer. Size of the target vocabulary. Defaults to
            `source_vocab_size`.
        hidden_size: Integer. Size h of embeddings and blocks.
        num_heads: Integer. Number of attention heads. Must divide `hidden_size`.
        ffn_hidden_size: Integer. Inner size of the feed-forward layers. Defaults to 4·h.
        encoder_layers: Integer. Number of encoder blocks.
        decoder_layers: Integer. Number of decoder blocks.
        dropout_rate: Float in [0, 1). Dropout rate of embeddings and sublayer outputs.
        attention_dropout_rate: Float in [0, 1). Dropout rate of attention probabilities.
            Defaults to `dropout_rate`.
        embedding_dropout_rate: Float in [0, 1). Dropout rate of embeddings. Defaults to
            `dropout_rate`.
        hidden_act: Name of a Keras activation, or a callable.
        positions: `"sinusoidal"`, or `"learned"`, limited to the maximum lengths.
        max_source_length: Integer. Number of learned source positions.
        max_target_length: Integer. Number of learned target positions.
        shared_embeddings: Boolean. Whether source and target share one embedding table.
            Requires equal vocabulary sizes.
        tied_head: Boolean. Whether the target's embedding table is also the head's kernel.
        head_bias: Boolean. Whether the head has a bias.
        post_layernorm_residual: Boolean. Whether blocks normalize after the residual
            addition.
        pad_id, start_id, end_id: Integers. Ids of the padding, start and end tokens.
        lambda_func: Callable that assigns blocks to pipeline stages.
        moe_config: `MoEConfig` or dict of its fields. Selected blocks have a mixture of
            experts (`MoE`) instead of a feed-forward layer. `None` disables experts.
        moe_every: Integer. Every `moe_every`-th block has experts. A `lambda_func` may
            choose other blocks.

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
        TypeError: If a size is not an integer, or a rate is not a number.
        ValueError: If a size or a rate is out of range, `num_heads` does not divide
            `hidden_size`, shared embeddings have different vocabulary sizes, or a text is
            longer than the learned positions.

    Example:

    >>> model = TranslationTransformer(
    ...     100, hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1)
    >>> source, target = tf.ones((2, 5), "int32"), tf.ones((2, 4), "int32")
    >>> model({"source": source, "target": target}).shape
    TensorShape([2, 4, 100])
    >>> model.generate(source, beam_size=4, max_length=7).shape[0]
    2
    """

    loops_on_mesh = True  # DTensor can compile this model's decoding loop

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int | None = None,
        hidden_size: int = 512,
        num_heads: int = 8,
        ffn_hidden_size: int | None = None,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        dropout_rate: float = 0.1,
        attention_dropout_rate: float | None = None,
        embedding_dropout_rate: float | None = None,
        hidden_act: str | Callable = "relu",
        positions: str = "sinusoidal",
        max_source_length: int = 256,
        max_target_length: int = 256,
        shared_embeddings: bool = False,
        tied_head: bool = False,
        head_bias: bool = False,
        post_layernorm_residual: bool = False,
        pad_id: int = 0,
        start_id: int = 2,
        end_id: int = 3,
        lambda_func: Callable | None = None,
        moe_config: MoEConfig | dict | None = None,
        moe_every: int = 1,
        name: str = "translation_transformer",
        **kwargs,
    ):
        arguments = given_arguments(locals())
        super().__init__(name=name, **kwargs)
        target_vocab_size = first_given(target_vocab_size, source_vocab_size)
        arguments["target_vocab_size"] = target_vocab_size
        if shared_embeddings and target_vocab_size != source_vocab_size:
            raise ValueError(
                f"`shared_embeddings=True` needs equal vocabularies, got `source_vocab_size="
                f"{source_vocab_size}` and `target_vocab_size={target_vocab_size}`."
            )
        self.arguments = complete_arguments(arguments)
        self._set_up(lambda_func)
