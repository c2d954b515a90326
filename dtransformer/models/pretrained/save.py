"""Save networks to folders that `transformers` loads."""

import json
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dtransformer.errors import InputError
from dtransformer.files import is_partial, write_into
from dtransformer.inputs.conversion import convert
from dtransformer.inputs.json_file import read_object
from dtransformer.layers.heads import PoolingHead
from dtransformer.models.base import TokenModel
from dtransformer.models.generation.rules import rules_to_fields
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.families.task_heads import (
    file_name,
    head_fields,
    network_tensors,
)
from dtransformer.models.pretrained.folder import CONFIG, GENERATION, WEIGHTS, write_modules
from dtransformer.models.pretrained.stored_weights import sinusoids
from dtransformer.models.weight_paths import weights_by_path
from dtransformer.parallel.collectives.objects import (
    all_gather_json,
    broadcast_arrays,
    call_on_all,
    from_chief,
)
from dtransformer.parallel.ops.low_rank import get_low_rank
from dtransformer.parallel.runtime import job

# `transformers` would load these files instead of `WEIGHTS`.
_REPLACED_FILES = ("model*.safetensors", "model*.safetensors.index.json")
# Files of the tokenizer and of generation that `transformers` reads next to the weights.
_TOKENIZER = (
    *("*tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("*.model", "*.spm", "vocab.*", "merges.txt", "chat_template*", "*sentence_*.json"),
    "additional_chat_templates/*.jinja",
)


def save_pretrained(
    network: TokenModel,
    folder: str | os.PathLike,
    family: str | None = None,
    overwrite: bool = False,
    tokenizer: Any = None,
    dtype: str | None = None,
) -> pathlib.Path:
    """Save a network to a folder that `transformers` and `from_pretrained` load.

    Call it on all ranks, in any layout. Rank 0 writes and needs memory for all weights.
    Quantized kernels are dequantized. The tokenizer's files are copied as well. If the folder
    contains another model, a new folder next to it is used, and a warning names it.

    Args:
        network: Built network.
        folder: Target folder.
        family: String. Key of `FAMILIES` in `dtransformer.models.pretrained.families`, such
            as `"llama"`. Defaults to the family that `from_pretrained` loaded.
        overwrite: Boolean. Whether to replace another model's files.
        tokenizer: Object whose `save(folder)` writes the tokenizer's files; see
            `load_tokenizer`. By default the files are copied from the folder that the
            network was loaded from.
        dtype: Data type of the saved tensors: `"float32"`, `"bfloat16"` or `"float16"`.
            By default each tensor has the type that it was loaded from, unless the
            network's variables have 16 bits.

    Returns:
        The `pathlib.Path` of the folder that contains the model.

    Raises:
        InputError: If the family cannot represent the network, the network has adapters, or
            the folder is not writable.
    """

    def checked():
        config = hf_config(network, family)
        if any(get_low_rank(x) is not None for x in weights_by_path(network).values()):
            raise InputError(
                "The network has adapters. Save them with `save_lora`, or call `merge_lora` before "
                "saving the network."
            )
        return config

    config = call_on_all(checked, "pretrained/save")
    values = _values_on_chief(network)
    shapes = network.weight_shapes()

    def write(fresh):
        kind = config["model_type"]
        arguments = network.arguments
        family = FAMILIES[kind]
        stored = {} if dtype else network.stored_dtypes
        main = dtype or next(iter(stored.values()), None)

        def without_padding(path):
            return values[path][tuple(slice(size) for size in shapes[path])]

        tensors = {}
        for tensor in network_tensors(kind, network):
            array = tensor.join([without_padding(path) for path in tensor.weights])
            tensor_dtype = stored.get(tensor.weights[0], main)
            tensors[tensor.name] = (
                array if tensor_dtype is None else convert(array, tensor_dtype, tensor.name)
            )
        table = next(iter(tensors.values()))
        for copy, name in family.files.untied_copies.items():
            if name in tensors and not arguments["tied_head"]:
                tensors[copy] = tensors[name]
        for name in family.files.saved_position_tables:
            positions = sinusoids(arguments["max_length"], arguments["hidden_size"])
            tensors[name] = positions.astype(table.dtype)
        for name, value in family.constants(arguments).items():
            tensors[name] = np.asarray(value, table.dtype)
        arrays = {file_name(kind, name, network): x for name, x in tensors.items()}
        fields = {**config, "dtype": str(table.dtype)}
        save_file(arrays, fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        _add_tokenizer(network, tokenizer, fresh)
        path = fresh / GENERATION
        rules = rules_to_fields(network.generation_rules)
        saved = read_object(path) if path.exists() else {}
        if rules.keys() - saved.keys():
            ids = {x: y for x, y in config.items() if x.endswith("_token_id")}
            text = json.dumps({**ids, **rules, **saved}, indent=2)
            path.write_text(text + "\n", encoding="utf-8")
        head = getattr(network, "head", None)
        if isinstance(head, PoolingHead):
            write_modules(fresh, head, network.arguments["hidden_size"])

    return save_on_chief(folder, write, overwrite, _REPLACED_FILES)


def save_on_chief(
    folder: str | os.PathLike, write: Callable, overwrite: bool, replaces: Sequence[str] = ()
) -> pathlib.Path:
    """Write a folder on rank 0 and return its path on every rank.

    See `write_into` for the arguments.
    """

    def save():
        return str(write_into(folder, write, overwrite, replaces)) if job.is_chief() else None

    with job.record_activity("saving"):
        target = call_on_all(save, "pretrained/write")
        return pathlib.Path(from_chief(lambda: target, "pretrained/landed"))


def _values_on_chief(network):
    """Return a dict of the full weights of all stages on rank 0. Call it on all ranks."""
    variables = weights_by_path(network)
    group = job.pipeline_group()
    paths_by_rank = all_gather_json(list(variables), "pretrained/paths")
    result = {}
    for path in dict.fromkeys(path for rank in group.ranks for path in paths_by_rank[rank]):
        value = np.asarray(variables[path].numpy()) if path in variables else None
        root = next(rank for rank in group.ranks if path in paths_by_rank[rank])
        if root != group.ranks[0]:
            values = broadcast_arrays({path: value}, root, group, f"pretrained/{path}")
            value = values[path]
        if job.is_chief():
            result[path] = value
    return result


def _add_tokenizer(network, tokenizer, fresh):
    """Write the tokenizer's files. A failure is only a warning, so that the weights are saved."""
    try:
        if tokenizer is not None:
            tokenizer.save(fresh)
            return
        source = pathlib.Path(network.origin[1]) if network.origin else fresh
        paths = {path for name in _TOKENIZER for path in source.glob(name) if path.is_file()}
        for path in sorted(paths):
            target = fresh / path.relative_to(source)
            if not target.exists() and not is_partial(path.name):
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        if not source.is_dir():
            raise InputError(f"{source} does not exist any more.")
    except (InputError, OSError) as error:
        warnings.warn(f"The tokenizer was not saved with the network: {error}", stacklevel=2)


def hf_config(network: TokenModel, name: str | None = None) -> dict:
    """Return the content of `config.json` for a network, without its `dtype`.

    Args:
        network: The network.
        name: String. Key of `FAMILIES`. Defaults to the family that the network came from.

    Raises:
        InputError: If the family cannot represent the network. The message has the reason.
    """
    if name is None and network.origin is not None:
        name = network.origin[0]
    if name not in FAMILIES:
        raise InputError(f"`family` must be one of {', '.join(FAMILIES)}, got {name!r}.")
    family = FAMILIES[name]
    arguments = network.arguments
    if not isinstance(network, family.network):
        raise InputError(
            f"The network is a {type(network).__name__}, but the family {name!r} needs a "
            f"{family.network.__name__}. Save it as another family."
        )
    return {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": arguments["vocab_size"],
        **family.to_hf(arguments),
        **{field: arguments[argument] for argument, field in family.special_ids.items()},
        "tie_word_embeddings": arguments["tied_head"],
        **head_fields(name, network),
    }
