"""Networks with the head of a task in place of that of their vocabulary."""

import keras

from dtransformer import _compat
from dtransformer.layers.heads import SequenceHead, TokenHead
from dtransformer.models.one_stack import OneStackModel


def with_task_head(network: OneStackModel, head: SequenceHead | TokenHead) -> OneStackModel:
    """Replace the head of a network by one that labels sequences or tokens.

    The old head's weights are gone. Where the new one has a dense layer before its logits, as
    BERT's, and the network one that was trained to tell sentences, that is taken.

    Args:
        network: a `CausalLM` or a `MaskedLM`.
        head: a `SequenceHead` or a `TokenHead`, not built.

    Returns:
        The network.

    Raises:
        ValueError: the network is none of these.

    Example:

    >>> from dtransformer.models import CausalLM
    >>> network = CausalLM(50, hidden_size=8, num_heads=2, num_layers=1)
    >>> network.build()
    >>> with_task_head(network, SequenceHead(3, "last"))(keras.ops.ones((2, 5), "int32")).shape
    TensorShape([2, 3])
    """
    if not isinstance(network, OneStackModel):
        raise ValueError(
            f"{type(network).__name__} has no place for a task's head: give a CausalLM or a MaskedLM"
        )
    sentences = getattr(network, "sentence_head", None)
    head.name = "head"
    if network.built:
        with keras.name_scope(network.name, caller=network):
            head.build((None, None, network.arguments["hidden_size"]))
    if network.built and sentences is not None and getattr(head, "pooler", None) is not None:
        for own, theirs in zip(head.pooler.weights, sentences.pooler.weights, strict=True):
            own.assign(theirs)
    _compat.replace_layer(network, "head", head)
    if sentences is not None:
        _compat.replace_layer(network, "sentence_head", None)
    return network
