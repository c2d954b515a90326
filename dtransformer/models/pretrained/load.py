"""Networks from folders of published weights, on any layout.

Fields of a config that no network is made of say nothing, or are refused.
"""

import os
import pathlib
import warnings

from dtransformer.architectures import Architecture
from dtransformer.errors import InputError, refusing, shown
from dtransformer.inputs.json_file import read_object
from dtransformer.models.base import TokenModel
from dtransformer.models.encoder_decoder import EncoderDecoderModel
from dtransformer.models.generation import rules as generation_rules
from dtransformer.models.pretrained.families import FAMILIES, Family
from dtransformer.models.pretrained.families.family import DECODER_IDS
from dtransformer.models.pretrained.families.task_heads import with_head_of
from dtransformer.models.pretrained.folder import CONFIG, GENERATION, PretrainedFolder
from dtransformer.models.pretrained.quantized import form_of
from dtransformer.models.pretrained.stored_weights import StoredWeights, has_tied_head
from dtransformer.models.published_fields import FIELDS
from dtransformer.parallel.collectives.objects import from_chief, together
from dtransformer.parallel.variable_factory import values_from

SILENT, _TRAINING, _REFUSED = (set(FIELDS["config"][x]) for x in ("silent", "training", "refused"))
_GENERATION = generation_rules.TAKEN | generation_rules.NAMED | generation_rules.SILENT
KNOWN = SILENT | _TRAINING | _REFUSED | _GENERATION


class ReadFields(dict):
    """The fields of a config, which remembers those that were asked for.

    Attributes:
        read: their names, the last one at the end, keys of a dict.
    """

    def __init__(self, fields: dict):
        super().__init__(fields)
        self.read = {}

    def __getitem__(self, name):
        self.read[name] = None
        return super().__getitem__(name)

    def get(self, name, default=None):
        """Return a field, or a default where it lacks."""
        self.read[name] = None
        return super().get(name, default)


def check_others(config: ReadFields, path: os.PathLike) -> None:
    """Refuse, or name in a warning, what a network was not made of and may have to be.

    Args:
        config: the fields, after the network's arguments were read.
        path: of the file, for messages.

    Raises:
        InputError: there is a field by which weights are others.
    """
    known = {"quantization_config"} if form_of(dict(config)) else set()
    left = {x: y for x, y in config.items() if x not in config.read.keys() | known and y}
    for name in sorted(left.keys() & _REFUSED):
        raise InputError(f"{name}={shown(left[name])} is not built: give the weights as they were")
    for names, told in (
        (left.keys() & _TRAINING, "training here does not apply"),
        (left.keys() - KNOWN, "fields that are not known here, and ignored:"),
    ):
        if names:
            message = ", ".join(f"{name}={shown(left[name])}" for name in sorted(names))
            warnings.warn(f"{path}: {told} {message}", stacklevel=3)


def from_pretrained(folder: str | os.PathLike, **arguments) -> TokenModel:
    """Return the network of a folder as `transformers` saves it, with its weights.

    The folder has a `config.json`, and weights in one or several `.safetensors` files. Each rank
    reads the shards that it holds, one tensor after the other. The config's `model_type` tells the
    family, one of `dtransformer.models.pretrained.families.FAMILIES`: decoders are a `CausalLM`,
    encoders a `MaskedLM`, and both together an `EncoderDecoderLM`.

    Args:
        folder: its path.
        **arguments: arguments of the network that replace those of the config, such as
            `dropout_rate`, `dtype` or `lambda_func`.

    Returns:
        A built network.

    Raises:
        InputError: there is no such folder, its family is not known, its config lacks a field or
            asks for what is not built, or its tensors are not those of the config; lists them.

    Example:

        network = dtransformer.models.from_pretrained("models/llama-3.2-1b")
    """

    def opened():
        content = PretrainedFolder(folder)
        family = family_of(content.config, content.path / CONFIG)
        found = network_arguments(family, content.config, content.path / CONFIG)
        rules = _generation_rules(content, family)
        return content, family, family.settled(found, content.shapes.keys()), rules

    content, family, found, rules = together(opened, "pretrained/folder")
    found |= arguments
    read_tied = lambda: has_tied_head(content, family, found)
    found["tied_head"] = from_chief(read_tied, "pretrained/copies")
    with refusing(content.path / CONFIG):
        network = family.network(**found)
    network = together(
        lambda: with_head_of(network, content.config, content.path), "pretrained/head"
    )
    stored = together(lambda: StoredWeights(content, family, network), "pretrained/tensors")
    with values_from(stored.read):
        together(network.build, "pretrained/values")
    if network.variable_dtype == "float32":  # weights of 16 bits are never saved with more
        network.stored_dtypes = stored.dtypes()
    network.origin = content.config["model_type"], str(folder)
    network.generation_rules = rules
    return network


