"""Access to the config and tensors in a folder of published weights.

A folder of sentence-transformers also has `modules.json` with a list of modules: the
Transformer, which is in the folder itself, its pooling and, for vectors of length 1,
`Normalize`.

Reference:
    [Reimers and Gurevych, 2019, Sentence-BERT](https://arxiv.org/abs/1908.10084)
"""

import json
import os
import pathlib

import numpy as np

from dtransformer.errors import InputError
from dtransformer.inputs.json_file import read_json, read_object
from dtransformer.inputs.safetensors_file import SafetensorsFile
from dtransformer.layers.heads import PoolingHead
from dtransformer.models.pretrained.quantized import QuantizedTensor, quantized_tensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"


class PretrainedFolder:
    """Folder with `config.json`, and `model.safetensors` or an index of several such files.

    Args:
        path: Path of the folder.

    Attributes:
        path: `pathlib.Path` of the folder.
        config: Dict of the config's fields.
        shapes: Dict from tensor names to shapes. A quantized tensor and its scales are one
            entry.

    Raises:
        InputError: If the folder is missing or its files are damaged.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        if not self.path.is_dir():
            raise InputError(f"{path} is not an existing folder. Download the model first.")
        self.config = read_object(self.path / CONFIG)
        self._files = self._open()
        shapes = {name: file.shapes[name] for name, file in self._files.items()}
        self._quantized = quantized_tensors(self.config, shapes, self._stored)
        parts = {part for tensor in self._quantized.values() for part in tensor.parts}
        self.shapes = {name: shape for name, shape in shapes.items() if name not in parts}
        self.shapes |= {name: tensor.shape for name, tensor in self._quantized.items()}

    def __getitem__(self, name: str) -> np.ndarray | QuantizedTensor:
        """Return a tensor. Its values are read from disk when they are used."""
        return self._quantized[name] if name in self._quantized else self._stored(name)

    def _stored(self, name):
        return self._files[name][name]

    def _open(self):
        """Return a dict from tensor names to the `SafetensorsFile` that contains them."""
        if (self.path / INDEX).exists():
            file_names = read_object(self.path / INDEX).get("weight_map")
            if not isinstance(file_names, dict) or not all(
                _is_name(x) for x in file_names.values()
            ):
                raise InputError(f"{self.path / INDEX}: `weight_map` must contain file names.")
            files = {name: SafetensorsFile(self.path / name) for name in set(file_names.values())}
            missing = [
                name
                for name, file_name in file_names.items()
                if name not in files[file_name].shapes
            ]
            if missing:
                raise InputError(
                    f"{self.path / file_names[missing[0]]} lacks {missing[0]} ({len(missing)} missing "
                    f"tensors), which {INDEX} lists. Download it again."
                )
            return {name: files[file_name] for name, file_name in file_names.items()}
        if (self.path / WEIGHTS).exists():
            file = SafetensorsFile(self.path / WEIGHTS)
            return dict.fromkeys(file.shapes, file)
        alternatives = sorted(x.name for x in self.path.glob("*.bin")) or ["no weights"]
        raise InputError(
            f"{self.path} must contain {WEIGHTS} or {INDEX}, found {alternatives[0]}. Save the model "
            "again in the safetensors format."
        )


def _is_name(text):
    return isinstance(text, str) and text == pathlib.Path(text).name


MODULES = "modules.json"
_POOLING = "1_Pooling"
_NORMALIZE = "2_Normalize"
_TYPES = "sentence_transformers.models."
_MODES = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def read_pooling_head(folder: pathlib.Path, dtype: object) -> PoolingHead | None:
    """Return the pooling head that a folder's modules describe, not built.

    Args:
        folder: Path of the folder.
        dtype: Data type or policy of the head.

    Returns:
        A `PoolingHead`, or `None` if the folder has no `modules.json`.

    Raises:
        InputError: If a module or pooling mode is not supported.
    """
    if not (folder / MODULES).exists():
        return None
    modules = read_json(folder / MODULES)
    try:
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        places = {kind: "" + module["path"] for kind, module in zip(kinds, modules)}
    except (AttributeError, KeyError, TypeError):
        raise InputError(
            f"{folder / MODULES} must contain a list of modules with `type` and `path`."
        ) from None
    expected = ["Transformer", "Pooling", "Normalize"]
    if kinds not in (expected, expected[:2]) or places["Transformer"]:
        raise InputError(
            f"{folder / MODULES}: The modules must be the Transformer in the folder itself, Pooling "
            f"and optionally Normalize, got {', '.join(kinds)}."
        )
    path = folder / places["Pooling"] / "config.json"
    fields = read_object(path).items()
    enabled = [name for name, value in fields if name.startswith("pooling_mode") and value]
    modes = [_MODES.get(name) for name in enabled]
    if len(modes) != 1 or modes[0] is None:
        raise InputError(
            f"{path}: One pooling mode of {', '.join(_MODES)} must be true, got "
            f"{', '.join(enabled) or 'none'}."
        )
    return PoolingHead(modes[0], normalize="Normalize" in kinds, dtype=dtype)


def write_modules(folder: pathlib.Path, head: PoolingHead, hidden_size: int) -> None:
    """Write the module files that make an encoder's folder loadable by sentence-transformers.

    Args:
        folder: Path of the folder.
        head: `PoolingHead` of the network.
        hidden_size: Integer. Size of the vectors.
    """
    pooling = {name: mode == head.pooling for name, mode in _MODES.items()}
    listed = [("", "Transformer"), (_POOLING, "Pooling")]
    if head.normalize:
        listed.append((_NORMALIZE, "Normalize"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": _TYPES + kind}
        for index, (path, kind) in enumerate(listed)
    ]
    (folder / _POOLING).mkdir()
    files = {
        MODULES: modules,
        f"{_POOLING}/config.json": {"word_embedding_dimension": hidden_size, **pooling},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
