"""A decoder-only Transformer: a language model."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from dtransformer.block_forms import check_pattern
from dtransformer.errors import check_int
from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.base import register
from dtransformer.layers.encoder import TransformerEncoder
from dtransformer.models.base import check_ids, completed, start_after_padding
from dtransformer.models.generation.continuation import Continuation, as_prompts
from dtransformer.models.generation.generator import Generator, OnTokens
from dtransformer.models.generation.rules import options_of
from dtransformer.models.input_keys import InputKeys, mask_of, segments_of
from dtransformer.models.one_stack import OneStackModel
from dtransformer.parallel.config.config import MoEConfig

_POSITIONS = "learned", "sinusoidal", "rotary", "alibi"


@register
class CausalLM(OneStackModel):
    """Give each position of a text the logits of its next token.

    The labels of a text are the text itself, one token further.

    Reference: Radford et al., 2018, "Improving language understanding by generative
    pre-training", and 2019, "Language models are unsupervised multitask learners";
    Vaswani et al., 2017, "Attention is all you need"; Touvron et al., 2023, "LLaMA", arXiv
    2302.13971, which is `positions="rotary", norm="rms_norm", gated=True, hidden_act="silu",
    use_bias=False, tied_head=False, embedding_scale=1.0`.

    Args:
        vocab_size: number V of entries of the vocabulary.
        hidden_size: size h of embeddings and blocks.
        num_heads: number of attention heads; divides h.
        ffn_hidden_size: inner size of the feed-forward layers; 4·h by default.
        num_layers: number of blocks.
        dropout_rate: dropout of embeddings and of each sublayer's output, in [0, 1).
        attention_dropout_rate: dropout of attention probabilities; `dropout_rate` by default.
        embedding_dropout_rate: dropout of embeddings; `dropout_rate` by default.
        hidden_act: a Keras activation's name, or a callable.
        positions: `"learned"` up to `max_length`, `"sinusoidal"`, or `"rotary"` or `"alibi"` in each
            block.
        max_length: number of learned positions, in tokens.
        position_offset: number of the first position, see `PositionEmbedding`; where it is more than
            0, positions begin at the first token that an `"attention_mask"` has.
        tied_head: whether the head's kernel is the embedding's table.
        head_bias: whether the head has a bias.
        post_layernorm_residual: whether blocks normalize after the residual.
        pad_id, start_id, end_id: ids of the padding, start and end tokens; None for none.
        lambda_func: places each block on a pipeline stage.
        embedding_scale: what embeddings are multiplied with; √h by default.
        norm, norm_epsilon, gated, use_bias: as `TransformerEncoderLayer`'s.
        num_kv_heads, head_dim, qkv_bias, query_scale, soft_cap, qk_norm, qk_norm_epsilon,
            qk_norm_after_rotary, sinks: as `MultiHeadAttention`'s.
        rotary_base, rotary_fraction, rotary_scaling: of rotary positions; see
            `rotary_frequencies`.
        norm_placement, residual_scale: as `TransformerEncoderLayer`'s.
        block_pattern: what differs from block to block: their windows, rotary positions and
            experts; see `block_forms`. None for nothing.
        latent: sizes of attention through latents, a dict of the fields of `block_forms.Latent`,
            where `head_dim` is the size of queries and keys; None for attention of plain projections.
        logits_scale, logits_soft_cap: of the head; see `VocabHead`.
        window: how many positions each may attend to, its own and those before it; None for all.
        implementation: of attention: `"auto"`, `"reference"`, `"blockwise"` or `"cudnn"`.
        prefix: whether each text has a prefix, all of which all of its tokens may attend to (Raffel
            et al., 2020, arXiv 1910.10683, §3.2.1): what `"prefix"` tells in training, and in
            `generate` the prompt.
        moe_config: a `MoEConfig`: blocks have a `MoE` of it in place of the feed-forward layer; None
            for none.
        moe_every: which blocks have it: every so many. A `lambda_func` may choose others.

    Call arguments:
        inputs: int tensor [b, s], padded at the end with `pad_id`. Or, where several sequences are
            packed into a row, a dict of `"tokens"` and `"segments"`, int tensors [b, s]: the
            number of each token's sequence, from 1, and 0 for padding. With `prefix` a dict that
            has `"prefix"`, too, [b, s]: 1 where a token is of the prefix of its sequence. A dict
            may have `"attention_mask"` [b, s]: 1 where there is a token and 0 for padding, which
            may be on the left then, whatever its id is. `"input_ids"` are the tokens.
        training: whether dropout applies.

    Output shape:
        [b, s, V'], V' being the vocabulary padded to a multiple of model_parallel.

    Raises:
        TypeError: a size is not an int, or a rate is not a number.
        ValueError: a size or a rate is out of range, `num_heads` does not divide
            `hidden_size`, `positions` is unknown, a text is longer than the learned
            positions, or another argument does not fit; see the layers.

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
        given = given_arguments(locals())
        super().__init__(name=name, **kwargs)
        self.arguments = completed(given)
        if positions not in _POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(_POSITIONS)}, got {positions!r}")
        windows = [window, *(one.get("window") for one in check_pattern(block_pattern))]
        if prefix and any(windows):
            raise ValueError(
                f"prefix=True does not work with window={max(filter(None, windows))}, which would hide "
                "the prefix from what comes later: leave one of them out"
            )
        check_ids(vocab_size, pad_id=pad_id, start_id=start_id, end_id=end_id)
        self.pad_id, self.start_id, self.end_id = pad_id, start_id, end_id
        self.vocab_size = vocab_size
        # DTensor does not compile the loop of a cache with a prefix.
        never = (pad_id,)
        self._generator = Generator(self, Continuation, never, loops_on_mesh=False)
        self._add_layers(lambda_func)

    def _add_layers(self, lambda_func):
        options, kind = self.arguments, self.arguments["positions"]
        self.embedding = self._make_embedding(self.vocab_size, "embedding")
        self.positions = None
        length = check_int("max_length", options["max_length"])
        if kind not in ("rotary", "alibi"):
            self.positions = self._make_positions(length, "positions")
        self.dropout = self._make_embedding_dropout("dropout")
        own = {"name": "blocks", "causal": True, "alibi": kind == "alibi"}
        arguments = self._block_arguments(lambda_func)
        self.blocks = TransformerEncoder(options["num_layers"], **own, **arguments)
        self.head = self._make_head()

    def build(self, input_shape: tuple | None = None) -> None:
        if not self.built:
            others = [self.positions, self.dropout, self.blocks, self.head]
            ids = tf.TensorSpec([1, 1], "int32")
            example = {"tokens": ids, "prefix": ids} if self.arguments["prefix"] else ids
            self._build_layers([self.embedding], others, example)

    def call(self, inputs: tf.Tensor | dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        named = self.named_inputs(inputs)
        ids, segments, prefix = named["tokens"], named.get("segments"), self._prefix_of(named)
        mask, start = mask_of(named), 0
        if self.arguments["position_offset"] and mask is not None and segments is None:
            start = start_after_padding(tf.cast(mask, "int32"), 0)
        x, table = self.embed(ids, start, segments, training)
        segments = segments_of(segments, mask)
        if segments is None and self.pad_id is not None:
            segments = ids != self.pad_id
        if segments is None and prefix is not None:
            segments = tf.ones_like(ids)
        mask = None if segments is None else Segments(segments, segments, prefix)
        x = self.blocks(x, mask, training=training)
        return self.labels(x, ids, mask, training) if self.has_task_head else self.head(x, table)

    def _prefix_of(self, inputs):
        """Return which tokens are of a prefix, bool [b, s]; None where there is none."""
        is_told = "prefix" in inputs
        if is_told != self.arguments["prefix"]:
            raise ValueError(
                f"the network was made with prefix={self.arguments['prefix']}, and its inputs "
                f'{"have" if is_told else "lack"} "prefix": give a dict of "tokens" and '
                '"prefix" to a network with prefix=True, and to no other'
            )
        return tf.cast(inputs["prefix"], "bool") if is_told else None

    def embed(
        self,
        ids: tf.Tensor,
        start: int | tf.Tensor = 0,
        segments: tf.Tensor | None = None,
        training: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the first block's input [b, s, h] of ids [b, s], and the table [V', h].

        Args:
            ids: int tensor [b, s].
            start: position of the first id, or of each row's.
            segments: int tensor [b, s], where sequences are packed; see `call`.
            training: whether dropout applies.
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
        """Continue texts, by greedy or beam search, or by sampling.

        Args:
            prompts: int tensor [b, s], padded at the end with `pad_id`; or a list of lists of ids;
                or a dict of such a tensor, `"tokens"` or `"input_ids"`, and its
                `"attention_mask"`, 0 for padding on either side.
            max_new_tokens: most tokens of a continuation, the end token included.
            on_tokens: called as `on_tokens(number, ids)` as soon as the text of a number has got
                other ids, its end token included; not where there are beams. On one device that is
                a call from TensorFlow to Python a token; elsewhere each token is a call of its own
                anyway. Every rank calls its own.
            **options: those of `GenerationOptions`, by their names; greedy search by default, with
                the rules that came with published weights.

        Returns:
            An int32 tensor [b·n, t ≤ max_new_tokens] of n = `num_return_sequences` continuations of
            each prompt, one after the other, with end tokens, padded with `pad_id`; with an end
            token where there is none.

        Raises:
            TypeError: there is no such option.
            ValueError: an option is out of range, a prompt is empty, beams are asked for together
                with a temperature or `on_tokens`, there are not enough learned positions, or the
                network has a task's head.
        """
        if self.has_task_head:
            raise ValueError(f"a {type(self.head).__name__} gives labels: generate needs tokens")
        check_int("max_new_tokens", max_new_tokens)
        self.build()
        source = as_prompts(self._rows_of(prompts), self.vocab_size, self.pad_id, self.end_id)
        options = options_of(self, options, source.shape[1])
        self.check_positions(source.shape[1] + max_new_tokens - 1)
        return self._generator(tf.constant(source), max_new_tokens, options, on_tokens)

    def _rows_of(self, prompts):
        """Return prompts, without what their mask says is padding."""
        if not isinstance(prompts, Mapping):
            return prompts
        named = self.named_inputs(prompts)
        if others := named.keys() - {"tokens", "attention_mask"}:
            raise ValueError(
                f"generate takes tokens and an attention_mask, not {sorted(others)[0]!r}"
            )
        mask, ids = mask_of(named), np.asarray(named["tokens"])
        return (
            ids if mask is None else [row[own] for row, own in zip(ids, mask.numpy(), strict=True)]
        )
