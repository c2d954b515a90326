"""Adapters by the names of the package `peft`, beside published weights: pure functions of arrays.

A factor is there a matrix as PyTorch's `Linear` has it, outputs first.
"""

import os
import re
import warnings

import numpy as np

from dtransformer.errors import InputError, shown
from dtransformer.models.base import TokenModel
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.published_fields import FIELDS
from dtransformer.parallel.ops.low_rank import KINDS

_PREFIX = "base_model.model."
_TASKS = {"CausalLM": "CAUSAL_LM", "EncoderDecoderLM": "SEQ_2_SEQ_LM"}
# Factors by this library's letters, with the magnitudes of DoRA.
_NAMES = {"a": "lora_A", "b": "lora_B", "m": "lora_magnitude_vector"}
_FIELDS, _NONE = FIELDS["adapters"], (None, False, {}, [])
_PLAIN = {**_FIELDS["plain"], **dict.fromkeys(_FIELDS["unset"], _NONE)}
KNOWN = {*_FIELDS["taken"], *_FIELDS["silent"], *_PLAIN}


def written(
    network: TokenModel, family: str, kernels: dict[str, dict], factors: dict[str, np.ndarray]
) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the config and the tensors of adapters.

    Args:
        network: the network.
        family: one of `FAMILIES`.
        kernels: `"rank"`, `"alpha"` and `"kind"` by the kernels' paths.
        factors: `"PATH.a"` [*inputs, r], `"PATH.b"` [r, *outputs] and, of kind `"dora"`, `"PATH.m"`
            [*outputs].

    Raises:
        InputError: the family is not known, several kernels are in one tensor of it, or adapters are
            of two kinds.
    """
    places = next((paths for name, paths in _fitting(network) if name == family), None)
    if places is None:
        names = ", ".join(name for name, _ in _fitting(network))
        raise InputError(f"family is {family!r}, expected one of {names}")
    tensors, modules = {}, {path: module for path, (module, _) in places.items()}
    for path in kernels:
        if path not in places:
            raise InputError(
                f"{family} has no tensor for {path} alone: adapters of other kernels, or by this "
                "library's names (family='dtransformer'), can be saved"
            )
        shapes = {"a": (-1, kernels[path]["rank"]), "b": (kernels[path]["rank"], -1), "m": (-1,)}
        for letter in KINDS[kernels[path]["kind"]]:
            value, name = factors[f"{path}.{letter}"], _NAMES[letter]
            if letter != "a" and places[path][1].order is not None:
                value = value[..., np.argsort(places[path][1].order)]
            name = f"{_PREFIX}{modules[path]}.{name}{'' if letter == 'm' else '.weight'}"
            tensors[name] = np.ascontiguousarray(value.reshape(shapes[letter]).T)
    first = next(iter(kernels.values()))
    if len({own["kind"] for own in kernels.values()}) > 1:
        raise InputError("some adapters are of kind dora, others of lora: peft has one kind")
    differing = lambda name: {
        modules[path]: own[name] for path, own in kernels.items() if own[name] != first[name]
    }
    return {
        "peft_type": "LORA",
        "task_type": _TASKS.get(type(network).__name__),
        "base_model_name_or_path": network.origin[1] if network.origin else None,
        "r": first["rank"],
        "lora_alpha": first["alpha"],
        "rank_pattern": differing("rank"),
        "alpha_pattern": differing("alpha"),
        "target_modules": [modules[path] for path in kernels],
        "fan_in_fan_out": family == "gpt2",
        "use_dora": first["kind"] == "dora",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }, tensors


def read(
    network: TokenModel, config: dict, tensors: dict[str, np.ndarray], folder: os.PathLike
) -> tuple[dict, dict[str, np.ndarray]]:
    """Return `"rank"`, `"alpha"` and `"kind"` by the kernels' paths, and the factors: see `written`.

    Raises:
        InputError: the config asks for what is not built, or a tensor is none of the network's.
    """
    _check_fields(config, folder)
    names = {
        name.removeprefix(_PREFIX).removesuffix(".weight"): name
        for name in tensors
        if not name.endswith(".base_layer.weight")  # of a head: a copy of the frozen one
    }
    kind = "dora" if config.get("use_dora") else "lora"
    endings = tuple(f".{_NAMES[letter]}" for letter in KINDS[kind])
    if others := [name for name in names if not name.endswith(endings)]:
        raise InputError(f"{folder}: {others[0]} is no factor of a kernel's adapter")
    modules = {name.rpartition(".lora_")[0] for name in names}
    places = _places(network, modules, folder)
    shapes, kernels, factors = network.weight_shapes(), {}, {}
    for module in sorted(modules):
        path, stored = places[module]
        rank, alpha = _rank_and_alpha(config, module, folder)
        kernels[path] = {"rank": rank, "alpha": alpha, "kind": kind}
        number = stored.num_inputs
        inputs, outputs = shapes[path][:number], shapes[path][number:]
        sizes = np.prod(inputs), np.prod(outputs)
        forms = {
            "a": ((*inputs, rank), (sizes[0], rank)),
            "b": ((rank, *outputs), (rank, sizes[1])),
            "m": (outputs, (sizes[1],)),
        }
        for letter in KINDS[kind]:
            shape, expected = forms[letter]
            name = names.get(f"{module}.{_NAMES[letter]}")
            value = np.zeros([0]) if name is None else tensors[name].T
            if value.shape != expected:
                raise InputError(
                    f"{folder}: {_NAMES[letter]} of {module}, of rank {rank}, is "
                    f"{list(value.shape[::-1])}, expected {[int(x) for x in expected[::-1]]}: are "
                    "these adapters of another network?"
                )
            value = np.ascontiguousarray(value).reshape(shape)
            if letter != "a" and stored.order is not None:
                value = value[..., list(stored.order)]
            factors[f"{path}.{letter}"] = value
    return kernels, factors


def _check_fields(config, folder):
    """Refuse what is not built, and warn of what only training would do."""
    if config["peft_type"] != "LORA":
        raise InputError(f"{folder}: peft_type is {config['peft_type']!r}, expected 'LORA'")
    for name, value in config.items():
        if name == "lora_dropout" and isinstance(value, float) and value:
            warnings.warn(
                f"{folder}: lora_dropout={value} is not applied where these adapters are trained on",
                stacklevel=2,
            )
        elif name not in KNOWN and value not in _NONE:
            raise InputError(f"{folder}: {shown(name)} is no field of adapters that is known here")
        elif name in _PLAIN and value not in _PLAIN[name]:
            hint = ""
            if name == "init_lora_weights":
                hint = (
                    ": they belong beside other weights than the published ones; let peft save them "
                    "with path_initial_model_for_weight_conversion"
                )
            raise InputError(f"{folder}: adapters with {name}={shown(value)} are not built{hint}")


def _rank_and_alpha(config, module, folder):
    """Return rank and α of a module, by the first pattern that its name matches, as `peft` does."""
    found = []
    for name, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        value, own = config.get(name), config.get(patterns) or {}
        try:
            matches = [x for pattern, x in own.items() if re.match(rf"(.*\.)?({pattern})$", module)]
        except (AttributeError, re.error):
            raise InputError(f"{folder}: {patterns} is {shown(own)}, expected patterns") from None
        value = matches[0] if matches else value
        kinds = (int,) if name == "r" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
            raise InputError(
                f"{folder}: {name} is {shown(value)}, expected a number of more than 0"
            )
        found.append(value)
    rank, alpha = found
    if config.get("use_rslora"):  # α / √r (Kalajdzievski, 2023, arXiv 2312.03732)
        alpha *= rank**0.5
    return rank, float(alpha)


def _places(network, modules, folder):
    """Return the path of the kernel of each module, and the `StoredTensor` that holds it."""
    lacking = modules
    for _, paths in _fitting(network):
        found = {module: (path, tensor) for path, (module, tensor) in paths.items()}
        if modules and modules <= found.keys():
            return {module: found[module] for module in modules}
        lacking = min(lacking, modules - found.keys(), key=len)
    message = ", ".join(sorted(lacking)[:3]) or "none at all"
    raise InputError(
        f"{folder}: has adapters of kernels that the network has not: {message}; are they of another "
        "network, or of a head that is tied?"
    )


def _fitting(network):
    """Give families whose form a network may have, its own first, and the modules of each."""
    own, shapes = (network.origin or [None])[0], network.weight_shapes()
    for name in sorted(FAMILIES, key=lambda name: name != own):
        if isinstance(network, FAMILIES[name].network):
            if (modules := _modules(network, name, shapes)) is not None:
                yield name, modules


def _modules(network, family, shapes):
    """Return a family's modules, and their tensors, by the paths of the kernels that have one alone.

    None where the network's kernels are not those of the family.
    """
    try:
        tensors = FAMILIES[family].tensors(network.arguments)
    except InputError:
        return None
    held, own = {x for tensor in tensors for x in tensor.weights}, shapes.keys()
    if held - own or any(not path.startswith("head/") for path in own - held):
        return None
    return {
        tensor.weights[0]: (FAMILIES[family].file_name(tensor.name).removesuffix(".weight"), tensor)
        for tensor in tensors
        if len(tensor.weights) == 1 and tensor.expert is None and tensor.name.endswith(".weight")
    }
