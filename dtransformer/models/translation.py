"""An encoder–decoder Transformer that translates."""

from collections.abc import Callable

import tensorflow as tf

from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.base import register
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.position import PositionEmbedding
from dtransformer.layers.transformer import Transformer
from dtransformer.models.base import TokenModel, check_ids, completed, first_given
from dtransformer.models.generation import Generation
from dtransformer.models.generation_options import GenerationOptions, check_int
from dtransformer.models.generator import Generator, OnTokens
from dtransformer.parallel.axis_rules import constrain


@register
class TranslationTransformer(TokenModel):
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
        name: str = "translation_transformer",
        **kwargs,
    ):
        super().__init__(name=name, **kwargs)
        target_vocab_size = first_given(target_vocab_size, source_vocab_size)
        if shared_embeddings and target_vocab_size != source_vocab_size:
            raise ValueError(
                f"shared_embeddings needs one vocabulary, got source_vocab_size={source_vocab_size} "
                f"and target_vocab_size={target_vocab_size}"
            )
        given = {
            "source_vocab_size": source_vocab_size,
            "target_vocab_size": target_vocab_size,
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "ffn_hidden_size": ffn_hidden_size,
            "encoder_layers": encoder_layers,
            "decoder_layers": decoder_layers,
            "dropout_rate": dropout_rate,
            "attention_dropout_rate": attention_dropout_rate,
            "embedding_dropout_rate": embedding_dropout_rate,
            "hidden_act": hidden_act,
            "positions": positions,
            "max_source_length": max_source_length,
            "max_target_length": max_target_length,
            "shared_embeddings": shared_embeddings,
            "tied_head": tied_head,
            "head_bias": head_bias,
            "post_layernorm_residual": post_layernorm_residual,
            "pad_id": pad_id,
            "start_id": start_id,
            "end_id": end_id,
            "lambda_func": lambda_func,
        }
        self.arguments = completed(given)
        check_ids(min(source_vocab_size, target_vocab_size), pad_id=pad_id)
        check_ids(target_vocab_size, start_id=start_id, end_id=end_id)
        self.pad_id, self.start_id, self.end_id = pad_id, start_id, end_id
        self.vocab_size = target_vocab_size
        self._add_layers(lambda_func)
        self._generator = Generator(self, Generation, never=(pad_id, start_id))

    def _add_layers(self, lambda_func):
        options, policy = self.arguments, self.dtype_policy
        h, positions = options["hidden_size"], options["positions"]
        self.source_embedding = self._make_embedding(
            options["source_vocab_size"], "source_embedding"
        )
        self.target_embedding = self.source_embedding
        if not options["shared_embeddings"]:
            self.target_embedding = self._make_embedding(self.vocab_size, "target_embedding")
        self.source_positions = PositionEmbedding(
            options["max_source_length"], positions, dtype=policy, name="source_positions"
        )
        self.target_positions = PositionEmbedding(
            options["max_target_length"], positions, dtype=policy, name="target_positions"
        )
        rate = options["embedding_dropout_rate"]
        self.source_dropout = Dropout(rate, dtype=policy, name="source_dropout")
        self.target_dropout = Dropout(rate, dtype=policy, name="target_dropout")
        self.transformer = Transformer(
            options["encoder_layers"],
            options["decoder_layers"],
            h,
            options["num_heads"],
            options["ffn_hidden_size"],
            lambda_func=lambda_func,
            name="transformer",
            causal=True,
            **self._block_arguments(),
        )
        self.head = self._make_head()

    def build(self, input_shape: tuple | None = None) -> None:
        if self.built:
            return
        others = [
            self.source_positions,
            self.target_positions,
            self.source_dropout,
            self.target_dropout,
            self.transformer,
            self.head,
        ]
        embeddings = [self.source_embedding, self.target_embedding]
        ids = tf.TensorSpec([1, 1], "int32")
        self._build_layers(embeddings, others, {"source": ids, "target": ids})

    def call(self, inputs: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        source_segments, segments = (
            inputs.get(f"{side}_segments") for side in ("source", "target")
        )
        if (source_segments is None) != (segments is None):
            raise ValueError(
                "packed inputs have 'source_segments' and 'target_segments'; got "
                f"{', '.join(sorted(inputs))}"
            )
        memory, memory_mask = self.encode(inputs["source"], source_segments, training=training)
        target = inputs["target"]
        x, table = self._embed_target(target, segments=segments, training=training)
        decoder_mask = Segments(target != self.pad_id, target != self.pad_id)
        if segments is not None:
            decoder_mask = Segments(segments, segments)
            memory_mask = Segments(segments, source_segments)
        x = self.transformer.decoder(x, decoder_mask, memory, memory_mask, training=training)
        return self.head(x, table)

    def encode(
        self, source: tf.Tensor, segments: tf.Tensor | None = None, training: bool = False
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what the decoder attends to.

        Args:
            source: int tensor [b, s], padded with `pad_id`.
            segments: int tensor [b, s], where sentences are packed; see `call`.
            training: whether dropout applies.

        Returns:
            The memory [b, s, h], and its mask [b, s] (bool).
        """
        mask = source != self.pad_id
        layers = self.source_embedding, self.source_positions, self.source_dropout
        x, _ = self._embed_ids(source, *layers, segments=segments, training=training)
        own = mask if segments is None else Segments(segments, segments)
        return self.transformer.encoder(x, own, training=training), mask

    def _embed_target(self, target, **options):
        layers = self.target_embedding, self.target_positions, self.target_dropout
        return self._embed_ids(target, *layers, **options)

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
        logits = constrain(self.head(x, table), ("batch", None, None))[:, 0, : self.vocab_size]
        return tf.cast(logits, "float32"), cache

    def generate(
        self,
        source: tf.Tensor,
        max_length: int | None = None,
        on_tokens: OnTokens | None = None,
        **options,
    ) -> tf.Tensor:
        """Translate, by greedy or beam search, or by sampling.

        Args:
            source: int tensor [b, s], padded with `pad_id`.
            max_length: most tokens of a translation, the end token included; by
                default 2·s + 10, or what learned positions allow.
            on_tokens: called as `on_tokens(number, ids)` as soon as the translation of a number has
                got other ids; as of `CausalLM.generate`. On a mesh each token then is a call, which
                takes five times as long as all of them in one.
            **options: those of `GenerationOptions`, by their names; greedy search by default. On a
                mesh `repetition_penalty` and `no_repeat_ngram_size` make each token a call, too.

        Returns:
            An int32 tensor [b·n, t ≤ max_length] of n = `num_return_sequences` translations of each
            source, one after the other, with their end tokens, padded with `pad_id`.

        Raises:
            TypeError: there is no such option.
            ValueError: an option is out of range, beams are asked for together with a temperature
                or `on_tokens`, or there are not enough learned positions.
        """
        options = GenerationOptions.of(**options)
        if max_length is not None:
            check_int("max_length", max_length, 1)
        self.build()
        source = tf.convert_to_tensor(source, dtype="int32")
        self._check_positions(max_source_length=source.shape[1], max_target_length=max_length)
        if max_length is None:
            max_length = 2 * int(tf.shape(source)[1]) + 10
            if self.arguments["positions"] == "learned":
                max_length = min(max_length, self.arguments["max_target_length"])
        return self._generator(source, max_length, options, on_tokens)

    def _check_positions(self, **lengths):
        if self.arguments["positions"] != "learned":
            return
        for name, length in lengths.items():
            if length is not None and length > self.arguments[name]:
                raise ValueError(
                    f"{length} positions are asked for, but the learned positions end at "
                    f"{name}={self.arguments[name]}"
                )

    def num_tokens(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """Return the number of source and target tokens, padding not counted.

        Args:
            inputs: as `call`'s.

        Returns:
            An int32 scalar tensor.
        """
        return tf.add_n(
            [
                tf.math.count_nonzero(ids != self.pad_id, dtype="int32")
                for ids in (inputs["source"], inputs["target"])
            ]
        )

    def flops_per_step(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """Return the floating-point operations of one training step without recompute.

        Six for each position and each weight in a product, and those of the attention
        cores; padded positions, which are computed too, count. The backward pass
        counts as two forward ones.

        Args:
            inputs: as `call`'s.

        Returns:
            A float32 scalar tensor.
        """
        options = self.arguments
        h, f = options["hidden_size"], options["ffn_hidden_size"]
        b, s = tf.unstack(tf.cast(tf.shape(inputs["source"]), "float32"))
        t = tf.cast(tf.shape(inputs["target"])[1], "float32")
        feed_forward, attention = 2 * h * f, 4 * h * h
        encoder = s * (attention + feed_forward) + 2 * h * s * s
        decoder = t * (1.5 * attention + feed_forward) + s * attention / 2 + 2 * h * t * (s + t)
        head = t * h * self.vocab_size
        blocks = options["encoder_layers"] * encoder + options["decoder_layers"] * decoder
        return 6.0 * b * (blocks + head)

    def stream_shapes(
        self, input_shapes: dict[str, tuple[int, int]]
    ) -> dict[str, tuple[int, int, int]]:
        """Return the shape of the residual stream in each stack of blocks.

        Args:
            input_shapes: dict of the shapes of `call`'s inputs.

        Returns:
            A dict of the stack's name and (b, s, h).
        """
        h = self.arguments["hidden_size"]
        return {
            "encoder": (*input_shapes["source"], h),
            "decoder": (*input_shapes["target"], h),
        }
