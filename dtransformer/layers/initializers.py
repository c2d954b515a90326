"""Initializers whose random values depend only on the job's seed and the weight's path."""

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel.runtime import seeds


class WrappedInitializer(keras.initializers.Initializer):
    """Base class of initializers that reshape, stack or pad the values of another initializer."""

    def __init__(self, initializer):
        self.initializer = keras.initializers.get(initializer)

    def around(self, initializer):
        """Return a copy of this initializer that wraps `initializer` instead."""
        return type(self)(**{**self.get_config(), "initializer": initializer})

    def get_config(self):
        return {"initializer": self.initializer}


@keras.saving.register_keras_serializable("dtransformer")
class FlattenedInitializer(WrappedInitializer):
    """Initialize a weight of several dimensions as the matrix that it represents.

    Keras treats a weight of three dimensions as a convolution kernel when it computes fan-in and
    fan-out. The attention kernels `[h, n, d]` and `[n, d, h]` are matrices of h × n·d and n·d × h.

    Args:
        initializer: Keras initializer or its name.
        num_inputs: Integer. Number of leading dimensions that form the matrix rows. Defaults to
            `1`.
        scale: Float. Factor of the values. Defaults to `1.0`.
    """

    def __init__(self, initializer, num_inputs=1, scale=1.0):
        super().__init__(initializer)
        self.num_inputs = num_inputs
        self.scale = scale

    def __call__(self, shape, dtype=None):
        inputs = shape[: self.num_inputs]
        outputs = shape[self.num_inputs :]
        matrix = self.initializer((int(np.prod(inputs)), int(np.prod(outputs))), dtype=dtype)
        matrix = matrix if self.scale == 1 else matrix * tf.cast(self.scale, matrix.dtype)
        return tf.reshape(matrix, shape)

    def get_config(self):
        return {**super().get_config(), "num_inputs": self.num_inputs, "scale": self.scale}


@keras.saving.register_keras_serializable("dtransformer")
class StackedInitializer(WrappedInitializer):
    """Initialize the weights of several experts, `[E, ...]`, each like a single layer's weight.

    Each expert has a separate seed.
    """

    def __call__(self, shape, dtype=None):
        num_experts, *expert_shape = shape
        draw = self.initializer
        config = self.initializer.get_config()
        values = []
        for i in range(num_experts):
            if isinstance(config.get("seed"), int):
                seed = seeds.derived_seed(f"{config['seed']}/{i}")
                draw = type(self.initializer).from_config({**config, "seed": seed})
            values.append(draw(tuple(expert_shape), dtype=dtype))
        return tf.stack(values)


def with_derived_seed(initializer, path: str):
    """Return an initializer with a seed derived from the job's seed and `path`.

    Initializers that are not random or already have a seed are returned as they are.
    """
    if isinstance(initializer, WrappedInitializer):
        return initializer.around(with_derived_seed(initializer.initializer, path))
    if not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    config = initializer.get_config()
    if config.get("seed", 0) is not None:
        return initializer  # Not random, or already seeded.
    return type(initializer).from_config({**config, "seed": seeds.derived_seed(path)})
