"""Functions of layers without side effects: added losses, metrics and new states are results."""

import itertools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from dtransformer.parallel.tracing.auxiliary_metrics import collecting, is_collecting


class StateScope(keras.StatelessScope):
    """Scope inside another scope that records updated variables.

    Args:
        *args, **kwargs: Arguments of `keras.StatelessScope`.
        records_seeds: Boolean. Whether `states` includes the seeds of Keras' own dropout. Defaults
            to `False`.

    Attributes:
        states: Dict from ids of updated variables to the variables.
    """

    def __init__(self, *args, records_seeds: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.states = {}
        self._records_seeds = records_seeds

    def add_update(self, update):
        super().add_update(update)
        variable, _ = update
        if variable.dtype != "uint32" or self._records_seeds:
            self.states[id(variable)] = variable

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        return value


class SideEffects:
    """Losses, metrics and states of a function, which are results of its traced form."""

    def __init__(self):
        self._num_losses = 0
        self._metric_names = []
        self._states = []

    @property
    def num_differentiable(self) -> int:
        """Number of results with gradients: the function's result and the losses."""
        return 1 + self._num_losses

    def trace(
        self, compute: Callable, scope: StateScope, collects: bool = True
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Call `compute()` inside the scope.

        Args:
            compute: Function without arguments that returns a tensor.
            scope: `StateScope` with `collect_losses=True`.
            collects: Boolean. Whether to collect metrics, if the current code does. Defaults to
                `True`.

        Returns:
            A list of the result and the losses, and a list of the metrics and new states.
        """
        with scope, collecting(is_collecting() and collects) as metrics:
            result = compute()
            self._num_losses = len(scope.losses)
            self._metric_names = list(metrics)
            self._states = list(scope.states.values())
            states = [scope.get_current_value(variable) for variable in self._states]
        return [result, *scope.losses], [*metrics.values(), *states]

    def publish(self, results: Sequence[tf.Tensor], report: Callable) -> tf.Tensor:
        """Call `report(losses, metrics)`, assign the states and return the function's result.

        Args:
            results: Sequence of tensors, all results of `trace`.
            report: Function of a list of losses and a dict of metrics.
        """
        remaining = iter(results)
        result = next(remaining)
        losses = list(itertools.islice(remaining, self._num_losses))
        report(losses, {name: next(remaining) for name in self._metric_names})
        for variable in self._states:
            variable.assign(next(remaining))
        return result
