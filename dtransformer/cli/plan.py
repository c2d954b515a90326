"""`dtransformer plan`: estimate memory, time and the best layout of a training run."""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re

from dtransformer.architectures import Architecture
from dtransformer.errors import InputError, check_installed, raise_as_input_error
from dtransformer.inputs.files import write_text_atomically
from dtransformer.inputs.yaml_file import parse_setting, read_yaml
from dtransformer.planner import Cluster, Job, Plan, plan, report
from dtransformer.planner.budget import default_batch
from dtransformer.planner.clusters import Constants, Device, Link, get_device
from dtransformer.planner.models import from_architecture, get_model, make_checked
from dtransformer.planner.plain_bfloat16 import bfloat16_hint
from dtransformer.planner.plan_file import plan_to_yaml
from dtransformer.planner.shape import ModelShape
from dtransformer.runs.options import DocumentData
from dtransformer.transformer_config import DECODER, ENCODER

# Default limit of the sequence length. Published positions go far beyond it.
_MAX_DEFAULT_LENGTH = 8192


def run_plan(arguments: argparse.Namespace) -> None:
    """Plan a training run, print the table of layouts, and write the requested files.

    Raises:
        InputError: If an option is missing or wrong, or options exclude each other.
    """
    if arguments.plot:
        check_installed("matplotlib", "Plots")
    tokens = arguments.tokens
    if tokens is not None and not 0 < tokens < math.inf:
        raise InputError(f"--tokens must be a positive number, such as 1e9, got {tokens:g}.")
    if arguments.measure:
        from dtransformer.cli.measured_machine import measure_to

        measure_to(arguments.measure)
        arguments.device = arguments.measure
        if arguments.model is None:
            return
    if _is_function(arguments.model):
        from dtransformer.cli.plan_keras import run_keras_plan

        run_keras_plan(arguments)
        return
    result, notes = make_plan(arguments)
    config = plan_to_yaml(result, arguments.model if os.path.isdir(arguments.model) else None)
    if arguments.yaml:
        write_text_atomically(arguments.yaml, config)
    if arguments.plot:
        report.draw(result, arguments.plot)
    if arguments.json:
        print(json.dumps({**report.plan_to_json(result, tokens), "notes": notes}, indent=2))
        return
    print("\n".join([report.plan_to_text(result, tokens), *notes]))
    if result.fits and not arguments.yaml:
        print(f"\n{config}", end="")


def _is_function(name):
    """Return whether a model is a `module:function` that returns a Keras model."""
    return name is not None and re.fullmatch(r"[\w.]+:\w+", name) is not None


def make_plan(arguments: argparse.Namespace) -> tuple[Plan, list[str]]:
    """Return a `(plan, notes)` tuple for the command's options.

    The notes are lines to print: the source of the default batch, and a hint about bfloat16.

    Raises:
        InputError: If an option is missing or wrong.
    """
    changes = {
        "sequence_length": arguments.sequence,
        "adapter_rank": arguments.lora,
        "base_dtype": arguments.base_dtype,
        "frozen_blocks": arguments.freeze,
    }
    model = load_model_shape(arguments.model, **{k: x for k, x in changes.items() if x is not None})
    device = load_device(arguments.device)
    if arguments.devices_per_node:
        device = dataclasses.replace(device, devices_per_node=arguments.devices_per_node)
    if (arguments.devices is None) == (arguments.nodes is None):
        raise InputError("Set either --devices, the number of devices on all nodes, or --nodes.")
    devices = arguments.devices or arguments.nodes * device.devices_per_node
    batch = arguments.global_batch
    reason = ""
    if batch is None:
        batch, reason = default_batch(model, devices, arguments.tokens)
    fixed = dict(parse_setting(text, "--fix", "FIELD=VALUE") for text in arguments.fix)
    job = Job(batch, arguments.precision, arguments.optimizer, fixed)
    result = plan(model, Cluster(device, devices), job, arguments.top)
    return result, [note for note in (reason, bfloat16_hint(result)) if note]


def load_model_shape(name: str | None, **changes) -> ModelShape:
    """Return the shape of a model.

    Args:
        name: Name of a published model, path of its folder, or path of a YAML file with
            `network` and its arguments, and fields of `ModelShape`.
        **changes: Fields to replace, such as `sequence_length`.

    Raises:
        InputError: If the model does not exist, or the file has unknown fields.
    """
    if name is None:
        raise InputError("--model is required: a name, such as gpt-175b, a folder or a YAML file.")
    if os.path.isdir(name):
        from dtransformer.models.pretrained.load import read_architecture

        title = pathlib.Path(name).resolve().name
        model = from_architecture(title, read_architecture(name), **changes)
        return _with_default_length(model, changes)
    if not name.endswith((".yaml", ".yml")):
        return _with_default_length(get_model(name, **changes), changes)
    fields = read_yaml(name)
    if not isinstance(fields, dict):
        raise InputError(f"{name}: expected the fields of a model, such as hidden_size: 1024.")
    if isinstance(fields.get("base"), str):
        return get_model(fields.pop("base"), **{**fields, **changes})
    architecture = Architecture(fields.pop("network", DECODER), {}, name)
    return from_architecture(name, architecture, **{**fields, **changes})


def _with_default_length(model, changes):
    """Return a published model with sequences of at most 8,192 tokens, unless a length is given.

    Masked language models have logits at the masked positions only.
    """
    length = changes.get("sequence_length", min(model.sequence_length, _MAX_DEFAULT_LENGTH))
    positions = model.predicted_positions
    if model.config.network == ENCODER and positions is None:
        positions = max(1, round(DocumentData.mask_rate * length))
    return dataclasses.replace(model, sequence_length=length, predicted_positions=positions)


def load_device(name: str) -> Device:
    """Return a device from its name or from a YAML file, such as one written by `--measure`.

    Raises:
        InputError: If the device does not exist, or the file has unknown fields.
    """
    if not name.endswith((".yaml", ".yml")):
        return get_device(name)
    fields = read_yaml(name)
    if not isinstance(fields, dict):
        raise InputError(f"{name}: expected the fields of a device, in the format of --measure.")
    with raise_as_input_error(name):
        base = vars(get_device(fields.pop("base"))) if "base" in fields else {}
        converted = {}
        if "links" in fields:
            converted["links"] = {
                axis: make_checked(Link, x) for axis, x in dict(fields["links"]).items()
            }
        if "constants" in fields:
            defaults = vars(base["constants"]) if base else {}
            converted["constants"] = make_checked(Constants, {**defaults, **fields["constants"]})
        custom = {"source": "custom"} if base else {}
        return make_checked(Device, {**base, **custom, **fields, **converted})
