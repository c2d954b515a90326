"""Restoring: each rank reads the shards that it needs, whatever layout has written them."""

import dataclasses
import os
from collections.abc import Callable

import tensorflow as tf

from dtransformer.errors import InputError, one_line
from dtransformer.parallel.collectives.objects import all_gather_json, from_chief, together
from dtransformer.parallel.runtime import job
from dtransformer.trainers.checkpoint.folders import checkpoints_of
from dtransformer.trainers.checkpoint.manifest import MANIFEST
from dtransformer.trainers.checkpoint.saved_checkpoint import REPLICAS, Checkpoint
from dtransformer.trainers.checkpoint.training_state import (
    METRICS,
    NETWORK,
    OPTIMIZER,
    TrainingState,
    differences,
    misfit,
)


@dataclasses.dataclass(frozen=True)
class Restored:
    """What was restored.

    Args:
        checkpoint: the `Checkpoint`.
        missing: names of the trainer's tensors that the checkpoint lacks.
        unexpected: names of the checkpoint's tensors that the trainer lacks.
        other_shapes: names of the tensors that were left as they are because their shapes
            differ, with the trainer's shape and the checkpoint's.
        damaged: paths of newer checkpoints that are damaged.
    """

    checkpoint: Checkpoint
    missing: list[str]
    unexpected: list[str]
    other_shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    damaged: list[str]

    @property
    def path(self) -> str:
        """The checkpoint's folder."""
        return str(self.checkpoint.path)

    @property
    def step(self) -> int:
        """The number of steps that the optimizer had done when it was saved."""
        return self.checkpoint.step

    @property
    def position(self) -> dict[str, int] | None:
        """The `epoch` and `batch` that come next; None where they are not known."""
        return self.checkpoint.manifest.get("position")


def restore(
    state: TrainingState,
    path: str | os.PathLike,
    strict: bool = True,
    weights_only: bool = False,
    check: Callable[[Restored], None] | None = None,
) -> Restored:
    """Set the state of a run, and the seed, from a checkpoint; all ranks have to call.

    Nothing is changed before the checkpoint was found to be intact, and to fit.

    Args:
        state: what is restored.
        path: a checkpoint's folder; or a folder of checkpoints, of which the newest intact one is
            taken.
        strict: whether a tensor that only one of them has, or of another shape, is an error.
        weights_only: whether only the network's weights are restored.
        check: a function of the `Restored` that is called before anything is changed.

    Returns:
        What was restored.

    Raises:
        InputError: there is no checkpoint, all are damaged (names every file), or the state
            does not fit (names the tensors); on every rank.
    """
    checkpoint, damaged = _newest_intact(path)
    prefixes = (NETWORK,) if weights_only else (NETWORK, OPTIMIZER)
    tensors = together(state.tensors, "checkpoint/state")
    tensors = [tensor for tensor in tensors if tensor.name.startswith(prefixes)]
    compared = differences(tensors, checkpoint.shapes_of(*prefixes))
    restored = Restored(checkpoint, *compared, damaged)
    if strict and (what := misfit(*compared)):
        raise InputError(
            f"{restored.path} does not fit this network and optimizer: {what}. Restore it with those "
            "that it was saved with, or restore what fits with strict=False"
        )
    if check is not None:
        check(restored)
    left_out = {*restored.missing, *restored.other_shapes}

    def assign():
        try:
            for tensor in tensors:
                if tensor.name not in left_out:
                    tensor.assign(checkpoint.read_local(tensor))
        except (tf.errors.OpError, OSError, MemoryError) as error:
            raise InputError(
                f"{checkpoint.path}: cannot be read ({one_line(str(error), 160)}); some tensors "
                "are replaced already: restore another checkpoint before you train on"
            ) from error

    together(assign, "checkpoint/restored")
    if not weights_only and job.seed() != checkpoint.manifest["seed"]:
        job.set_seed(checkpoint.manifest["seed"])
    return restored


def restore_metrics(state: TrainingState, restored: Restored) -> None:
    """Set the sums since the epoch began, of those metrics that are built."""
    shapes = restored.checkpoint.shapes_of(METRICS)
    for tensor in state.metric_tensors():
        if shapes.get(tensor.name) == tensor.shape:
            tensor.assign(restored.checkpoint.read_local(tensor))


def _newest_intact(path):
    """Return the first checkpoint of a path that is intact, and the paths of those before it.

    Ranks share the work to read all files. A damaged file that has an intact replica is replaced.
    """
    candidates = from_chief(
        lambda: [str(folder) for folder in checkpoints_of(path)], "checkpoint/candidates"
    )
    message = []
    for number, candidate in enumerate(candidates):
        checkpoint, problems = _verified(candidate)
        if not problems:
            if message:
                lines = "\n  ".join(message)
                job.print_once(f"Damaged, and skipped:\n  {lines}\nTaken instead: {candidate}")
            return checkpoint, candidates[:number]
        message += problems
    raise InputError(f"{path}: no checkpoint is intact: {'; '.join(message)}")


def _verified(path):
    """Return a `Checkpoint` and a list of what is wrong with it, found by all ranks together."""
    checkpoint, problems = None, {}
    try:
        checkpoint = Checkpoint(path)
        own_files = checkpoint.file_names()[job.rank() :: job.size()]
        problems = checkpoint.problems(own_files)
    except (InputError, OSError) as error:
        problems = {MANIFEST: str(error)}
    problems = {
        name: problem
        for theirs in all_gather_json(problems, "checkpoint/verified")
        for name, problem in theirs.items()
        if not name.startswith(REPLICAS)
    }

    def repair():
        repaired = [name for name in problems if checkpoint is not None and checkpoint.repair(name)]
        for name in repaired:
            print(f"{problems[name]}; replaced by its replica", flush=True)
        return repaired

    repaired = from_chief(repair, "checkpoint/repaired")
    return checkpoint, [text for name, text in problems.items() if name not in repaired]
