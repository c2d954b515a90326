"""Base of every `generate`: one compiled function for each set of options."""

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
    """Finds what comes next, by a network, for any options.

    Args:
        network: a `keras.Model` that has `vocab_size`, `pad_id` and `end_id`.
        decode: a function of the network and a search that returns a `Decoding`, such as
            `Generation`.
        never: ids that are never next, unless they end texts; None is no id.
        loops_on_mesh: see `loops.compiled`. Where rules look back at texts each token is a call
            in any case.
    """

    def __init__(
        self,
        network,
        decode: Callable[..., loops.Decoding],
        never: tuple[int | None, ...] = (),
        loops_on_mesh: bool = True,
    ):
        self._network, self._decode, self._never = network, decode, never
        self._loops_on_mesh = loops_on_mesh
        self._stream, self._functions = _TokenStream(), {}

    def __call__(
        self,
        source: tf.Tensor,
        max_length: int,
        options: GenerationOptions,
        on_tokens: OnTokens | None = None,
    ) -> tf.Tensor:
        """Return what is found for source ids.

        Args:
            source: int32 tensor [b, s], as the `Decoding` takes it.
            max_length: most tokens of a result.
            options: the options; there are n = `num_return_sequences` results of each source.
            on_tokens: called as `on_tokens(number, ids)` with the number of a result and its next
                ids, as soon as they are found; not where there are beams.

        Returns:
            An int32 tensor [b·n, t ≤ max_length], the results of a source one after the other,
            padded.

        Raises:
            ValueError: an id is not in the vocabulary, or there is `on_tokens` with beams.
        """
        ids = SpecialIds.of(self._network, options.stop_ids, self._never)
        for name in ID_LISTS:
            for one in getattr(options, name) or ():
                check_ids(ids.vocab_size, **{name: one})
        if options.beam_size == 1:
            source = tf.repeat(source, options.num_return_sequences, axis=0)
        elif on_tokens is not None:
            raise ValueError(
                f"on_tokens is told what is found for good, and beam_size={options.beam_size} may "
                "change it later: set beam_size=1"
            )
        function = self._function(ids, options, on_tokens is not None)
        with self._stream.told_to(on_tokens, ids.end_ids):
            found = function(source, max_length, options.seed % _NUM_SEEDS)
        return _without_padding(tf.reshape(found, [-1, max_length]), ids)

    def forget_functions(self) -> None:
        """Compile all anew: the network has got other weights, or lost some."""
        self._functions.clear()

    def _function(self, ids, options, streams):
        options = dataclasses.replace(options, seed=0)  # it is given when the function is called
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
                loops_on_mesh=self._loops_on_mesh and not options.looks_back,
                on_tokens=self._stream if streams else None,
            )
        return self._functions[key]


class _TokenStream:
    """Tells a callback what each text has got, until its end.

    Compiled functions call it, whatever the callback of a call is.
    """

    def __init__(self):
        self._on_tokens, self._end_ids, self._ended, self._error = None, (), set(), None

    @contextlib.contextmanager
    def told_to(self, on_tokens: OnTokens | None, end_ids: tuple[int, ...]) -> Iterator[None]:
        """Tell a callback, whose error is raised as it is; all of TensorFlow's would be one."""
        self._on_tokens, self._end_ids, self._ended, self._error = on_tokens, end_ids, set(), None
        try:
            yield
        except tf.errors.OpError:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            self._on_tokens = None

    def __call__(self, tokens: np.ndarray) -> None:
        """Take the last tokens [b] of all texts."""
        try:
            for number, token in enumerate(tokens.tolist()):
                if number not in self._ended:
                    self._on_tokens(number, [token])
                if token in self._end_ids:
                    self._ended.add(number)
        except Exception as error:
            self._error = error
            raise


def _without_padding(found, ids):
    """Return results [r, max_length] without the columns that are padding alone."""
    if not ids.end_ids:
        return found
    columns = np.nonzero(np.any(np.asarray(found) != ids.pad_id, axis=0))[0]
    length = np.max(columns, initial=-1) + 1
    is_end_too = ids.pad_id in ids.end_ids and length < found.shape[1]
    return found[:, : int(length + is_end_too)]