def architecture_of(folder: str | os.PathLike) -> Architecture:
    """Return the sizes of the network of a folder, of which its `config.json` alone is read.

    Raises:
        InputError: there is no such file, its family is not known, or it asks for what is not built.
    """
    path = pathlib.Path(folder) / CONFIG
    config = read_object(path)
    family = family_of(config, path)
    return Architecture(
        family.network.__name__, network_arguments(family, config, path), str(folder)
    )


def _generation_rules(content, family):
    """Return the rules of generation of a folder; of older ones the config has them."""
    if not hasattr(family.network, "generate"):
        return {}
    path, fields = content.path / GENERATION, content.config
    if path.exists():
        fields = read_object(path)
    else:
        path = content.path / CONFIG
        taken = generation_rules.TAKEN | generation_rules.NAMED
        fields = {x: fields[x] for x in fields if x in taken}
    has_source = issubclass(family.network, EncoderDecoderModel)
    return generation_rules.rules_of(fields, path, has_source, content.config["vocab_size"])


def family_of(config: dict, path: os.PathLike) -> Family:
    """Return the `Family` of a published config.

    Raises:
        InputError: it is not known.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(
            f"{path}: model_type is {shown(kind)}, expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def network_arguments(family: Family, config: dict, path: os.PathLike) -> dict:
    """Return the arguments of a network that a published config asks for.

    Raises:
        InputError: a field is lacking, or asks for what is not built.
    """
    config = ReadFields(config)
    if "EncoderModel" in f"{config.get('architectures')}":
        raise InputError(
            f"{path}: architectures has an encoder alone, expected {family.architecture}, whose "
            "files also have the decoder"
        )
    try:
        vocab_size, names = config["vocab_size"], family.special_ids
        arguments = {"vocab_size": vocab_size, **family.arguments(config)}
        for ours, theirs in names.items():
            default = family.ids.get(theirs)
            if default is not None and default >= vocab_size:
                default = None
            value = config.get(theirs, default)
            value = value[0] if isinstance(value, list) and value else value
            if value is None and names is DECODER_IDS:
                raise InputError(
                    f"lacks the field {theirs}: the id of a token, which its texts need"
                )
            arguments[ours] = value
        arguments["pad_id"] = _padding(family, **arguments)
        check_others(config, path)
    except KeyError as error:
        raise InputError(f"{path}: lacks the field {error}") from None
    except (TypeError, AttributeError, ArithmeticError):
        last = [f"{x}={shown(config[x])}" for x in config.read if x in config][-3:]
        raise InputError(f"{path}: of {', '.join(last)} one is not as published") from None
    except (InputError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None
    return arguments


def _padding(family, pad_id, vocab_size, start_id=None, end_id=None, **_):
    """Return the id of padding; None where it is none of the vocabulary, or has a meaning too."""
    others = (start_id, end_id) if family.own_padding else ()
    is_padding = pad_id is not None and 0 <= pad_id < vocab_size
    return pad_id if is_padding and pad_id not in others else None
