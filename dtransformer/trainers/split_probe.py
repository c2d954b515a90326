"""Probe that finds losses and layer states which cannot be combined from parts of a batch.

For example, a loss that is a ratio or a product of batch means is not the mean of the losses of two
half batches. Layers and losses that could behave like this are computed on a few random rows and
on the two halves of these rows, and the results are compared.
"""

import contextlib
import inspect
import itertools
import math
import warnings

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import to_one_line
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.pipeline_parallel.stage_assignment import is_elsewhere, placed_layers
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.added_losses import may_add_losses
from dtransformer.parallel.tracing.state_scope import StateScope

# How to combine a state's changes over the parts of a batch.
MEAN = "mean"
SUM = "sum"
_ROWS = 4
_MAX_POSITIONS = 16  # Maximum sequence length when losses are probed.
_MAX_ELEMENTS = 2**24  # Maximum number of weight elements in a probed layer.


def updatable_states(layer: keras.Layer) -> list[keras.Variable]:
    """Return a layer's non-trainable variables that its call may update.

    Variables of inner layers and seeds are excluded.
    """
    trained = {id(variable) for variable in _compat.direct_trainable_variables(layer)}
    return [v for v in _compat.direct_variables(layer) if id(v) not in trained]


def probe_split(network: keras.Model, objective, inputs, labels) -> tuple[dict, list, list]:
    """Probe all layers and losses whose results could differ when a batch is divided.

    Args:
        network: The `keras.Model`, built.
        objective: The `Objective`.
        inputs, labels: Nested tensors of a batch. Only their shapes and dtypes are used.

    Returns:
        A `(rules, differing, row_loss_layers)` tuple: a dict that maps the id of each updated
        state to `MEAN` or `SUM`, a list of the names of layers and losses that are neither the
        mean nor the sum of their parts, and a list of the names of layers that add losses which
        depend on the rows.
    """
    elsewhere = [layer for layer in placed_layers(network) if is_elsewhere(layer)]
    elsewhere = {id(inner) for layer in elsewhere for inner in _compat.flat_layers(layer)}
    layers = [layer for layer in _compat.flat_layers(network) if id(layer) not in elsewhere]
    layers = [
        layer
        for layer in layers
        if may_add_losses(layer)
        or (updatable_states(layer) and not type(layer).__module__.startswith("dtransformer."))
    ]
    has_custom_loss = any(_is_custom_loss(loss) for loss in objective.losses)
    if not layers and not has_custom_loss:
        return {}, [], []
    try:
        outputs, calls, adding = _record_calls(network, inputs, layers, _ROWS)
        _, half_calls, _ = _record_calls(network, inputs, layers, _ROWS // 2)
    except Exception as error:
        return {}, [f"{network.name} (not tried: {to_one_line(str(error), 80)})"], []
    rules = {}
    differing = []
    row_loss_layers = []
    for layer in layers:
        if layer not in half_calls or not (layer in adding or updatable_states(layer)):
            continue
        name = layer.path or layer.name
        trials = _run_trials(layer, calls[layer], half_calls[layer])
        if trials is None:
            differing.append(f"{name} (not tried)")
            rules.update((id(variable), MEAN) for variable in updatable_states(layer))
            continue
        (loss, states), *halves = trials
        half_losses = [half_loss for half_loss, _ in halves]
        can_combine = _add_rules(states, halves, rules) or _is_synchronized(layer)
        if not can_combine or not _is_near(loss, sum(half_losses) / 2):
            differing.append(name)
        # A loss that is identical for all rows depends only on weights.
        if not _is_near([loss] * 2, half_losses):
            row_loss_layers.append(name)
    if has_custom_loss:
        differing += _probe_losses(objective, outputs, labels)
    return rules, differing, row_loss_layers


def _is_synchronized(layer):
    """Return whether a layer's states are identical on all ranks, because it reduces them."""
    is_full_batch = get_parallel_config().micro_batch_num == 1
    return is_full_batch and getattr(layer, "synchronized", False)


def _add_rules(states, halves, rules):
    """Add the rules of a layer's states to `rules`; return whether all states can be combined."""
    can_combine = True
    for i, (variable, change, is_set) in enumerate(states):
        half_changes = [half[i][1] for _, half in halves]
        # The call may set a state without changing it in this trial.
        if is_set:
            rules[id(variable)] = MEAN
        if np.any(change) or np.any(half_changes):
            is_mean = _is_near(change, sum(half_changes) / 2)
            is_sum = _is_near(change, sum(half_changes))
            rules[id(variable)] = SUM if is_sum and not is_mean else MEAN
            can_combine &= is_sum or is_mean
    return can_combine


def warn_split_results(differing: list[str]) -> None:
    """Warn on rank 0 about layers and losses whose results depend on how a batch is divided.

    All ranks must call it.

    Args:
        differing: List of names of layers and losses found on this rank.
    """
    names = list(dict.fromkeys(itertools.chain(*all_gather_json(differing, "parts"))))
    if names and job.is_chief():
        warnings.warn(
            f"The result of {', '.join(names)} for a batch is not the mean of "
            "the results for its parts, but data shards and micro-batches divide each batch. "
            "Results therefore differ from Keras'. Use one data shard and `micro_batch_num=1` for "
            "Keras' results.",
            stacklevel=2,
        )


def _record_calls(network, inputs, layers, rows):
    """Trace a network for a number of rows and record the calls of some layers.

    Returns:
        A `(outputs, calls, adding)` tuple: the outputs' specs, a dict that maps each layer to the
        `(args, kwargs)` of its first call, and the set of layers that called `add_loss`.
    """
    calls = {}
    adding = set()

    def watch(layer, call, add_loss):
        def watched_call(*args, **kwargs):
            calls.setdefault(layer, (args, kwargs))
            return call(*args, **kwargs)

        def watched_add_loss(loss):
            adding.add(layer)
            return add_loss(loss)

        return _compat.patched(layer, call=watched_call, add_loss=watched_add_loss)

    symbols = tf.nest.map_structure(
        lambda x: keras.KerasTensor((rows, *(n or _ROWS for n in x.shape[1:])), x.dtype.name),
        tf.nest.map_structure(tf.convert_to_tensor, inputs),
    )
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(watch(layer, layer.call, layer.add_loss))
        outputs = _compat.compute_output_spec(lambda x: network(x, training=True), symbols)
    return outputs, calls, adding


def _run_trials(layer, call, half_call):
    """Return the results of a layer's call on random rows and on the two halves of these rows.

    Each result is a tuple `(loss, [(state, change, is set), ...])`. Returns `None` if the layer is
    too large or cannot be called alone.
    """
    if sum(math.prod(v.shape) for v in layer.variables) > _MAX_ELEMENTS:
        return None
    rng = np.random.default_rng(0)
    flat = tf.nest.flatten(call)
    trials = [list(flat) for _ in range(3)]
    for i, (x, half) in enumerate(zip(flat, tf.nest.flatten(half_call))):
        if not tf.is_tensor(x):
            continue
        first, second = (_random_values(half.shape, half.dtype, part, rng) for part in range(2))
        if x.shape == half.shape:  # The argument has no rows.
            trial_values = [first, first, first]
        else:
            trial_values = [tf.concat([first, second], 0), first, second]
        for trial, value in zip(trials, trial_values):
            trial[i] = value
    seeds = [v for v in layer.variables if _compat.is_seed(v)]
    values = [
        (v, _random_values(v.shape, v.dtype, 0, rng))
        for v in layer.variables
        if not _compat.is_seed(v)
    ]
    packed = [tf.nest.pack_sequence_as(call, trial) for trial in trials]
    try:
        results = [_run_layer(layer, values, args, kwargs) for args, kwargs in packed]
        other_seeds = [(seed, rng.integers(2**31, size=seed.shape)) for seed in seeds]
        again = _run_layer(layer, values + other_seeds, *packed[0])
        # The call is random: repeat it without randomness, for the losses only.
        if not _is_near(results[0][0], again[0]):
            packed = [(args, {**kwargs, "training": False}) for args, kwargs in packed]
            results = [(_run_layer(layer, values, args, kwargs)[0], []) for args, kwargs in packed]
    except Exception:
        return None
    return results


def _run_layer(layer, values, args, kwargs):
    with StateScope(values, collect_losses=True) as scope:
        layer(*args, **kwargs)
    before = {id(variable): value for variable, value in values}
    loss = sum(float(tf.reduce_sum(x)) for x in scope.losses)
    changes = []
    for variable in updatable_states(layer):
        new = np.asarray(scope.get_current_value(variable), "float64")
        change = new - np.asarray(before[id(variable)], "float64")
        changes.append((variable, change, id(variable) in scope.states))
    return loss, changes


def _random_values(shape, dtype, part, rng):
    """Return random values. The two parts have different distributions."""
    dtype = tf.as_dtype(dtype)
    if dtype.is_floating:
        return tf.cast(rng.normal(part, 0.5 + part, shape), dtype)
    return tf.cast(rng.random(shape) < 0.2 + 0.6 * part, dtype)


def _is_near(x, y):
    scale = np.max(np.abs([x, y])) if np.size(x) else 0.0
    return bool(np.all(np.abs(np.subtract(x, y)) <= 0.01 * scale))


# Probe of losses.


def _is_custom_loss(loss):
    """Return whether a loss is custom and does not declare that it compares rows.

    It may not be a mean over rows.
    """
    loss = getattr(loss, "fn", loss)
    if loss is None or isinstance(loss, str) or hasattr(loss, "per_token"):
        return False
    if getattr(loss, "compares_rows", False):
        return False
    source = loss if inspect.isfunction(loss) else type(loss)
    return not source.__module__.startswith("keras.")


def _probe_losses(objective, outputs, labels):
    """Return the names of losses that are not the mean over two halves of random rows."""
    rng = np.random.default_rng(0)
    differing = []
    lengths = {x.shape[1] for x in tf.nest.flatten(outputs) if len(x.shape) > 2}

    def shorten(x):
        shape = list(x.shape)
        shape[1:2] = [min(n, _MAX_POSITIONS) if n in lengths else n for n in shape[1:2]]
        return tf.TensorSpec(shape, x.dtype)

    labels = tf.nest.map_structure(tf.convert_to_tensor, labels)
    labels, outputs = tf.nest.map_structure(shorten, (labels, outputs))
    outputs = tf.nest.map_structure(lambda x: _random_probabilities(x.shape, rng), outputs)
    for ignored in (0, -100):  # Common labels of ignored positions.
        random_labels = tf.nest.map_structure(lambda x: _random_labels(x, ignored, rng), labels)
        try:
            counts = objective.counts(random_labels, random_labels, None)
            full, *halves = (
                objective.sums(
                    *tf.nest.map_structure(lambda x: x[rows], (outputs, random_labels)),
                    None,
                    counts,
                    is_full_batch=False,
                )
                for rows in (slice(_ROWS), slice(_ROWS // 2), slice(_ROWS // 2, _ROWS))
            )
        except Exception:  # The loss may not accept these labels.
            continue
        names = [name for name in full if name.startswith("loss/")] or ["loss"]
        for name in names:
            full_loss = _total_loss([full], name)
            total = _total_loss(halves, name)
            if np.isfinite(full_loss + total) and not _is_near(full_loss, total):
                differing.append(objective.describe_loss(name))
    return differing


def _total_loss(sums, name):
    """Return the total loss of several parts."""
    ratio = sum(float(part.get("normalizer_ratio", 0.0)) for part in sums) or 1.0
    return sum(float(part[name]) for part in sums) / ratio


def _random_labels(like, ignored, rng):
    """Return random labels. The second half has fewer ignored labels."""
    shape = (_ROWS // 2, *(n or _ROWS for n in like.shape[1:]))
    counts = tf.concat([_random_values(shape, "bool", part, rng) for part in range(2)], 0)
    return tf.cast(tf.where(counts, 1, ignored if like.dtype.is_integer else 0), like.dtype)


def _random_probabilities(shape, rng):
    """Return random positive values. The values of several classes sum to 1."""
    values = rng.uniform(0.05, 0.95, shape)
    if len(shape) > 1 and shape[-1] > 1:
        values /= values.sum(-1, keepdims=True)
    return tf.constant(values, "float32")
