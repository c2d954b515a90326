"""Base class of encoder–decoder networks."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.decoder import DecoderCache
from dtransformer.layers.position_bias import distance_ranges
from dtransformer.layers.transformer import Transformer
from dtransformer.models.base import TokenModel, start_after_padding
from dtransformer.models.generation.continuation import Generation
from dtransformer.models.generation.generator import Generator, OnTokens
from dtransformer.models.generation.rules import resolve_options
from dtransformer.models.input_keys import InputKeys, get_mask, masked_segments
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape
from dtransformer.transformer_config import TRANSLATION, TransformerConfig

SIDES = "source", "target"
_RELATIVE = "relative"


class EncoderDecoderModel(TokenModel):
    """Encoder of a source sequence and decoder of a target sequence.

    Call arguments:
        inputs: Dict of int tensors:
            `"source"` (or `"input_ids"`): [b, s], source ids, padded with `pad_id`.
            `"target"` (or `"decoder_input_ids"`): [b, t], target ids that begin with the
            start token, padded with `pad_id`.
            `"source_segments"` and `"target_segments"`: [b, s] and [b, t], for packed pairs
            (`TranslationBatches(packed_length=…)`). Pair index of each token, from 1; 0 for
            padding.
            `"attention_mask"` and `"decoder_attention_mask"`: [b, s] and [b, t], 1 for
            tokens and 0 for padding. Defaults to 0 where the id is `pad_id`.
        training: Boolean. Whether to apply dropout.

    Output shape:
        [b, t, V'], with V' the target vocabulary size padded to a multiple of
        `model_parallel`.
    """

    input_keys = InputKeys(
        SIDES,
        ("source_segments", "target_segments", "attention_mask", "decoder_attention_mask"),
        {"input_ids": "source", "decoder_input_ids": "target"},
    )
    # Whether a mesh decodes all tokens in one compiled function; see `loops.compiled`.
    loops_on_mesh = False

    def __init__(self, config: TransformerConfig | int | None = None, **arguments):
        super().__init__(config, **arguments)
        config = self.config
        self.start_id = config.start_id
        self.end_id = config.end_id
        never = self.pad_id, self.start_id
        self._generator = Generator(self, Generation, never, loops_on_mesh=self.loops_on_mesh)
        self._add_embeddings()
        self.transformer = Transformer(
            config.encoder_layers,
            config.decoder_layers,
            name="transformer",
            causal=True,
            **self._relative_positions(),
            **self._block_arguments(),
        )
        self.head = self._make_head()

    @property
    def _max_lengths(self):
        """Number of learned positions of each side."""
        options = self.config.embedding
        target = options.max_length
        is_translation = self.network_class == TRANSLATION
        return dict(zip(SIDES, (options.max_source_length if is_translation else target, target)))

    def _add_embeddings(self):
        options = self.config.embedding
        source_size = options.source_vocab_size or self.vocab_size
        self.source_embedding = self._make_embedding(source_size, "source_embedding")
        self.target_embedding = self.source_embedding
        if self.network_class == TRANSLATION and not options.shared_embeddings:
            self.target_embedding = self._make_embedding(self.vocab_size, "target_embedding")
        self.source_positions = self.target_positions = self.source_norm = self.target_norm = None
        if options.positions != _RELATIVE:
            for side in SIDES:
                positions = self._make_positions(self._max_lengths[side], f"{side}_positions")
                setattr(self, f"{side}_positions", positions)
        if options.embedding_norm:
            for side in SIDES:
                setattr(self, f"{side}_norm", self._make_embedding_norm(f"{side}_norm"))
        self.source_dropout, self.target_dropout = (
            self._make_embedding_dropout(f"{side}_dropout") for side in SIDES
        )

    def _relative_positions(self):
        """Return the stacks' arguments for relative positions; empty for other positions."""
        options = self.config.embedding
        if options.positions != _RELATIVE:
            return {}
        names = ("relative_ranges", "relative_max_distance")
        arguments = {name: getattr(options, name) for name in names}
        distance_ranges(*arguments.values())  # raises an error for invalid values
        return arguments

    def build(self, input_shape: tuple | None = None) -> None:
        if self.built:
            return
        embeddings = [self.source_embedding, self.target_embedding]
        layers = [
            *(self.source_positions, self.source_norm, self.source_dropout),
            *(self.target_positions, self.target_norm, self.target_dropout),
            *(self.transformer, self.head),
        ]
        ids = tf.TensorSpec([1, 1], "int32")
        self._build_layers(embeddings, layers, {"source": ids, "target": ids})
        if self.head.use_bias and not self.config.head.trains_head_bias:
            self.head.bias.trainable = False

    def call(self, inputs: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        inputs = self.named_inputs(inputs)
        source_segments, segments = (
            inputs.get(f"{side}_segments") for side in ("source", "target")
        )
        if (source_segments is None) != (segments is None):
            raise ValueError(
                "Packed inputs need both 'source_segments' and 'target_segments', got "
                f"{', '.join(sorted(inputs))}."
            )
        mask = get_mask(inputs)
        memory, memory_mask = self.encode(inputs["source"], source_segments, mask, training)
        target = inputs["target"]
        start = self._start(target, segments)
        x, table = self._embed_target(target, start=start, segments=segments, training=training)
        target_segments = masked_segments(segments, get_mask(inputs, "decoder_attention_mask"))
        target_segments = self._is_token(target) if target_segments is None else target_segments
        decoder_mask = Segments(target_segments, target_segments)
        if segments is not None:
            memory_mask = Segments(segments, masked_segments(source_segments, mask))
        x = self.transformer.decoder(x, decoder_mask, memory, memory_mask, training=training)
        return self._logits(x, table)

    def _logits(self, x, table):
        if self.config.head.scales_output:
            x *= tf.cast(self.config.hidden_size**-0.5, x.dtype)
        return self.head(x, table)

    def _is_token(self, target):
        """Return a bool mask [b, t] of tokens. The start token counts even if it is the padding."""
        is_token = target != self.pad_id
        if self.start_id == self.pad_id:
            is_token |= tf.range(static_or_dynamic_shape(target)[1]) == 0
        return is_token

    def encode(
        self,
        source: tf.Tensor,
        segments: tf.Tensor | None = None,
        mask: tf.Tensor | None = None,
        training: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Encode source ids.

        Args:
            source: Int tensor [b, s], padded with `pad_id`.
            segments: Int tensor [b, s] of pair indices for packed pairs; see `call`.
            mask: Bool tensor [b, s], True at tokens. Defaults to `source != pad_id`.
            training: Boolean. Whether to apply dropout.

        Returns:
            A `(memory, mask)` tuple: encoder outputs [b, s, h] for the decoder to attend to,
            and a bool mask [b, s] of its tokens.
        """
        segments = None if segments is None else masked_segments(segments, mask)
        mask = source != self.pad_id if mask is None else mask
        x, _ = self._embed_ids(
            source,
            self.source_embedding,
            self.source_positions,
            self.source_dropout,
            segments=segments,
            norm=self.source_norm,
            start=self._start(source, segments),
            training=training,
        )
        attention_mask = mask if segments is None else Segments(segments, segments)
        return self.transformer.encoder(x, attention_mask, training=training), mask

    def _start(self, ids, segments):
        """Return the position of the first id, or one per row if padding may precede the tokens."""
        is_counted = self.config.embedding.positions_after_padding and segments is None
        return start_after_padding(ids, self.pad_id) if is_counted else 0

    def _embed_target(self, target, **options):
        layers = self.target_embedding, self.target_positions, self.target_dropout
        return self._embed_ids(target, *layers, norm=self.target_norm, **options)

    def init_cache(
        self, memory: tf.Tensor, max_length: int | tf.Tensor, num_hypotheses: int = 1
    ) -> list[DecoderCache]:
        """Return the decoder's empty cache for targets of up to `max_length` tokens.

        Args:
            memory: Float tensor [b, s, h], encoder outputs.
            max_length: Integer or int scalar. Maximum number of target tokens.
            num_hypotheses: Integer. Number k of hypotheses per source.

        Returns:
            A list with a `DecoderCache` per block.
        """
        return self.transformer.decoder.init_cache(memory, max_length, num_hypotheses)

    def decode_step(
        self,
        tokens: tf.Tensor,
        position: tf.Tensor,
        cache: list[DecoderCache],
        memory_mask: tf.Tensor,
        entries_mask: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, list[DecoderCache]]:
        """Return logits of the tokens that follow `tokens`.

        Args:
            tokens: Int tensor [b·k], the last tokens of k hypotheses per source.
            position: Int scalar. Position of `tokens`.
            cache: Cache from `init_cache` or from the previous step.
            memory_mask: Bool tensor [b, s], True at source tokens.
            entries_mask: Bool tensor [b, k, max_length·k] of the cache entries that each
                hypothesis attends to; see `MultiHeadAttention.init_cache`. `None` if k is 1.

        Returns:
            A `(logits, cache)` tuple: float32 logits [b·k, V] and the cache for the next step.
        """
        x, table = self._embed_target(tokens[:, None], start=position)
        x, cache = self.transformer.decoder.decode_step(
            x, cache, entries_mask, memory_mask=memory_mask
        )
        logits = constrain(self._logits(x, table), ("batch", None, None))[:, 0, : self.vocab_size]
        return tf.cast(logits, "float32"), cache

    def generate(
        self,
        source: tf.Tensor,
        max_length: int | None = None,
        on_tokens: OnTokens | None = None,
        **options,
    ) -> tf.Tensor:
        """Generate targets with greedy search, beam search or sampling.

        Args:
            source: Int tensor [b, s], padded with `pad_id`, or a dict of the tensor as
                `"source"` or `"input_ids"` and an `"attention_mask"`.
            max_length: Integer. Maximum number of tokens per target, including the end token.
                Defaults to 2·s + 10, limited by learned positions.
            on_tokens: Callable `on_tokens(index, ids)` for streaming; see `CausalLM.generate`.
                On a mesh, streaming calls a function per token, which takes five times as long
                as one call for all tokens.
            **options: Fields of `GenerationOptions`. Defaults to greedy search with the
                generation rules of published weights. On a mesh, `repetition_penalty` and
                `no_repeat_ngram_size` also call a function per token.

        Returns:
            An int32 tensor [b·n, t] with t ≤ `max_length` and n = `num_return_sequences`. The n
            targets of a source are consecutive rows. Each ends with its end token, if it has
            one, and is padded with `pad_id`.

        Raises:
            TypeError: If an option is unknown.
            ValueError: If an option is out of range, beams are combined with a temperature or
                `on_tokens`, or the learned positions are too few.
        """
        options = resolve_options(self, options, 1)
        if max_length is not None:
            check_int("max_length", max_length)
        self.build()
        source = tf.convert_to_tensor(self._source_ids(source), dtype="int32")
        for side, length in zip(SIDES, (source.shape[1], max_length)):
            name = f"max_{side}_length"
            self.check_positions(length or 0, name if name in self.arguments else "max_length")
        if max_length is None:
            max_length = 2 * int(tf.shape(source)[1]) + 10
            if self.config.embedding.positions == "learned":
                max_length = min(max_length, self._max_lengths["target"])
        return self._generator(source, max_length, options, on_tokens)

    def _source_ids(self, source):
        """Return the source ids. A mask must mark exactly the padding tokens."""
        if not isinstance(source, Mapping):
            return source
        named = dataclasses.replace(self.input_keys, required=("source",)).to_dict(
            source, "generate"
        )
        mask = get_mask(named)
        ids = tf.convert_to_tensor(named["source"])
        if mask is not None and not np.array_equal(mask, ids != self.pad_id):
            raise ValueError(
                f"`attention_mask` must be 0 where the source has `pad_id={self.pad_id}`, and 1 "
                "elsewhere. Pad sources with that id."
            )
        return ids

    def stream_shapes(
        self, input_shapes: dict[str, tuple[int, int]]
    ) -> dict[str, tuple[int, int, int]]:
        """Return the shape of the residual stream in each stack of blocks.

        Args:
            input_shapes: Dict with the shapes of `call`'s inputs.

        Returns:
            A dict from the stacks' names, `"encoder"` and `"decoder"`, to shapes (b, s, h).
        """
        h = self.config.hidden_size
        input_shapes = self.named_inputs(input_shapes)
        return {"encoder": (*input_shapes["source"], h), "decoder": (*input_shapes["target"], h)}
