"""Initializers: random values that depend on the job's seed and the weight's path only."""

import keras
import numpy as np
import tensorflow as tf

from dtransformer.parallel.runtime import seeds


class WrappedInitializer(keras.initializers.Initializer):
    """An initializer that shapes what another one draws."""

    def __init__(self, initializer):
        self.initializer = keras.initializers.get(initializer)

    def around(self, initializer):
        """Return the same around another initializer."""
        return type(self)(**{**self.get_config(), "initializer": initializer})

    def get_config(self):
        return {"initializer": self.initializer}


@keras.saving.register_keras_serializable("dtransformer")
class FlattenedInitializer(WrappedInitializer):
    """Draw a weight of several dimensions as the matrix that it multiplies as.

    Keras takes a weight of three dimensions for a convolution's; the attention
    kernels [h,n,d] and [n,d,h] are matrices of h × n·d.

    Args:
        initializer: a Keras initializer, or its name.
        num_inputs: how many leading dimensions are summed over.
        scale: what the values are multiplied with.
    """

    def __init__(self, initializer, num_inputs=1, scale=1.0):
        super().__init__(initializer)
        self.num_inputs, self.scale = num_inputs, scale

    def __call__(self, shape, dtype=None):
        inputs, outputs = shape[: self.num_inputs], shape[self.num_inputs :]
        matrix = self.initializer((int(np.prod(inputs)), int(np.prod(outputs))), dtype=dtype)
        matrix = matrix if self.scale == 1 else matrix * tf.cast(self.scale, matrix.dtype)
        return tf.reshape(matrix, shape)

    def get_config(self):
        return {**super().get_config(), "num_inputs": self.num_inputs, "scale": self.scale}


@keras.saving.register_keras_serializable("dtransformer")
class StackedInitializer(WrappedInitializer):
    """Draw the weights of several experts [E, ...], each as one that is alone."""

    def __call__(self, shape, dtype=None):
        number, *of_one = shape
        draw, config = self.initializer, self.initializer.get_config()
        values = []
        for i in range(number):
            if isinstance(config.get("seed"), int):
                seed = seeds.derived_seed(f"{config['seed']}/{i}")
                draw = type(self.initializer).from_config({**config, "seed": seed})
            values.append(draw(tuple(of_one), dtype=dtype))
        return tf.stack(values)


def seeded(initializer, path: str):
    """Return `initializer` with a seed derived from the job's seed and `path`."""
    if isinstance(initializer, WrappedInitializer):
        return initializer.around(seeded(initializer.initializer, path))
    if not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    config = initializer.get_config()
    if config.get("seed", 0) is not None:
        return initializer  # not random, or with a seed of its own
    return type(initializer).from_config({**config, "seed": seeds.derived_seed(path)})
