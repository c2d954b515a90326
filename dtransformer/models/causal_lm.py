"""Decoder-only Transformer language model."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from dtransformer.block_forms import check_pattern
from dtransformer.errors import check_int
from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.base import register
from dtransformer.layers.encoder import TransformerEncoder
from dtransformer.models.base import check_ids, complete_arguments, start_after_padding
from dtransformer.models.generation.continuation import Continuation, as_prompts
from dtransformer.models.generation.generator import Generator, OnTokens
from dtransformer.models.generation.rules import resolve_options
from dtransformer.models.input_keys import InputKeys, get_mask, masked_segments
from dtransformer.models.one_stack import OneStackModel
from dtransformer.parallel.config.config import MoEConfig

_POSITIONS = "learned", "sinusoidal", "rotary", "alibi"


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
        vocab_size: Integer. Size V of the vocabulary.
        hidden_size: Integer. Size h of embeddings and blocks.
        num_heads: Integer. Number of attention heads. Must divide `hidden_size`, unless
            `head_dim` is set.
        ffn_hidden_size: Integer. Inner size of the feed-forward layers. Defaults to 4·h.
        num_layers: Integer. Number of blocks.
        dropout_rate: Float in [0, 1). Dropout rate of embeddings and sublayer outputs.
        attention_dropout_rate: Float in [0, 1). Dropout rate of attention probabilities.
            Defaults to `dropout_rate`.
        embedding_dropout_rate: Float in [0, 1). Dropout rate of embeddings. Defaults to
            `dropout_rate`.
        hidden_act: Name of a Keras activation, or a callable.
        positions: `"learned"`, `"sinusoidal"`, `"rotary"` or `"alibi"`. Learned positions
            are limited to `max_length`. The last two act inside each block.
        max_length: Integer. Number of learned positions, in tokens.
        position_offset: Integer. Index of the first position; see `PositionEmbedding`. If
            positive and the inputs have an `"attention_mask"`, positions start at the first
            token in the mask.
        tied_head: Boolean. Whether the embedding table is also the head's kernel.
        head_bias: Boolean. Whether the head has a bias.
        post_layernorm_residual: Boolean. Whether blocks normalize after the residual
            addition.
        pad_id, start_id, end_id: Integers. Ids of the padding, start and end tokens. `None`
            if the vocabulary has no such token.
        lambda_func: Callable that assigns blocks to pipeline stages.
        embedding_scale: Float. Factor on embeddings. Defaults to √h.
        norm, norm_epsilon, gated, use_bias: See `TransformerEncoderLayer`.
        num_kv_heads, head_dim, qkv_bias, query_scale, soft_cap, qk_norm, qk_norm_epsilon,
            qk_norm_after_rotary, sinks: See `MultiHeadAttention`.
        rotary_base, rotary_fraction, rotary_scaling: See `rotary_frequencies`.
        norm_placement, residual_scale: See `TransformerEncoderLayer`.
        block_pattern: List of dicts with the arguments that differ between blocks, such as
            windows, rotary positions and experts; see `block_forms`. `None` if all blocks
            are equal.
        latent: Dict of the fields of `block_forms.Latent` for multi-head latent attention.
            `head_dim` is then the size of queries and keys. `None` disables latents.
        logits_scale, logits_soft_cap: See `VocabHead`.
        window: Integer. Number of positions that each position attends to, including
            itself and the preceding ones. `None` disables the limit.
        implementation: Attention implementation: `"auto"`, `"reference"`, `"blockwise"` or
            `"cudnn"`.
        prefix: Boolean. Whether each text starts with a prefix that all of its tokens
            attend to in both directions (Raffel et al., 2020, arXiv 1910.10683, §3.2.1). In
            training, the input `"prefix"` marks it. In `generate`, it is the prompt.
        moe_config: `MoEConfig` or dict of its fields. Selected blocks have a mixture of
            experts (`MoE`) instead of a feed-forward layer. `None` disables experts.
        moe_every: Integer. Every `moe_every`-th block has experts. A `lambda_func` may
            choose other blocks.

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
        TypeError: If a size is not an integer, or a rate is not a number.
        ValueError: If a size or a rate is out of range, `num_heads` does not divide
            `hidden_size`, `positions` is unknown, a text is longer than the learned
            positions, or a layer rejects an argument.

    Example:

    >>> model = CausalLM(100, hidden_size=16, num_heads=2, num_layers=1)
    >>> model(tf.ones((2, 5), "int32")).shape
    TensorShape([2, 5, 100])
    """

    input_keys = InputKeys(
        ("tokens",), ("attention_mask", "segments", "prefix"), {"input_ids": "tokens"}
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
        positions: str = "learned",
        max_length: int = 1024,
        tied_head: bool = True,
        head_bias: bool = False,
        post_layernorm_residual: bool = False,
        pad_id: int | None = 0,
        start_id: int | None = 2,
        end_id: int | None = 3,
        lambda_func: Callable | None = None,
        embedding_scale: float | None = None,
        norm: str = "layer_norm",
        norm_epsilon: float | None = None,
        gated: bool = False,
        use_bias: bool = True,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool | None = None,
        rotary_base: float = 10000.0,
        rotary_fraction: float = 1.0,
        rotary_scaling: dict | None = None,
        window: int | None = None,
        query_scale: float | None = None,
        soft_cap: float | None = None,
        qk_norm: str | None = None,
        qk_norm_epsilon: float | None = None,
        implementation: str = "auto",
        prefix: bool = False,
        moe_config: MoEConfig | dict | None = None,
        moe_every: int = 1,
        norm_placement: str | None = None,
        residual_scale: float = 1.0,
        block_pattern: Sequence[Mapping] | None = None,
        logits_scale: float = 1.0,
        logits_soft_cap: float | None = None,
        sinks: bool = False,
        latent: Mapping | None = None,
        qk_norm_after_rotary: bool = False,
        position_offset: int = 0,
        name: str = "causal_lm",
        **kwargs,
    ):
        arguments = given_arguments(locals())
        super().__init__(name=name, **kwargs)
        self.arguments = complete_arguments(arguments)
        if positions not in _POSITIONS:
            raise ValueError(
                f"`positions` must be one of {', '.join(_POSITIONS)}, got {positions!r}."
            )
        windows = [window, *(block.get("window") for block in check_pattern(block_pattern))]
        if prefix and any(windows):
            raise ValueError(
                f"`prefix=True` does not work with `window={max(filter(None, windows))}`: the window "
                "would hide the prefix from later tokens. Remove one of them."
            )
        check_ids(vocab_size, pad_id=pad_id, start_id=start_id, end_id=end_id)
        self.pad_id = pad_id
        self.start_id = start_id
        self.end_id = end_id
        self.vocab_size = vocab_size
        # DTensor cannot compile the decoding loop over a cache that has a prefix.
        never = (pad_id,)
        self._generator = Generator(self, Continuation, never, loops_on_mesh=False)
        self._add_layers(lambda_func)

    def _add_layers(self, lambda_func):
        options = self.arguments
        kind = self.arguments["positions"]
        self.embedding = self._make_embedding(self.vocab_size, "embedding")
        self.positions = None
        length = check_int("max_length", options["max_length"])
        if kind not in ("rotary", "alibi"):
            self.positions = self._make_positions(length, "positions")
        self.dropout = self._make_embedding_dropout("dropout")
        stack_options = {"name": "blocks", "causal": True, "alibi": kind == "alibi"}
        arguments = self._block_arguments(lambda_func)
        self.blocks = TransformerEncoder(options["num_layers"], **stack_options, **arguments)
        self.head = self._make_head()

    def build(self, input_shape: tuple | None = None) -> None:
        if not self.built:
            layers = [self.positions, self.dropout, self.blocks, self.head]
            ids = tf.TensorSpec([1, 1], "int32")
            example = {"tokens": ids, "prefix": ids} if self.arguments["prefix"] else ids
            self._build_layers([self.embedding], layers, example)

    def call(self, inputs: tf.Tensor | dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        named = self.named_inputs(inputs)
        ids = named["tokens"]
        segments = named.get("segments")
        prefix = self._prefix_mask(named)
        mask = get_mask(named)
        start = 0
        if self.arguments["position_offset"] and mask is not None and segments is None:
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
        if has_prefix != self.arguments["prefix"]:
            raise ValueError(
                f"The network has `prefix={self.arguments['prefix']}`, but its inputs "
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
