"""What a translation model computes for a search: `parallel.decoding` says where."""

import tensorflow as tf

from dtransformer.models.search import NEVER
from dtransformer.parallel.decoding import Search
from dtransformer.parallel.shapes import static_or_dynamic_shape


class Generation:
    """A model's encoder once, then its decoder with a cache, token by token.

    Args:
        model: a `TranslationTransformer`, built.
        search: a `Sampling` or a `BeamSearch` of it.
    """

    def __init__(self, model, search: Search):
        self.search, self._model = search, model

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
        k = self.search.num_beams

        def grown(x, axis, number):
            paddings = [[0, number if i == axis else 0] for i in range(x.shape.rank)]
            return tf.pad(tf.gather(x, sources), paddings)

        own = lambda block: {
            **{name: grown(block[name], 2, more * k) for name in ("key", "value")},
            "index": block["index"],
        }
        memory = lambda block: {name: tf.gather(x, sources) for name, x in block.items()}
        blocks = [
            {"self": own(block["self"]), "memory": memory(block["memory"])}
            for block in cache["blocks"]
        ]
        entries = tf.nest.map_structure(lambda x: grown(x, 2, more), cache["entries"])
        return {"blocks": blocks, "entries": entries}

    def memory_mask(self, source: tf.Tensor) -> tf.Tensor:
        """Return what hypotheses may attend to of source ids [b, s]: bool [b, s]."""
        return source != self._model.pad_id

    def next_logits(
        self, state: dict, cache: dict, memory_mask: tf.Tensor
    ) -> tuple[tf.Tensor, dict]:
        """Return the logits [r, V] of the next tokens, and the cache for the ones after.

        Padding and start tokens are never next.
        """
        model, search = self._model, self.search
        entries, mask = search.next_entries(cache["entries"], state)
        logits, blocks = model.decode_step(
            state["last"], state["position"], cache["blocks"], memory_mask, mask
        )
        vocabulary = tf.range(model.vocab_size)
        is_never = (vocabulary == model.pad_id) | (vocabulary == model.start_id)
        return tf.where(is_never, NEVER, logits), {"blocks": blocks, "entries": entries}
