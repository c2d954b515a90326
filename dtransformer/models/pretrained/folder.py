"""A folder of published weights: its config, and the files that hold its tensors.

One of sentence-transformers has `modules.json`, a list of modules: the Transformer, in the folder
itself, its pooling, and, where vectors have length 1, `Normalize`. Reference: Reimers and Gurevych,
2019, "Sentence-BERT", arXiv 1908.10084.
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

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"


class PretrainedFolder:
    """A folder with `config.json`, and `model.safetensors` or an index of several such files.

    Args:
        path: the folder.

    Attributes:
        path: a `pathlib.Path`.
        config: dict of the config's fields.
        shapes: dict of the tensors' names and shapes.

    Raises:
        InputError: there is no such folder, or what is in it is damaged.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        if not self.path.is_dir():
            raise InputError(f"{path}: there is no such folder: download the model first")
        self.config = read_object(self.path / CONFIG)
        self._files = self._open()
        shapes = {name: file.shapes[name] for name, file in self._files.items()}
        self._quantized = quantized_tensors(self.config, shapes, self._stored)
        parts = {part for tensor in self._quantized.values() for part in tensor.parts}
        self.shapes = {name: shape for name, shape in shapes.items() if name not in parts}
        self.shapes |= {name: tensor.shape for name, tensor in self._quantized.items()}

    def __getitem__(self, name: str) -> np.ndarray | QuantizedTensor:
        """Return a tensor, whose slices are read where they are used."""
        return self._quantized[name] if name in self._quantized else self._stored(name)

    def _stored(self, name):
        return self._files[name][name]

    def _open(self):
        """Return a dict of the tensors' names and the files that hold them."""
        if (self.path / INDEX).exists():
            places = read_object(self.path / INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(_is_name(x) for x in places.values()):
                raise InputError(f"{self.path / INDEX}: expected a weight_map of names of files")
            files = {name: SafetensorsFile(self.path / name) for name in set(places.values())}
            lacking = [name for name, place in places.items() if name not in files[place].shapes]
            if lacking:
                raise InputError(
                    f"{self.path / places[lacking[0]]}: lacks {lacking[0]} ({len(lacking)} missing "
                    f"tensors), which {INDEX} lists: download it again"
                )
            return {name: files[place] for name, place in places.items()}
        if (self.path / WEIGHTS).exists():
            file = SafetensorsFile(self.path / WEIGHTS)
            return dict.fromkeys(file.shapes, file)
        others = sorted(x.name for x in self.path.glob("*.bin")) or ["no weights"]
        raise InputError(
            f"{self.path}: expected {WEIGHTS} or {INDEX}, found {others[0]}: other formats are not "
            "read; save the model again as safetensors"
        )


def _is_name(text):
    return isinstance(text, str) and text == pathlib.Path(text).name


MODULES = "modules.json"
_POOLING, _NORMALIZE = "1_Pooling", "2_Normalize"
_TYPES = "sentence_transformers.models."
_MODES = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def pooling_of(folder: pathlib.Path, dtype: object) -> PoolingHead | None:
    """Return the head that the modules of a folder are, not built; None where it lists none.

    Args:
        folder: the folder.
        dtype: the head's type, as of layers.

    Raises:
        InputError: a module, or a way of pooling, is none that is built.
    """
    if not (folder / MODULES).exists():
        return None
    modules = read_json(folder / MODULES)
    try:
        kinds = [module["type"].rpartition(".")[2] for module in modules]
        places = {kind: "" + module["path"] for kind, module in zip(kinds, modules)}
    except (AttributeError, KeyError, TypeError):
        raise InputError(f"{folder / MODULES}: expected a list of modules: type, path") from None
    usual = ["Transformer", "Pooling", "Normalize"]
    if kinds not in (usual, usual[:2]) or places["Transformer"]:
        raise InputError(
            f"{folder / MODULES}: the modules are {', '.join(kinds)}, expected the Transformer in the "
            "folder itself, Pooling, and perhaps Normalize"
        )
    path = folder / places["Pooling"] / "config.json"
    found = read_object(path).items()
    asked = [name for name, value in found if name.startswith("pooling_mode") and value]
    modes = [_MODES.get(name) for name in asked]
    if len(modes) != 1 or modes[0] is None:
        raise InputError(
            f"{path}: pools by {', '.join(asked) or 'nothing'}, expected one of {', '.join(_MODES)}"
        )
    return PoolingHead(modes[0], normalize="Normalize" in kinds, dtype=dtype)


def write_modules(folder: pathlib.Path, head: PoolingHead, hidden_size: int) -> None:
    """Write what makes a folder of an encoder one of sentence-transformers."""
    pooling = {name: mode == head.pooling for name, mode in _MODES.items()}
    listed = [("", "Transformer"), (_POOLING, "Pooling")]
    listed += [(_NORMALIZE, "Normalize")] * head.normalize
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": _TYPES + kind}
        for number, (path, kind) in enumerate(listed)
    ]
    (folder / _POOLING).mkdir()
    found = {
        MODULES: modules,
        f"{_POOLING}/config.json": {"word_embedding_dimension": hidden_size, **pooling},
    }
    for name, content in found.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
