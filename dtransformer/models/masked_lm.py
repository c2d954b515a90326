"""Encoders for masked language modeling, such as BERT and ModernBERT."""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.base import register
from dtransformer.layers.encoder import TransformerEncoder
from dtransformer.layers.heads import MaskedLMHead, SequenceHead
from dtransformer.layers.position import TokenTypeEmbedding
from dtransformer.models.base import check_ids, complete_arguments, start_after_padding
from dtransformer.models.input_keys import InputKeys, get_mask, masked_segments
from dtransformer.models.one_stack import OneStackModel
from dtransformer.parallel.config.config import MoEConfig

_POSITIONS = "learned", "rotary"


@register
class MaskedLM(OneStackModel):
    """Encoder that returns logits of the original tokens at masked positions.

    Labels are the original tokens at masked positions. At all other positions they are an id
    that the loss ignores; see `CrossEntropyLoss(ignore_id=…)`.

    RoBERTa is `num_token_types=1, position_offset=2, pad_id=1`. ModernBERT is
    `positions="rotary", norm="layer_norm_without_beta", gated=True, use_bias=False,
    post_layernorm_residual=False, num_token_types=0` with a `block_pattern`.

    Reference:
        - [Devlin et al., 2019, BERT](https://arxiv.org/abs/1810.04805)
        - [Liu et al., 2019, RoBERTa](https://arxiv.org/abs/1907.11692)
        - [Warner et al., 2024, ModernBERT](https://arxiv.org/abs/2412.13663)

    Args:
        vocab_size: Integer. Size V of the vocabulary.
        hidden_size: Integer. Size h of embeddings and blocks.
        num_heads: Integer. Number of attention heads. Must divide `hidden_size`.
        ffn_hidden_size: Integer. Inner size of the feed-forward layers. Defaults to 4·h.
        num_layers: Integer. Number of blocks.
        dropout_rate: Float in [0, 1). Dropout rate of embeddings and sublayer outputs.
        attention_dropout_rate: Float in [0, 1). Dropout rate of attention probabilities.
            Defaults to `dropout_rate`.
        embedding_dropout_rate: Float in [0, 1). Dropout rate of embeddings. Defaults to
            `dropout_rate`.
        hidden_act: Name of a Keras activation, or a callable. The head uses it as well.
        max_length: Integer. Number of learned positions, in tokens.
        positions: `"learned"`, limited to `max_length`, or `"rotary"` in each block.
        position_offset: Integer. Index of the first position; see `PositionEmbedding`.
        num_token_types: Integer. Number of token types, such as 2 for sentence pairs. 0
            disables token types.
        next_sentence: Boolean. Whether to add a head for next-sentence prediction on the
            first token.
        tied_head: Boolean. Whether the embedding table is also the head's kernel.
        post_layernorm_residual: Boolean. Whether blocks normalize after the residual
            addition.
        norm_epsilon: Float. Constant added to the variance in norms. Defaults to 1e-12, as
            in BERT.
        norm, gated, use_bias: For blocks and the head; see `TransformerEncoderLayer`.
        rotary_base, rotary_fraction, rotary_scaling, block_pattern: See `CausalLM`.
        window: Integer. Number of positions, including itself, that each position attends
            to on either side. `None` disables the limit.
        embedding_scale: Float. Factor on embeddings.
        pad_id: Integer. Id of the padding token. `None` if the vocabulary has none.
        lambda_func: Callable that assigns blocks to pipeline stages.
        moe_config: `MoEConfig` or dict of its fields. Selected blocks have a mixture of
            experts (`MoE`) instead of a feed-forward layer. `None` disables experts.
        moe_every: Integer. Every `moe_every`-th block has experts. A `lambda_func` may
            choose other blocks.

    Call arguments:
        inputs: Int tensor [b, s] of token ids, padded at the end with `pad_id`, or a dict of
            int tensors [b, s]:
            `"tokens"` (or `"input_ids"`): The token ids.
            `"token_types"` (or `"token_type_ids"`): Values in [0, `num_token_types`).
            Defaults to 0.
            `"segments"`: For packed texts. Text index of each token, from 1; 0 for padding.
            `"attention_mask"`: 1 for tokens and 0 for padding. Defaults to 0 where the id is
            `pad_id`.
        training: Boolean. Whether to apply dropout.

    Output shape:
        [b, s, V'], with V' the vocabulary size padded to a multiple of `model_parallel`.
        With `next_sentence`, a dict of these logits as `"masked_lm"` and of
        `"next_sentence"` [b, 2].

    Raises:
        TypeError: If a size is not an integer, or a rate is not a number.
        ValueError: If a size or a rate is out of range, `num_heads` does not divide
            `hidden_size`, an input name is unknown, or a text is longer than the learned
            positions.

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
        arguments = given_arguments(locals())
        super().__init__(name=name, **kwargs)
        self.arguments = complete_arguments(arguments)
        if positions not in _POSITIONS:
            raise ValueError(
                f"`positions` must be one of {', '.join(_POSITIONS)}, got {positions!r}."
            )
        check_ids(vocab_size, pad_id=pad_id)
        self.pad_id = pad_id
        self.vocab_size = vocab_size
        self._add_layers(lambda_func)

    def _add_layers(self, lambda_func):
        options = self.arguments
        policy = self.dtype_policy
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
            embedding_layers = [self.positions, self.token_types, self.embedding_norm, self.dropout]
            layers = [*embedding_layers, self.blocks, self.head, self.sentence_head]
            self._build_layers([self.embedding], layers, tf.TensorSpec([1, 1], "int32"))

    def call(
        self, inputs: tf.Tensor | dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor | dict[str, tf.Tensor]:
        named = self.named_inputs(inputs)
        ids = named["tokens"]
        segments = named.get("segments")
        if segments is not None and self.sentence_head is not None:
            raise ValueError(
                "'segments' pack several texts into a row, but `next_sentence=True` classifies each "
                "row. Use one text per row, or set `next_sentence=False`."
            )
        start = 0
        if self.arguments["position_offset"] and self.pad_id is not None and segments is None:
            # RoBERTa counts positions from the first token. Padding may precede it.
            start = start_after_padding(ids, self.pad_id)
        x, table = self._embed_ids(
            ids,
            self.embedding,
            self.positions,
            self.dropout,
            start=start,
            segments=segments,
            norm=lambda x: self._normalize_embedding(x, named.get("token_types")),
            training=training,
        )
        mask = get_mask(named)
        if segments is not None:
            segments = masked_segments(segments, mask)
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

    def _normalize_embedding(self, x, types):
        if self.token_types is not None:
            x = self.token_types(x, types)
        elif types is not None:
            raise ValueError(
                "The inputs contain 'token_types', but the network has no token types. Remove them."
            )
        return self.embedding_norm(x)

    def logits_vocab_size(self) -> int | dict[str, int]:
        """Return the number of classes in the logits, in the structure of the outputs.

        Logits from this index on are padding.
        """
        if self.has_task_head:
            return self.head.num_labels
        if self.sentence_head is None:
            return self.vocab_size
        return {"masked_lm": self.vocab_size, "next_sentence": self.sentence_head.num_labels}
