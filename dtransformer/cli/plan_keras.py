"""`dtransformer plan --model module:function`: count the weights of a Keras model per device."""

import argparse
import dataclasses
import importlib
import json
import math
import os
import sys

import keras
import tensorflow as tf

from dtransformer.errors import InputError, short_repr
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.config.topology import divisors
from dtransformer.parallel.keras_layers.layouts import WeightLayout, weight_layouts
from dtransformer.parallel.variable_factory import shapes_alone
from dtransformer.planner.job import OPTIMIZERS
from dtransformer.tables import columns
from dtransformer.trainers import Muon

_GIB = 2**30
_MAX_LISTED = 10


@dataclasses.dataclass(frozen=True)
class KerasLayout:
    """Bytes per device of a Keras model's weights under a layout.

    Args:
        data_parallel, model_parallel: Integers. Degrees of parallelism.
        sharded_fraction: Float. Fraction of the parameters that the model axis shards.
        weights: Integer. Bytes of the weights on a device. Gradients take the same.
        states: Integer. Bytes of the optimizer's states on a device.
        states_sharded: Integer. The same with `optimizer_shard=1`.
    """

    data_parallel: int
    model_parallel: int
    sharded_fraction: float
    weights: int
    states: int
    states_sharded: int

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and states with `optimizer_shard=1`."""
        return 2 * self.weights + self.states_sharded


def run_keras_plan(arguments: argparse.Namespace) -> None:
    """Print the bytes per device of a Keras model for each degree of tensor parallelism.

    Raises:
        InputError: If the model cannot be created, or an option does not apply to it.
    """
    if arguments.devices is None:
        raise InputError("Set --devices, the number of devices on all nodes.")
    for option in ("yaml", "plot", "lora", "base_dtype", "freeze", "sequence"):
        if getattr(arguments, option):
            raise InputError(
                f"--{option} does not apply to a Keras model given as module:function, whose "
                "activations and time the planner cannot estimate. Remove it."
            )
    if arguments.optimizer not in OPTIMIZERS:
        raise InputError(
            f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {short_repr(arguments.optimizer)}."
        )
    network = import_network(arguments.model)
    devices = arguments.devices
    rows = [keras_layout(network, devices, x, arguments.optimizer) for x in divisors(devices)]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    print("\n".join(_lines(network, rows, arguments.optimizer)))


def import_network(name: str) -> keras.Model:
    """Return the Keras model that a function creates, with shapes instead of values.

    Args:
        name: String of the form `"module:function"`. The module is imported from the current folder
            or the installed packages.

    Raises:
        InputError: If the function does not exist or does not return a built `keras.Model`.
    """
    module_name, _, function_name = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"--model {name}: {error}.") from None
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise InputError(f"--model {name} must be a function that returns a keras.Model.")
    with shapes_alone():
        network = function()
    if not isinstance(network, keras.Model) or not network.built:
        raise InputError(
            f"--model {name} returned {short_repr(type(network).__name__)}, but expected a built "
            "keras.Model. Build it, or call it on a `keras.Input`, in the function."
        )
    return network


def keras_layout(
    network: keras.Model, devices: int, model_parallel: int, optimizer: str
) -> KerasLayout:
    """Return the bytes per device of a built Keras model under a layout.

    Args:
        network: Built `keras.Model`. Values are not needed.
        devices: Integer. Number of devices.
        model_parallel: Integer. Number of weight shards. It divides `devices`.
        optimizer: String. Name of the optimizer, a key of `planner.job.OPTIMIZERS`.
    """
    data_parallel = devices // model_parallel
    layouts = _layouts(network, model_parallel)
    total = sum(layout.num_elements for layout in layouts)
    sharded = sum(layout.num_elements for layout in layouts if layout.is_sharded)
    stored = {
        id(layout): layout.num_elements // (model_parallel if layout.is_sharded else 1)
        for layout in layouts
    }
    trained = [layout for layout in layouts if layout.variable.trainable]
    muon = Muon() if optimizer == "muon" else None
    num_states = OPTIMIZERS[optimizer]
    weights = sum(stored[id(x)] * tf.as_dtype(x.variable.dtype).size for x in layouts)
    states = 0
    for x in trained:
        # Muon updates some weights with AdamW.
        uses_adamw = muon is not None and muon.matrix_shape(x.variable) is None
        count = OPTIMIZERS["adamw"] if uses_adamw else num_states
        states += stored[id(x)] * tf.as_dtype(x.variable.dtype).size * count
    fraction = sharded / total if model_parallel > 1 else 0.0
    return KerasLayout(
        data_parallel, model_parallel, fraction, weights, states, -(-states // data_parallel)
    )


def _layouts(network, model_parallel) -> list[WeightLayout]:
    config = TransformerOpParallelConfig(model_parallel=model_parallel)
    return weight_layouts(network, config, {"model": model_parallel})


def _lines(network, rows, optimizer):
    total = sum(math.prod(variable.shape) for variable in network.variables)
    header = (
        *("data_parallel", "model_parallel", "sharded", "weights", f"{optimizer} states"),
        *("states, optimizer_shard=1", "weights, gradients, states"),
    )
    table = [header]
    for row in rows:
        sizes = row.weights, row.states, row.states_sharded, row.total
        cells = (f"{size / _GIB:,.3g}" for size in sizes)
        table.append((row.data_parallel, row.model_parallel, f"{row.sharded_fraction:.0%}", *cells))
    degree = rows[-1].model_parallel
    replicated = [layout for layout in _layouts(network, degree) if not layout.is_sharded]
    replicated.sort(key=lambda layout: -layout.num_elements)
    lines = [
        f"{network.name}: {total:,} parameters. GiB per device, without activations:",
        "",
        *columns(table, right=tuple(range(len(header)))),
        "",
        f"Replicated with model_parallel={degree}, largest first:",
    ]
    for layout in replicated[:_MAX_LISTED]:
        lines.append(f"  {layout.variable.path}: {layout.num_elements:,} ({layout.rule})")
    if len(replicated) > _MAX_LISTED:
        lines.append(f"  and {len(replicated) - _MAX_LISTED} more")
    return lines
