"""Encoders for masked language modeling, such as BERT and ModernBERT."""

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.base import register
from dtransformer.layers.encoder import TransformerEncoder
from dtransformer.layers.heads import MaskedLMHead, SequenceHead
from dtransformer.layers.position import TokenTypeEmbedding
from dtransformer.models.base import start_after_padding
from dtransformer.models.input_keys import InputKeys, get_mask, masked_segments
from dtransformer.models.one_stack import OneStackModel
from dtransformer.parallel.tensor_parallel.embedding import gather_positions
from dtransformer.transformer_config import TransformerConfig


@register
class MaskedLM(OneStackModel):
    """Encoder that returns logits of the original tokens at masked positions.

    Labels are the original tokens at masked positions. At all other positions they are an id
    that the loss ignores; see `CrossEntropyLoss(ignore_id=…)`. With `"masked_lm_positions"` in the
    inputs, the head computes logits at these positions only, and labels have their shape.

    RoBERTa is `num_token_types=1, position_offset=2, pad_id=1`. ModernBERT is
    `positions="rotary", norm="layer_norm_without_beta", gated=True, use_bias=False,
    post_layernorm_residual=False, num_token_types=0` with a `block_pattern`.

    Reference:
        - [Devlin et al., 2019, BERT](https://arxiv.org/abs/1810.04805)
        - [Liu et al., 2019, RoBERTa](https://arxiv.org/abs/1907.11692)
        - [Warner et al., 2024, ModernBERT](https://arxiv.org/abs/2412.13663)

    Args:
        config: `TransformerConfig` with this `network`, or an integer: the size of the vocabulary.
        **arguments: Fields of the config and its groups instead of a `config`, and the arguments
            of `TokenModel`.

    Call arguments:
        inputs: Int tensor [b, s] of token ids, padded at the end with `pad_id`, or a dict of
            int tensors [b, s]:
            `"tokens"` (or `"input_ids"`): The token ids.
            `"token_types"` (or `"token_type_ids"`): Values in [0, `num_token_types`).
            Defaults to 0.
            `"segments"`: For packed texts. Text index of each token, from 1; 0 for padding.
            `"attention_mask"`: 1 for tokens and 0 for padding. Defaults to 0 where the id is
            `pad_id`.
            `"masked_lm_positions"`: [b, P], the positions in [0, s) that get logits. The loss must
            ignore the labels of positions that fill a row. Defaults to all positions.
        training: Boolean. Whether to apply dropout.

    Output shape:
        [b, s, V'], or [b, P, V'] with `"masked_lm_positions"`. V' is the vocabulary size padded to
        a multiple of `model_parallel`.
        With `next_sentence`, a dict of these logits as `"masked_lm"` and of
        `"next_sentence"` [b, 2].

    Raises:
        TypeError: If an argument is unknown or has a wrong type.
        ValueError: If an argument is out of range, does not apply to the network or contradicts
            another one, or a text is longer than the learned positions.

    Example:

    >>> model = MaskedLM(100, hidden_size=16, num_heads=2, num_layers=1, next_sentence=True)
    >>> outputs = model({"tokens": tf.ones((2, 5), "int32")})
    >>> outputs["masked_lm"].shape, outputs["next_sentence"].shape
    (TensorShape([2, 5, 100]), TensorShape([2, 2]))
    """

    input_keys = InputKeys(
        ("tokens",),
        ("attention_mask", "token_types", "segments", "masked_lm_positions"),
        {"input_ids": "tokens", "token_type_ids": "token_types"},
        training_only=("masked_lm_positions",),
    )

    network_class = "MaskedLM"
    default_name = "masked_lm"

    def __init__(self, config: TransformerConfig | int | None = None, **arguments):
        super().__init__(config, **arguments)
        config = self.config
        policy = self.dtype_policy
        self.embedding = self._make_embedding(self.vocab_size, "embedding")
        self.positions = self.token_types = None
        if config.embedding.positions != "rotary":
            self.positions = self._make_positions(config.embedding.max_length, "positions")
        if config.embedding.num_token_types:
            self.token_types = TokenTypeEmbedding(
                config.embedding.num_token_types, dtype=policy, name="token_types"
            )
        self.embedding_norm = self._make_embedding_norm("embedding_norm")
        self.dropout = self._make_embedding_dropout("dropout")
        self.blocks = TransformerEncoder(
            config.num_layers, name="blocks", **self._block_arguments()
        )
        self.head = MaskedLMHead(
            self.vocab_size,
            config.hidden_size,
            config.block.hidden_act,
            config.block.norm_epsilon,
            norm=config.block.norm,
            dense_bias=config.block.use_bias,
            tied=config.head.tied_head,
            dtype=policy,
            name="head",
        )
        self.sentence_head = None
        if config.head.next_sentence:
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
        if self.config.embedding.position_offset and self.pad_id is not None and segments is None:
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
        positions = named.get("masked_lm_positions")
        if positions is not None:
            self._check_masked_positions(positions, ids)
        if self.has_task_head:
            return self.labels(x, ids, mask, training)
        masked = x if positions is None else gather_positions(x, positions)
        logits = self.head(masked, table)
        if self.sentence_head is None:
            return logits
        return {"masked_lm": logits, "next_sentence": self.sentence_head(x)}

    def _check_masked_positions(self, positions, ids):
        if self.has_task_head:
            raise ValueError(
                "The inputs contain 'masked_lm_positions', but the network has a "
                f"{type(self.head).__name__} instead of a head for masked tokens. Remove them."
            )
        if not positions.shape.is_compatible_with([ids.shape[0], None]):
            raise ValueError(
                f"'masked_lm_positions' have shape {tuple(positions.shape)}, but 'tokens' have shape "
                f"{tuple(ids.shape)}. Pass the same number of positions for every row, [b, P]."
            )

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
