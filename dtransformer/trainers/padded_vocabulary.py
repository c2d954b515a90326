"""Padded vocabularies: losses and outputs without the padding classes."""

import tensorflow as tf

from dtransformer.layers.loss import CrossEntropyLoss


def exclude_padding_classes(loss, network):
    """Exclude the padding classes of a network's logits from its token losses.

    Args:
        loss: As in `keras.Model.compile`.
        network: A `keras.Model`. The losses are returned unchanged if it has no
            `logits_vocab_size`.
    """
    return _exclude_padding(loss, _vocab_sizes(network))


def _exclude_padding(loss, sizes):
    if isinstance(loss, dict) and isinstance(sizes, dict):
        return {
            name: _exclude_padding(output_loss, sizes.get(name))
            for name, output_loss in loss.items()
        }
    if isinstance(loss, CrossEntropyLoss) and isinstance(sizes, int):
        return loss.with_vocab_size(sizes)
    return loss


def without_padding(outputs, network):
    """Return a network's outputs without the padding classes of its logits."""
    sizes = _vocab_sizes(network)
    if sizes is None:
        return outputs
    return tf.nest.map_structure(lambda x, size: x[..., :size], outputs, sizes)


def _vocab_sizes(network):
    return network.logits_vocab_size() if hasattr(network, "logits_vocab_size") else None
