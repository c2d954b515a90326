"""Folders of sentence-transformers: an encoder whose vectors are pooled, and perhaps normalized.

`modules.json` lists the modules: the Transformer, in the folder itself, its pooling, and, where vectors
have length 1, `Normalize`. Reference: Reimers and Gurevych, 2019, "Sentence-BERT", arXiv 1908.10084.
"""

import json
import pathlib

from dtransformer.errors import InputError
from dtransformer.inputs.json_file import read_json
from dtransformer.layers.heads import PoolingHead

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
    fields = read_json(path)
    found = fields.items() if isinstance(fields, dict) else ()
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
