"""What a translation model computes for a search: `parallel.decoding` says where."""

import tensorflow as tf

from dtransformer.models.search import NEVER
from dtransformer.parallel.decoding import Search


class Generation:
    """A model's encoder once, then its decoder with a cache, token by token.

    Args:
        model: a `TranslationTransformer`, built.
        search: a `Sampling` or a `BeamSearch` of it.
    """

    def __init__(self, model, search: Search):
        self.search, self._model = search, model

    def encode(self, source: tf.Tensor) -> list[dict]:
        """Return the decoder's cache of source ids [b, s], for all hypotheses."""
        memory, _ = self._model.encode(source)
        return self._model.init_cache(self.search.for_beams(memory), self.search.max_length)

    def memory_mask(self, source: tf.Tensor) -> tf.Tensor:
        """Return what hypotheses may attend to of source ids [b, s]: bool [r, s]."""
        return self.search.for_beams(source != self._model.pad_id)

    def next_logits(
        self, state: dict, cache: list[dict], memory_mask: tf.Tensor
    ) -> tuple[tf.Tensor, list[dict]]:
        """Return the logits [r, V] of the next tokens, and the cache for the ones after.

        Padding and start tokens are never next.
        """
        model, cache = self._model, self.search.pick(cache, state["beams"])
        logits, cache = model.decode_step(state["last"], state["position"], cache, memory_mask)
        entries = tf.range(model.vocab_size)
        is_never = (entries == model.pad_id) | (entries == model.start_id)
        return tf.where(is_never, NEVER, logits), cache
