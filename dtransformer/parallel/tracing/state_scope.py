"""Functions of layers without side effects: added losses, metrics and new states are results."""

import itertools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.tracing.auxiliary_metrics import collecting, is_collecting


class StateScope(keras.StatelessScope):
    """Scope inside another scope that records updated variables.

    Args:
        *args, **kwargs: Arguments of `keras.StatelessScope`.
        reads_others: Boolean. Whether trainable variables without a value in this scope may be
            read. Defaults to `True`.

    Attributes:
        states: Dict from ids of updated variables to the variables.
    """

    def __init__(self, *args, reads_others: bool = True, **kwargs):
        super().__init__(*args, **kwargs)
        self.states = {}
        self._reads_others = reads_others

    def add_update(self, update):
        super().add_update(update)
        variable, _ = update
        self.states[id(variable)] = variable

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is not None:
            return value
        if variable.trainable and not self._reads_others:
            raise ValueError(
                f"A recomputed layer reads {variable.path}, which is not among its weights, so its "
                "gradient would be lost. Set the layer that has the weight as an attribute of the "
                "recomputed layer, or do not recompute it."
            )
        return (
            None if self.original_scope is None else self.original_scope.get_current_value(variable)
        )


class SideEffects:
    """Losses, metrics and states of a function, which are results of its traced form."""

    def __init__(self):
        self._result = None
        self._floats = []
        self._others = []
        self._mask_indices = []
        self._num_losses = 0
        self._metric_names = []
        self._states = []

    @property
    def num_differentiable(self) -> int:
        """Number of results with gradients: float tensors of the function's result, and losses."""
        return len(self._floats) + self._num_losses

    def trace(
        self, compute: Callable, scope: StateScope, collects: bool = True
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Call `compute()` inside the scope.

        Args:
            compute: Function without arguments that returns nested tensors and other values.
            scope: `StateScope` with `collect_losses=True`.
            collects: Boolean. Whether to collect metrics, if the current code does. Defaults to
                `True`.

        Returns:
            A list of the float tensors of the result and the losses, and a list of the result's
            other tensors, its Keras masks, the metrics and new states.
        """
        with scope, collecting(is_collecting() and collects) as metrics:
            self._result = compute()
            flat = tf.nest.flatten(self._result)
            tensors = [i for i, x in enumerate(flat) if tf.is_tensor(x)]
            self._floats = [i for i in tensors if flat[i].dtype.is_floating]
            self._others = [i for i in tensors if i not in self._floats]
            masks = _compat.get_keras_masks(self._result)
            self._mask_indices = list(masks)
            self._num_losses = len(scope.losses)
            self._metric_names = list(metrics)
            self._states = list(scope.states.values())
            states = [scope.get_current_value(variable) for variable in self._states]
        differentiable = [flat[i] for i in self._floats] + scope.losses
        others = [flat[i] for i in self._others]
        return differentiable, [*others, *masks.values(), *metrics.values(), *states]

    def publish(self, results: Sequence[tf.Tensor], report: Callable):
        """Call `report(losses, metrics)`, assign the states and return the function's result.

        Args:
            results: Sequence of tensors, all results of `trace`.
            report: Function of a list of losses and a dict of metrics.
        """
        flat = tf.nest.flatten(self._result)
        remaining = iter(results)
        for i in self._floats:
            flat[i] = next(remaining)
        losses = list(itertools.islice(remaining, self._num_losses))
        for i in self._others:
            flat[i] = next(remaining)
        masks = {i: next(remaining) for i in self._mask_indices}
        report(losses, {name: next(remaining) for name in self._metric_names})
        for variable in self._states:
            variable.assign(next(remaining))
        return _compat.with_masks(tf.nest.pack_sequence_as(self._result, flat), masks)
