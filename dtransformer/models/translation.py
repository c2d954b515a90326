"""An encoder–decoder Transformer that translates."""

from collections.abc import Callable

from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.base import register
from dtransformer.models.base import completed, first_given
from dtransformer.models.encoder_decoder import EncoderDecoderModel
from dtransformer.parallel.config.config import MoEConfig


@register
class TranslationTransformer(EncoderDecoderModel):
    """Give each position of a translation the logits of its next token.

    Reference: Vaswani et al., 2017, "Attention is all you need".

    Args:
        source_vocab_size: number of entries of the source's vocabulary.
        target_vocab_size: number of the target's; the source's by default.
        hidden_size: size h of embeddings and blocks.
        num_heads: number of attention heads.
        ffn_hidden_size: inner size of the feed-forward layers; 4·h by default.
        encoder_layers: number of the encoder's blocks.
        decoder_layers: number of the decoder's blocks.
        dropout_rate: dropout of embeddings and of each sublayer's output, in [0, 1).
        attention_dropout_rate: dropout of attention probabilities; `dropout_rate` by default.
        embedding_dropout_rate: dropout of embeddings; `dropout_rate` by default.
        hidden_act: a Keras activation's name, or a callable.
        positions: `"sinusoidal"`, or `"learned"` up to the maximal lengths.
        max_source_length: learned positions of the source.
        max_target_length: learned positions of the target.
        shared_embeddings: whether source and target share one table; needs one
            vocabulary.
        tied_head: whether the head's kernel is the target's table.
        head_bias: whether the head has a bias.
        post_layernorm_residual: whether blocks normalize after the residual.
        pad_id, start_id, end_id: ids of the padding, start and end tokens.
        lambda_func: places each block on a pipeline stage.
        moe_config: a `MoEConfig`: blocks have a `MoE` of it in place of the feed-forward layer; None
            for none.
        moe_every: which blocks have it: every so many. A `lambda_func` may choose others.

    Call arguments:
        inputs: a dict of int tensors `"source"` [b, s] and `"target"` [b, t], the
            translation so far, from the start token on; padded with `pad_id`. Where several pairs
            are packed into a row (`TranslationBatches(packed_length=…)`), also
            `"source_segments"` and `"target_segments"`, int tensors of the same shapes: the
            number of each token's pair, from 1, and 0 for padding.
        training: whether dropout applies.

    Output shape:
        [b, t, V'], V' being the target's vocabulary padded to a multiple of
        model_parallel.

    Example:

    >>> model = TranslationTransformer(
    ...     100, hidden_size=16, num_heads=2, encoder_layers=1, decoder_layers=1)
    >>> source, target = tf.ones((2, 5), "int32"), tf.ones((2, 4), "int32")
    >>> model({"source": source, "target": target}).shape
    TensorShape([2, 4, 100])
    >>> model.generate(source, beam_size=4, max_length=7).shape[0]
    2
    """

    loops_on_mesh = True  # of its form DTensor compiles more than one

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
        given = given_arguments(locals())
        super().__init__(name=name, **kwargs)
        target_vocab_size = first_given(target_vocab_size, source_vocab_size)
        given["target_vocab_size"] = target_vocab_size
        if shared_embeddings and target_vocab_size != source_vocab_size:
            raise ValueError(
                f"shared_embeddings needs one vocabulary, got source_vocab_size={source_vocab_size} "
                f"and target_vocab_size={target_vocab_size}"
            )
        self.arguments = completed(given)
        self._set_up(lambda_func)
