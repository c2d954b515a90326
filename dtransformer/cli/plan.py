"""`dtransformer plan`: does it fit, how long does a step take, which layout is best; and `new`."""

import argparse
import dataclasses
import json
import os
import pathlib

from dtransformer.errors import InputError, check_installed, refusing
from dtransformer.inputs.files import write_text_atomically
from dtransformer.inputs.yaml_file import parse_setting, read_yaml
from dtransformer.planner import Cluster, Job, Plan, plan, report
from dtransformer.planner.clusters import Constants, Device, Link, device_named
from dtransformer.planner.models import checked, from_architecture, named
from dtransformer.planner.shape import ModelShape

# Sequences where nothing is said: published positions go far beyond what is trained.
_LONGEST = 8192


def run_plan(arguments: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        InputError: what is asked does not exist, or does not go together.
    """
    if arguments.plot:
        check_installed("matplotlib", "pictures")
    if arguments.measure:
        from dtransformer.cli.measured_machine import measure_to

        measure_to(arguments.measure)
        arguments.device = arguments.measure
        if arguments.model is None:
            return
    found = plan_of(arguments)
    if arguments.json:
        print(json.dumps(report.json_of(found), indent=2))
    else:
        print(report.text_of(found))
    if arguments.yaml:
        write_text_atomically(arguments.yaml, report.yaml_of(found))
    elif not arguments.json and found.fits:
        print(f"\n{report.yaml_of(found)}", end="")
    if arguments.plot:
        report.draw(found, arguments.plot)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the `Plan` that the options ask for.

    Raises:
        InputError: an option is missing or wrong.
    """
    changes = {
        "sequence_length": arguments.sequence,
        "adapter_rank": arguments.lora,
        "frozen_blocks": arguments.freeze,
    }
    model = model_of(arguments.model, **{k: x for k, x in changes.items() if x is not None})
    device = device_of(arguments.device)
    if arguments.devices_per_node:
        device = dataclasses.replace(device, devices_per_node=arguments.devices_per_node)
    if (arguments.devices is None) == (arguments.nodes is None):
        raise InputError("give --devices, the number of all devices, or --nodes")
    devices = arguments.devices or arguments.nodes * device.devices_per_node
    if arguments.global_batch is None:
        raise InputError("--global-batch is not given: the number of sequences of a step")
    fixed = dict(parse_setting(text, "--fix", "FIELD=VALUE") for text in arguments.fix)
    job = Job(arguments.global_batch, arguments.precision, arguments.optimizer, fixed)
    return plan(model, Cluster(device, devices), job, arguments.top)


def model_of(name: str | None, **changes) -> ModelShape:
    """Return the `ModelShape` of a name, of a published folder, or of a YAML file with its fields.

    Args:
        name: it.
        **changes: fields that replace its own, such as `sequence_length`.

    Raises:
        InputError: there is no such model, or the file has other fields.
    """
    if name is None:
        raise InputError("--model is not given: a name, such as gpt-175b, a folder, or a YAML file")
    if os.path.isdir(name):
        from dtransformer.models.pretrained.load import architecture_of

        title = pathlib.Path(name).resolve().name
        return _usual(from_architecture(title, architecture_of(name), **changes), changes)
    if not name.endswith((".yaml", ".yml")):
        return _usual(named(name, **changes), changes)
    fields = read_yaml(name)
    if not isinstance(fields, dict):
        raise InputError(f"{name}: expected the fields of a model, such as hidden_size: 1024")
    if isinstance(fields.get("base"), str):  # a named model with other fields
        return named(fields.pop("base"), **{**fields, **changes})
    return checked(ModelShape, {"name": name, **fields, **changes})


def _usual(model, changes):
    """Return a published model with sequences of a usual length, where none is given."""
    length = changes.get("sequence_length", min(model.sequence_length, _LONGEST))
    return dataclasses.replace(model, sequence_length=length)


def device_of(name: str) -> Device:
    """Return the `Device` of a name or of a file of `--measure`.

    Raises:
        InputError: there is no such device, or the file has other fields.
    """
    if not name.endswith((".yaml", ".yml")):
        return device_named(name)
    fields = read_yaml(name)
    if not isinstance(fields, dict):
        raise InputError(f"{name}: expected the fields of a device, as --measure writes them")
    with refusing(name):
        base = vars(device_named(fields.pop("base"))) if "base" in fields else {}
        own = {}
        if "links" in fields:
            own["links"] = {axis: checked(Link, x) for axis, x in dict(fields["links"]).items()}
        if "constants" in fields:
            given = vars(base["constants"]) if base else {}
            own["constants"] = checked(Constants, {**given, **fields["constants"]})
        return checked(Device, {**base, **fields, **own})
