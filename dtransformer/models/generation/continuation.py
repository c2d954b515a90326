"""Computation for a search: of a translation model, and of a language model, which continues texts."""

import numpy as np
import tensorflow as tf

from dtransformer.layers.attention_mask import Segments
from dtransformer.models.generation.logits_rules import NO_TOKEN
from dtransformer.parallel.decoding.loops import Search
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


class Generation:
    """A model's encoder once, then its decoder with a cache, token by token.

    Args:
        model: a `TranslationTransformer`, built.
        search: a `Sampling` or a `BeamSearch` of it.
    """

    def __init__(self, model, search: Search):
        self.search, self._model = search, model

    def texts(self, source: tf.Tensor) -> tf.Tensor:
        """Return what translations begin with, the start tokens: int32 [b, 1]."""
        return tf.fill([static_or_dynamic_shape(source)[0], 1], self._model.start_id)

    def encode(self, source: tf.Tensor, capacity: int | tf.Tensor) -> dict:
        """Return the cache of source ids [b, s]: the decoder's, and what `search` tells of it."""
        memory, _ = self._model.encode(source)
        blocks = self._model.init_cache(memory, capacity, self.search.num_beams)
        batch_size = static_or_dynamic_shape(source)[0]
        return {"blocks": blocks, "entries": self.search.start_entries(batch_size, capacity)}

    def memory_mask(self, source: tf.Tensor) -> tf.Tensor:
        """Return what hypotheses may attend to of source ids [b, s]: bool [b, s]."""
        return source != self._model.pad_id

    def next_logits(
        self, state: dict, cache: dict, memory_mask: tf.Tensor
    ) -> tuple[tf.Tensor, dict]:
        """Return the logits [r, V] of the next tokens, and the cache for the ones after."""
        model, search = self._model, self.search
        entries, mask = search.next_entries(cache["entries"], state)
        logits, blocks = model.decode_step(
            state["last"], state["position"], cache["blocks"], memory_mask, mask
        )
        return logits, {"blocks": blocks, "entries": entries}


class Continuation:
    """All but the last token of each text at once, then token by token, with a cache.

    The texts [b, s] end in the last column: `NO_TOKEN` comes before those that are shorter. What
    is in the cache of the p = s - 1 tokens before the last column stays as it is, and is that of
    all hypotheses of a text.

    Args:
        model: a `CausalLM`, built.
        search: a `Sampling` or a `BeamSearch`.
    """

    def __init__(self, model, search: Search):
        self.search, self._model = search, model

    def texts(self, source: tf.Tensor) -> tf.Tensor:
        """Return the texts themselves, int32 [b, s]."""
        return source

    def memory_mask(self, source: tf.Tensor) -> tf.Tensor:
        """Return where there is a token before the last: bool [b, p]."""
        return source[:, :-1] != NO_TOKEN

    def encode(self, source: tf.Tensor, capacity: int | tf.Tensor) -> dict:
        """Return the cache of texts [b, s]; see `decoding.Decoding`."""
        model, search = self._model, self.search
        # The last token's keys are computed by the first step of the search. It is seen by the
        # tokens before it where the text is a prefix.
        last = None if model.arguments["prefix"] else -1
        is_token = source[:, :last] != NO_TOKEN
        x, _ = model.embed(tf.where(is_token, source[:, :last], 0), start=-_count(~is_token))
        mask = Segments(is_token, is_token, None if last else is_token)
        _, prefixes = model.blocks(x, mask, cache=[{} for _ in model.blocks.blocks])
        if last is None:
            prefixes = [{name: x[:, :, :-1] for name, x in own.items()} for own in prefixes]
        batch_size = static_or_dynamic_shape(source)[0]
        empty = model.blocks.init_cache(batch_size, capacity, search.num_beams)
        return {
            "blocks": [{**prefix, **own} for prefix, own in zip(prefixes, empty, strict=True)],
            "entries": search.start_entries(batch_size, capacity),
        }

    def next_logits(
        self, state: dict, cache: dict, memory_mask: tf.Tensor
    ) -> tuple[tf.Tensor, dict]:
        """Return the logits [r, V] of the next tokens, and the cache for the ones after."""
        model, search = self._model, self.search
        entries, mask = search.next_entries(cache["entries"], state)
        start = tf.repeat(_count(memory_mask), search.num_beams) + state["position"]
        x, table = model.embed(state["last"][:, None], start=start)
        x, blocks = model.blocks(x, mask, cache=cache["blocks"], prefix_mask=memory_mask)
        logits = constrain(model.head(x, table), ("batch", None, None))[:, 0, : model.vocab_size]
        return tf.cast(logits, "float32"), {"blocks": blocks, "entries": entries}


def _count(mask):
    return tf.reduce_sum(tf.cast(mask, "int32"), axis=1)


def as_prompts(texts, vocab_size: int, pad_id: int | None, end_id: int | None = None) -> np.ndarray:
    """Return texts as `Continuation` takes them: int32 [b, s].

    Args:
        texts: int array [b, s], padded at the end with `pad_id`; or a list of lists of ids.
        vocab_size: number of ids.
        pad_id: None where no id is padding.
        end_id: id that ends texts, with which others may have padded them; None for none.

    Raises:
        ValueError: there is no text, one without a token, one with padding before its tokens, or
            an id that is none of the vocabulary; or some texts of one length begin, or end, with
            the end token.
    """
    rows = [np.asarray(row) for row in texts]
    if any(row.ndim != 1 or (row.size and row.dtype.kind not in "iu") for row in rows):
        raise ValueError("prompts must be an int tensor [b, s], or a list of lists of ids")
    _check_ends(rows, pad_id, end_id)
    if pad_id is not None:
        rows = [row[: np.max(np.nonzero(row != pad_id)[0], initial=-1) + 1] for row in rows]
    if not rows or not all(map(len, rows)):
        raise ValueError("each prompt must have a token at least: give the start token alone")
    for number, row in enumerate(rows):
        outside = row[(row < 0) | (row >= vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompt {number} has the id {outside[0]}, which is not in the vocabulary of "
                f"{vocab_size}"
            )
        if pad_id is not None and (row == pad_id).any():
            raise ValueError(
                f"prompt {number} has padding (pad_id={pad_id}) before a token: padding comes at "
                "the end, or give lists of different lengths"
            )
    longest = max(map(len, rows))
    aligned = [np.pad(row, (longest - len(row), 0), constant_values=NO_TOKEN) for row in rows]
    return np.array(aligned, "int32")


def _check_ends(rows, pad_id, end_id):
    """Refuse texts of one length of which some begin or end with what may be padding."""
    if pad_id is not None or end_id is None or len({len(row) for row in rows}) != 1:
        return
    for place in (0, -1) if len(rows[0]) > 1 else ():
        are_ends = [bool(row[place] == end_id) for row in rows]
        if any(are_ends) and not all(are_ends):
            raise ValueError(
                f"prompt {are_ends.index(True)} {'ends' if place else 'begins'} with the end token "
                f"{end_id}, and others do not: if it is padding, give a dict with an "
                '"attention_mask", or lists without it'
            )
