"""Scores of predictions against labels that are no means over rows."""

import numpy as np


def macro_f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return the mean of the F1 of each class that is there; arguments int [n].

    Example:

    >>> macro_f1(np.array([0, 0, 1]), np.array([0, 1, 1]))
    0.6666666666666666
    """
    classes = np.union1d(labels, predicted)
    right = [np.sum((labels == c) & (predicted == c)) for c in classes]
    there = [np.sum(labels == c) + np.sum(predicted == c) for c in classes]
    return float(np.mean(2 * np.array(right) / np.array(there)))


def matthews(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Return the correlation of classes and predicted ones (Gorodkin, 2004); 0 where one is constant.

    Example:

    >>> matthews(np.array([0, 1, 2]), np.array([0, 1, 2]))
    1.0
    """
    classes = np.union1d(labels, predicted)
    own, their = ((x[:, None] == classes).astype(float) for x in (labels, predicted))
    return _correlation(own, their)


def spearman(values: np.ndarray, predicted: np.ndarray) -> float:
    """Return the correlation of ranks, ties sharing theirs; 0 where one is constant.

    Example:

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 9.0]))
    1.0
    """
    return _correlation(_ranks(values), _ranks(predicted))


def _correlation(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    size = np.sqrt((x**2).sum() * (y**2).sum())
    return float((x * y).sum() / size) if size else 0.0


def _ranks(x):
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[place]
