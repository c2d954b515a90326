"""Greedy search and sampling.

`Sampling` and `BeamSearch` implement `parallel.decoding.loops.Search`. Their states are dicts
of tensors.
"""

import dataclasses

import tensorflow as tf

from dtransformer.models.generation import logits_rules
from dtransformer.models.generation.logits_rules import is_any
from dtransformer.models.generation.options import GenerationOptions
from dtransformer.parallel.mesh.random_numbers import random_floats
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Special ids and size of a vocabulary.

    Args:
        vocab_size: Integer. Number V of vocabulary entries.
        pad_id: Integer. Id that pads results.
        end_ids: Tuple of the ids that end a text.
        never: Tuple of the ids that are never generated.
    """

    vocab_size: int
    pad_id: int
    end_ids: tuple[int, ...]
    never: tuple[int, ...] = ()

    @classmethod
    def from_model(
        cls, model, stop_ids: tuple[int, ...] | None = None, never: tuple[int | None, ...] = ()
    ) -> "SpecialIds":
        """Return the special ids of a network.

        A network without padding pads with its first end id, or with 0 if it has no end id.

        Args:
            model: Network with `vocab_size`, `pad_id` and `end_id`. Both ids may be `None`.
            stop_ids: Tuple of ids that end a text. Defaults to the network's `end_id`.
            never: Tuple of ids that are never generated, unless they end a text. `None` entries
                are skipped.
        """
        if stop_ids is None:
            stop_ids = () if model.end_id is None else (model.end_id,)
        pad_id = model.pad_id
        if pad_id is None:
            pad_id = stop_ids[0] if stop_ids else 0
        never = tuple(x for x in never if x is not None and x not in stop_ids)
        return cls(model.vocab_size, pad_id, tuple(stop_ids), never)


class Sampling:
    """Search that chooses the most likely token or samples one.

    Args:
        ids: `SpecialIds` of the vocabulary.
        max_length: Integer or int scalar. Maximum number of tokens per result.
        seed: Int tensor [2] for sampling.
        options: `GenerationOptions`. Beam options are ignored.
    """

    num_beams = num_results = 1

    def __init__(
        self,
        ids: SpecialIds,
        max_length: int | tf.Tensor,
        seed: tf.Tensor | None,
        options: GenerationOptions,
    ):
        self.max_length = max_length
        self._ids = ids
        self._seed = seed
        self._options = options

    def start(self, texts: tf.Tensor) -> dict:
        """Return the initial state, a dict of tensors.

        Args:
            texts: Int32 tensor [b, s] of the tokens before the results; see `Decoding.texts`.
        """
        batch_size = static_or_dynamic_shape(texts)[0]
        return {
            "position": tf.constant(0),
            "last": texts[:, -1],
            "beams": tf.range(batch_size),
            "ids": tf.fill([batch_size, self.max_length], self._ids.pad_id),
            "finished": tf.zeros([batch_size], "bool"),
            **({"texts": texts} if self._options.needs_history else {}),
        }

    def start_entries(self, batch_size: int | tf.Tensor, capacity: int | tf.Tensor) -> tuple:
        """Return an empty tuple: every cache row has a single hypothesis."""
        return ()

    def ended(self, state: dict) -> tf.Tensor:
        """Return a bool tensor [b], True for texts that have ended."""
        return state["finished"]

    def next_entries(self, entries: tuple, state: dict) -> tuple[tuple, None]:
        """Return the entries unchanged and no mask; see `BeamSearch.next_entries`."""
        return entries, None

    def update(self, state: dict, logits: tf.Tensor) -> dict:
        """Return the next state.

        Args:
            state: State from `start` or the previous `update`.
            logits: Float tensor [b, V] of the tokens that follow `state["last"]`.
        """
        position = state["position"]
        finished = state["finished"]
        ids = state["ids"]
        logits = logits_rules.without_ids(logits, self._ids.never)
        logits = logits_rules.apply_history_rules(
            logits, self._options, state.get("texts"), ids, position
        )
        logits = logits_rules.apply_position_rules(
            logits, self._options, self._ids.end_ids, position, self.max_length
        )
        tokens = tf.where(finished, self._ids.pad_id, self._choose(logits, position))
        is_current = tf.range(self.max_length) == position
        return {
            **state,
            "position": position + 1,
            "last": tokens,
            "ids": tf.where(is_current, tokens[:, None], ids),
            "finished": finished | is_any(tokens, self._ids.end_ids),
        }

    def result(self, state: dict) -> tf.Tensor:
        """Return an int32 tensor [b, 1, max_length], padded after the end tokens."""
        return tf.expand_dims(state["ids"], 1)  # DTensor does not support `tf.newaxis`

    def _choose(self, logits, position):
        options = self._options
        if options.temperature == 0:
            return tf.argmax(logits, axis=-1, output_type="int32")
        logits /= options.temperature
        logits = logits_rules.top_k(logits, options.top_k)
        logits = logits_rules.top_p(logits, options.top_p)
        logits = logits_rules.min_p(logits, options.min_p)
        # The argmax of logits plus Gumbel noise is a sample from their softmax. TensorFlow's own
        # sampling op returns other values under XLA.
        draw = tf.maximum(
            random_floats(static_or_dynamic_shape(logits), self._seed, position), 1e-20
        )
        return tf.argmax(logits - tf.math.log(-tf.math.log(draw)), axis=-1, output_type="int32")
