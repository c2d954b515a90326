"""Convert adapters to and from the format of the `peft` package, as pure functions of arrays.

`peft` stores each factor as a matrix [outputs, inputs], like PyTorch's `Linear`.
"""

import os
import re
import warnings

import numpy as np

from dtransformer.errors import InputError, short_repr
from dtransformer.models.base import TokenModel
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.published_fields import FIELDS
from dtransformer.parallel.ops.low_rank import KINDS

_PREFIX = "base_model.model."
_TASKS = {"CausalLM": "CAUSAL_LM", "EncoderDecoderLM": "SEQ_2_SEQ_LM"}
# Factor letters in this library -> names in `peft`. `m` is the magnitude of DoRA.
_NAMES = {"a": "lora_A", "b": "lora_B", "m": "lora_magnitude_vector"}
_FIELDS = FIELDS["adapters"]
_UNSET_VALUES = (None, False, {}, [])
_REQUIRED_VALUES = {
    **_FIELDS["required_values"],
    **dict.fromkeys(_FIELDS["must_be_unset"], _UNSET_VALUES),
}
KNOWN_FIELDS = {*_FIELDS["supported"], *_FIELDS["ignored"], *_REQUIRED_VALUES}


def to_peft(
    network: TokenModel, family: str, kernels: dict[str, dict], factors: dict[str, np.ndarray]
) -> tuple[dict, dict[str, np.ndarray]]:
    """Convert adapters to the config and tensors of the `peft` package.

    Args:
        network: Network with the adapters.
        family: String. Key of `FAMILIES`.
        kernels: Dict from kernel paths to dicts of `"rank"`, `"alpha"` and `"kind"`.
        factors: Dict of float arrays: `"PATH.a"` [*inputs, r], `"PATH.b"` [r, *outputs] and,
            for kind `"dora"`, `"PATH.m"` [*outputs].

    Returns:
        A `(config, tensors)` tuple: the content of `adapter_config.json` and a dict of
        arrays.

    Raises:
        InputError: If the family is unknown, its files store an adapted kernel together with
            others in one tensor, or the adapters are of different kinds.
    """
    modules_by_path = next(
        (paths for name, paths in _compatible_families(network) if name == family), None
    )
    if modules_by_path is None:
        names = ", ".join(name for name, _ in _compatible_families(network))
        raise InputError(f"`family` must be one of {names}, got {family!r}.")
    tensors = {}
    modules = {path: module for path, (module, _) in modules_by_path.items()}
    for path in kernels:
        if path not in modules_by_path:
            raise InputError(
                f"{family} has no separate tensor for {path}. Adapt other kernels, or save in this "
                "library's format with `family='dtransformer'`."
            )
        shapes = {"a": (-1, kernels[path]["rank"]), "b": (kernels[path]["rank"], -1), "m": (-1,)}
        for letter in KINDS[kernels[path]["kind"]]:
            value = factors[f"{path}.{letter}"]
            name = _NAMES[letter]
            if letter != "a" and modules_by_path[path][1].order is not None:
                value = value[..., np.argsort(modules_by_path[path][1].order)]
            name = f"{_PREFIX}{modules[path]}.{name}{'' if letter == 'm' else '.weight'}"
            tensors[name] = np.ascontiguousarray(value.reshape(shapes[letter]).T)
    first = next(iter(kernels.values()))
    if len({settings["kind"] for settings in kernels.values()}) > 1:
        raise InputError(
            "Some adapters are of kind dora, others of lora. peft needs a single kind."
        )

    def differing(name):
        return {
            modules[path]: settings[name]
            for path, settings in kernels.items()
            if settings[name] != first[name]
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


def from_peft(
    network: TokenModel, config: dict, tensors: dict[str, np.ndarray], folder: os.PathLike
) -> tuple[dict, dict[str, np.ndarray]]:
    """Convert the config and tensors of the `peft` package to adapters.

    Args:
        network: Network to load the adapters into.
        config: Content of `adapter_config.json`.
        tensors: Dict of float arrays from the adapter's file.
        folder: Folder of the adapters, for messages.

    Returns:
        A `(kernels, factors)` tuple; see `to_peft` for both.

    Raises:
        InputError: If the config needs an unsupported feature, or a tensor does not match
            the network.
    """
    _check_fields(config, folder)
    names = {
        name.removeprefix(_PREFIX).removesuffix(".weight"): name
        for name in tensors
        # peft also stores a copy of an adapted head's frozen weight.
        if not name.endswith(".base_layer.weight")
    }
    kind = "dora" if config.get("use_dora") else "lora"
    endings = tuple(f".{_NAMES[letter]}" for letter in KINDS[kind])
    if unexpected := [name for name in names if not name.endswith(endings)]:
        raise InputError(f"{folder}: {unexpected[0]} is not a factor of a low-rank adapter.")
    modules = {name.rpartition(".lora_")[0] for name in names}
    paths_by_module = _kernels_by_module(network, modules, folder)
    shapes = network.weight_shapes()
    kernels = {}
    factors = {}
    for module in sorted(modules):
        path, stored = paths_by_module[module]
        rank, alpha = _rank_and_alpha(config, module, folder)
        kernels[path] = {"rank": rank, "alpha": alpha, "kind": kind}
        num_inputs = stored.num_inputs
        inputs = shapes[path][:num_inputs]
        outputs = shapes[path][num_inputs:]
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
                    f"{folder}: {_NAMES[letter]} of {module}, with rank {rank}, has shape "
                    f"{list(value.shape[::-1])}, expected {[int(x) for x in expected[::-1]]}. Check "
                    "that the adapters belong to this network."
                )
            value = np.ascontiguousarray(value).reshape(shape)
            if letter != "a" and stored.order is not None:
                value = value[..., list(stored.order)]
            factors[f"{path}.{letter}"] = value
    return kernels, factors


