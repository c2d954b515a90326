"""`dtransformer models`: list published model sizes, and the families that can be loaded and saved."""

import argparse
import json

from dtransformer.architectures import ARCHITECTURES
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.families.task_heads import task_heads
from dtransformer.planner.models import get_model
from dtransformer.tables import columns


def presets() -> list[dict]:
    """Return one dict per published size: preset, network, parameters, positions and source."""
    return [
        {
            "preset": name,
            "network": architecture.network,
            "parameters": get_model(name).parameters(),
            "positions": architecture.arguments.get("max_length"),
            "source": architecture.source,
        }
        for name, architecture in ARCHITECTURES.items()
    ]


def families() -> list[dict]:
    """Return one dict per family: its class in `transformers`, network, abilities and task heads."""
    return [
        {
            "family": name,
            "class": family.architecture,
            "network": family.network.__name__,
            "generates": hasattr(family.network, "generate"),
            "heads": [x.removeprefix("For") for x in task_heads(name)],
        }
        for name, family in FAMILIES.items()
    ]


def models(arguments: argparse.Namespace) -> None:
    """Print published sizes and families, as two tables or as JSON."""
    tables = {"presets": presets(), "families": families()}
    if arguments.json:
        print(json.dumps(tables))
        return
    for title, rows in tables.items():
        print(f"\n{title}\n")
        print("\n".join(columns([list(rows[0]), *(map(_format_cell, x.values()) for x in rows)])))


def _format_cell(value):
    """Return a value as the text of a table cell."""
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:,}" if isinstance(value, int) else value or ""
