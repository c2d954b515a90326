"""`dtransformer checkpoint inspect | verify | export`."""

import argparse
import dataclasses
import json
import time

import dtransformer.models  # noqa: F401 (Keras finds by their names what is imported)
from dtransformer.errors import InputError, to_one_line
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.tables import columns
from dtransformer.trainers.checkpoint import Checkpoint, export, folders


def export_weights(arguments: argparse.Namespace) -> None:
    """Write the weights of a checkpoint to one file. Errors are the same as in `export`."""
    num_tensors = export(arguments.path, arguments.out, overwrite=arguments.overwrite)
    print(f"{arguments.out}: {num_tensors} tensors")


def inspect(arguments: argparse.Namespace) -> None:
    """Print the step, layout and tensors of a checkpoint, or its manifest as JSON.

    If the path is a folder of checkpoints, print its newest checkpoint.

    Raises:
        InputError: If there is no checkpoint, or its manifest is damaged.
    """
    checkpoint = Checkpoint(folders.list_checkpoints(arguments.path)[0])
    manifest = checkpoint.manifest
    if arguments.json:
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
    ranks = "1 rank" if manifest["ranks"] == 1 else f"{manifest['ranks']} ranks"
    print(
        to_one_line(f"Saved by {ranks}: {', '.join(parallel) or 'default parallel config'}", None)
    )
    print(f"Seed {manifest['seed']}; metrics: {manifest['metrics'] or 'none'}")
    print(f"{len(sizes)} files, {sum(sizes) / 2**20:,.1f} MiB")
    print("\n".join(columns(rows)))


def verify(arguments: argparse.Namespace) -> None:
    """Compare all files of one or several checkpoints with their checksums, and print the problems.

    Raises:
        InputError: If there is no checkpoint, or one is damaged.
    """
    damaged = 0
    for folder in folders.list_checkpoints(arguments.path):
        try:
            checkpoint = Checkpoint(folder)
            problems = list(checkpoint.problems().values())
            if folders.parse_step(folder) not in (-1, checkpoint.step):
                problems.append(f"its name does not match its step {checkpoint.step}; rename it")
        except (InputError, OSError) as error:
            problems = [str(error)]
        print(
            f"{folder}: {'; '.join(problems) or f'{len(checkpoint.file_names())} files are intact'}"
        )
        damaged += bool(problems)
    if damaged:
        raise InputError(
            f"`{arguments.path}`: {damaged} damaged. Restoring uses the newest intact checkpoint, and "
            "replaces damaged files that have a replica."
        )
