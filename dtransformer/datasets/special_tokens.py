"""Special token ids of a published tokenizer, read from the files in its folder."""

import pathlib
from collections.abc import Callable

from dtransformer.errors import InputError, short_repr
from dtransformer.inputs.json_file import read_object

CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
_MODEL = "config.json"
FILES = CONFIG, "special_tokens_map.json", GENERATION  # Optional files of a tokenizer.
_NAMES = {"pad": "pad", "unk": "unk", "start": "bos", "end": "eos"}
_NAMES |= {name: name for name in ("cls", "sep", "mask")}


def special_tokens(
    folder: pathlib.Path, token_to_id: Callable[[str], int | None], default_tokens: dict[str, str]
) -> tuple[dict, dict]:
    """Return the special ids of a published tokenizer, from the files in its folder.

    `tokenizer_config.json` and `special_tokens_map.json` name the tokens. A text ends at the
    tokenizer's end token and at each `eos_token_id` of `generation_config.json` and `config.json`.

    Args:
        folder: Folder. All of these files are optional.
        token_to_id: Function of a token that returns its id or `None`.
        default_tokens: Dict of default tokens, by `"pad"`, `"unk"`, `"start"` and `"end"`.

    Returns:
        A `(ids, config)` tuple: the id attributes of `PublishedTokenizer`, and the fields of
        `tokenizer_config.json`.

    Raises:
        InputError: If a file is damaged or names a token that the tokenizer lacks.
    """
    config, token_map, _ = (optional_fields(folder / name) for name in FILES)
    ids = {}
    for attribute, hf_name in _NAMES.items():
        token = config.get(f"{hf_name}_token") or token_map.get(f"{hf_name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        named = token or default_tokens.get(attribute, "")
        ids[attribute] = token_to_id(named) if isinstance(named, str) else None
        if token and ids[attribute] is None:
            raise InputError(
                f"{folder / CONFIG}: `{hf_name}_token` is {short_repr(token)}, which the tokenizer "
                "lacks. Use the files of a single model."
            )
    ends = [*_end_ids_in(folder / GENERATION), *_end_ids_in(folder / _MODEL), ids["end"]]
    named = {f"{name}_id": token_id for name, token_id in ids.items()}
    return {**named, "stop_ids": tuple(dict.fromkeys(x for x in ends if x is not None))}, config


def _end_ids_in(path):
    """Return the ids of `eos_token_id` in a file, which is an id or a list of ids."""
    value = optional_fields(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    ids = [token_id for token_id in ids if token_id is not None]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise InputError(
            f"{path}: `eos_token_id` must be an id or a list of ids, got {short_repr(value)}."
        )
    return ids


def optional_fields(path: pathlib.Path) -> dict:
    """Return the fields of a JSON file. A missing file has no fields.

    Raises:
        InputError: If the file is damaged or contains no object.
    """
    return read_object(path) if path.exists() else {}
