"""Networks of the sizes of published models, which `dtransformer.architectures` has as data."""

from dtransformer.architectures import architecture_named
from dtransformer.models.base import TokenModel
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.masked_lm import MaskedLM

_NETWORKS = {network.__name__: network for network in (CausalLM, EncoderDecoderLM, MaskedLM)}


def from_preset(name: str, **arguments) -> TokenModel:
    """Return a network of the size of a published model, not built, with weights of its own.

    Args:
        name: a key of `dtransformer.architectures.ARCHITECTURES`; "-" may stand for "_".
        **arguments: arguments that replace the preset's, such as `vocab_size`.

    Raises:
        InputError: there is no such preset; says which is like it, or what exists.

    Example:

    >>> from_preset("bert_base").num_parameters()
    110106428
    """
    _, preset = architecture_named(name)
    return _NETWORKS[preset.network](**{**preset.arguments, **arguments})
