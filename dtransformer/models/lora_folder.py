"""Save and load adapters without the rest of the network. The files suit every layout."""

import json
import os
import pathlib
import typing
import warnings
from typing import Annotated

import numpy as np
import pydantic
from pydantic import Field
from safetensors.numpy import save_file

from dtransformer.errors import InputError
from dtransformer.inputs.conversion import convert
from dtransformer.inputs.json_file import STRICT, read_json, typed
from dtransformer.inputs.safetensors_file import SafetensorsFile
from dtransformer.models.base import TokenModel
from dtransformer.models.lora import adapted_kernels, add_adapters, check_has_adapters, get_adapters
from dtransformer.models.pretrained import peft
from dtransformer.models.pretrained.save import save_on_chief
from dtransformer.parallel.collectives.objects import call_on_all, from_all_stages
from dtransformer.parallel.ops.low_rank import KINDS
from dtransformer.parallel.weights.sharded_tensor import get_sharded_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_FORMAT = "dtransformer"


# An unknown field could change the meaning of the others.
_STRICT = {**STRICT, "extra": "forbid"}


class _Kernel(pydantic.BaseModel):
    """Config of one adapted kernel."""

    model_config = _STRICT
    rank: Annotated[int, Field(gt=0)]
    alpha: Annotated[float, Field(gt=0, strict=False)]
    kind: typing.Literal[tuple(KINDS)] = "lora"


class _Config(pydantic.BaseModel):
    """Content of `adapter_config.json` in this library's format."""

    model_config = _STRICT
    format: typing.Literal[_FORMAT]
    kernels: dict[str, _Kernel]


def save_lora(
    network: TokenModel,
    folder: str | os.PathLike,
    family: str | None = None,
    overwrite: bool = False,
) -> pathlib.Path:
    """Save the adapters of a network to a folder, without the network's other weights.

    Writes `adapter_model.safetensors` and `adapter_config.json`. Call it on all ranks, in any
    layout; rank 0 writes. If the folder contains other adapters, a new folder next to it is
    used, and a warning names it.

    Args:
        network: Network with adapters from `add_lora`.
        folder: Target folder.
        family: Model family, such as `"llama"`, `"mistral"`, `"qwen2"` or `"gpt2"`, to write
            files that the `peft` package loads with the published weights. Defaults to the
            family of `from_pretrained`, if its format can store these adapters.
            `"dtransformer"` selects this library's format.
        overwrite: Boolean. Whether to replace other adapters in the folder.

    Returns:
        The `pathlib.Path` of the folder that contains the adapters.

    Raises:
        ValueError: If the network has no adapters.
        InputError: If the folder is not writable, or the requested family's format cannot
            store these adapters. In the second case, they are saved in this library's
            format.
    """
    check_has_adapters(network, "save_lora")
    local_factors = {
        f"{path}.{letter}": _without_padding(factor)
        for path, kernel in adapted_kernels(network).items()
        for letter, factor in kernel.low_rank.factors.items()
    }
    arrays = from_all_stages(local_factors, "lora/factors")

    kernels = get_adapters(network)
    error_text = None
    config = {"format": _FORMAT, "kernels": kernels}
    tensors = arrays
    kind = family or (network.origin or [_FORMAT])[0]
    if kind != _FORMAT:
        try:
            config, tensors = peft.to_peft(network, kind, kernels, arrays)
        except InputError as error:
            error_text = error

    def write(fresh):
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(config, indent=2) + "\n"
        (fresh / CONFIG).write_text(text, encoding="utf-8")

    target = save_on_chief(folder, write, overwrite)
    if error_text is not None:
        message = (
            f"{error_text} The adapters are in {target} in this library's format, which peft cannot "
            "load."
        )
        if family is not None:
            raise InputError(message)
        warnings.warn(message, stacklevel=2)
    return target


def load_lora(
    network: TokenModel,
    folder: str | os.PathLike,
    freeze_others: bool = True,
    dtype: str = "float32",
) -> list[str]:
    """Add the adapters in a folder of `save_lora` or the `peft` package to a network.

    Each rank keeps its local shards. Kernels that have equal adapters already get the
    folder's values. Call it on all ranks, before `compile`.

    Args:
        network: Built network that the adapters were trained with, in any layout.
        folder: Folder with the adapters.
        freeze_others: Boolean. Whether to freeze all weights except adapters.
        dtype: `"float32"` or `"bfloat16"`, the type of new adapters. The type in the folder does
            not matter. See `add_lora`.

    Returns:
        A list of the kernels' paths, without the network's name.

    Raises:
        InputError: If a file is missing, damaged or needs an unsupported feature, or if
            kernels, ranks or sizes do not match the network.
    """
    folder = pathlib.Path(folder)
    kernels, arrays = call_on_all(lambda: _read(network, folder), "lora/read")
    present = get_adapters(network)
    new_kernels = {
        path: {**settings, "dtype": dtype}
        for path, settings in kernels.items()
        if path not in present
    }

    def check():
        for path, current in present.items():
            if current != kernels.get(path):
                settings = ", ".join(f"{name} {x}" for name, x in current.items())
                raise InputError(
                    f"{folder} does not match the network's adapters: {path} has {settings} in the "
                    "network. Load the folder into a network without adapters."
                )

    call_on_all(check, "lora/same")
    add_adapters(network, new_kernels, freeze_others)
    shards = [
        (path, letter, tensor)
        for path, kernel in adapted_kernels(network).items()
        for letter, factor in kernel.low_rank.factors.items()
        for tensor in get_sharded_tensors(path, factor)
    ]

    def check_shapes():
        for path, letter, tensor in shards:
            shape = arrays[f"{path}.{letter}"].shape
            if shape != tensor.shape:
                raise InputError(
                    f"{folder}: Factor {letter.upper()} of {path} has shape {list(shape)}, expected "
                    f"{list(tensor.shape)}. Check that the adapters belong to this network."
                )

    call_on_all(check_shapes, "lora/shapes")
    for path, letter, tensor in shards:
        value = arrays[f"{path}.{letter}"]
        tensor.assign(
            tensor.assemble(lambda bounds, x=value: x[tuple(slice(*ends) for ends in bounds)])
        )
    return list(kernels)


def _read(network, folder):
    """Return the adapters' settings by kernel path, and their float32 factors.

    The factors' keys are the kernel's path plus `.a`, `.b` or `.m`.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise InputError(
                f"{folder / name} does not exist. Pass a folder with {CONFIG} and {WEIGHTS}."
            )
    config = read_json(folder / CONFIG)
    file = SafetensorsFile(folder / WEIGHTS)
    factors = {
        name: convert(file[name], np.dtype("float32"), f"{folder / WEIGHTS}: {name}")
        for name in file.shapes
    }
    if isinstance(config, dict) and "peft_type" in config:
        return peft.from_peft(network, config, factors, folder)
    kernels = typed(config, _Config, folder / CONFIG)["kernels"]
    kernels = {
        path: {"kind": "lora", **settings, "alpha": float(settings["alpha"])}
        for path, settings in kernels.items()
    }
    expected = {
        f"{path}.{x}" for path, settings in kernels.items() for x in KINDS[settings["kind"]]
    }
    if wrong := sorted(expected ^ factors.keys()):
        raise InputError(
            f"{folder}: {CONFIG} and {WEIGHTS} do not match: only one of them has {wrong[0]}."
        )
    return kernels, factors


def _without_padding(factor):
    value = np.asarray(factor.numpy())[tuple(slice(size) for size in factor.true_shape)]
    return np.ascontiguousarray(value)  # safetensors requires contiguous arrays
