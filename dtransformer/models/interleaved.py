"""Parts of a batch that do not wait for each other, so that messages hide behind products."""

from typing import Any

import keras
import tensorflow as tf

from dtransformer.layers.base import check_size, register


@register
class MicroBatchInterleaved(keras.Model):
    """Compute a batch as several parts of one step, none of which needs another's results.

    Under model parallelism a block computes, then waits for an all-reduce, then computes. With two
    parts one has products to compute while the other waits, where the devices send and compute at
    the same time, as GPUs do. Other than micro-batches of a pipeline, or of gradient accumulation,
    all parts are kept until the backward pass: memory stays, results do, too, but for the order of
    sums and for dropout's masks. The wrapper of that name in MindSpore does the same.

    Args:
        network: a `keras.Model` that computes each row of a batch by itself.
        interleave_num: number of parts.

    Raises:
        ValueError: `interleave_num` is less than 1; a layer adds losses of activations, which
            would be those of parts.

    Example:

    >>> from dtransformer.models import CausalLM, MicroBatchInterleaved
    >>> network = MicroBatchInterleaved(CausalLM(50, 8, num_heads=2, num_layers=1))
    >>> network(tf.zeros((4, 3), "int32")).shape
    TensorShape([4, 3, 50])
    """

    def __init__(self, network: keras.Model, interleave_num: int = 2, **kwargs):
        super().__init__(**kwargs)
        self.network = network
        self.interleave_num = check_size("interleave_num", interleave_num)

    def __getattr__(self, name):
        """Return what a trainer asks the network for, such as `logits_vocab_size`."""
        if name.startswith("_") or name == "network":
            raise AttributeError(name)
        return getattr(self.network, name)

    def __call__(self, inputs: Any, *args, **kwargs) -> Any:
        if not self.network.built:  # under its own name: weights are those without the wrapper
            self.network(inputs)
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: tuple | None = None) -> None:
        if not self.network.built:
            self.network.build(input_shape)
        self.built = True

    def call(self, inputs: Any, training: bool | None = False) -> Any:
        rows, number = tf.nest.flatten(inputs)[0].shape[0], self.interleave_num
        if rows is not None and rows % number:
            return self.network(inputs, training=training)
        parts = [
            self.network(
                tf.nest.map_structure(lambda x: _part(x, k, number), inputs), training=training
            )
            for k in range(number)
        ]
        of_weights = [w for w in self.network.trainable_weights if w.regularizer is not None]
        if len(self.network.losses) > len(of_weights):
            raise ValueError(
                f"a layer of {self.network.name} adds a loss of its activations, which parts of a "
                "batch would add each: leave MicroBatchInterleaved out"
            )
        return tf.nest.map_structure(lambda *xs: _joined(xs), *parts)

    def get_config(self) -> dict:
        return {
            "name": self.name,
            "network": keras.saving.serialize_keras_object(self.network),
            "interleave_num": self.interleave_num,
        }

    @classmethod
    def from_config(cls, config: dict) -> "MicroBatchInterleaved":
        """Return the network of a config."""
        network = keras.saving.deserialize_keras_object(config["network"])
        return cls(**{**config, "network": network})


def _part(x, k, number):
    """Return the rows k, k + number, ... of [b, ...]; of a batch that is sharded so is each part."""
    if x.shape[0] is None:
        return x[k::number]
    return tf.reshape(x, [x.shape[0] // number, number, *x.shape[1:]])[:, k]


def _joined(parts):
    """Return the rows of the parts in their order."""
    if parts[0].shape[0] is not None:
        rows = tf.stack(parts, 1)
        return tf.reshape(rows, [-1, *rows.shape[2:]])
    sizes = [tf.shape(part)[0] for part in parts]
    places = [k + len(parts) * tf.range(size) for k, size in enumerate(sizes)]
    return tf.dynamic_stitch(places, parts)
