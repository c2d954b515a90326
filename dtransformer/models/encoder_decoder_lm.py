"""Encoder–decoders of one vocabulary, as published ones are: BART, Marian and T5."""

from collections.abc import Callable

from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.base import register
from dtransformer.models.base import completed
from dtransformer.models.encoder_decoder import EncoderDecoderModel
from dtransformer.parallel.config.config import MoEConfig


@register
class EncoderDecoderLM(EncoderDecoderModel):
    """Give each position of a target the logits of its next token; source and target are alike.

    They share a vocabulary and its table.

    Reference: Lewis et al., 2020, "BART", arXiv 1910.13461, which is `positions="learned",
    position_offset=2, embedding_norm=True, pad_id=1, start_id=2, end_id=2`; Junczys-Dowmunt et al.,
    2018, "Marian", arXiv 1804.00344, which is `positions="sinusoidal_paper", hidden_act="silu"`,
    with embeddings that are multiplied with √h, and the padding as the start, which is not trained;
    Raffel et al., 2019, "T5", arXiv 1910.10683, which is `positions="relative", norm="rms_norm",
    use_bias=False, post_layernorm_residual=False, query_scale=1.0, scales_output=True`, and in its
    version 1.1 `gated=True, hidden_act="gelu_tanh", tied_head=False, scales_output=False`.

    Args:
        vocab_size: number V of entries of the vocabulary.
        hidden_size: size h of embeddings and blocks.
        num_heads: number of attention heads; divides h.
        ffn_hidden_size: inner size of the feed-forward layers; 4·h by default.
        encoder_layers: number of the encoder's blocks.
        decoder_layers: number of the decoder's blocks.
        dropout_rate: dropout of embeddings and of each sublayer's output, in [0, 1).
        attention_dropout_rate: dropout of attention probabilities; `dropout_rate` by default.
        embedding_dropout_rate: dropout of embeddings; `dropout_rate` by default.
        hidden_act: a Keras activation's name, or a callable.
        positions: `"learned"` up to `max_length`, a sinusoidal kind of `PositionEmbedding`, or
            `"relative"`: a bias of scores by distance in each stack; see `relative_bias`.
        max_length: number of learned positions of the source, and of the target.
        position_offset: number of the first position; see `PositionEmbedding`.
        positions_after_padding: whether positions begin at the first token, before which padding
            may be.
        embedding_norm: whether embeddings are normalized.
        embedding_scale: what embeddings are multiplied with; √h where it is None.
        tied_head: whether the head's kernel is the embeddings' table.
        head_bias: whether the head has a bias.
        trains_head_bias: whether that is trained: published ones are not.
        trains_padding: whether the embedding of the padding is trained, which may be the start's,
            where it is looked up: Marian's is not.
        post_layernorm_residual: whether blocks normalize after the residual.
        norm, norm_epsilon: of the blocks and the embeddings; as `TransformerEncoderLayer`'s.
        gated, use_bias, head_dim, query_scale: as there.
        relative_ranges, relative_max_distance: of relative positions.
        scales_output: whether the decoder's output is multiplied with h^(-1/2) before the head.
        pad_id, start_id, end_id: ids of the padding, start and end tokens. The start may be the
            padding, or the end.
        lambda_func: places each block on a pipeline stage.
        moe_config: a `MoEConfig`: blocks have a `MoE` of it in place of the feed-forward layer; None
            for none.
        moe_every: which blocks have it: every so many. A `lambda_func` may choose others.

    Call arguments:
        inputs: a dict of int tensors `"source"` [b, s] and `"target"` [b, t], the target so far,
            from the start token on; padded at the end with `pad_id`. Where several pairs are packed
            into a row, also `"source_segments"` and `"target_segments"`: the number of each token's
            pair, from 1, and 0 for padding.
        training: whether dropout applies.

    Output shape:
        [b, t, V'], V' being the vocabulary padded to a multiple of model_parallel.

    Raises:
        TypeError: a size is not an int, or a rate is not a number.
        ValueError: a size or a rate is out of range, `num_heads` does not divide `hidden_size`, or
            a text is longer than the learned positions.

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
        given = given_arguments(locals())
        super().__init__(name=name, **kwargs)
        self.arguments = completed(given)
        self._set_up(lambda_func)
