"""Token-by-token decoding on one device, on a mesh and in a pipeline.

On one device and on a mesh, the loop is compiled into one function. In a pipeline, the last stage
searches and sends its choices to the other stages.
"""

import contextlib
import functools
import typing
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import decoding_rules, override_rules, relayout
from dtransformer.parallel.mesh.batch import local_value, put_replicated
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.pipeline_parallel.forward_pass import ForwardPass, from_last
from dtransformer.parallel.pipeline_parallel.stage_assignment import has_outputs
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.weights.sharded_variable import ShardedVariable
from dtransformer.parallel.zero.gather import unsharding


class Search(typing.Protocol):
    """Algorithm that chooses the next token of each of r = b·k hypotheses of b sources.

    Its state is a dict of tensors. `"last"`, int32 `[r]`, has the last tokens. `"position"`, an
    int32 scalar, has their position. `"beams"`, int32 `[r]`, has the rows of the cache that the
    hypotheses continue. A search may add other entries.

    Attributes:
        num_beams: Integer. Number k of hypotheses per source.
        num_results: Integer. Number n of results per source.
        max_length: Integer or integer scalar tensor. Maximum number of tokens of a result.
    """

    num_beams: int
    num_results: int
    max_length: int | tf.Tensor

    def start(self, texts: tf.Tensor) -> dict:
        """Return the initial state. See `Decoding.texts` for the argument."""

    def ended(self, state: dict) -> tf.Tensor:
        """Return a bool tensor `[b]` that is True for finished sources."""

    def update(self, state: dict, logits: tf.Tensor) -> dict:
        """Return the next state from the logits `[r, V]` of the tokens after the last ones."""

    def result(self, state: dict) -> tf.Tensor:
        """Return the resulting ids, an int32 tensor `[b, n, max_length]`."""


class Decoding(typing.Protocol):
    """Computations of a network for a `search`. In a pipeline, each stage computes its layers."""

    search: Search

    def texts(self, source: tf.Tensor) -> tf.Tensor:
        """Return the prompts, int32 `[b, t]`, with -1 as padding on the left."""

    def encode(self, source: tf.Tensor, capacity: int | tf.Tensor):
        """Return the nested cache of source ids `[b, s]`, with room for `capacity` tokens."""

    def memory_mask(self, source: tf.Tensor) -> tf.Tensor:
        """Return a bool tensor `[b, s]`, True where hypotheses may attend to the source."""

    def next_logits(self, state: dict, cache, memory_mask: tf.Tensor) -> tuple:
        """Return the logits `[r, V]` of the tokens after the last ones, and the next cache."""


def decode(decoding: Decoding, source: tf.Tensor, on_tokens: Callable | None = None) -> tf.Tensor:
    """Decode in a TensorFlow loop, with a cache that has room for all tokens from the start.

    Args:
        decoding: `Decoding`.
        source: int32 tensor `[b, s]`.
        on_tokens: See `compiled`.

    Returns:
        The `result` of the search.
    """
    search = decoding.search
    mask = decoding.memory_mask(source)

    def step(state, cache):
        """Decode a token of every hypothesis."""
        logits, cache = decoding.next_logits(state, cache, mask)
        state = search.update(state, logits)
        if on_tokens is not None:
            tf.numpy_function(on_tokens, [state["last"]], [])
        return state, cache

    cache = decoding.encode(source, search.max_length)
    state = search.start(decoding.texts(source))
    state, _ = tf.while_loop(lambda state, _: needs_token(search, state), step, (state, cache))
    return search.result(state)


def needs_token(search: Search, state: dict) -> tf.Tensor:
    """Return a bool scalar tensor that is True if another token is needed."""
    return (state["position"] < search.max_length) & ~tf.reduce_all(search.ended(state))


def compiled(
    network: keras.Model,
    make: Callable[..., Decoding],
    loops_on_mesh: bool = True,
    on_tokens: Callable | None = None,
) -> Callable:
    """Compile decoding for this rank's device, mesh or pipeline. Every rank decodes all rows.

    Args:
        network: Built `keras.Model`.
        make: Function of `(max_length, seed)` that returns a `Decoding`. `max_length` is an integer
            or an int32 scalar, and `seed` an int32 tensor `[2]`. In a pipeline the seed is `None`
            in computations that choose no tokens.
        loops_on_mesh: Whether a mesh compiles the loop into one function. Otherwise each token is a
            call, which takes five times as long. DTensor cannot compile every loop. Defaults to
            `True`.
        on_tokens: Function that is called after each token with the last tokens of all sources, an
            int32 array `[b]`. Defaults to `None`.

    Returns:
        A function of `(source, max_length, seed)` that returns the result of the search. `source`
        is an int32 tensor `[b, s]`, and the others are integers. Every rank of the job must call
        it.
    """
    loops_on_mesh = loops_on_mesh and on_tokens is None
    if job.stage()[1] > 1 or not (loops_on_mesh or job.mesh() is None):
        return _in_stages(network, make, on_tokens)
    if job.mesh() is None:
        return _on_one_device(network, make, on_tokens)
    return _on_mesh(network, make)


