"""Networks into folders that `transformers` loads."""

import json
import os
import pathlib

import numpy as np
from safetensors.numpy import save_file

from dtransformer.errors import InputError
from dtransformer.files import adding_to
from dtransformer.models.base import TokenModel
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.folder import CONFIG, WEIGHTS
from dtransformer.models.pretrained.stored_weights import own_path
from dtransformer.parallel import job
from dtransformer.parallel.low_rank import low_rank_of
from dtransformer.parallel.object_collectives import together
from dtransformer.parallel.sharded_variable import unsharded_on_chief


def save_pretrained(network: TokenModel, folder: str | os.PathLike, family: str) -> None:
    """Write a network into a folder that `transformers`, and `from_pretrained`, load.

    All ranks have to call; rank 0 writes, and needs memory for all weights.

    Args:
        network: a built network.
        folder: the folder, which must not exist.
        family: its name, one of `FAMILIES` in `dtransformer.models.pretrained.families`, such as
            `"llama"`: a network that was made by `from_pretrained` may be saved as its family.

    Raises:
        InputError: the network is none of the family's, stages of a pipeline share it, or the
            folder exists.
    """
    folder = pathlib.Path(folder)

    def checked():
        if family not in FAMILIES:
            raise InputError(f"family is {family!r}, expected one of {', '.join(FAMILIES)}")
        config = _config_of(network, family)
        if any(low_rank_of(variable) is not None for variable in network.variables):
            raise InputError(
                "the network has adapters: save_lora writes them, or merge_lora adds them to the "
                "kernels first"
            )
        if job.is_chief() and folder.exists():
            raise InputError(f"{folder}: is there already: give another, or remove it")
        tensors = FAMILIES[family].tensors(network.arguments)
        variables = {own_path(variable): variable for variable in network.variables}
        lacking = {weight for x in tensors for weight in x.weights} - variables.keys()
        if lacking:
            raise InputError(
                f"this rank lacks {sorted(lacking)[0]}, which another stage of the pipeline has: "
                "save a checkpoint, restore it without a pipeline, and save that"
            )
        return config, tensors, variables

    config, tensors, variables = together(checked, "pretrained/save")
    with unsharded_on_chief(variables.values()):
        together(lambda: _write(folder, config, tensors, variables, network), "pretrained/write")


def _write(folder, config, tensors, variables, network):
    if not job.is_chief():
        return
    shapes = network.weight_shapes()

    def value(path):  # without a vocabulary's padding
        full = np.asarray(variables[path])
        return full[tuple(slice(size) for size in shapes[path])]

    family = FAMILIES[config["model_type"]]
    arrays = {family.file_name(x.name): x.join([value(w) for w in x.weights]) for x in tensors}
    config = {**config, "dtype": str(next(iter(arrays.values())).dtype)}
    with adding_to(folder) as fresh:
        save_file(arrays, fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _config_of(network, name):
    family, arguments = FAMILIES[name], network.arguments
    if not isinstance(network, family.network):
        raise InputError(
            f"the network is of the class {type(network).__name__}, those of the family {name!r} "
            f"are of {family.network.__name__}: it cannot be saved as one of them"
        )
    return {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": arguments["vocab_size"],
        **family.config(arguments),
        **{theirs: arguments[ours] for ours, theirs in family.special_ids.items()},
        "tie_word_embeddings": arguments["tied_head"],
    }
