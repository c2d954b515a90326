"""Shapes of published models and of network objects."""

import dataclasses
from collections.abc import Mapping

from dtransformer.architectures import Architecture, get_architecture
from dtransformer.errors import InputError, raise_as_input_error, short_repr
from dtransformer.planner.shape import ModelShape
from dtransformer.transformer_config import TransformerConfig

_DEFAULT_LENGTH = 512  # Training length of models without a maximum length.
_OPTIONS = {field.name for field in dataclasses.fields(ModelShape)} - {"name", "config"}


def get_model(name: str, /, **changes) -> ModelShape:
    """Return the shape of a published model.

    Args:
        name: Key of `dtransformer.architectures.ARCHITECTURES`. "-" is read as "_".
        **changes: Fields of `ModelShape`, such as `sequence_length`, or arguments of the network.

    Raises:
        InputError: If no such model exists. The message lists all names.

    Example:

    >>> get_model("llama2-7b").num_blocks, get_model("bert_base", sequence_length=128).sequence_length
    (32, 128)
    """
    try:
        key, architecture = get_architecture(name)
    except InputError as error:
        hint = "A YAML file or the folder of a published model is also possible."
        raise InputError(f"{error} {hint}") from None
    return from_architecture(key, architecture, **changes)


def from_architecture(name: str, architecture: Architecture, /, **changes) -> ModelShape:
    """Return the shape of a network from its class name and arguments.

    Args:
        name: Name of the shape.
        architecture: Its `Architecture`.
        **changes: Fields of `ModelShape`, such as another `name`, or arguments of the network.
    """
    sizes = {key: value for key, value in changes.items() if key not in _OPTIONS}
    options = {key: value for key, value in changes.items() if key in _OPTIONS}
    name = sizes.pop("name", name)
    arguments = {**architecture.arguments, **sizes}
    for key in sizes:
        if "expert" in key:
            raise InputError(
                f"{name}: unknown field `{key}`, got {short_repr(sizes[key])}. Set experts in "
                "`moe_config`, a mapping of the fields of MoEConfig."
            )
    with raise_as_input_error(name):
        config = TransformerConfig.from_arguments(architecture.network, **arguments)
    length = arguments.get("max_length") or arguments.get("max_target_length")
    return ModelShape(name, config, **{"sequence_length": length or _DEFAULT_LENGTH, **options})


def from_network(network: object, **changes) -> ModelShape:
    """Return the shape of a network object, built or not.

    Args:
        network: A network from `dtransformer.models`.
        **changes: Fields of `ModelShape`, or arguments of the network.

    Raises:
        InputError: If the network has no `TransformerConfig`.
    """
    if not isinstance(getattr(network, "config", None), TransformerConfig):
        raise InputError(
            f"The network of class {type(network).__name__} has no TransformerConfig `config`. Use "
            "a network from dtransformer.models, or a ModelShape."
        )
    if getattr(network, "has_task_head", False):
        changes = {"num_labels": network.head.num_labels, **changes}
    architecture = Architecture(network.network_class, network.config.arguments(), "")
    return from_architecture(network.name, architecture, **changes)


def make_checked(kind, fields: Mapping):
    """Return `kind(**fields)` for a dataclass `kind`, with one-line errors for wrong fields.

    Raises:
        InputError: If a field is unknown or missing. The message lists the known fields.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in names:
            raise InputError(
                f"{kind.__name__} has no field {short_repr(name)}. Its fields are {', '.join(names)}."
            )
    try:
        return kind(**fields)
    except TypeError as error:
        raise InputError(f"{kind.__name__}: {str(error).split('__init__() ')[-1]}") from None
