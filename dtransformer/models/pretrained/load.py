"""Load networks from folders of published weights, in any layout.

Config fields that no network uses are ignored, reported in a warning or rejected.
"""

import os
import pathlib
import warnings

from dtransformer.architectures import Architecture
from dtransformer.errors import InputError, raise_as_input_error, short_repr
from dtransformer.inputs.json_file import read_object
from dtransformer.models.base import TokenModel
from dtransformer.models.encoder_decoder import EncoderDecoderModel
from dtransformer.models.generation import rules as generation_rules
from dtransformer.models.pretrained.families import FAMILIES, Family
from dtransformer.models.pretrained.families.task_heads import with_stored_head
from dtransformer.models.pretrained.folder import CONFIG, GENERATION, PretrainedFolder
from dtransformer.models.pretrained.quantized import quantization_form
from dtransformer.models.pretrained.stored_weights import StoredWeights, has_tied_head
from dtransformer.models.published_fields import FIELDS
from dtransformer.parallel.collectives.objects import call_on_all, from_chief
from dtransformer.parallel.variable_factory import values_from

IGNORED_FIELDS, _TRAINING, _UNSUPPORTED = (
    set(FIELDS["config"][x]) for x in ("ignored", "training", "unsupported")
)
_GENERATION_FIELDS = (
    generation_rules.SUPPORTED_FIELDS
    | generation_rules.REPORTED_FIELDS
    | generation_rules.IGNORED_FIELDS
)
KNOWN_FIELDS = IGNORED_FIELDS | _TRAINING | _UNSUPPORTED | _GENERATION_FIELDS


class ReadFields(dict):
    """Config dict that records which fields were read.

    Attributes:
        read: Dict whose keys are the names of the fields that were read, in order.
    """

    def __init__(self, fields: dict):
        super().__init__(fields)
        self.read = {}

    def __getitem__(self, name):
        self.read[name] = None
        return super().__getitem__(name)

    def get(self, name, default=None):
        """Return a field, or a default if it is missing."""
        self.read[name] = None
        return super().get(name, default)


def check_unused_fields(config: ReadFields, path: os.PathLike) -> None:
    """Check the config fields that were not used to create the network.

    Issues warnings for fields that only affect training and for unknown fields.

    Args:
        config: `ReadFields` after the network's arguments were read from it.
        path: Path of the config, for messages.

    Raises:
        InputError: If an unused field changes the meaning of the weights.
    """
    read_elsewhere = {"quantization_config"} if quantization_form(dict(config)) else set()
    unused = {x: y for x, y in config.items() if x not in config.read.keys() | read_elsewhere and y}
    for name in sorted(unused.keys() & _UNSUPPORTED):
        raise InputError(
            f"`{name}={short_repr(unused[name])}` is not supported. Use the unmodified weights."
        )
    for names, intro in (
        (unused.keys() & _TRAINING, "Training ignores"),
        (unused.keys() - KNOWN_FIELDS, "Ignored unknown fields"),
    ):
        if names:
            message = ", ".join(f"{name}={short_repr(unused[name])}" for name in sorted(names))
            warnings.warn(f"{path}: {intro} {message}.", stacklevel=3)


def from_pretrained(folder: str | os.PathLike, **arguments) -> TokenModel:
    """Create a network from a folder in the format of `transformers`, with its weights.

    The folder contains `config.json` and one or several `.safetensors` files. Each rank reads
    its local shards, one tensor at a time. The config's `model_type` selects the family from
    `dtransformer.models.pretrained.families.FAMILIES`. Decoders become a `CausalLM`, encoders
    a `MaskedLM`, and encoder–decoders an `EncoderDecoderLM`.

    Args:
        folder: Path of the folder.
        **arguments: Network arguments that override the config, such as `dropout_rate`,
            `dtype` or `lambda_func`.

    Returns:
        A built network.

    Raises:
        InputError: If the folder is missing, its family is unknown, its config lacks a field
            or needs an unsupported feature, or its tensors do not match the config. The
            message lists the tensors.

    Example:

        network = dtransformer.models.from_pretrained("models/llama-3.2-1b")
    """

    def open_folder():
        content = PretrainedFolder(folder)
        family = get_family(content.config, content.path / CONFIG)
        network_args = network_arguments(family, content.config, content.path / CONFIG)
        rules = _generation_rules(content, family)
        return content, family, family.adapt_to_file(network_args, content.shapes), rules

    content, family, network_args, rules = call_on_all(open_folder, "pretrained/folder")
    network_args |= arguments

    def read_tied_head():
        return has_tied_head(content, family, network_args)

    network_args["tied_head"] = from_chief(read_tied_head, "pretrained/copies")
    with raise_as_input_error(content.path / CONFIG):
        network = family.network(**network_args)
    network = call_on_all(
        lambda: with_stored_head(network, content.config, content.path), "pretrained/head"
    )
    stored = call_on_all(lambda: StoredWeights(content, family, network), "pretrained/tensors")
    with values_from(stored.read):
        call_on_all(network.build, "pretrained/values")
    # A network with 16-bit weights is always saved in their type.
    if network.variable_dtype == "float32":
        network.stored_dtypes = stored.dtypes()
    network.origin = content.config["model_type"], str(folder)
    network.generation_rules = rules
    return network


