"""Logits that are wider than their vocabulary: losses and outputs without the padding.

A network that has such logits says how many of them count: `logits_vocab_size()` returns a number,
or for several outputs a dict of numbers by the outputs' names.
"""

import tensorflow as tf

from dtransformer.layers.loss import CrossEntropyLoss


def of_classes(loss, network):
    """Return a loss of so many classes as an output of a network has, where it is of tokens.

    Args:
        loss: as of `keras.Model.compile`, a dict of losses where the network has several outputs.
        network: a `keras.Model`.
    """
    return _of_sizes(loss, _sizes(network))


def _of_sizes(loss, sizes):
    if isinstance(loss, dict) and isinstance(sizes, dict):
        return {name: _of_sizes(one, sizes.get(name)) for name, one in loss.items()}
    if isinstance(loss, CrossEntropyLoss) and isinstance(sizes, int):
        return loss.of_classes(sizes)
    return loss


def without_padding(outputs, network):
    """Return the outputs of a network without the padding of its logits."""
    sizes = _sizes(network)
    if sizes is None:
        return outputs
    return tf.nest.map_structure(lambda x, size: x[..., :size], outputs, sizes)


def _sizes(network):
    return network.logits_vocab_size() if hasattr(network, "logits_vocab_size") else None
