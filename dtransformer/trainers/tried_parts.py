"""Probe that finds losses and layer states which cannot be combined from parts of a batch.

For example, a loss that is a ratio or a product of batch means is not the mean of the losses of two
half batches. Layers and losses that could behave like this are computed on a few random rows and
on the two halves of these rows, and the results are compared.
"""

import contextlib
import functools
import inspect
import math
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import one_line
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.pipeline_parallel.stage_assignment import is_elsewhere, placed_layers
from dtransformer.parallel.recompute.recompute import StateScope
from dtransformer.parallel.runtime import job

# How to combine a state's changes over the parts of a batch.
MEAN, SUM = "mean", "sum"
_ROWS = 4
_TYPE_OF_SEEDS = "uint32"
_POSITIONS = 16  # Maximum sequence length when losses are probed.
_MOST_ELEMENTS = 2**24  # Maximum number of weight elements in a probed layer.


def own_states(layer: keras.Layer) -> list[keras.Variable]:
    """Return a layer's non-trainable variables that its call may update.

    Variables of inner layers and seeds are excluded.
    """
    trained = {id(variable) for variable in _compat.own_trainable_variables(layer)}
    return [
        v
        for v in _compat.own_variables(layer)
        if id(v) not in trained and v.dtype != _TYPE_OF_SEEDS
    ]


