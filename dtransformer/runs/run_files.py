"""Check the files of a run folder."""

import os
import pathlib

from dtransformer.errors import InputError
from dtransformer.runs.config import RunConfig, load_config
from dtransformer.runs.folder import replaced_run
from dtransformer.runs.identity import ADAPTERS, CONFIG, TOKENIZER, WEIGHTS, RunIdentity, is_run


def check_run(folder: pathlib.Path) -> RunConfig:
    """Compare the files of a run folder with their checksums, and return the run's config.

    Raises:
        InputError: If a file is missing, damaged, or belongs to another run.
    """
    if not os.path.isdir(folder):
        raise InputError(
            f"The run folder `{folder}` does not exist. Create it with `dtransformer train`."
        )
    if not (is_run(folder) or any((folder / x).exists() for x in (CONFIG, WEIGHTS, TOKENIZER))):
        raise InputError(_other_run(folder))
    for name in (CONFIG, TOKENIZER, WEIGHTS):
        exists = (folder / name).exists() or (name == WEIGHTS and (folder / ADAPTERS).exists())
        if not exists:
            replaced = replaced_run(folder)
            hint = f" The replaced run is in `{replaced}`." if replaced.is_dir() else ""
            raise InputError(
                f"The run folder `{folder}` has no {name}, because its training ended too early. "
                f"Train again, or choose another run.{hint}"
            )
    RunIdentity.load(folder).check(folder)
    return load_config(folder / CONFIG)


def _other_run(folder):
    """Return the error message for a folder that `dtransformer train` did not write."""
    message = f"`{folder}` is not a run of `dtransformer train`."
    for inner in (folder, folder / "model"):
        if (inner / "config.json").is_file():
            hint = "Pass it as --model to dtransformer generate, predict or embed."
            return f"{message} `{inner}` contains a published model. {hint}"
    old = replaced_run(folder)
    if old.is_dir():
        return f"{message} The replaced run is in `{old}`."
    names = ", ".join(sorted(x.name for x in folder.iterdir())[:3]) or "nothing"
    return f"{message} It contains {names}."
