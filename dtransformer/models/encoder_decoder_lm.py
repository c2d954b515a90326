"""Encoder–decoder networks with one vocabulary, such as BART, Marian and T5."""

from collections.abc import Callable

from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.base import register
from dtransformer.models.base import complete_arguments
from dtransformer.models.encoder_decoder import EncoderDecoderModel
from dtransformer.parallel.config.config import MoEConfig


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
        vocab_size: Integer. Size V of the vocabulary.
        hidden_size: Integer. Size h of embeddings and blocks.
        num_heads: Integer. Number of attention heads. Must divide `hidden_size`, unless
            `head_dim` is set.
        ffn_hidden_size: Integer. Inner size of the feed-forward layers. Defaults to 4·h.
        encoder_layers: Integer. Number of encoder blocks.
        decoder_layers: Integer. Number of decoder blocks.
        dropout_rate: Float in [0, 1). Dropout rate of embeddings and sublayer outputs.
        attention_dropout_rate: Float in [0, 1). Dropout rate of attention probabilities.
            Defaults to `dropout_rate`.
        embedding_dropout_rate: Float in [0, 1). Dropout rate of embeddings. Defaults to
            `dropout_rate`.
        hidden_act: Name of a Keras activation, or a callable.
        positions: `"learned"`, limited to `max_length`; a sinusoidal kind of
            `PositionEmbedding`; or `"relative"`, a bias of the attention scores by distance
            in each stack (see `relative_bias`).
        max_length: Integer. Number of learned positions of the source and of the target.
        position_offset: Integer. Index of the first position; see `PositionEmbedding`.
        positions_after_padding: Boolean. Whether positions start at the first token, which
            padding may precede.
        embedding_norm: Boolean. Whether to normalize embeddings.
        embedding_scale: Float. Factor on embeddings. `None` means √h.
        tied_head: Boolean. Whether the embedding table is also the head's kernel.
        head_bias: Boolean. Whether the head has a bias.
        trains_head_bias: Boolean. Whether to train the head's bias. In published models it
            is fixed.
        trains_padding: Boolean. Whether to train the padding embedding, which may also be
            the start embedding. Marian does not train it.
        post_layernorm_residual: Boolean. Whether blocks normalize after the residual
            addition.
        norm, norm_epsilon: For blocks and embeddings; see `TransformerEncoderLayer`.
        gated, use_bias, head_dim, query_scale: See `TransformerEncoderLayer`.
        relative_ranges, relative_max_distance: For `positions="relative"`; see
            `relative_bias`.
        scales_output: Boolean. Whether to multiply decoder outputs by h^(-1/2) before the
            head.
        pad_id, start_id, end_id: Integers. Ids of the padding, start and end tokens. The
            start token may be the padding or end token.
        lambda_func: Callable that assigns blocks to pipeline stages.
        moe_config: `MoEConfig` or dict of its fields. Selected blocks have a mixture of
            experts (`MoE`) instead of a feed-forward layer. `None` disables experts.
        moe_every: Integer. Every `moe_every`-th block has experts. A `lambda_func` may
            choose other blocks.

    Call arguments:
        inputs: Dict of int tensors `"source"` [b, s] and `"target"` [b, t], padded at the
            end with `pad_id`. Targets begin with the start token. Packed pairs need
            `"source_segments"` and `"target_segments"`; see `EncoderDecoderModel`.
        training: Boolean. Whether to apply dropout.

    Output shape:
        [b, t, V'], with V' the vocabulary size padded to a multiple of `model_parallel`.

    Raises:
        TypeError: If a size is not an integer, or a rate is not a number.
        ValueError: If a size or a rate is out of range, `num_heads` does not divide
            `hidden_size`, or a text is longer than the learned positions.

    Example:

    >>> model = EncoderDecoderLM(
    ...     100, hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1)
    >>> source, target = tf.ones((2, 5), "int32"), tf.ones((2, 4), "int32")
    >>> model({"source": source, "target": target}).shape
    TensorShape([2, 4, 100])
    >>> model.generate(source, beam_size=4, max_length=7).shape[0]
    2
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int = 512,
        num_heads: int = 8,
        ffn_hidden_size: int | None = None,
        encoder_layers: int = 6,
        decoder_layers: int = 6,
        dropout_rate: float = 0.1,
        attention_dropout_rate: float | None = None,
        embedding_dropout_rate: float | None = None,
        hidden_act: str | Callable = "gelu",
        positions: str = "learned",
        max_length: int = 1024,
        position_offset: int = 0,
        embedding_norm: bool = False,
        embedding_scale: float | None = 1.0,
        tied_head: bool = True,
        head_bias: bool = False,
        trains_head_bias: bool = True,
        trains_padding: bool = True,
        post_layernorm_residual: bool = True,
        norm: str = "layer_norm",
        norm_epsilon: float | None = None,
        gated: bool = False,
        use_bias: bool = True,
        head_dim: int | None = None,
        query_scale: float | None = None,
        relative_ranges: int = 32,
        relative_max_distance: int = 128,
        scales_output: bool = False,
        pad_id: int = 0,
        start_id: int = 2,
        end_id: int = 3,
        lambda_func: Callable | None = None,
        moe_config: MoEConfig | dict | None = None,
        moe_every: int = 1,
        positions_after_padding: bool = False,
        name: str = "encoder_decoder_lm",
        **kwargs,
    ):
        arguments = given_arguments(locals())
        super().__init__(name=name, **kwargs)
        self.arguments = complete_arguments(arguments)
        self._set_up(lambda_func)
