"""Equal layers, which share one traced function.

The function takes the weights and random ids of a layer as arguments. `signature` decides whether
layers are equal, and `EqualLayers` maps everything that differs between them.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.tracing.auxiliary_metrics import collecting, is_collecting, report_all
from dtransformer.parallel.tracing.dropout_seed import (
    current_random_id,
    random_layers,
    use_random_ids,
)
from dtransformer.parallel.tracing.trace import context_signature
from dtransformer.parallel.weights.weight import trained_value


def signature(layer: keras.layers.Layer) -> tuple:
    """Return a hashable value that is the same for layers with the same computation.

    The layers and all their sublayers must have the same types, the same configs except for names,
    the same types of random layers, the same recompute, and weights of the same shape, dtype and
    trainability. They must be traced in the same context, see `context_signature`. Names, values
    of weights and ids of random layers may differ.
    """
    inner = _compat.flat_layers(layer)
    configs = [{**sublayer.get_config(), "name": None} for sublayer in inner]
    remat_modes = tuple(map(_compat.get_remat_mode, inner))
    return (
        context_signature(),
        tuple(map(type, inner)),
        repr((configs, remat_modes)),
        tuple((tuple(w.shape), w.dtype, w.trainable) for w in layer.variables),
        tuple(map(type, random_layers(inner))),
    )


def is_from_package(layer: keras.layers.Layer) -> bool:
    """Return whether this package defines the layer's class. Its layers change no state."""
    return type(layer).__module__.startswith("dtransformer.")


class EqualLayers:
    """Consecutive layers of a list, with everything that differs between equal layers.

    Args:
        stack: List of layers.
        first: Integer. Index of the first of these layers. Defaults to `0`.
        last: Integer. Index after the last of these layers. Defaults to the length of `stack`.

    Attributes:
        layers: List of these layers.
        inner: List of these layers and all their sublayers.
        weights: List of their Keras variables, in the same order for equal layers.
        random_layers: List of the random layers among `inner`.
    """

    def __init__(self, stack: list, first: int = 0, last: int | None = None):
        self._stack = stack
        self._first = first
        self.layers = stack[first:last]
        self.inner = []
        self.weights = []
        for layer in self.layers:
            self.inner += _compat.flat_layers(layer)
            self.weights += layer.variables
        self.random_layers = random_layers(self.inner)

    def signature(self) -> tuple:
        """Return the signatures of the layers."""
        return tuple(map(signature, self.layers))

    def random_ids(self) -> list[int | tf.Tensor]:
        """Return the current ids of the random layers."""
        return [current_random_id(layer) for layer in self.random_layers]

    def use_random_ids(self, ids: Sequence):
        """Replace the ids of the random layers inside the `with` block by ids of equal layers."""
        return use_random_ids({id(layer): ids[i] for i, layer in enumerate(self.random_layers)})

    def weight_values(self) -> list[tf.Tensor]:
        """Return the values of `weights`."""
        with _compat.without_autocast():  # Gradients have the dtype of the stored weights.
            return [tf.convert_to_tensor(trained_value(weight)) for weight in self.weights]

    def compute_with(self, compute: Callable, values: Sequence, ids: Sequence) -> tuple:
        """Call a function of these layers with the weights and random ids of equal layers.

        Args:
            compute: Function without arguments that calls these layers.
            values: Sequence of tensors, the `weight_values` of equal layers.
            ids: Sequence of integers or scalar tensors, the `random_ids` of equal layers.

        Returns:
            A `(result, losses, metrics)` tuple: the result of `compute`, the losses that layers
            add, and their auxiliary metrics by the names of these layers.
        """
        scope = keras.StatelessScope(zip(self.weights, values), collect_losses=True)
        with self.use_random_ids(ids), scope, collecting(is_collecting()) as metrics:
            result = compute()
        return result, scope.losses, metrics

    def report(self, source: "EqualLayers", losses: list, metrics: dict) -> None:
        """Add losses and report metrics that `source.compute_with` returned for these layers."""
        self.layers[0].add_loss(losses)
        report_all(source.rename_for(self, metrics))

    def role(self, name: str) -> tuple[int | None, str]:
        """Return the role of a name, which is the same for equal layers.

        Args:
            name: String. Name of a tensor or metric, such as `"stack/block_3:0"`.

        Returns:
            A `(offset, rest)` tuple. `offset` is the distance of the named layer from the first of
            these layers, and `rest` follows its path in the name. A name of no layer in the stack
            has the role `(None, name)`.
        """
        for index, layer in enumerate(self._stack):
            rest = name.removeprefix(layer.path)
            if rest != name and rest[:1] in "/:":
                return index - self._first, rest
        return None, name

    def rename_for(self, target: "EqualLayers", values: dict) -> dict:
        """Replace names of these layers in the keys of a dict by names of equal layers."""
        renamed = {}
        for name, value in values.items():
            offset, rest = self.role(name)
            if offset is not None:
                rest = target._stack[target._first + offset].path + rest
            renamed[rest] = value
        return renamed