def read_architecture(folder: str | os.PathLike) -> Architecture:
    """Return the `Architecture` of the network in a folder, from its `config.json` alone.

    Raises:
        InputError: If the file is missing, its family is unknown, or it needs an unsupported
            feature.
    """
    path = pathlib.Path(folder) / CONFIG
    config = read_object(path)
    family = get_family(config, path)
    return Architecture(
        family.network.__name__, network_arguments(family, config, path), str(folder)
    )


def _generation_rules(content, family):
    """Return the generation rules of a folder. In older folders `config.json` contains them."""
    if not hasattr(family.network, "generate"):
        return {}
    path = content.path / GENERATION
    fields = content.config
    if path.exists():
        fields = read_object(path)
    else:
        path = content.path / CONFIG
        relevant = generation_rules.SUPPORTED_FIELDS | generation_rules.REPORTED_FIELDS
        fields = {x: fields[x] for x in fields if x in relevant}
    has_source = issubclass(family.network, EncoderDecoderModel)
    return generation_rules.parse_rules(fields, path, has_source, content.config["vocab_size"])


def get_family(config: dict, path: os.PathLike) -> Family:
    """Return the `Family` of a published config.

    Args:
        config: Content of `config.json`.
        path: Path of the config, for messages.

    Raises:
        InputError: If the config's `model_type` is not in `FAMILIES`.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(
            f"{path}: `model_type` must be one of {', '.join(FAMILIES)}, got {short_repr(kind)}."
        )
    return FAMILIES[kind]


def network_arguments(family: Family, config: dict, path: os.PathLike) -> dict:
    """Return the network arguments for a published config.

    Args:
        family: `Family` of the config.
        config: Content of `config.json`.
        path: Path of the config, for messages.

    Raises:
        InputError: If a field is missing or has an unsupported value.
    """
    config = ReadFields(config)
    if "EncoderModel" in f"{config.get('architectures')}":
        raise InputError(
            f"{path}: `architectures` names an encoder without its decoder. Use the files of "
            f"{family.architecture}."
        )
    try:
        vocab_size = config["vocab_size"]
        is_encoder_decoder = issubclass(family.network, EncoderDecoderModel)
        arguments = {"vocab_size": vocab_size, **family.from_hf(config)}
        for argument, field in family.special_ids.items():
            default = family.ids.get(field)
            if default is not None and default >= vocab_size:
                default = None
            value = config.get(field, default)
            value = value[0] if isinstance(value, list) and value else value
            if value is None and is_encoder_decoder:
                raise InputError(f"The token id `{field}` is missing, which target texts need.")
            arguments[argument] = value
        arguments["pad_id"] = _padding(family, **arguments)
        check_unused_fields(config, path)
    except KeyError as error:
        raise InputError(f"{path}: The field {error} is missing.") from None
    except (TypeError, AttributeError, ArithmeticError):
        last = [f"{x}={short_repr(config[x])}" for x in config.read if x in config][-3:]
        raise InputError(f"{path}: One of {', '.join(last)} has an invalid value.") from None
    except (InputError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None
    return arguments


def _padding(family, pad_id, vocab_size, start_id=None, end_id=None, **_):
    """Return the padding id, or `None` if it is out of the vocabulary or also another token."""
    # Encoder–decoders may start or end with the padding.
    is_encoder_decoder = issubclass(family.network, EncoderDecoderModel)
    other_ids = () if is_encoder_decoder else (start_id, end_id)
    is_padding = pad_id is not None and 0 <= pad_id < vocab_size
    return pad_id if is_padding and pad_id not in other_ids else None