@contextlib.contextmanager
def _hoisting(variables) -> Iterator[None]:
    """Read variables once, before the loop in the `with` block. Sharded variables are not read."""
    plain = [v for v in variables if not isinstance(v, ShardedVariable)]
    values = [(v, tf.convert_to_tensor(v.value)) for v in plain]
    with trace.decoding_loop(), keras.StatelessScope(state_mapping=values):
        yield


def _on_one_device(network, make, on_tokens):
    """Compile one function for all batch sizes and lengths."""

    def run(source, max_length, seed):
        with unsharding("generate", keeps=True) as weights:
            weights.unshard_now(network.variables)
            with _hoisting(network.variables):
                return decode(make(max_length, seed), source, on_tokens)

    function = tf.function(run, autograph=False).get_concrete_function(
        tf.TensorSpec([None, None], "int32"),
        tf.TensorSpec([], "int32"),
        tf.TensorSpec([2], "int32"),
    )
    return lambda source, max_length, seed: function(
        source, tf.constant(max_length), tf.constant([seed, 0])
    )


def _on_mesh(network, make):
    """Return a function that compiles decoding for each length, with all rows on every device."""
    functions = {}

    def run(source, max_length, seed):
        def on_mesh(source, seed):
            with override_rules(decoding_rules()):
                ids = decode(make(max_length, seed), source)
            return relayout(ids, (None, None, None))

        if max_length not in functions:
            functions[max_length] = MeshFunction(on_mesh, network.variables)
        seed = np.array([seed, 0], "int32")
        return local_value(functions[max_length](put_replicated(source), put_replicated(seed)))

    return run


def _in_stages(network, make, on_tokens):
    """Return a function that decodes in a Python loop over all stages."""
    of = functools.cache(functools.partial(_StagedDecoding, network, make, on_tokens))
    return lambda source, max_length, seed: of(tuple(source.shape), max_length)(source, seed)


class _StagedDecoding:
    """Decoding in a pipeline, for sources of a fixed shape."""

    def __init__(self, network, make, on_tokens, source_shape, max_length):
        self._shape = source_shape
        self._on_tokens = on_tokens
        self._make_decoding = make
        self._max_length = max_length
        self._encode = ForwardPass(network, self._compute_cache, "encode")
        self._step = ForwardPass(network, self._compute_logits, "decode")
        self._update = tf.function(self._choose, autograph=False)
        self._devices = self._encode.devices

    def _make(self, seed=None):
        return self._make_decoding(self._max_length, seed)

    def _compute_cache(self, source, _):
        decoding = self._make()
        source = self._devices.unpack_scalars(source, self._shape)
        return [], decoding.encode(source, decoding.search.max_length)

    def _compute_logits(self, inputs, cache):
        decoding = self._make()
        unpack = self._devices.unpack_scalars
        rows = [self._shape[0] * decoding.search.num_beams]
        shapes = {"last": rows, "beams": rows, "position": []}
        state = {name: unpack(inputs[name], shape) for name, shape in shapes.items()}
        mask = decoding.memory_mask(unpack(inputs["source"], self._shape))
        if cache is None:  # The cache is None while the dataflow between the stages is traced.
            cache = self._encode.empty_state
        return decoding.next_logits(state, cache, mask)

    def _choose(self, state, logits, seed):
        return self._make(seed).search.update(state, logits)

    def __call__(self, source, seed):
        with override_rules(decoding_rules()):
            return self._run(source, tf.constant([seed, 0]))

    def _run(self, source, seed):
        put = self._devices.put_scalars
        decoding = self._make(seed)
        search = decoding.search
        state = search.start(decoding.texts(source))
        source = put(source)
        _, caches = self._encode(source)
        has_next = True
        while has_next:
            inputs = {name: put(state[name]) for name in ("last", "beams", "position")}
            logits, caches = self._step({"source": source, **inputs}, caches)
            if has_outputs():
                state = self._update(state, logits, seed)
            scalars = [state["position"], tf.cast(needs_token(search, state), "int32")]
            chosen = from_last(tf.concat([state["last"], state["beams"], scalars], 0), "choice")
            state["last"], state["beams"] = tf.split(chosen[:-2], 2)
            state["position"] = chosen[-2]
            has_next = bool(chosen[-1])
            if self._on_tokens is not None:
                self._on_tokens(state["last"].numpy())
        return from_last(search.result(state), "ids")
