"""`dtransformer checkpoint inspect | verify | export`."""

import argparse
import dataclasses
import json
import os
import time

import dtransformer.models  # noqa: F401 (Keras finds by their names what is imported)
from dtransformer.errors import InputError, one_line
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.tables import columns
from dtransformer.trainers.checkpoint import Checkpoint, export, folders


def checkpoint(arguments: argparse.Namespace) -> None:
    """Inspect, verify or export, as the arguments say; errors as of these."""
    if arguments.action == "inspect":
        inspect(arguments.path, arguments.json)
    elif arguments.action == "verify":
        verify(arguments.path)
    else:
        number = export(arguments.path, arguments.out, overwrite=arguments.overwrite)
        print(f"{arguments.out}: {number} tensors")


def inspect(path: str | os.PathLike, as_json: bool = False) -> None:
    """Print what a checkpoint holds.

    Args:
        path: a checkpoint's folder; or a folder of checkpoints, of which the newest is taken.
        as_json: whether to print its manifest as JSON.

    Raises:
        InputError: there is no checkpoint, or its manifest is damaged.
    """
    checkpoint = Checkpoint(folders.checkpoints_of(path)[0])
    manifest = checkpoint.manifest
    if as_json:
        print(json.dumps({"path": str(checkpoint.path), **manifest}, indent=1))
        return
    position = manifest["position"]
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["saved_at"]))
    default = json.loads(json.dumps(dataclasses.asdict(TransformerOpParallelConfig())))
    parallel = [
        f"{name}={value}"
        for name, value in manifest["parallel"].items()
        if value not in (default.get(name), 1)
    ]
    sizes = [file["bytes"] for file in manifest["files"].values()]
    rows = [("tensor", "shape", "type")]
    rows += [
        (name, "×".join(map(str, shape)) or "scalar", dtype)
        for name, (shape, dtype) in sorted(manifest["tensors"].items())
    ]
    print(f"{checkpoint.path}: step {checkpoint.step}, saved {saved_at}")
    if position is not None:
        print(f"Next: epoch {position['epoch'] + 1}, batch {position['batch'] + 1}")
    ranks = f"{manifest['ranks']} rank{'s' * (manifest['ranks'] > 1)}"
    print(one_line(f"Saved by {ranks}: {', '.join(parallel) or 'default parallel config'}", None))
    print(f"Seed {manifest['seed']}; metrics: {manifest['metrics'] or 'none'}")
    print(f"{len(sizes)} files, {sum(sizes) / 2**20:,.1f} MiB")
    print("\n".join(columns(rows)))


def verify(path: str | os.PathLike) -> None:
    """Compare all files of the checkpoints of a path with their checksums; print what is wrong.

    Args:
        path: a checkpoint's folder, or a folder of checkpoints.

    Raises:
        InputError: there is no checkpoint, or one is damaged.
    """
    damaged = 0
    for folder in folders.checkpoints_of(path):
        try:
            checkpoint = Checkpoint(folder)
            problems = list(checkpoint.problems().values())
            if folders.step_of(folder) not in (-1, checkpoint.step):
                problems.append(f"it is of step {checkpoint.step}: give it that name again")
        except (InputError, OSError) as error:
            problems = [str(error)]
        print(
            f"{folder}: {'; '.join(problems) or f'{len(checkpoint.file_names())} files are intact'}"
        )
        damaged += bool(problems)
    if damaged:
        raise InputError(
            f"{path}: {damaged} damaged; restoring takes the newest intact one, and replaces files "
            "that have a replica"
        )
