"""`run.json`: checksums of the files and records of a run, written once when the run begins.

    {"run": {"version": 1, "id": "9f86d081…",
             "files": {"config.yaml": SHA-256, "tokenizer/tokenizer.json": SHA-256, …},
             "data": {"train": SHA-256 of the records, "dev": …}},
     "sha256": SHA-256 of the value of "run"}

A file of weights ends with the SHA-256 of this file (see `checkpoint.export`), and every checkpoint
contains a copy of it. This detects changed files and files from other runs.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import secrets
from collections.abc import Iterable
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from dtransformer.errors import InputError
from dtransformer.inputs.files import MEBIBYTE, read_bytes
from dtransformer.inputs.json_file import STRICT, parse_json, typed
from dtransformer.inputs.manifest import Sha256
from dtransformer.trainers.checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.export import RUN, check_seal, hash_file
from dtransformer.trainers.checkpoint.folders import saved_steps

# Names of the files and folders in a run folder.
CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
WEIGHTS = "model.weights.h5"
METRICS = "metrics.jsonl"
ADAPTERS = "adapters"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
PLAN = "plan.txt"
CSV = "metrics.csv"
LOSS_PLOT = "loss.svg"
PROFILE = "profile"
LOGS = "logs"
ENVIRONMENT = "env.json"
SHARDS = "shards"
PARTS = frozenset(
    {RUN, CONFIG, TOKENIZER, WEIGHTS, ADAPTERS, METRICS, CHECKPOINTS, TENSORBOARD, PLAN, SHARDS}
    | {CSV, LOSS_PLOT, PROFILE, LOGS, ENVIRONMENT, "wandb"}
)

_VERSION = 1
_MAX_BYTES = MEBIBYTE
_File = Annotated[str, Field(pattern=rf"^({re.escape(CONFIG)}|{TOKENIZER}/([a-z_]+/)?[\w.-]+)$")]


class _Body(pydantic.BaseModel):
    """Value of "run" in `run.json`."""

    model_config = STRICT
    version: Literal[_VERSION]
    files: dict[_File, Sha256]
    data: dict[Literal["train", "dev"], Sha256 | None]


class _Document(pydantic.BaseModel):
    """Content of `run.json`."""

    model_config = STRICT
    run: _Body
    sha256: Sha256


def is_run(folder: str | os.PathLike) -> bool:
    """Return whether a folder is a run folder: it contains `run.json`."""
    return os.path.isfile(os.path.join(folder, RUN))


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """Identity of a run: the checksums in its `run.json`.

    Args:
        text: Text of the file.
        files: Dict from file names, relative to the run folder, to their SHA-256.
        data: Dict with the SHA-256 of the "train" and "dev" records. `None` if a part has no records.
    """

    text: str
    files: dict[str, str]
    data: dict[str, str | None]

    @classmethod
    def new(cls, folder: pathlib.Path, data: dict[str, str | None]) -> "RunIdentity":
        """Create the identity of a new run.

        Args:
            folder: Folder with the run's config and tokenizer.
            data: Dict with the SHA-256 of the "train" and "dev" records, or `None` for no records.
        """
        tokenizer = sorted(x for x in (folder / TOKENIZER).rglob("*") if x.is_file())
        paths = [folder / CONFIG, *tokenizer]
        files = {path.relative_to(folder).as_posix(): hash_file(path) for path in paths}
        body = {"version": _VERSION, "id": secrets.token_hex(16), "files": files, "data": data}
        text = json.dumps({"run": body, "sha256": _digest(body)}, indent=1) + "\n"
        return cls(text, files, data)

    @classmethod
    def load(cls, folder: pathlib.Path) -> "RunIdentity":
        """Read the identity of a run folder.

        Raises:
            InputError: If `run.json` is missing or damaged.
        """
        path = folder / RUN
        if not path.is_file():
            raise InputError(
                f"`{folder}` has no {RUN}. It is not a run folder, or an older dtransformer wrote it. "
                "Choose another run, or train it again."
            )
        try:
            data = read_bytes(path, _MAX_BYTES)
            document = typed(parse_json(data, path, _MAX_BYTES), _Document, path)
            if document["sha256"] != _digest(document["run"]):
                raise InputError(f"{path} is damaged: its checksum does not match")
        except InputError as error:
            raise InputError(
                f"{str(error).rstrip('.')}. Restore the file from a checkpoint of the run."
            ) from None
        return cls(data.decode(), document["run"]["files"], document["run"]["data"])

    @property
    def key(self) -> str:
        """The SHA-256 of `run.json`. Every file of the run's weights ends with it."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def save(self, path: str | os.PathLike) -> None:
        """Write `run.json` to the file `path`."""
        pathlib.Path(path).write_text(self.text, encoding="utf-8", newline="")

    def check(self, folder: pathlib.Path) -> None:
        """Compare the config, the tokenizer and the weights in a run folder with the checksums.

        Raises:
            InputError: If a file is missing, damaged, or belongs to another run.
        """
        for name, digest in self.files.items():
            path = folder / name
            if not path.is_file():
                raise InputError(f"`{path}` is missing. Restore the file of this run.")
            if hash_file(path) != digest:
                raise InputError(
                    f"`{path}` has changed since the run began: it was edited, is damaged, or belongs "
                    "to another run. Restore the file from a checkpoint of the run."
                )
        if os.path.lexists(folder / WEIGHTS):
            check_seal(folder / WEIGHTS, self.key)

    def check_checkpoints(self, folder: pathlib.Path) -> None:
        """Check that all checkpoints in a run folder belong to this run.

        Damaged checkpoints are skipped. Loading reports them.

        Raises:
            InputError: If a checkpoint belongs to another run. The message names the first one.
        """
        for _, path in saved_steps(folder / CHECKPOINTS):
            try:
                checkpoint = Checkpoint(path)
                if RUN in checkpoint.manifest["files"] and checkpoint.problem_with(RUN):
                    continue
            except (InputError, OSError):
                continue
            copy = checkpoint.path / RUN
            if not copy.is_file() or hash_file(copy) != self.key:
                raise InputError(
                    f"`{path}` is a checkpoint of another run than the {RUN} in {folder}. Move it to "
                    "another folder."
                )


def hash_records(records: Iterable) -> str:
    """Return the SHA-256 of the records as JSON. It does not depend on the format of their files."""
    digest = hashlib.sha256()
    for record in records:
        text = json.dumps(record, sort_keys=True, ensure_ascii=False, default=str)
        digest.update(text.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()


def _digest(body):
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
