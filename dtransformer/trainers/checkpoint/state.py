"""The state of a training run: which tensors it consists of, and what this rank has of them.

Names do not depend on the layout: `network/PATH` is a weight, without the network's own name;
`optimizer/KIND/PATH` what an optimizer keeps for it, such as `optimizer/momentums/PATH`;
`optimizer/NAME` its scalars, `metrics/NUMBER/NAME` sums since the epoch began.
"""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel.sharded_variable import full_bounds, own_shards, shard_bounds_of
from dtransformer.parallel.zero.variables import MasterShardedVariable
from dtransformer.trainers.checkpoint.boxes import Piece, pieces_of, size_of, split
from dtransformer.trainers.checkpoint.names import names_of

NETWORK, OPTIMIZER, METRICS = "network/", "optimizer/", "metrics/"
_BYTES_OF_A_PIECE = 2**22
# Keras' own lists of an optimizer's variables, which are no states.
_NO_STATES = ("_variables", "_trainable_variables", "_non_trainable_variables")


@dataclasses.dataclass(frozen=True)
class Held:
    """What this rank has of a tensor of the state.

    Args:
        name: the tensor's name in checkpoints.
        shape: the whole tensor's shape, without the padding of a vocabulary.
        variable: the Keras or TensorFlow variable that has this rank's part.
        pieces: tuple of `Piece`s: where the part lies in the whole.
        is_saved: whether checkpoints are written from it; what is made from others is not.
    """

    name: str
    shape: tuple
    variable: object
    pieces: tuple[Piece, ...]
    is_saved: bool = True

    @property
    def dtype(self):
        """The name of the type of the entries."""
        return tf.as_dtype(self.variable.dtype).name

    @property
    def written_pieces(self):
        """The pieces as they are written: who reads a slice reads all pieces that it touches."""
        most = _BYTES_OF_A_PIECE // tf.as_dtype(self.dtype).size
        return [small for piece in self.pieces for small in split(piece, most)]

    @property
    def part_shape(self):
        """The shape of this rank's part, padding included."""
        return tuple(self.variable.shape)

    def bytes_of(self, piece):
        """Return the bytes of one of the pieces."""
        return piece.entries * tf.as_dtype(self.dtype).size

    def read(self):
        """Return this rank's part as it is now; later updates do not change it."""
        with tf.device("CPU:0"):  # of memory there is enough
            return tf.identity(tf.convert_to_tensor(self.variable))

    def assign(self, part):
        """Set this rank's part, from a tensor or array of its shape."""
        self.variable.assign(tf.cast(part, self.dtype))

    def put_together(self, read):
        """Return this rank's part, a tensor or array, made of boxes of the whole.

        Args:
            read: a function of a box that returns it, a tensor or array.
        """
        if [piece.shape for piece in self.pieces] == [self.part_shape]:
            value = read(self.pieces[0].box)
            if tuple(value.shape) == self.part_shape:
                return value
            values = [value]
        else:
            values = (read(piece.box) for piece in self.pieces)
        part = np.zeros(math.prod(self.part_shape), tf.as_dtype(self.dtype).as_numpy_dtype)
        for piece, value in zip(self.pieces, values):
            here = part[piece.start : piece.stop].reshape(piece.shape)
            here[piece.inside_slices] = value
        return part.reshape(self.part_shape)

    def cut(self, part, piece):
        """Return a piece of the part, a tensor of the shape of its box."""
        if part.shape != piece.shape or piece.entries != math.prod(part.shape):
            part = tf.reshape(tf.reshape(part, [-1])[piece.start : piece.stop], piece.shape)
            part = part[piece.inside_slices]
        return part


def state_of(trainer):
    """Return the list of all `Held` of a trainer whose network and optimizer are built.

    Raises:
        ValueError: two tensors have the same name.
    """
    network = trainer.network
    names = names_of(network)
    held = _held_of_variables(network, names)
    parts = [(s.weight, s.bounds, s.flat_range) for s in trainer.optimizer_step.shards]
    for name, number, variable in _optimizer_states(trainer.optimizer, len(parts)):
        if number is None:
            held.append(_whole(f"{OPTIMIZER}{name}", variable))
            continue
        weight, box, flat = parts[number]
        path = f"{OPTIMIZER}{name}/{names[id(weight)]}"
        if math.prod(variable.shape) == (flat[1] - flat[0] if flat else size_of(box)):
            held.append(_held(path, _true_shape(weight), variable, (box, flat)))
        else:  # sums over dimensions, as Adafactor has them
            held.append(_whole(path, variable))
    held.append(
        _whole(f"{OPTIMIZER}skipped_steps", trainer.optimizer_step.loss_scale.skipped_steps)
    )
    _check_names(held, network)
    return held + metrics_of(trainer)


def held_of_network(network):
    """Return the list of all `Held` of a built network's variables."""
    return _held_of_variables(network, names_of(network))


def metrics_of(trainer):
    """Return the list of `Held` that are sums since the epoch began."""
    metrics = [trainer._loss_tracker, trainer._accuracy_tracker, trainer._compile_metrics]
    variables = [
        variable for metric in metrics if metric is not None for variable in metric.variables
    ]
    return [
        _whole(f"{METRICS}{i}/{variable.name}", variable) for i, variable in enumerate(variables)
    ]


def _held_of_variables(network, names):
    held = []
    for variable in network.variables:
        name, shape = NETWORK + names[id(variable)], _true_shape(variable)
        own = zip(own_shards([variable]), shard_bounds_of(variable), strict=True)
        held += [_held(name, shape, shard, place) for shard, place in own]
        if isinstance(variable, MasterShardedVariable):
            held.append(dataclasses.replace(_whole(name, variable.copy), is_saved=False))
    return held


def _whole(name, variable):
    return _held(name, tuple(variable.shape), variable, (full_bounds(variable.shape), None))


def _held(name, shape, variable, place):
    return Held(name, shape, variable, tuple(pieces_of(shape, *place)))


def _true_shape(variable):
    return tuple(getattr(variable, "true_shape", variable.shape))


def _optimizer_states(optimizer, num_parts):
    """Return (kind, number of the part or None, variable) of all that an optimizer keeps.

    An optimizer's states are attributes: lists with an entry, or None, for each part that it
    updates, and single variables.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    found = [] if inner is None else _optimizer_states(inner, num_parts)
    prefix = "" if inner is None else "loss_scale/"
    for attribute, value in sorted(vars(optimizer).items()):
        name = prefix + attribute.strip("_")
        if isinstance(value, keras.Variable):
            found.append((name, None, value))
        elif isinstance(value, list) and len(value) == num_parts and attribute not in _NO_STATES:
            found += [
                (name, number, variable)
                for number, variable in enumerate(value)
                if isinstance(variable, keras.Variable)
            ]
    return found


def _check_names(held, network):
    seen = {}
    for one in held:
        if not one.is_saved:
            continue
        for piece in one.pieces:
            same = seen.setdefault((one.name, piece.box), one.variable) is one.variable
            if not same or seen.setdefault(one.name, one.shape) != one.shape:
                raise ValueError(
                    f"two variables of {network.name} have the name {one.name}, so that a "
                    "checkpoint could not tell them apart: give their layers names of their own"
                )
