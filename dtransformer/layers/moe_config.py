"""A `MoEConfig` as layers take it, and as their configs hold it."""

import dataclasses

from dtransformer.parallel.config import MoEConfig


def as_moe_config(value: MoEConfig | dict) -> MoEConfig:
    """Return a copy of a `MoEConfig`, or one of a dict of its fields.

    Raises:
        TypeError: it is neither, or a field is unknown or of the wrong type.
        ValueError: a field has a value that is not allowed.
    """
    if isinstance(value, dict):
        return MoEConfig(**value)
    if not isinstance(value, MoEConfig):
        raise TypeError(f"moe_config must be a MoEConfig, got {value!r} ({type(value).__name__})")
    return dataclasses.replace(value)


def moe_as_dict(value: MoEConfig | dict | None) -> dict | None:
    """Return the fields of a `MoEConfig`, for a file; None for none."""
    return dataclasses.asdict(value) if isinstance(value, MoEConfig) else value
