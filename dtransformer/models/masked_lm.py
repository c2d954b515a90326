"""An encoder that is trained to find masked tokens: BERT's form, and ModernBERT's."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.base import register
from dtransformer.layers.encoder import TransformerEncoder
from dtransformer.layers.heads import MaskedLMHead, SequenceHead
from dtransformer.layers.position import TokenTypeEmbedding
from dtransformer.models.base import check_ids, completed, start_after_padding
from dtransformer.models.input_keys import InputKeys, mask_of, segments_of
from dtransformer.models.one_stack import OneStackModel
from dtransformer.parallel.config.config import MoEConfig

_POSITIONS = "learned", "rotary"


@register
class MaskedLM(OneStackModel):
    """Give each position of a text the logits of the token that was there before it was masked.

    The labels are the tokens where some are masked, and elsewhere an id that the loss leaves out,
    as `CrossEntropyLoss(ignore_id=…)` does.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805; Liu et al., 2019, "RoBERTa", arXiv
    1907.11692, which is `num_token_types=1, position_offset=2, pad_id=1`; Warner et al., 2024,
    "ModernBERT", arXiv 2412.13663, which is `positions="rotary", norm="layer_norm_without_beta",
    gated=True, use_bias=False, post_layernorm_residual=False, num_token_types=0` and a
    `block_pattern`.

    Args:
        vocab_size: number V of entries of the vocabulary.
        hidden_size: size h of embeddings and blocks.
        num_heads: number of attention heads; divides h.
        ffn_hidden_size: inner size of the feed-forward layers; 4·h by default.
        num_layers: number of blocks.
        dropout_rate: dropout of embeddings and of each sublayer's output, in [0, 1).
        attention_dropout_rate: dropout of attention probabilities; `dropout_rate` by default.
        embedding_dropout_rate: dropout of embeddings; `dropout_rate` by default.
        hidden_act: a Keras activation's name, or a callable; that of the head, too.
        max_length: number of positions, in tokens.
        positions: `"learned"` up to `max_length`, or `"rotary"` in each block.
        position_offset: number of the first position; see `PositionEmbedding`.
        num_token_types: number of types of tokens, as of two sentences; 0 for none.
        next_sentence: whether there is a head that tells whether the second sentence of a text
            follows the first one, by the first token.
        tied_head: whether the head's kernel is the embedding's table.
        post_layernorm_residual: whether blocks normalize after the residual.
        norm_epsilon: what norms add to the variance; 1e-12 as published.
        norm, gated, use_bias: of blocks, and of the head; as `TransformerEncoderLayer`'s.
        rotary_base, rotary_fraction, rotary_scaling, window, block_pattern: of blocks; as
            `CausalLM`'s, but a window goes both ways.
        embedding_scale: what embeddings are multiplied with.
        pad_id: id of the padding token; None for none.
        lambda_func: places each block on a pipeline stage.
        moe_config: a `MoEConfig`: blocks have a `MoE` of it in place of the feed-forward layer; None
            for none.
        moe_every: which blocks have it: every so many. A `lambda_func` may choose others.

    Call arguments:
        inputs: int tensor [b, s], padded at the end with `pad_id`. Or a dict of `"tokens"`, such
            a tensor; `"token_types"` [b, s], in [0, num_token_types), 0 without it; and, where
            several texts are packed into a row, `"segments"` [b, s]: the number of each token's
            text, from 1, and 0 for padding. `"attention_mask"` [b, s] is 1 where there is a token;
            without it that is where the id is not `pad_id`. `"input_ids"` and `"token_type_ids"`
            are the tokens and their types.
        training: whether dropout applies.

    Output shape:
        [b, s, V'], V' being the vocabulary padded to a multiple of model_parallel. With
        `next_sentence` a dict of this, `"masked_lm"`, and `"next_sentence"` [b, 2].

    Raises:
        TypeError: a size is not an int, or a rate is not a number.
        ValueError: a size or a rate is out of range, `num_heads` does not divide
            `hidden_size`, inputs have other names, or a text is longer than the positions.

    Example:

    >>> model = MaskedLM(100, hidden_size=16, num_heads=2, num_layers=1, next_sentence=True)
    >>> outputs = model({"tokens": tf.ones((2, 5), "int32")})
    >>> outputs["masked_lm"].shape, outputs["next_sentence"].shape
    (TensorShape([2, 5, 100]), TensorShape([2, 2]))
    """

    input_keys = InputKeys(
        ("tokens",),
        ("attention_mask", "token_types", "segments"),
        {"input_ids": "tokens", "token_type_ids": "token_types"},
    )

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int = 512,
        num_heads: int = 8,
        ffn_hidden_size: int | None = None,
        num_layers: int = 6,
        dropout_rate: float = 0.1,
        attention_dropout_rate: float | None = None,
        embedding_dropout_rate: float | None = None,
        hidden_act: str | Callable = "gelu",
        max_length: int = 512,
        position_offset: int = 0,
        num_token_types: int = 2,
        next_sentence: bool = False,
        tied_head: bool = True,
        post_layernorm_residual: bool = True,
        norm_epsilon: float = 1e-12,
        embedding_scale: float = 1.0,
        pad_id: int | None = 0,
        lambda_func: Callable | None = None,
        moe_config: MoEConfig | dict | None = None,
        moe_every: int = 1,
        positions: str = "learned",
        norm: str = "layer_norm",
        gated: bool = False,
        use_bias: bool = True,
        rotary_base: float = 10000.0,
        rotary_fraction: float = 1.0,
        rotary_scaling: dict | None = None,
        window: int | None = None,
        block_pattern: Sequence[Mapping] | None = None,
        name: str = "masked_lm",
        **kwargs,
    ):
        given = given_arguments(locals())
        super().__init__(name=name, **kwargs)
        self.arguments = completed(given)
        if positions not in _POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(_POSITIONS)}, got {positions!r}")
        check_ids(vocab_size, pad_id=pad_id)
        self.pad_id, self.vocab_size = pad_id, vocab_size
        self._add_layers(lambda_func)

    def _add_layers(self, lambda_func):
        options, policy = self.arguments, self.dtype_policy
        self.embedding = self._make_embedding(self.vocab_size, "embedding")
        self.positions = self.token_types = None
        if options["positions"] != "rotary":
            self.positions = self._make_positions(options["max_length"], "positions")
        if options["num_token_types"]:
            self.token_types = TokenTypeEmbedding(
                options["num_token_types"], dtype=policy, name="token_types"
            )
        self.embedding_norm = self._make_embedding_norm("embedding_norm")
        self.dropout = self._make_embedding_dropout("dropout")
        arguments = self._block_arguments(lambda_func)
        self.blocks = TransformerEncoder(options["num_layers"], name="blocks", **arguments)
        self.head = MaskedLMHead(
            self.vocab_size,
            options["hidden_size"],
            options["hidden_act"],
            options["norm_epsilon"],
            norm=options["norm"],
            dense_bias=options["use_bias"],
            tied=options["tied_head"],
            dtype=policy,
            name="head",
        )
        self.sentence_head = None
        if options["next_sentence"]:
            self.sentence_head = SequenceHead(
                2, hidden_act="tanh", dtype=policy, name="sentence_head"
            )

    def build(self, input_shape: tuple | None = None) -> None:
        if not self.built:
            first = [self.positions, self.token_types, self.embedding_norm, self.dropout]
            others = [*first, self.blocks, self.head, self.sentence_head]
            self._build_layers([self.embedding], others, tf.TensorSpec([1, 1], "int32"))

    def call(
        self, inputs: tf.Tensor | dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor | dict[str, tf.Tensor]:
        given = self.named_inputs(inputs)
        ids, segments = given["tokens"], given.get("segments")
        if segments is not None and self.sentence_head is not None:
            raise ValueError(
                "'segments' pack several texts into a row, and next_sentence classifies a row by "
                "its first token: give one text a row, or next_sentence=False"
            )
        start = 0
        if self.arguments["position_offset"] and self.pad_id is not None and segments is None:
            # RoBERTa's positions begin at the first token: padding may come before it.
            start = start_after_padding(ids, self.pad_id)
        x, table = self._embed_ids(
            ids,
            self.embedding,
            self.positions,
            self.dropout,
            start=start,
            segments=segments,
            norm=lambda x: self._normed(x, given.get("token_types")),
            training=training,
        )
        mask = mask_of(given)
        if segments is not None:
            segments = segments_of(segments, mask)
            mask = Segments(segments, segments)
        elif mask is None and self.pad_id is not None:
            mask = ids != self.pad_id
        x = self.blocks(x, mask, training=training)
        if self.has_task_head:
            return self.labels(x, ids, mask, training)
        logits = self.head(x, table)
        if self.sentence_head is None:
            return logits
        return {"masked_lm": logits, "next_sentence": self.sentence_head(x)}

    def _normed(self, x, types):
        if self.token_types is not None:
            x = self.token_types(x, types)
        elif types is not None:
            raise ValueError("inputs have 'token_types', and the network has none: leave them out")
        return self.embedding_norm(x)

    def logits_vocab_size(self) -> int | dict[str, int]:
        """Return the number of classes of the outputs, in their structure; more are padding."""
        if self.has_task_head:
            return self.head.num_labels
        if self.sentence_head is None:
            return self.vocab_size
        return {"masked_lm": self.vocab_size, "next_sentence": self.sentence_head.num_labels}
