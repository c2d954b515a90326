"""Adapters by the names of the package `peft`, beside published weights: pure functions of arrays.

A factor is there a matrix as PyTorch's `Linear` has it, outputs first.
"""

import os

import numpy as np

from dtransformer.errors import InputError
from dtransformer.models.base import TokenModel
from dtransformer.models.pretrained.families import FAMILIES

_PREFIX = "base_model.model."
# Fields of a config that change what adapters compute, and the values by which they do not.
_PLAIN = {
    "bias": ("none",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


def written(
    network: TokenModel, family: str, kernels: dict[str, dict], factors: dict[str, np.ndarray]
) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the config and the tensors of adapters.

    Args:
        network: the network.
        family: one of `FAMILIES`.
        kernels: `"rank"` and `"alpha"` by the kernels' paths.
        factors: `"PATH.a"` [*inputs, r] and `"PATH.b"` [r, *outputs].

    Raises:
        InputError: the family is not known, several kernels are in one tensor of it, or ranks
            differ.
    """
    if family not in FAMILIES or not isinstance(network, FAMILIES[family].network):
        raise InputError(f"family is {family!r}, expected one of {', '.join(_fitting(network))}")
    places, tensors = _modules(network, family), {}
    for path in kernels:
        if path not in places:
            raise InputError(
                f"{family} has no tensor for {path} alone: save adapters by this library's names "
                "(family=None), or train those of other kernels"
            )
        for letter, names in (("a", "lora_A"), ("b", "lora_B")):
            rank, value = kernels[path]["rank"], factors[f"{path}.{letter}"]
            matrix = value.reshape((-1, rank) if letter == "a" else (rank, -1))
            tensors[f"{_PREFIX}{places[path]}.{names}.weight"] = np.ascontiguousarray(matrix.T)
    if len({(x["rank"], x["alpha"]) for x in kernels.values()}) > 1:
        raise InputError("adapters of different ranks or alphas are saved with family=None only")
    first = next(iter(kernels.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": first["rank"],
        "lora_alpha": first["alpha"],
        "target_modules": [places[path] for path in kernels],
        "fan_in_fan_out": family == "gpt2",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }, tensors


def read(
    network: TokenModel, config: dict, tensors: dict[str, np.ndarray], folder: os.PathLike
) -> tuple[dict, dict[str, np.ndarray]]:
    """Return `"rank"` and `"alpha"` by the kernels' paths, and the factors: see `written`.

    Raises:
        InputError: the config asks for what is not built, or a tensor is none of the network's.
    """
    if config["peft_type"] != "LORA":
        raise InputError(f"{folder}: peft_type is {config['peft_type']!r}, expected 'LORA'")
    for name, plain in _PLAIN.items():
        if name in config and config[name] not in plain:
            raise InputError(f"{folder}: adapters with {name}={config[name]!r} are not built")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)) or min(rank, alpha) <= 0:
        raise InputError(f"{folder}: expected numbers of more than 0 as r and lora_alpha")
    if config.get("use_rslora"):  # α / √r (Kalajdzievski, 2023, arXiv 2312.03732)
        alpha *= rank**0.5
    names = {
        name.removeprefix(_PREFIX).removesuffix(".weight"): name
        for name in tensors
        if not name.endswith(".base_layer.weight")  # of a head: a copy of the frozen one
    }
    if others := [name for name in names if ".lora_" not in name]:
        raise InputError(f"{folder}: {others[0]} is no factor of an adapter")
    modules = {name.rpartition(".lora_")[0] for name in names}
    places = _places(network, modules, folder)
    shapes, kernels, factors = network.weight_shapes(), {}, {}
    for module in sorted(modules):
        path, number = places[module]
        kernels[path] = {"rank": rank, "alpha": float(alpha)}
        inputs, outputs = shapes[path][:number], shapes[path][number:]
        for letter, shape in (("a", (*inputs, rank)), ("b", (rank, *outputs))):
            name = names.get(f"{module}.lora_{letter.upper()}")
            value = np.zeros([0]) if name is None else tensors[name].T
            if value.size != np.prod(shape) or len(value.shape) != 2:
                raise InputError(
                    f"{folder}: lacks lora_{letter.upper()} of {module} of rank {rank}"
                )
            factors[f"{path}.{letter}"] = np.ascontiguousarray(value).reshape(shape)
    return kernels, factors


def _places(network, modules, folder):
    """Return path and number of dimensions of inputs of the kernel of each module."""
    for family in _fitting(network):
        found = {module: path for path, module in _modules(network, family).items()}
        if modules and modules <= found.keys():
            inputs = _num_inputs(network, family)
            return {module: (found[module], inputs[found[module]]) for module in modules}
    raise InputError(f"{folder}: has adapters of no kernel of the network: {sorted(modules)[:3]}")


def _fitting(network):
    """Return the names of the families whose networks are of a network's class."""
    return [name for name, family in FAMILIES.items() if isinstance(network, family.network)]


def _modules(network, family):
    """Return the names of a family's modules by the paths of the kernels that have one alone."""
    prefix = FAMILIES[family].prefix
    return {
        tensor.weights[0]: ("" if tensor.name.startswith("lm_head") else prefix)
        + tensor.name.removesuffix(".weight")
        for tensor in FAMILIES[family].tensors(network.arguments)
        if len(tensor.weights) == 1 and tensor.name.endswith(".weight")
    }


def _num_inputs(network, family):
    return {x.weights[0]: x.num_inputs for x in FAMILIES[family].tensors(network.arguments)}
