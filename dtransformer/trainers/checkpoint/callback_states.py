"""States of Keras' own callbacks in checkpoints, such as the patience of early stopping."""

import pathlib
from collections.abc import Iterable

import keras
import numpy as np
from safetensors.numpy import save_file

from dtransformer.inputs.safetensors_file import SafetensorsFile

FILE = "callbacks.safetensors"
KINDS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.ModelCheckpoint,
)
_FIELDS = "best", "best_epoch", "cooldown_counter", "stopped_epoch", "wait"
_WEIGHTS = "best_weights"


class CallbackStates(keras.callbacks.Callback):
    """What Keras' callbacks with a state have, set once more after they have begun.

    Args:
        callbacks: the callbacks of a `fit`, which come before this one.
        folder: the checkpoint that a run goes on from, or None.
    """

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback], folder: str | None):
        super().__init__()
        self._with_state, names = {}, []
        for one in callbacks:
            if isinstance(one, KINDS):
                names.append(type(one).__name__)
                self._with_state[f"{names[-1]}.{names.count(names[-1])}"] = one
        self._path = None if folder is None else pathlib.Path(folder) / FILE

    def on_train_begin(self, logs=None):
        if self._path is None or not self._path.exists():
            return
        file = SafetensorsFile(self._path)
        for name, one in self._with_state.items():
            for field in _FIELDS:
                if f"{name}.{field}" in file.shapes:
                    setattr(one, field, file[f"{name}.{field}"][0].item())
            weights = sorted(x for x in file.shapes if x.startswith(f"{name}.{_WEIGHTS}."))
            if weights:
                one.best_weights = [np.array(file[x]) for x in weights]

    def assets(self) -> dict:
        """Return what a checkpoint gets: the states as they are now; nothing where there are none."""
        values = {}
        for name, one in self._with_state.items():
            for field in _FIELDS:
                value = getattr(one, field, None)
                if value is not None:
                    values[f"{name}.{field}"] = np.array([value])
            for number, value in enumerate(getattr(one, _WEIGHTS, None) or ()):
                values[f"{name}.{_WEIGHTS}.{number:06}"] = np.array(value, order="C")
        return {FILE: _Values(values)} if values else {}


class _Values:
    """Arrays that a checkpoint's thread writes."""

    def __init__(self, values):
        self._values = values

    def save(self, path):
        save_file(self._values, path)


def saved_after_states(callbacks: list, saving: type) -> list:
    """Return callbacks in an order in which checkpoints see states that an epoch's end has changed.

    Args:
        callbacks: a `fit`'s callbacks.
        saving: the class of those that save.

    Example:

    >>> first, second = keras.callbacks.History(), keras.callbacks.EarlyStopping()
    >>> saved_after_states([first, second], keras.callbacks.History) == [second, first]
    True
    """
    last = max((i for i, one in enumerate(callbacks) if isinstance(one, KINDS)), default=-1)
    place = lambda i: last + 0.5 if i < last and isinstance(callbacks[i], saving) else i
    return [callbacks[i] for i in sorted(range(len(callbacks)), key=place)]
