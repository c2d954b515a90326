"""The squares of gradients' norms, where the gradients are; what is alike is traced once."""

import tensorflow as tf

from dtransformer.trainers.alike_calls import alike_calls_on, traced_apart


def own_square_norms(gradients: list, devices: list | None = None) -> tf.Tensor:
    """Return the square of the Euclidean norm of each of what this rank has.

    Args:
        gradients: list of tensors.
        devices: for each of them the name of the device that has it; None where there is one.

    Returns:
        A float32 tensor [number of gradients].
    """
    if tf.executing_eagerly() or not gradients:
        return _squares(gradients)
    keys = [(str(x.shape), x.dtype) for x in gradients]
    devices = [None] * len(gradients) if devices is None else devices
    functions, order, squares = {}, [], []
    for device, calls in alike_calls_on(devices, keys):
        for positions in calls:
            key, own = tuple(keys[i] for i in positions), [gradients[i] for i in positions]
            if key not in functions:
                functions[key] = traced_apart(_squares, own)
            with tf.device(device):
                squares.append(functions[key](own))
            order += positions
    place = {position: number for number, position in enumerate(order)}
    return tf.gather(tf.concat(squares, 0), [place[i] for i in range(len(gradients))])


def _squares(gradients):
    if not gradients:
        return tf.zeros([0])
    return 2.0 * tf.stack([tf.nn.l2_loss(tf.cast(gradient, "float32")) for gradient in gradients])
