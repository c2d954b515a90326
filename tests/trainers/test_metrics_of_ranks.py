"""Every Keras metric has the same value on several data ranks as on one."""

import threading

import keras
import numpy as np
import pytest

from dtransformer import _compat
from dtransformer.parallel.runtime import job
from dtransformer.trainers import compiled_metrics
from dtransformer.trainers.compiled_metrics import CompiledMetrics

ROWS, CLASSES = 12, 3
BASES = {"Metric", "MeanMetricWrapper", "Mean", "Sum"}  # Their values are no (y_true, y_pred).
BASES |= {"SensitivitySpecificityBase"}
rng = np.random.default_rng(0)
CLASS = rng.integers(0, CLASSES, ROWS)
ONE_HOT = np.eye(CLASSES, dtype="float32")[CLASS]
PROBABILITY = rng.dirichlet(np.ones(CLASSES), ROWS).astype("float32")
BINARY = (rng.random((ROWS, 1)) < 0.5).astype("float32")
SCORE = rng.random((ROWS, 1)).astype("float32")
MAPS = [rng.integers(0, CLASSES, (ROWS, 4)) for _ in range(2)]
# Arguments, labels and outputs of the metrics that do not take two float arrays.
SPECIAL = {
    "AUC": [({}, BINARY, SCORE), ({"multi_label": True}, ONE_HOT, PROBABILITY)],
    "BinaryAccuracy": [({}, BINARY, SCORE)],
    "BinaryCrossentropy": [({}, BINARY, SCORE)],
    "BinaryIoU": [({}, BINARY, SCORE)],
    "CategoricalHinge": [({}, ONE_HOT, PROBABILITY)],
    "F1Score": [({}, ONE_HOT, PROBABILITY), ({"average": "macro"}, ONE_HOT, PROBABILITY)],
    "FBetaScore": [({"beta": 2.0}, ONE_HOT, PROBABILITY)],
    "IoU": [({"num_classes": CLASSES, "target_class_ids": [0, 2]}, *MAPS)],
    "MeanIoU": [({"num_classes": CLASSES}, *MAPS)],
    "OneHotIoU": [
        ({"num_classes": CLASSES, "target_class_ids": [1]}, ONE_HOT, PROBABILITY),
    ],
    "OneHotMeanIoU": [({"num_classes": CLASSES}, ONE_HOT, PROBABILITY)],
    "PrecisionAtRecall": [({"recall": 0.5}, BINARY, SCORE)],
    "R2Score": [
        ({}, ONE_HOT, PROBABILITY),
        ({"num_regressors": 2}, BINARY, SCORE),
        ({"class_aggregation": None}, ONE_HOT, PROBABILITY),
    ],
    "RecallAtPrecision": [({"precision": 0.5}, BINARY, SCORE)],
    "SensitivityAtSpecificity": [({"specificity": 0.5}, BINARY, SCORE)],
    "SpecificityAtSensitivity": [({"sensitivity": 0.5}, BINARY, SCORE)],
    "SparseCategoricalAccuracy": [({}, CLASS, PROBABILITY)],
    "SparseCategoricalCrossentropy": [({}, CLASS, PROBABILITY)],
    "SparseTopKCategoricalAccuracy": [({"k": 2}, CLASS, PROBABILITY)],
    "TopKCategoricalAccuracy": [({"k": 2}, ONE_HOT, PROBABILITY)],
}


def all_metrics():
    names_by_class = {}
    for metric_class in vars(keras.metrics).values():
        is_metric = isinstance(metric_class, type) and issubclass(
            metric_class, keras.metrics.Metric
        )
        if is_metric and metric_class.__name__ not in BASES:
            names_by_class[metric_class] = metric_class.__name__
    for metric_class, name in sorted(names_by_class.items(), key=lambda item: item[1]):
        for i, case in enumerate(SPECIAL.get(name, [({}, ONE_HOT, PROBABILITY)])):
            yield pytest.param(metric_class, *case, id=f"{name}-{i}" if i else name)


class TwoRanks:
    """Two threads that act as data ranks. Sums over ranks wait for both threads."""

    def __init__(self, monkeypatch):
        self._local = threading.local()
        self._barrier = threading.Barrier(2, timeout=60)
        self._values = [None, None]
        monkeypatch.setattr(job, "size", lambda: 2)
        monkeypatch.setattr(job, "data_shard", lambda: (self._local.rank, 2))
        monkeypatch.setattr(compiled_metrics, "reduce_sum", self._reduce_sum)

    def _reduce_sum(self, values, name):
        self._values[self._local.rank] = values
        self._barrier.wait()
        first, second = self._values
        self._barrier.wait()
        return {key: first[key] + second[key] for key in values}

    def run(self, function):
        """Return the results of `function(rank)` on both ranks."""
        results, errors = [None, None], []

        def call(rank):
            self._local.rank = rank
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=call, args=[rank]) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def container(metric):
    compiled = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    compiled.compile(loss="mse", metrics=[metric])
    return compiled._compile_metrics


@pytest.mark.parametrize("metric_class, options, labels, outputs", all_metrics())
def test_two_ranks_match_one_rank(monkeypatch, metric_class, options, labels, outputs):
    expected = metric_class(**options)
    halves = [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)]
    for half in halves:  # Two steps.
        expected.update_state(labels[half], outputs[half])

    def train(rank):
        metric = metric_class(**options)
        metrics = CompiledMetrics(container(metric), on_build=print)
        metrics.build(labels, outputs)
        for half in halves:
            quarter = slice(half.start + 3 * rank, half.start + 3 * rank + 3)
            metrics.update(
                labels[quarter], (outputs[quarter], _compat.get_keras_masks(outputs)), None
            )
        return np.asarray(metric.result())

    for result in TwoRanks(monkeypatch).run(train):
        np.testing.assert_allclose(result, np.asarray(expected.result()), rtol=2e-6, atol=1e-7)


def test_metric_that_needs_sample_weights_is_built(monkeypatch):
    class Weighted(keras.metrics.Sum):
        def update_state(self, labels, outputs, sample_weight=None):
            super().update_state(keras.ops.convert_to_tensor(sample_weight))

    monkeypatch.setattr(job, "size", lambda: 2)
    metric = Weighted()
    weighted = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    weighted.compile(loss="mse", weighted_metrics=[metric])
    metrics = CompiledMetrics(weighted._compile_metrics, on_build=print)
    metrics.build(BINARY, SCORE, np.ones(ROWS))
    assert metrics.container.built and float(metric.result()) == 0
