"""Computation of a translation model for a search."""

import tensorflow as tf

from dtransformer.parallel.decoding import cache as kv_cache
from dtransformer.parallel.decoding.loops import Search
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def taken_entries(entries, sources: tf.Tensor, more: tf.Tensor):
    """Return a search's entries of some of the sources, with room for more positions."""
    return tf.nest.map_structure(lambda x: kv_cache.grown(x, sources, more), entries)


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

    def encode(self, source: tf.Tensor, capacity: int | tf.Tensor | None = None) -> dict:
        """Return the cache of source ids [b, s]: the decoder's, and what `search` tells of it."""
        memory, _ = self._model.encode(source)
        if capacity is None:
            capacity = self.search.max_length
        blocks = self._model.init_cache(memory, capacity, self.search.num_beams)
        batch_size = static_or_dynamic_shape(source)[0]
        return {"blocks": blocks, "entries": self.search.start_entries(batch_size, capacity)}

    def take(self, cache: dict, sources: tf.Tensor, more: tf.Tensor) -> dict:
        """Return the cache of some of the sources, by their numbers, with room for more tokens."""
        memory = lambda block: {name: tf.gather(x, sources) for name, x in block.items()}
        blocks = [
            {
                "self": kv_cache.take(block["self"], sources, more, self.search.num_beams),
                "memory": memory(block["memory"]),
            }
            for block in cache["blocks"]
        ]
        return {"blocks": blocks, "entries": taken_entries(cache["entries"], sources, more)}

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
