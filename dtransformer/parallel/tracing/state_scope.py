"""Scope that replaces weights and records the new values of states."""

import keras


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
