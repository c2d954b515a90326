"""Networks of the sizes of published models, which `dtransformer.architectures` has as data."""

from dtransformer.architectures import ARCHITECTURES
from dtransformer.models.base import TokenModel
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.masked_lm import MaskedLM

_NETWORKS = {network.__name__: network for network in (CausalLM, EncoderDecoderLM, MaskedLM)}


def from_preset(name: str, **arguments) -> TokenModel:
    """Return a network of the size of a published model, not built, with weights of its own.

    Args:
        name: a key of `dtransformer.architectures.ARCHITECTURES`.
        **arguments: arguments that replace the preset's, such as `vocab_size`.

    Raises:
        ValueError: there is no such preset; lists what exists.

    Example:

    >>> from_preset("bert_base").num_parameters()
    110106428
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"there is no preset {name!r}, expected one of {', '.join(ARCHITECTURES)}")
    preset = ARCHITECTURES[name]
    return _NETWORKS[preset.network](**{**preset.arguments, **arguments})