def try_parts(network: keras.Model, objective, inputs, labels) -> tuple[dict, list, list]:
    """Probe all layers and losses whose results could differ when a batch is divided.

    Args:
        network: The `keras.Model`, built.
        objective: The `Objective`.
        inputs, labels: Nested tensors of a batch. Only their shapes and dtypes are used.

    Returns:
        A `(rules, differing, of_rows)` tuple: a dict that maps the id of each updated state to
        `MEAN` or `SUM`, a list of the names of layers and losses that are neither the mean nor the
        sum of their parts, and a list of the names of layers that add losses which depend on the
        rows.
    """
    elsewhere = [layer for layer in placed_layers(network) if is_elsewhere(layer)]
    elsewhere = {id(inner) for layer in elsewhere for inner in _compat.flat_layers(layer)}
    layers = [one for one in _compat.flat_layers(network) if id(one) not in elsewhere]
    layers = [
        one
        for one in layers
        if _may_add_losses(one)
        or (own_states(one) and not type(one).__module__.startswith("dtransformer."))
    ]
    owns = any(_is_own_loss(loss) for loss in objective.losses)
    if not layers and not owns:
        return {}, [], []
    try:
        outputs, calls, adding = _calls(network, inputs, layers, _ROWS)
        _, of_half, _ = _calls(network, inputs, layers, _ROWS // 2)
    except Exception as error:
        return {}, [f"{network.name} (not tried: {one_line(str(error), 80)})"], []
    rules, differing, of_rows = {}, [], []
    for layer in layers:
        if layer not in of_half or not (layer in adding or own_states(layer)):
            continue
        name, trials = layer.path or layer.name, _trials(layer, calls[layer], of_half[layer])
        if trials is None:
            differing.append(f"{name} (not tried)")
            rules.update((id(variable), MEAN) for variable in own_states(layer))
            continue
        (loss, states), *halves = trials
        losses, add_up = [half for half, _ in halves], _find_rules(states, halves, rules)
        if not add_up or not _is_near(loss, sum(losses) / 2):
            differing.append(name)
        # A loss that is identical for all rows depends only on weights.
        if not _is_near([loss] * 2, losses):
            of_rows.append(name)
    differing += _losses_that_differ(objective, outputs, labels) if owns else []
    return rules, differing, of_rows


def _find_rules(states, halves, rules):
    """Add the rules of a layer's states to `rules`; return whether all states can be combined."""
    adds_up = True
    for number, (variable, whole, is_set) in enumerate(states):
        changes = [half[number][1] for _, half in halves]
        # The call may set a state without changing it in this trial.
        if is_set:
            rules[id(variable)] = MEAN
        if np.any(whole) or np.any(changes):
            is_mean, is_sum = (_is_near(whole, sum(changes) / n) for n in (2, 1))
            rules[id(variable)] = SUM if is_sum and not is_mean else MEAN
            adds_up &= is_sum or is_mean
    return adds_up


def tell_of_parts(differing: list[str]) -> None:
    """Warn on rank 0 about layers and losses whose results depend on how a batch is divided.

    All ranks must call it.

    Args:
        differing: List of names of layers and losses found on this rank.
    """
    everyone = [name for names in all_gather_json(differing, "parts") for name in names]
    if everyone and job.is_chief():
        warnings.warn(
            f"The result of {', '.join(dict.fromkeys(everyone))} for a batch is not the mean of "
            "the results for its parts, but data shards and micro-batches divide each batch. "
            "Results therefore differ from Keras'. Use one data shard and `micro_batch_num=1` for "
            "Keras' results.",
            stacklevel=2,
        )


def _may_add_losses(layer):
    regularizes = getattr(layer, "activity_regularizer", None) is not None
    return regularizes or any(map(_code_adds_losses, type(layer).__mro__))


@functools.cache
def _code_adds_losses(of):
    """Return whether `add_loss` appears in the code of a user's class or of its module."""
    if of is object or of.__module__.startswith(("keras.", "dtransformer.")):
        return False
    module = vars(sys.modules.get(of.__module__, of))
    functions = filter(inspect.isfunction, [*vars(of).values(), *module.values()])
    return any("add_loss" in inspect.unwrap(one).__code__.co_names for one in functions)


def _calls(network, inputs, layers, rows):
    """Trace a network for a number of rows and record the calls of some layers.

    Returns:
        A `(outputs, calls, adding)` tuple: the outputs' specs, a dict that maps each layer to the
        `(args, kwargs)` of its first call, and the set of layers that called `add_loss`.
    """
    found, adding = {}, set()

    def watched(layer, call, add_loss):
        def watched_call(*args, **kwargs):
            found.setdefault(layer, (args, kwargs))
            return call(*args, **kwargs)

        def watched_add_loss(loss):
            adding.add(layer)
            return add_loss(loss)

        return _compat.meanwhile(layer, call=watched_call, add_loss=watched_add_loss)

    symbols = tf.nest.map_structure(
        lambda x: keras.KerasTensor((rows, *(n or _ROWS for n in x.shape[1:])), x.dtype.name),
        tf.nest.map_structure(tf.convert_to_tensor, inputs),
    )
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(watched(layer, layer.call, layer.add_loss))
        outputs = _compat.compute_output_spec(lambda x: network(x, training=True), symbols)
    return outputs, found, adding


def _trials(layer, call, of_half):
    """Return the results of a layer's call on random rows and on the two halves of these rows.

    Each result is a tuple `(loss, [(state, change, is set), ...])`. Returns `None` if the layer is
    too large or cannot be called alone.
    """
    if sum(math.prod(v.shape) for v in layer.variables) > _MOST_ELEMENTS:
        return None
    draw = np.random.default_rng(0)
    flat, halves = tf.nest.flatten(call), tf.nest.flatten(of_half)
    trials = [list(flat) for _ in range(3)]
    for number, (x, half) in enumerate(zip(flat, halves)):
        if not tf.is_tensor(x):
            continue
        parts = [_drawn(half.shape, half.dtype, part, draw) for part in range(2)]
        is_of_rows = x.shape != half.shape
        whole = tf.concat(parts, 0) if is_of_rows else parts[0]
        for trial, value in zip(trials, [whole, *(parts if is_of_rows else parts[:1] * 2)]):
            trial[number] = value
    values = [(v, _drawn(v.shape, v.dtype, 0, draw)) for v in layer.variables]
    values = [(v, value) for v, value in values if v.dtype != _TYPE_OF_SEEDS]
    packed = [tf.nest.pack_sequence_as(call, trial) for trial in trials]
    try:
        results = [_computed(layer, values, *one) for one in packed]
        # The call is random: repeat it without randomness, for the losses only.
        if not _is_near(results[0][0], _computed(layer, values, *packed[0])[0]):
            packed = [(args, {**kwargs, "training": False}) for args, kwargs in packed]
            results = [(_computed(layer, values, *one)[0], []) for one in packed]
    except Exception:
        return None
    return results


def _computed(layer, values, args, kwargs):
    with StateScope(values, collect_losses=True) as scope:
        layer(*args, **kwargs)
    before = {id(variable): value for variable, value in values}
    loss = sum(float(tf.reduce_sum(x)) for x in scope.losses)
    changes = []
    for variable in own_states(layer):
        new = np.asarray(scope.get_current_value(variable), "float64")
        change = new - np.asarray(before[id(variable)], "float64")
        changes.append((variable, change, id(variable) in scope.states))
    return loss, changes


def _drawn(shape, dtype, part, draw):
    """Return random values. The two parts have different distributions."""
    dtype = tf.as_dtype(dtype)
    if dtype.is_floating:
        return tf.cast(draw.normal(part, 0.5 + part, shape), dtype)
    return tf.cast(draw.random(shape) < 0.2 + 0.6 * part, dtype)


def _is_near(x, y):
    scale = np.max(np.abs([x, y])) if np.size(x) else 0.0
    return bool(np.all(np.abs(np.subtract(x, y)) <= 0.01 * scale))


# Probe of losses.


def _is_own_loss(loss):
    """Return whether a loss is custom, so that it may not be a mean over rows."""
    loss = getattr(loss, "fn", loss)
    if loss is None or isinstance(loss, str) or hasattr(loss, "per_token"):
        return False
    of = loss if inspect.isfunction(loss) else type(loss)
    return not of.__module__.startswith("keras.")


def _losses_that_differ(objective, outputs, labels):
    """Return the names of losses that are not the mean over two halves of random rows."""
    draw, differing = np.random.default_rng(0), []
    lengths = {x.shape[1] for x in tf.nest.flatten(outputs) if len(x.shape) > 2}

    def of_few_positions(x):
        shape = list(x.shape)
        shape[1:2] = [min(n, _POSITIONS) if n in lengths else n for n in shape[1:2]]
        return tf.TensorSpec(shape, x.dtype)

    labels = tf.nest.map_structure(tf.convert_to_tensor, labels)
    labels, outputs = tf.nest.map_structure(of_few_positions, (labels, outputs))
    outputs = tf.nest.map_structure(lambda x: _probabilities(x.shape, draw), outputs)
    for ignored in (0, -100):  # Common labels of ignored positions.
        own = tf.nest.map_structure(lambda x: _drawn_labels(x, ignored, draw), labels)
        try:
            counts = objective.counts(own, own, None)
            of_rows = lambda start, end: tf.nest.map_structure(
                lambda x: x[start:end], (outputs, own)
            )
            sums = [
                objective.sums(*of_rows(*rows), None, counts, own_is_all=False)
                for rows in ((0, _ROWS), (0, _ROWS // 2), (_ROWS // 2, _ROWS))
            ]
        except Exception:  # The loss may not accept these labels.
            continue
        names = [name for name in sums[0] if name.startswith("loss/")] or ["loss"]
        for name in names:
            whole, total = _loss_of(sums[:1], name), _loss_of(sums[1:], name)
            if np.isfinite(whole + total) and not _is_near(whole, total):
                differing.append(objective.name_of(name))
    return differing


def _loss_of(sums, name):
    """Return the total loss of several parts."""
    divided = sum(float(one.get("divided", 0.0)) for one in sums) or 1.0
    return sum(float(one[name]) for one in sums) / divided


def _drawn_labels(like, ignored, draw):
    """Return random labels. The second half has fewer ignored labels."""
    shape = (_ROWS // 2, *(n or _ROWS for n in like.shape[1:]))
    counts = tf.concat([_drawn(shape, "bool", part, draw) for part in range(2)], 0)
    return tf.cast(tf.where(counts, 1, ignored if like.dtype.is_integer else 0), like.dtype)


def _probabilities(shape, draw):
    """Return random positive values. The values of several classes sum to 1."""
    values = draw.uniform(0.05, 0.95, shape)
    if len(shape) > 1 and shape[-1] > 1:
        values /= values.sum(-1, keepdims=True)
    return tf.constant(values, "float32")
