"""`run.json`: what belongs to a run, as checksums. It is written once, when the run begins.

    {"run": {"version": 1, "id": "9f86d081…",
             "files": {"config.yaml": SHA-256, "tokenizer/tokenizer.json": SHA-256, …},
             "data": {"train": SHA-256 of the records, "dev": …}},
     "sha256": SHA-256 of what is under "run"}

Weights end with the SHA-256 of this file, see `checkpoint.export`, and checkpoints have a copy of it:
what comes from another run, or was changed, does not pass for the run's own.
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
from dtransformer.trainers.checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.export import RUN, check_seal, sha256_of
from dtransformer.trainers.checkpoint.folders import saved_steps

# What a run folder holds.
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
SHARDS = "shards"
PARTS = frozenset(
    {RUN, CONFIG, TOKENIZER, WEIGHTS, ADAPTERS, METRICS, CHECKPOINTS, TENSORBOARD, PLAN, SHARDS}
    | {CSV, LOSS_PLOT, PROFILE, "wandb"}
)

_VERSION = 1
_MAX_BYTES = MEBIBYTE
_File = Annotated[str, Field(pattern=rf"^({re.escape(CONFIG)}|{TOKENIZER}/([a-z_]+/)?[\w.-]+)$")]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Body(pydantic.BaseModel):
    """What belongs to a run."""

    model_config = STRICT
    version: Literal[_VERSION]
    files: dict[_File, _Digest]
    data: dict[Literal["train", "dev"], _Digest | None]


class _Document(pydantic.BaseModel):
    """What `run.json` holds."""

    model_config = STRICT
    run: _Body
    sha256: _Digest


def is_run(folder: str | os.PathLike) -> bool:
    """Return whether a folder is a run's."""
    return os.path.isfile(os.path.join(folder, RUN))


@dataclasses.dataclass(frozen=True)
class RunIdentity:
    """What `run.json` says.

    Args:
        text: the file's content.
        files: names of files, and the SHA-256 of each.
        data: the SHA-256 of the records "train" and "dev"; None where there are none.
    """

    text: str
    files: dict[str, str]
    data: dict[str, str | None]

    @classmethod
    def new(cls, folder: pathlib.Path, data: dict[str, str | None]) -> "RunIdentity":
        """Return that of a run that begins with the config and the tokenizer in a folder."""
        tokenizer = sorted(x for x in (folder / TOKENIZER).rglob("*") if x.is_file())
        paths = [folder / CONFIG, *tokenizer]
        files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}
        body = {"version": _VERSION, "id": secrets.token_hex(16), "files": files, "data": data}
        text = json.dumps({"run": body, "sha256": _digest_of(body)}, indent=1) + "\n"
        return cls(text, files, data)

    @classmethod
    def load(cls, folder: pathlib.Path) -> "RunIdentity":
        """Read that of a run folder.

        Raises:
            InputError: the folder has none, or it is damaged.
        """
        path = folder / RUN
        if not path.is_file():
            raise InputError(
                f"{folder}: has no {RUN}, as it is no run folder or is of an older dtransformer: give "
                "another run, or train it anew"
            )
        try:
            data = read_bytes(path, _MAX_BYTES)
            document = typed(parse_json(data, path, _MAX_BYTES), _Document, path)
            if document["sha256"] != _digest_of(document["run"]):
                raise InputError(f"{path} is damaged: its checksum is another")
        except InputError as error:
            raise InputError(
                f"{error}; put the run's own back, such as the copy in its checkpoints"
            ) from None
        return cls(data.decode(), document["run"]["files"], document["run"]["data"])

    @property
    def key(self) -> str:
        """What the run's weights end with: the SHA-256 of `run.json`."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def save(self, path: str | os.PathLike) -> None:
        """Write `run.json` to a path."""
        pathlib.Path(path).write_text(self.text, encoding="utf-8", newline="")

    def check(self, folder: pathlib.Path) -> None:
        """Compare the files, the weights and the checkpoints of a run folder with this.

        Raises:
            InputError: one is missing, damaged, or of another run.
        """
        for name, digest in self.files.items():
            path = folder / name
            if not path.is_file():
                raise InputError(f"{path}: is missing: put the run's own there")
            if sha256_of(path) != digest:
                raise InputError(
                    f"{path}: is not what the run began with: it was changed, is damaged, or is of "
                    "another run; put the run's own back, such as the copy in its checkpoints"
                )
        if os.path.lexists(folder / WEIGHTS):
            check_seal(folder / WEIGHTS, self.key)

    def check_checkpoints(self, folder: pathlib.Path) -> None:
        """Refuse checkpoints of other runs in a run folder; damaged ones are told elsewhere.

        Raises:
            InputError: names the first.
        """
        for _, path in saved_steps(folder / CHECKPOINTS):
            try:
                checkpoint = Checkpoint(path)
                if RUN in checkpoint.manifest["files"] and checkpoint.problem_with(RUN):
                    continue
            except (InputError, OSError):
                continue
            own = checkpoint.path / RUN
            if not own.is_file() or sha256_of(own) != self.key:
                raise InputError(
                    f"{path}: is a checkpoint of another run than the {RUN} of {folder}: move it away"
                )


def digest_of_records(records: Iterable) -> str:
    """Return the SHA-256 of records, of what JSON has, whatever files they came from."""
    digest = hashlib.sha256()
    for record in records:
        text = json.dumps(record, sort_keys=True, ensure_ascii=False, default=str)
        digest.update(text.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()


def _digest_of(body):
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
