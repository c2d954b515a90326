"""Decoding with a cache, for encoder–decoders and for language models."""

import numpy as np
import tensorflow as tf

from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.cached_attention import count_tokens
from dtransformer.models.generation.logits_rules import NO_TOKEN
from dtransformer.parallel.decoding.loops import Search
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


class CachedDecoding:
    """Base class of decoding with a cache. Implements `loops.Decoding` together with its subclasses.

    The cache is a dict with the caches of all `"blocks"` and the search's `"entries"`.

    Args:
        model: Built network.
        search: `Sampling` or `BeamSearch`.
    """

    def __init__(self, model, search: Search):
        self.search = search
        self._model = model

    def encode(self, source: tf.Tensor, capacity: int | tf.Tensor) -> dict:
        """Return the cache of source ids [b, s], with room for `capacity` tokens."""
        batch_size = static_or_dynamic_shape(source)[0]
        entries = self.search.start_entries(batch_size, capacity)
        return {"blocks": self._prefill(source, capacity), "entries": entries}

    def next_logits(
        self, state: dict, cache: dict, memory_mask: tf.Tensor
    ) -> tuple[tf.Tensor, dict]:
        """Return the logits [r, V] of the next tokens, and the updated cache."""
        entries, mask = self.search.next_entries(cache["entries"], state)
        logits, blocks = self._decode_step(state, cache["blocks"], memory_mask, mask)
        return logits, {"blocks": blocks, "entries": entries}


class Generation(CachedDecoding):
    """Decoding of an encoder–decoder: encodes the source once, then decodes token by token.

    Args:
        model: Built `EncoderDecoderModel`.
        search: `Sampling` or `BeamSearch`.
    """

    def texts(self, source: tf.Tensor) -> tf.Tensor:
        """Return the start tokens of the targets: int32 [b, 1]."""
        return tf.fill([static_or_dynamic_shape(source)[0], 1], self._model.start_id)

    def memory_mask(self, source: tf.Tensor) -> tf.Tensor:
        """Return a bool mask [b, s], True at source tokens."""
        return source != self._model.pad_id

    def _prefill(self, source, capacity):
        memory, _ = self._model.encode(source)
        return self._model.init_cache(memory, capacity, self.search.num_beams)

    def _decode_step(self, state, caches, memory_mask, mask):
        last = state["last"]
        return self._model.decode_step(last, state["position"], caches, memory_mask, mask)


class Continuation(CachedDecoding):
    """Decoding of a language model: computes the prompts first, then decodes token by token.

    The prompts [b, s] are aligned at the end: `NO_TOKEN` precedes shorter ones. The cache of
    the p = s - 1 tokens before the last column is fixed, and all hypotheses of a prompt
    share it.

    Args:
        model: Built `CausalLM`.
        search: `Sampling` or `BeamSearch`.
    """

    def texts(self, source: tf.Tensor) -> tf.Tensor:
        """Return the prompts, int32 [b, s]."""
        return source

    def memory_mask(self, source: tf.Tensor) -> tf.Tensor:
        """Return a bool mask [b, p], True at tokens before the last column."""
        return source[:, :-1] != NO_TOKEN

    def _prefill(self, source, capacity):
        model = self._model
        # The first step of the search computes the keys of the last token. With a bidirectional
        # prefix, earlier tokens attend to the last token, so it is part of this pass as well.
        is_bidirectional = model.arguments["prefix"]
        prompts = source if is_bidirectional else source[:, :-1]
        is_token = prompts != NO_TOKEN
        x, _ = model.embed(tf.where(is_token, prompts, 0), start=-count_tokens(~is_token))
        mask = Segments(is_token, is_token, is_token if is_bidirectional else None)
        _, caches = model.blocks.prefill(x, capacity, mask, num_hypotheses=self.search.num_beams)
        if is_bidirectional:
            # The cache of a block on another pipeline stage is `()`.
            return [cache and cache.without_last_prompt_position() for cache in caches]
        return caches

    def _decode_step(self, state, caches, memory_mask, mask):
        model = self._model
        start = tf.repeat(count_tokens(memory_mask), self.search.num_beams) + state["position"]
        x, table = model.embed(state["last"][:, None], start=start)
        x, caches = model.blocks.decode_step(x, caches, mask, prompt_mask=memory_mask)
        logits = constrain(model.head(x, table), ("batch", None, None))[:, 0, : model.vocab_size]
        return tf.cast(logits, "float32"), caches


def as_prompts(texts, vocab_size: int, pad_id: int | None, end_id: int | None = None) -> np.ndarray:
    """Return prompts in the form that `Continuation` expects: aligned at the end.

    Args:
        texts: Int array [b, s], padded at the end with `pad_id`, or a list of lists of ids.
        vocab_size: Integer. Size of the vocabulary.
        pad_id: Integer. Id of the padding token, or `None` if there is no padding.
        end_id: Integer. Id of the end token, which other libraries also use as padding, or
            `None`.

    Returns:
        An int32 array [b, s] with `NO_TOKEN` before shorter prompts.

    Raises:
        ValueError: If there is no prompt, a prompt has no token or has padding before a
            token, or an id is out of the vocabulary. Also if `pad_id` is `None` and only
            some of several equally long prompts begin or end with the end token.
    """
    rows = [np.asarray(row) for row in texts]
    if any(row.ndim != 1 or (row.size and row.dtype.kind not in "iu") for row in rows):
        raise ValueError("`prompts` must be an int tensor [b, s], or a list of lists of ids.")
    _check_ends(rows, pad_id, end_id)
    if pad_id is not None:
        rows = [row[: np.max(np.nonzero(row != pad_id)[0], initial=-1) + 1] for row in rows]
    if not rows or not all(map(len, rows)):
        raise ValueError("Each prompt must have at least one token, such as the start token.")
    for index, row in enumerate(rows):
        outside = row[(row < 0) | (row >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"Prompt {index} has the id {outside[0]}, which is not in the vocabulary of "
                f"{vocab_size} entries. Check that the tokenizer belongs to the model."
            )
        if pad_id is not None and (row == pad_id).any():
            raise ValueError(
                f"Prompt {index} has padding (`pad_id={pad_id}`) before a token. Pad at the end, "
                "or pass lists of different lengths."
            )
    longest = max(map(len, rows))
    aligned = [np.pad(row, (longest - len(row), 0), constant_values=NO_TOKEN) for row in rows]
    return np.array(aligned, "int32")


def _check_ends(rows, pad_id, end_id):
    """Raise an error if some prompts of equal length may be padded with the end token."""
    if pad_id is not None or end_id is None or len({len(row) for row in rows}) != 1:
        return
    for column in (0, -1) if len(rows[0]) > 1 else ():
        are_ends = [bool(row[column] == end_id) for row in rows]
        if any(are_ends) and not all(are_ends):
            raise ValueError(
                f"Prompt {are_ends.index(True)} {'ends' if column else 'begins'} with the end token "
                f"{end_id}, but other prompts do not. If it is padding, pass a dict with an "
                '"attention_mask", or lists without padding.'
            )
