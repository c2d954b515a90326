"""Base of networks of an encoder and a decoder, whatever their arguments are called."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.position_bias import distance_ranges
from dtransformer.layers.transformer import Transformer
from dtransformer.models.base import TokenModel, check_ids, start_after_padding
from dtransformer.models.generation.continuation import Generation
from dtransformer.models.generation.generator import Generator, OnTokens
from dtransformer.models.generation.rules import options_of
from dtransformer.models.input_keys import InputKeys, mask_of, segments_of
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

SIDES = "source", "target"
_RELATIVE = "relative"


class EncoderDecoderModel(TokenModel):
    """An encoder of a source and a decoder of a target.

    Call arguments:
        inputs: a dict of int tensors `"source"` [b, s] and `"target"` [b, t], the target so far,
            from the start token on; padded with `pad_id`. Where several pairs are packed into a
            row (`TranslationBatches(packed_length=…)`), also `"source_segments"` and
            `"target_segments"`, int tensors of the same shapes: the number of each token's pair,
            from 1, and 0 for padding. `"attention_mask"` and `"decoder_attention_mask"` are 1
            where there is a token, for other padding; `"input_ids"` and `"decoder_input_ids"` are
            source and target.
        training: whether dropout applies.

    Output shape:
        [b, t, V'], V' being the target's vocabulary padded to a multiple of model_parallel.
    """

    input_keys = InputKeys(
        SIDES,
        ("source_segments", "target_segments", "attention_mask", "decoder_attention_mask"),
        {"input_ids": "source", "decoder_input_ids": "target"},
    )
    # Whether all tokens are one function on a mesh; see `decoding.compiled`.
    loops_on_mesh = False

    def _set_up(self, lambda_func):
        """Make the layers, of the arguments; those of one side have its name where sides differ."""
        options = self.arguments
        of_side = lambda name, usual: options.get(name, options.get(usual))
        source_size, self.vocab_size = (of_side(f"{x}_vocab_size", "vocab_size") for x in SIDES)
        self._max_lengths = {x: of_side(f"max_{x}_length", "max_length") for x in SIDES}
        self.pad_id, self.start_id, self.end_id = (
            options[f"{name}_id"] for name in ("pad", "start", "end")
        )
        check_ids(min(source_size, self.vocab_size), pad_id=self.pad_id)
        check_ids(self.vocab_size, start_id=self.start_id, end_id=self.end_id)
        never = self.pad_id, self.start_id
        self._generator = Generator(self, Generation, never, loops_on_mesh=self.loops_on_mesh)
        self._add_embeddings(source_size, options.get("shared_embeddings", True))
        self.transformer = Transformer(
            options["encoder_layers"],
            options["decoder_layers"],
            name="transformer",
            causal=True,
            **self._relative_positions(),
            **self._block_arguments(lambda_func),
        )
        self.head = self._make_head()

    def _add_embeddings(self, source_vocab_size, shared):
        options = self.arguments
        self.source_embedding = self._make_embedding(source_vocab_size, "source_embedding")
        self.target_embedding = self.source_embedding
        if not shared:
            self.target_embedding = self._make_embedding(self.vocab_size, "target_embedding")
        self.source_positions = self.target_positions = self.source_norm = self.target_norm = None
        if options["positions"] != _RELATIVE:
            for side in SIDES:
                made = self._make_positions(self._max_lengths[side], f"{side}_positions")
                setattr(self, f"{side}_positions", made)
        if options.get("embedding_norm"):
            for side in SIDES:
                setattr(self, f"{side}_norm", self._make_embedding_norm(f"{side}_norm"))
        self.source_dropout, self.target_dropout = (
            self._make_embedding_dropout(f"{side}_dropout") for side in SIDES
        )

    def _relative_positions(self):
        """Return what the stacks are told of positions, where embeddings have none."""
        if self.arguments["positions"] != _RELATIVE:
            return {}
        names = ("relative_ranges", "relative_max_distance")
        found = {name: self.arguments[name] for name in names}
        distance_ranges(*found.values())  # which checks them
        return found

    def build(self, input_shape: tuple | None = None) -> None:
        if self.built:
            return
        embeddings = [self.source_embedding, self.target_embedding]
        others = [
            *(self.source_positions, self.source_norm, self.source_dropout),
            *(self.target_positions, self.target_norm, self.target_dropout),
            *(self.transformer, self.head),
        ]
        ids = tf.TensorSpec([1, 1], "int32")
        self._build_layers(embeddings, others, {"source": ids, "target": ids})
        if self.head.use_bias and not self.arguments.get("trains_head_bias", True):
            self.head.bias.trainable = False

    def call(self, inputs: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        inputs = self.named_inputs(inputs)
        source_segments, segments = (
            inputs.get(f"{side}_segments") for side in ("source", "target")
        )
        if (source_segments is None) != (segments is None):
            raise ValueError(
                "packed inputs have 'source_segments' and 'target_segments'; got "
                f"{', '.join(sorted(inputs))}"
            )
        mask = mask_of(inputs)
        memory, memory_mask = self.encode(inputs["source"], source_segments, mask, training)
        target = inputs["target"]
        start = self._start(target, segments)
        x, table = self._embed_target(target, start=start, segments=segments, training=training)
        own = segments_of(segments, mask_of(inputs, "decoder_attention_mask"))
        own = self._is_token(target) if own is None else own
        decoder_mask = Segments(own, own)
        if segments is not None:
            memory_mask = Segments(segments, segments_of(source_segments, mask))
        x = self.transformer.decoder(x, decoder_mask, memory, memory_mask, training=training)
        return self._logits(x, table)

    def _logits(self, x, table):
        if self.arguments.get("scales_output"):
            x *= tf.cast(self.arguments["hidden_size"] ** -0.5, x.dtype)
        return self.head(x, table)

    def _is_token(self, target):
        """Return where a target [b, t] has tokens, bool [b, t]: the first one is, whatever it is."""
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
        """Return what the decoder attends to.

        Args:
            source: int tensor [b, s], padded with `pad_id`.
            segments: int tensor [b, s], where sentences are packed; see `call`.
            mask: bool tensor [b, s], where there is a token; by default where no padding is.
            training: whether dropout applies.

        Returns:
            The memory [b, s, h], and its mask [b, s] (bool).
        """
        segments = None if segments is None else segments_of(segments, mask)
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
        own = mask if segments is None else Segments(segments, segments)
        return self.transformer.encoder(x, own, training=training), mask

    def _start(self, ids, segments):
        """Return the position of the first id, or of each row's, before which padding may be."""
        is_counted = self.arguments.get("positions_after_padding") and segments is None
        return start_after_padding(ids, self.pad_id) if is_counted else 0

    def _embed_target(self, target, **options):
        layers = self.target_embedding, self.target_positions, self.target_dropout
        return self._embed_ids(target, *layers, norm=self.target_norm, **options)

    def init_cache(
        self, memory: tf.Tensor, max_length: int | tf.Tensor, num_hypotheses: int = 1
    ) -> list[dict]:
        """Return the decoder's cache for translations of up to `max_length` tokens."""
        return self.transformer.decoder.init_cache(memory, max_length, num_hypotheses)

    def decode_step(
        self,
        tokens: tf.Tensor,
        position: tf.Tensor,
        cache: list[dict],
        memory_mask: tf.Tensor,
        entries_mask: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, list[dict]]:
        """Give the logits of the token after `tokens`.

        Args:
            tokens: int tensor [b·k], the last tokens of k translations of each source.
            position: int scalar, their position.
            cache: from `init_cache`, or from the step before.
            memory_mask: bool tensor [b, s].
            entries_mask: what each translation may attend to of the cache: bool [b, k,
                max_length·k]; see `MultiHeadAttention.init_cache`. None where k is 1.

        Returns:
            Logits [b·k, V] in float32, and the cache for the next step.
        """
        x, table = self._embed_target(tokens[:, None], start=position)
        x, cache = self.transformer.decoder(x, entries_mask, None, memory_mask, cache=cache)
        logits = constrain(self._logits(x, table), ("batch", None, None))[:, 0, : self.vocab_size]
        return tf.cast(logits, "float32"), cache

    def generate(
        self,
        source: tf.Tensor,
        max_length: int | None = None,
        on_tokens: OnTokens | None = None,
        **options,
    ) -> tf.Tensor:
        """Return targets of sources, by greedy or beam search, or by sampling.

        Args:
            source: int tensor [b, s], padded with `pad_id`; or a dict of it, `"source"` or
                `"input_ids"`, and of an `"attention_mask"`.
            max_length: most tokens of a target, the end token included; by
                default 2·s + 10, or what learned positions allow.
            on_tokens: called as `on_tokens(number, ids)` as soon as the target of a number has got
                other ids; as of `CausalLM.generate`. On a mesh each token then is a call, which
                takes five times as long as all of them in one.
            **options: those of `GenerationOptions`, by their names; greedy search by default, with
                the rules that came with published weights. On a
                mesh `repetition_penalty` and `no_repeat_ngram_size` make each token a call, too.

        Returns:
            An int32 tensor [b·n, t ≤ max_length] of n = `num_return_sequences` targets of each
            source, one after the other, with their end tokens, padded with `pad_id`.

        Raises:
            TypeError: there is no such option.
            ValueError: an option is out of range, beams are asked for together with a temperature
                or `on_tokens`, or there are not enough learned positions.
        """
        options = options_of(self, options, 1)
        if max_length is not None:
            check_int("max_length", max_length)
        self.build()
        source = tf.convert_to_tensor(self._source_of(source), dtype="int32")
        for side, length in zip(SIDES, (source.shape[1], max_length)):
            name = f"max_{side}_length"
            self.check_positions(length or 0, name if name in self.arguments else "max_length")
        if max_length is None:
            max_length = 2 * int(tf.shape(source)[1]) + 10
            if self.arguments["positions"] == "learned":
                max_length = min(max_length, self._max_lengths["target"])
        return self._generator(source, max_length, options, on_tokens)

    def _source_of(self, source):
        """Return the ids of a source; what its mask leaves out has to be padding, and no more."""
        if not isinstance(source, Mapping):
            return source
        named = dataclasses.replace(self.input_keys, needed=("source",)).named(source, "generate")
        mask, ids = mask_of(named), tf.convert_to_tensor(named["source"])
        if mask is not None and not np.array_equal(mask, ids != self.pad_id):
            raise ValueError(
                f"attention_mask is not 0 where the source has pad_id={self.pad_id}, and 1 elsewhere: "
                "pad sources with that id"
            )
        return ids

    def stream_shapes(
        self, input_shapes: dict[str, tuple[int, int]]
    ) -> dict[str, tuple[int, int, int]]:
        """Return the shape of the residual stream in each stack of blocks.

        Args:
            input_shapes: dict of the shapes of `call`'s inputs.

        Returns:
            A dict of the stack's name and (b, s, h).
        """
        h, input_shapes = self.arguments["hidden_size"], self.named_inputs(input_shapes)
        return {"encoder": (*input_shapes["source"], h), "decoder": (*input_shapes["target"], h)}
