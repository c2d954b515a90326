"""Networks with the sizes of published models, from `dtransformer.architectures`."""

from dtransformer.architectures import get_architecture
from dtransformer.models.base import TokenModel
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.masked_lm import MaskedLM

_NETWORKS = {network.__name__: network for network in (CausalLM, EncoderDecoderLM, MaskedLM)}


def from_preset(name: str, **arguments) -> TokenModel:
    """Return a network with the sizes of a published model and no trained weights.

    The network is not built. `from_pretrained` loads published weights.

    Args:
        name: String. Key of `dtransformer.architectures.ARCHITECTURES`. `"-"` may replace
            `"_"`.
        **arguments: Arguments that override the preset, such as `vocab_size`.

    Returns:
        A `CausalLM`, `EncoderDecoderLM` or `MaskedLM`.

    Raises:
        InputError: If the preset does not exist. The message names similar or all presets.

    Example:

    >>> from_preset("bert_base").num_parameters()
    110106428
    """
    _, preset = get_architecture(name)
    return _NETWORKS[preset.network](**{**preset.arguments, **arguments})
