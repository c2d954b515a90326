"""Special ids of a published tokenizer, by the files that lie beside it."""

import pathlib
from collections.abc import Callable

from dtransformer.errors import InputError, shown
from dtransformer.inputs.json_file import read_object

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
FILES = CONFIG, "special_tokens_map.json", GENERATION  # that a tokenizer may have beside it
_NAMES = {"pad": "pad", "unk": "unk", "start": "bos", "end": "eos"}
_NAMES |= {name: name for name in ("cls", "sep", "mask")}


def special_tokens(
    folder: pathlib.Path, id_of: Callable[[str], int | None], usual: dict[str, str]
) -> tuple[dict, dict]:
    """Return the special ids of a published tokenizer, as a folder says; its files may lack.

    `tokenizer_config.json` and `special_tokens_map.json` name the tokens, and
    `generation_config.json` the ids that end texts.

    Args:
        folder: the folder.
        id_of: a function of a token that returns its id, or None.
        usual: dict of the tokens where no file names them, by `"pad"`, `"unk"`, `"start"` and
            `"end"`.

    Returns:
        The attributes of `PublishedTokenizer` that are ids; and the fields of
        `tokenizer_config.json`.

    Raises:
        InputError: a file is damaged, or names a token that the tokenizer lacks.
    """
    config, others, generation = (optional_fields(folder / name) for name in FILES)
    ids = {}
    for ours, theirs in _NAMES.items():
        token = config.get(f"{theirs}_token") or others.get(f"{theirs}_token")
        if isinstance(token, dict):
            token = token.get("content")
        named = token or usual.get(ours, "")
        ids[ours] = id_of(named) if isinstance(named, str) else None
        if token and ids[ours] is None:
            raise InputError(
                f"{folder / CONFIG}: {theirs}_token is {shown(token)}, which the tokenizer "
                "lacks: are the files of one model?"
            )
    stop_ids = generation.get("eos_token_id")
    stop_ids = stop_ids if isinstance(stop_ids, list) else [stop_ids]
    stop_ids = [one for one in stop_ids if one is not None]
    if any(type(one) is not int or one < 0 for one in stop_ids):
        raise InputError(f"{folder / GENERATION}: eos_token_id must be an id, or a list of ids")
    if not stop_ids and ids["end"] is not None:
        stop_ids = [ids["end"]]
    named = {f"{name}_id": one for name, one in ids.items()}
    return {**named, "stop_ids": tuple(stop_ids)}, config


def optional_fields(path: pathlib.Path) -> dict:
    """Return the fields of a file of JSON; none where there is no file.

    Raises:
        InputError: it is damaged, or has no fields.
    """
    return read_object(path) if path.exists() else {}
