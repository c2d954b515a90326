"""Networks from folders of published weights, on any layout."""

import os

import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.inputs.safetensors_file import convert
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.folder import CONFIG, PretrainedFolder
from dtransformer.parallel.object_collectives import together
from dtransformer.parallel.sharded_tensor import tensors_of

_MAX_TOLD = 5


def from_pretrained(folder: str | os.PathLike, **arguments) -> CausalLM:
    """Return the network of a folder as `transformers` saves it, with its weights.

    The folder has a `config.json`, and weights in one or several `.safetensors` files. Each rank
    reads the shards that it holds, one tensor after the other. Families: GPT-2, Llama, Mistral and
    Qwen2, by the config's `model_type`.

    Args:
        folder: its path.
        **arguments: arguments of `CausalLM` that replace those of the config, such as
            `dropout_rate`, `dtype` or `lambda_func`.

    Returns:
        A built `CausalLM`.

    Raises:
        InputError: there is no such folder, its family is not known, its config lacks a field or
            asks for what is not built, or its tensors are not those of the config; lists them.

    Example:

        network = dtransformer.models.from_pretrained("models/llama-3.2-1b")
    """

    def opened():
        content = PretrainedFolder(folder)
        family = family_of(content.config, content.path / CONFIG)
        return content, family, network_arguments(family, content.config, content.path / CONFIG)

    content, family, found = together(opened, "pretrained/folder")
    network = _built({**found, **arguments}, content.path / CONFIG)
    stored = together(lambda: _Stored(content, family, network), "pretrained/tensors")
    for variable in network.variables:
        path = own_path(variable)
        for tensor in tensors_of(path, variable):
            tensor.assign(stored.value(path, tensor))
    return network


def _built(arguments, path):
    try:
        network = CausalLM(**arguments)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None
    network.build()
    return network


def family_of(config: dict, path: os.PathLike):
    """Return the `Family` of a published config.

    Raises:
        InputError: it is not known.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise InputError(f"{path}: model_type is {kind!r}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def network_arguments(family, config: dict, path: os.PathLike) -> dict:
    """Return the arguments of `CausalLM` that a published config asks for.

    Raises:
        InputError: a field is lacking, or asks for what is not built.
    """
    try:
        arguments = {"vocab_size": config["vocab_size"], **family.arguments(config)}
        arguments |= {
            f"{ours}_id": _special_id(config.get(f"{theirs}_token_id"))
            for ours, theirs in {"pad": "pad", "start": "bos", "end": "eos"}.items()
        }
        arguments["pad_id"] = _padding(**arguments)
    except KeyError as error:
        raise InputError(f"{path}: lacks the field {error}") from None
    except (InputError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{path}: {error}") from None
    return {**arguments, "embedding_scale": 1.0}


def _special_id(value):
    """Return the first of one or several ids; None for none."""
    return value[0] if isinstance(value, list) and value else value


def _padding(pad_id, start_id, end_id, vocab_size, **_):
    """Return the id of padding; None where it is none of the vocabulary, or has a meaning too."""
    is_padding = pad_id is not None and 0 <= pad_id < vocab_size
    return pad_id if is_padding and pad_id not in (start_id, end_id) else None


def own_path(variable) -> str:
    """Return a variable's path without the network's name."""
    return variable.path.partition("/")[2]


class _Stored:
    """The tensors of a folder by the paths of our weights."""

    def __init__(self, content, family, network):
        self._content, arguments = content, network.arguments
        names = {name.removeprefix(family.prefix): name for name in content.shapes}
        tensors = family.tensors(arguments)
        unused = names.keys() - {tensor.name for tensor in tensors}
        unused -= {name for name in unused if name.endswith(family.ignored or ("\0",))}
        if arguments["tied_head"]:
            unused -= {"lm_head.weight"}
        told = [f"it lacks {x.name}" for x in tensors if x.name not in names]
        told += [f"it also has {name}" for name in sorted(unused)]
        held = {weight for tensor in tensors for weight in tensor.weights}
        others = {own_path(variable) for variable in network.variables} - held
        told += [f"the network also has {weight}" for weight in sorted(others)]
        if told:
            raise InputError(_told(content.path, told))
        self._places = {
            weight: (tensor, number, names[tensor.name])
            for tensor in tensors
            for number, weight in enumerate(tensor.weights)
        }
        self._check_shapes(arguments, tensors, names)

    def _check_shapes(self, arguments, tensors, names):
        shapes = weight_shapes(arguments)
        told = []
        for tensor in tensors:
            expected = tensor.shape([shapes[weight] for weight in tensor.weights])
            found = self._content.shapes[names[tensor.name]]
            if found != expected:
                told.append(f"{tensor.name} is {list(found)}, not {list(expected)}")
        if told:
            raise InputError(_told(self._content.path, told))
        self._shapes = shapes

    def value(self, path, tensor):
        """Return what this rank holds of a weight."""
        stored, number, name = self._places[path]
        shapes = [self._shapes[weight] for weight in stored.weights]
        weight = stored.of(self._content[name], number, shapes)
        kind = tf.as_dtype(tensor.dtype).as_numpy_dtype
        told = f"{self._content.path}: {name}"
        read = lambda bounds: convert(
            np.ascontiguousarray(weight[tuple(slice(*ends) for ends in bounds)]), kind, told
        )
        return tensor.assemble(read)


def weight_shapes(arguments: dict) -> dict[str, tuple[int, ...]]:
    """Return the paths and shapes of all weights of a `CausalLM`, whatever the layout is."""
    h, f, n = (arguments[key] for key in ("hidden_size", "ffn_hidden_size", "num_heads"))
    d, m = arguments["head_dim"] or h // n, arguments["num_kv_heads"] or n
    vocab, blocks = arguments["vocab_size"], "blocks/"
    shapes = {
        "embedding/table": (vocab, h),
        "positions/table": (arguments["max_length"], h),
        "head/kernel": (h, vocab),
        f"{blocks}final_norm/gamma": (h,),
        f"{blocks}final_norm/beta": (h,),
    }
    block = {"feed_forward/projection_bias": (h,), "attention/output_bias": (h,)}
    for norm in ("attention_norm", "feed_forward_norm"):
        block |= {f"{norm}/gamma": (h,), f"{norm}/beta": (h,)}
    for name, heads in {"query": n, "key": m, "value": m}.items():
        block |= {f"attention/{name}_kernel": (h, heads, d), f"attention/{name}_bias": (heads, d)}
    for name in ("mapping", "gate"):
        block |= {f"feed_forward/{name}_kernel": (h, f), f"feed_forward/{name}_bias": (f,)}
    block |= {"feed_forward/projection_kernel": (f, h), "attention/output_kernel": (n, d, h)}
    for number in range(arguments["num_layers"]):
        shapes |= {f"{blocks}block_{number}/{name}": shape for name, shape in block.items()}
    return shapes


def _told(path, told):
    more = len(told) - _MAX_TOLD
    ending = f" and {more} more" if more > 0 else ""
    return f"{path} does not fit its config: {'; '.join(told[:_MAX_TOLD])}{ending}"
