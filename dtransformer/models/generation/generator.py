"""Implementation of `generate`: one compiled function per set of options."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from dtransformer.models.base import check_ids
from dtransformer.models.generation.beam_search import BeamSearch
from dtransformer.models.generation.options import ID_LISTS, GenerationOptions
from dtransformer.models.generation.search import Sampling, SpecialIds
from dtransformer.parallel.decoding import loops

OnTokens = Callable[[int, list[int]], None]
_NUM_SEEDS = 2**31


class Generator:
    """Callable that generates token ids with a network.

    Args:
        network: `keras.Model` with `vocab_size`, `pad_id` and `end_id`.
        decode: Callable `decode(network, search)` that returns a `Decoding`, such as the
            class `Generation`.
        never: Tuple of ids that are never generated, unless they end a text. `None` entries
            are skipped.
        loops_on_mesh: Boolean; see `loops.compiled`. Rules that depend on previous tokens
            always call a function per token on a mesh.
    """

    def __init__(
        self,
        network,
        decode: Callable[..., loops.Decoding],
        never: tuple[int | None, ...] = (),
        loops_on_mesh: bool = True,
    ):
        self._network = network
        self._decode = decode
        self._never = never
        self._loops_on_mesh = loops_on_mesh
        self._stream = _TokenStream()
        self._functions = {}

    def __call__(
        self,
        source: tf.Tensor,
        max_length: int,
        options: GenerationOptions,
        on_tokens: OnTokens | None = None,
    ) -> tf.Tensor:
        """Generate results for source ids.

        Args:
            source: Int32 tensor [b, s] in the form that the `Decoding` expects.
            max_length: Integer. Maximum number of tokens per result.
            options: `GenerationOptions`, with n = `num_return_sequences` results per source.
            on_tokens: Callable `on_tokens(index, ids)` that receives the index of a result and
                its next ids as soon as they are decoded. Not supported with beams.

        Returns:
            An int32 tensor [b·n, t] with t ≤ `max_length`, padded. The results of a source are
            consecutive rows.

        Raises:
            ValueError: If an id is out of the vocabulary, or `on_tokens` is combined with beams.
        """
        ids = SpecialIds.from_model(self._network, options.stop_ids, self._never)
        for name in ID_LISTS:
            for token_id in getattr(options, name) or ():
                check_ids(ids.vocab_size, **{name: token_id})
        if options.beam_size == 1:
            source = tf.repeat(source, options.num_return_sequences, axis=0)
        elif on_tokens is not None:
            raise ValueError(
                f"`on_tokens` does not work with `beam_size={options.beam_size}`, because beam "
                "search may replace earlier tokens. Set `beam_size=1`."
            )
        function = self._get_function(ids, options, on_tokens is not None)
        with self._stream.streaming_to(on_tokens, ids.end_ids):
            results = function(source, max_length, options.seed % _NUM_SEEDS)
        return _without_padding(tf.reshape(results, [-1, max_length]), ids)

    def forget_functions(self) -> None:
        """Drop all compiled functions. Call it after weights were added or removed."""
        self._functions.clear()

    def _get_function(self, ids, options, streams):
        # The seed is an argument of the compiled function, not part of its key.
        options = dataclasses.replace(options, seed=0)
        key = options, streams
        if key not in self._functions:

            def make(max_length, seed):
                if options.beam_size > 1:
                    search = BeamSearch(ids, max_length, options)
                else:
                    search = Sampling(ids, max_length, seed, options)
                return self._decode(self._network, search)

            self._functions[key] = loops.compiled(
                self._network,
                make,
                loops_on_mesh=self._loops_on_mesh and not options.needs_history,
                on_tokens=self._stream if streams else None,
            )
        return self._functions[key]


class _TokenStream:
    """Callback that passes new tokens of unfinished results to the user's callback.

    Compiled functions refer to this object, so they can be reused with other callbacks.
    """

    def __init__(self):
        self._on_tokens = None
        self._end_ids = ()
        self._ended = set()
        self._error = None

    @contextlib.contextmanager
    def streaming_to(self, on_tokens: OnTokens | None, end_ids: tuple[int, ...]) -> Iterator[None]:
        """Use a callback inside of the context. Its errors are raised instead of TensorFlow's."""
        self._on_tokens = on_tokens
        self._end_ids = end_ids
        self._ended = set()
        self._error = None
        try:
            yield
        except tf.errors.OpError:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            self._on_tokens = None

    def __call__(self, tokens: np.ndarray) -> None:
        """Pass the next tokens [b] of all results to the user's callback."""
        try:
            for index, token in enumerate(tokens.tolist()):
                if index not in self._ended:
                    self._on_tokens(index, [token])
                if token in self._end_ids:
                    self._ended.add(index)
        except Exception as error:
            self._error = error
            raise


def _without_padding(results, ids):
    """Return results [r, max_length] without trailing columns that are only padding."""
    if not ids.end_ids:
        return results
    columns = np.nonzero(np.any(np.asarray(results) != ids.pad_id, axis=0))[0]
    length = np.max(columns, initial=-1) + 1
    is_end_too = ids.pad_id in ids.end_ids and length < results.shape[1]
    return results[:, : int(length + is_end_too)]
