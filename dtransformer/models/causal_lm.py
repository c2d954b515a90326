"""Decoder-only Transformer language model."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.base import register
from dtransformer.layers.encoder import TransformerEncoder
from dtransformer.models.base import start_after_padding
from dtransformer.models.generation.continuation import Continuation, as_prompts
from dtransformer.models.generation.generator import Generator, OnTokens
from dtransformer.models.generation.rules import resolve_options
from dtransformer.models.input_keys import InputKeys, get_mask, masked_segments
from dtransformer.models.one_stack import OneStackModel
from dtransformer.transformer_config import TransformerConfig


@register
class CausalLM(OneStackModel):
    """Decoder-only Transformer that returns next-token logits at each position.

    The labels of a text are its tokens shifted by one position. Llama (arXiv 2302.13971) is
    `positions="rotary", norm="rms_norm", gated=True, hidden_act="silu", use_bias=False,
    tied_head=False, embedding_scale=1.0`.

    Reference:
        - [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762)
        - Radford et al., 2018, "Improving language understanding by generative pre-training"
        - Radford et al., 2019, "Language models are unsupervised multitask learners"
        - [Touvron et al., 2023](https://arxiv.org/abs/2302.13971)

    Args:
        config: `TransformerConfig`, or an integer: the size of the vocabulary.
        **arguments: Fields of the config and its groups instead of a `config`, and the arguments
            of `TokenModel`.

    Call arguments:
        inputs: Int tensor [b, s] of token ids, padded at the end with `pad_id`, or a dict of
            int tensors [b, s]:
            `"tokens"` (or `"input_ids"`): The token ids.
            `"segments"`: For packed sequences. Sequence index of each token, from 1; 0 for
            padding.
            `"prefix"`: Required with `prefix=True`. 1 for tokens in the prefix of their
            sequence, else 0.
            `"attention_mask"`: 1 for tokens and 0 for padding. Padding may then be on the
            left and have any id.
        training: Boolean. Whether to apply dropout.

    Output shape:
        [b, s, V'], with V' the vocabulary size padded to a multiple of `model_parallel`.

    Raises:
        TypeError: If an argument is unknown or has a wrong type.
        ValueError: If an argument is out of range, does not apply to the network or contradicts
            another one, or a text is longer than the learned positions.

    Example:

    >>> model = CausalLM(100, hidden_size=16, num_heads=2, num_layers=1)
    >>> model(tf.ones((2, 5), "int32")).shape
    TensorShape([2, 5, 100])
    """

    input_keys = InputKeys(
        ("tokens",), ("attention_mask", "segments", "prefix"), {"input_ids": "tokens"}
    )

    network_class = "CausalLM"
    default_name = "causal_lm"

    def __init__(self, config: TransformerConfig | int | None = None, **arguments):
        super().__init__(config, **arguments)
        config = self.config
        self.start_id = config.start_id
        self.end_id = config.end_id
        # DTensor cannot compile the decoding loop over a cache that has a prefix.
        never = (self.pad_id,)
        self._generator = Generator(self, Continuation, never, loops_on_mesh=False)
        kind = config.embedding.positions
        self.embedding = self._make_embedding(self.vocab_size, "embedding")
        self.positions = None
        if kind not in ("rotary", "alibi"):
            self.positions = self._make_positions(config.embedding.max_length, "positions")
        self.dropout = self._make_embedding_dropout("dropout")
        self.blocks = TransformerEncoder(
            config.num_layers,
            name="blocks",
            causal=True,
            alibi=kind == "alibi",
            **self._block_arguments(),
        )
        self.head = self._make_head()

    def build(self, input_shape: tuple | None = None) -> None:
        if not self.built:
            layers = [self.positions, self.dropout, self.blocks, self.head]
            ids = tf.TensorSpec([1, 1], "int32")
            example = {"tokens": ids, "prefix": ids} if self.config.prefix else ids
            self._build_layers([self.embedding], layers, example)

    def call(self, inputs: tf.Tensor | dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        named = self.named_inputs(inputs)
        ids = named["tokens"]
        segments = named.get("segments")
        prefix = self._prefix_mask(named)
        mask = get_mask(named)
        start = 0
        if self.config.embedding.position_offset and mask is not None and segments is None:
            start = start_after_padding(tf.cast(mask, "int32"), 0)
        x, table = self.embed(ids, start, segments, training)
        segments = masked_segments(segments, mask)
        if segments is None and self.pad_id is not None:
            segments = ids != self.pad_id
        if segments is None and prefix is not None:
            segments = tf.ones_like(ids)
        mask = None if segments is None else Segments(segments, segments, prefix)
        x = self.blocks(x, mask, training=training)
        return self.labels(x, ids, mask, training) if self.has_task_head else self.head(x, table)

    def _prefix_mask(self, inputs):
        """Return a bool mask [b, s], True for prefix tokens, or `None` without prefixes."""
        has_prefix = "prefix" in inputs
        if has_prefix != self.config.prefix:
            raise ValueError(
                f"The network has `prefix={self.config.prefix}`, but its inputs "
                f'{"contain" if has_prefix else "lack"} "prefix". Pass a dict with "tokens" and '
                '"prefix" if and only if the network has `prefix=True`.'
            )
        return tf.cast(inputs["prefix"], "bool") if has_prefix else None

    def embed(
        self,
        ids: tf.Tensor,
        start: int | tf.Tensor = 0,
        segments: tf.Tensor | None = None,
        training: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the first block's input [b, s, h] for ids [b, s], and the table [V', h].

        Args:
            ids: Int tensor [b, s].
            start: Position of the first id: an integer, or an int tensor [b] with one per row.
            segments: Int tensor [b, s] of sequence indices for packed sequences; see `call`.
            training: Boolean. Whether to apply dropout.
        """
        layers = self.embedding, self.positions, self.dropout
        return self._embed_ids(ids, *layers, start=start, segments=segments, training=training)

    def generate(
        self,
        prompts: tf.Tensor | list[list[int]],
        max_new_tokens: int = 64,
        on_tokens: OnTokens | None = None,
        **options,
    ) -> tf.Tensor:
        """Continue prompts with greedy search, beam search or sampling.

        Args:
            prompts: Int tensor [b, s], padded at the end with `pad_id`; a list of lists of ids;
                or a dict of the tensor as `"tokens"` or `"input_ids"` and an `"attention_mask"`
                with 0 for padding on either side.
            max_new_tokens: Integer. Maximum number of tokens per continuation, including the end
                token.
            on_tokens: Callable `on_tokens(index, ids)` for streaming. It receives the index of a
                result and its new ids as soon as they are decoded, including the end token.
                Every rank calls its callback. Not supported with beams. On one device, each
                token costs a call from TensorFlow to Python. Meshes and pipelines call a
                function per token anyway.
            **options: Fields of `GenerationOptions`. Defaults to greedy search with the
                generation rules of published weights.

        Returns:
            An int32 tensor [b·n, t] with t ≤ `max_new_tokens` and n = `num_return_sequences`.
            The n continuations of a prompt are consecutive rows. Each ends with its end token,
            if it has one, and is padded with `pad_id`, or with an end token if the vocabulary
            has no padding.

        Raises:
            TypeError: If an option is unknown.
            ValueError: If an option is out of range, a prompt is empty, beams are combined with
                a temperature or `on_tokens`, the learned positions are too few, or the network
                has a task head.
        """
        if self.has_task_head:
            raise ValueError(
                f"`generate` needs a language model head, but the network has a "
                f"{type(self.head).__name__}, which returns labels."
            )
        check_int("max_new_tokens", max_new_tokens)
        self.build()
        source = as_prompts(
            self._remove_padding(prompts), self.vocab_size, self.pad_id, self.end_id
        )
        options = resolve_options(self, options, source.shape[1])
        self.check_positions(source.shape[1] + max_new_tokens - 1)
        return self._generator(tf.constant(source), max_new_tokens, options, on_tokens)

    def _remove_padding(self, prompts):
        """Return the prompts without the padding in their attention mask."""
        if not isinstance(prompts, Mapping):
            return prompts
        named = self.named_inputs(prompts)
        if unexpected := named.keys() - {"tokens", "attention_mask"}:
            raise ValueError(
                f"`generate` accepts 'tokens' and 'attention_mask', got {sorted(unexpected)[0]!r}."
            )
        mask = get_mask(named)
        ids = np.asarray(named["tokens"])
        if mask is None:
            return ids
        return [row[is_token] for row, is_token in zip(ids, mask.numpy(), strict=True)]
