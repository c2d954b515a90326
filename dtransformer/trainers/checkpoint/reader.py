"""Restoring of checkpoints: each rank reads only the shards that it needs, from any layout."""

import dataclasses
import os
from collections.abc import Callable

import tensorflow as tf

from dtransformer.errors import InputError, to_one_line
from dtransformer.parallel.collectives.objects import all_gather_json, call_on_all, from_chief
from dtransformer.parallel.runtime import job
from dtransformer.trainers.checkpoint.folders import list_checkpoints
from dtransformer.trainers.checkpoint.manifest import MANIFEST
from dtransformer.trainers.checkpoint.saved_checkpoint import REPLICAS, Checkpoint
from dtransformer.trainers.checkpoint.training_state import (
    GUARD,
    METRICS,
    NETWORK,
    OPTIMIZER,
    TrainingState,
    describe_differences,
    find_differences,
)


@dataclasses.dataclass(frozen=True)
class Restored:
    """Result of restoring a checkpoint.

    Args:
        checkpoint: The `Checkpoint`.
        missing: Names of tensors that only the trainer has.
        unexpected: Names of tensors that only the checkpoint has.
        other_shapes: Dict of tensors that were not restored because their shapes differ: name ->
            the trainer's shape and the checkpoint's shape.
        damaged: Paths of newer checkpoints that were skipped because they are damaged.
    """

    checkpoint: Checkpoint
    missing: list[str]
    unexpected: list[str]
    other_shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    damaged: list[str]

    @property
    def path(self) -> str:
        """Path of the checkpoint's folder."""
        return str(self.checkpoint.path)

    @property
    def step(self) -> int:
        """Number of optimizer steps before the checkpoint was saved."""
        return self.checkpoint.step

    @property
    def position(self) -> dict[str, int] | None:
        """The next `epoch` and `batch`, or `None` if they are unknown."""
        return self.checkpoint.manifest.get("position")


def restore(
    state: TrainingState,
    path: str | os.PathLike,
    strict: bool = True,
    weights_only: bool = False,
    check: Callable[[Restored], None] | None = None,
) -> Restored:
    """Restore the state and the seed of a run from a checkpoint. All ranks must call it.

    The state is only changed after all checks of the checkpoint have passed.

    Args:
        state: The `TrainingState` to change.
        path: Folder of a checkpoint. Or a folder of checkpoints, whose newest intact checkpoint is
            restored.
        strict: Whether tensors that are missing, unexpected or have another shape raise an error.
            Otherwise they are skipped. Defaults to `True`.
        weights_only: Whether only the network's weights are restored. Defaults to `False`.
        check: Function of the `Restored`, called before the state is changed. It may raise.

    Returns:
        A `Restored`.

    Raises:
        InputError: If there is no checkpoint, if all are damaged, or if the checkpoint does not fit
            the state and `strict` is set. All ranks raise the error.
    """
    checkpoint, damaged = _newest_intact(path)
    prefixes = (NETWORK,) if weights_only else (NETWORK, OPTIMIZER)
    tensors = call_on_all(state.tensors, "checkpoint/state")
    tensors = [tensor for tensor in tensors if tensor.name.startswith(prefixes)]
    differences = find_differences(tensors, checkpoint.get_shapes(*prefixes))
    restored = Restored(checkpoint, *differences, damaged)
    if strict and (text := describe_differences(*differences)):
        raise InputError(
            f"{restored.path} does not fit this network and optimizer: {text}. Restore it with the "
            "network and optimizer that were saved, or pass `strict=False` to skip these tensors."
        )
    if check is not None:
        check(restored)
    skipped = {*restored.missing, *restored.other_shapes}
    if not weights_only:
        saved = checkpoint.get_shapes(GUARD)
        tensors += [tensor for tensor in state.guard_tensors() if tensor.name in saved]

    def assign():
        try:
            for tensor in tensors:
                if tensor.name not in skipped:
                    tensor.assign(checkpoint.read_local(tensor))
        except (tf.errors.OpError, OSError, MemoryError) as error:
            raise InputError(
                f"{checkpoint.path} cannot be read ({to_one_line(str(error), 160)}). Some tensors "
                "have already been replaced. Restore another checkpoint before you continue."
            ) from error

    call_on_all(assign, "checkpoint/restored")
    if not weights_only and job.seed() != checkpoint.manifest["seed"]:
        job.set_seed(checkpoint.manifest["seed"])
    return restored


def restore_metrics(state: TrainingState, restored: Restored) -> None:
    """Restore the sums since the epoch began, for metrics that are built."""
    shapes = restored.checkpoint.get_shapes(METRICS)
    for tensor in state.metric_tensors():
        if shapes.get(tensor.name) == tensor.shape:
            tensor.assign(restored.checkpoint.read_local(tensor))


def _newest_intact(path):
    """Return the first intact checkpoint of a path, and the paths of the checkpoints before it.

    The ranks divide the files among themselves. Damaged files are replaced by intact replicas.
    """
    candidates = from_chief(
        lambda: [str(folder) for folder in list_checkpoints(path)], "checkpoint/candidates"
    )
    message = []
    for i, candidate in enumerate(candidates):
        checkpoint, problems = _verified(candidate)
        if not problems:
            if message:
                lines = "\n  ".join(message)
                job.print_once(
                    f"Skipped damaged checkpoints:\n  {lines}\nUsing {candidate} instead."
                )
            return checkpoint, candidates[:i]
        message += problems
    raise InputError(f"{path} contains no intact checkpoint: {'; '.join(message)}")


def _verified(path):
    """Check a checkpoint on all ranks; return the `Checkpoint` and a list of its problems."""
    checkpoint = None
    problems = {}
    try:
        checkpoint = Checkpoint(path)
        local_names = checkpoint.file_names()[job.rank() :: job.size()]
        problems = checkpoint.problems(local_names)
    except (InputError, OSError) as error:
        problems = {MANIFEST: str(error)}
    problems = {
        name: problem
        for rank_problems in all_gather_json(problems, "checkpoint/verified")
        for name, problem in rank_problems.items()
        if not name.startswith(REPLICAS)
    }

    def repair():
        repaired = [name for name in problems if checkpoint is not None and checkpoint.repair(name)]
        for name in repaired:
            print(f"Replaced a damaged file by its replica: {problems[name]}", flush=True)
        return repaired

    repaired = from_chief(repair, "checkpoint/repaired")
    return checkpoint, [text for name, text in problems.items() if name not in repaired]