def _check_fields(config, folder):
    """Raise an error for unsupported fields, and warn about fields that only affect training."""
    if config["peft_type"] != "LORA":
        raise InputError(f"{folder}: `peft_type` must be 'LORA', got {config['peft_type']!r}.")
    for name, value in config.items():
        if name == "lora_dropout" and isinstance(value, float) and value:
            warnings.warn(
                f"{folder}: `lora_dropout={value}` is ignored if these adapters are trained further.",
                stacklevel=2,
            )
        elif name not in KNOWN_FIELDS and value not in _UNSET_VALUES:
            raise InputError(
                f"{folder}: {short_repr(name)} is not a known field of adapter configs."
            )
        elif name in _REQUIRED_VALUES and value not in _REQUIRED_VALUES[name]:
            hint = ""
            if name == "init_lora_weights":
                hint = (
                    " They belong to modified base weights. Let peft save them with "
                    "`path_initial_model_for_weight_conversion`."
                )
            raise InputError(
                f"{folder}: Adapters with `{name}={short_repr(value)}` are not supported.{hint}"
            )


def _rank_and_alpha(config, module, folder):
    """Return a module's rank and α, from the first pattern that matches its name, as in `peft`."""
    values = []
    for name, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        value = config.get(name)
        overrides = config.get(patterns) or {}
        try:
            matches = [
                x for pattern, x in overrides.items() if re.match(rf"(.*\.)?({pattern})$", module)
            ]
        except (AttributeError, re.error):
            raise InputError(
                f"{folder}: `{patterns}` must be a dict from patterns to numbers, got "
                f"{short_repr(overrides)}."
            ) from None
        value = matches[0] if matches else value
        kinds = (int,) if name == "r" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
            raise InputError(
                f"{folder}: `{name}` must be a positive number, got {short_repr(value)}."
            )
        values.append(value)
    rank, alpha = values
    if config.get("use_rslora"):  # α / √r (Kalajdzievski, 2023, arXiv 2312.03732)
        alpha *= rank**0.5
    return rank, float(alpha)


def _kernels_by_module(network, modules, folder):
    """Find the kernels of adapted modules.

    Args:
        network: The network.
        modules: Set of the module names in the file.
        folder: Folder of the file, for error messages.

    Returns:
        A dict from module names to tuples of the kernel's path and its `StoredTensor`, by the names
        of the first compatible family that has all modules.

    Raises:
        InputError: If no family has all modules.
    """
    missing = modules
    for _, paths in _compatible_families(network):
        by_module = {module: (path, tensor) for path, (module, tensor) in paths.items()}
        if modules and modules <= by_module.keys():
            return {module: by_module[module] for module in modules}
        missing = min(missing, modules - by_module.keys(), key=len)
    message = ", ".join(sorted(missing)[:3]) or "no adapters in the file"
    raise InputError(
        f"{folder}: The adapters do not match the network's kernels: {message}. They may belong to "
        "another network, or to a tied head."
    )


def _compatible_families(network):
    """Yield compatible families and their modules, first the family that the network came from."""
    origin = (network.origin or [None])[0]
    shapes = network.weight_shapes()
    for name in sorted(FAMILIES, key=lambda name: name != origin):
        if isinstance(network, FAMILIES[name].network):
            if (modules := _modules(network, name, shapes)) is not None:
                yield name, modules


def _modules(network, family, shapes):
    """Return the family's modules for kernels that have a tensor to themselves.

    The result maps kernel paths to tuples of the module's name and the `StoredTensor`. It is
    `None` if the network's kernels do not match the family.
    """
    try:
        tensors = FAMILIES[family].tensors(network.arguments)
    except InputError:
        return None
    stored_paths = {x for tensor in tensors for x in tensor.weights}
    network_paths = shapes.keys()
    if stored_paths - network_paths or any(
        not path.startswith("head/") for path in network_paths - stored_paths
    ):
        return None
    return {
        tensor.weights[0]: (FAMILIES[family].file_name(tensor.name).removesuffix(".weight"), tensor)
        for tensor in tensors
        if len(tensor.weights) == 1 and tensor.expert is None and tensor.name.endswith(".weight")
    }
