"""The optimizer's state beside the network's weights in one file.

Keras' `load_weights` of the network passes over it, so that the file serves both to go
on training and to translate.
"""

import h5py

_GROUP = "trainer_optimizer"


def save_optimizer(filepath, optimizer):
    """Add the state of a built optimizer to an HDF5 file of weights."""
    with h5py.File(filepath, "a") as file:
        for number, variable in enumerate(optimizer.variables):
            file[f"{_GROUP}/{number}"] = variable.numpy()


def load_optimizer(filepath, optimizer):
    """Set the state of a built optimizer from a file, where it holds that of one alike."""
    with h5py.File(filepath) as file:
        state = file.get(_GROUP)
        if state is None or len(state) != len(optimizer.variables):
            return
        values = [state[str(number)][()] for number in range(len(state))]
    shapes = [tuple(variable.shape) for variable in optimizer.variables]
    if [value.shape for value in values] == shapes:
        for variable, value in zip(optimizer.variables, values):
            variable.assign(value)
