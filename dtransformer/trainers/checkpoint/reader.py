"""Restoring: each rank reads the slices that it needs, whatever layout has written them."""

import dataclasses

import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.parallel import job
from dtransformer.parallel.object_collectives import (
    all_gather_json,
    from_chief,
    together,
)
from dtransformer.trainers.checkpoint import files
from dtransformer.trainers.checkpoint.differences import differences
from dtransformer.trainers.checkpoint.state import (
    METRICS,
    NETWORK,
    OPTIMIZER,
    metrics_of,
    state_of,
)

_NAMES_TOLD = 10


@dataclasses.dataclass(frozen=True)
class Restored:
    """What was restored.

    Args:
        checkpoint: the `files.Checkpoint`.
        missing: list of the names of the trainer's tensors that the checkpoint lacks.
        unexpected: list of the checkpoint's that the trainer lacks.
        other_shapes: dict of names, and both shapes, of those that were left as they are.
        damaged: list of the paths of newer checkpoints that are damaged.
    """

    checkpoint: files.Checkpoint
    missing: list
    unexpected: list
    other_shapes: dict
    damaged: list

    @property
    def path(self):
        """The checkpoint's folder."""
        return str(self.checkpoint.path)

    @property
    def manifest(self):
        """Dict; see `files.Checkpoint`."""
        return self.checkpoint.manifest

    @property
    def step(self):
        """The number of updates before it was saved."""
        return self.checkpoint.step

    @property
    def position(self):
        """Dict with the `epoch` and `batch` that come next; None where it is not known."""
        return self.manifest.get("position")


def restore(trainer, path, strict=True, weights_only=False, check=None):
    """Set the state of a trainer from a checkpoint; all ranks have to call.

    Nothing is changed before the checkpoint was found to be whole, and to fit.

    Args:
        trainer: a `Trainer` whose network and optimizer are built.
        path: a checkpoint's folder; or a folder of them, of which the newest is taken that
            is not damaged.
        strict: whether a tensor that one of them lacks, or of another shape, is an error.
        weights_only: whether the network's weights are restored alone.
        check: a function of the `Restored` that is called before anything is changed.

    Returns:
        A `Restored`.

    Raises:
        InputError: there is no checkpoint, all are damaged (names every file), or the state
            does not fit (names every tensor); on every rank.
    """
    checkpoint, damaged = _first_whole(path)
    kinds = (NETWORK,) if weights_only else (NETWORK, OPTIMIZER)
    held = together(lambda: state_of(trainer), "checkpoint/state")
    held = [one for one in held if one.name.startswith(kinds)]
    found = Restored(checkpoint, *differences(held, checkpoint.shapes_of(*kinds)), damaged)
    if strict:
        _check(found)
    if check is not None:
        check(found)
    left = {*found.missing, *found.other_shapes}
    held = [one for one in held if one.name not in left]

    def assign():
        try:
            for one in held:
                one.assign(files.read_part(checkpoint, one))
        except (tf.errors.OpError, OSError, MemoryError) as error:
            raise InputError(
                f"{checkpoint.path}: cannot be read ({str(error).splitlines()[0]}); a part of the "
                "state is replaced already: restore another checkpoint before you train on"
            ) from error

    together(assign, "checkpoint/restored")
    if not weights_only and job.seed() != checkpoint.manifest["seed"]:
        job.set_seed(checkpoint.manifest["seed"])
        trainer.train_function = None  # traced with the other one
    return found


def restore_metrics(trainer, restored):
    """Set the sums since the epoch began, of those metrics that there are already."""
    shapes = restored.checkpoint.shapes_of(METRICS)
    for one in metrics_of(trainer):
        if shapes.get(one.name) == one.shape:
            one.assign(files.read_part(restored.checkpoint, one))


def _first_whole(path):
    """Return the first checkpoint of a path that is not damaged, and the paths of those before.

    Ranks share the work to read all files. A part that has a good replica is replaced.
    """
    candidates = from_chief(
        lambda: [str(folder) for folder in files.open_or_latest(path)], "checkpoint/candidates"
    )
    wrong = []
    for number, candidate in enumerate(candidates):
        checkpoint, problems = _verified(candidate)
        if not problems:
            if wrong and job.is_chief():
                lines = "\n  ".join(wrong)
                print(f"Damaged, and passed by:\n  {lines}\nTaken instead: {candidate}", flush=True)
            return checkpoint, candidates[:number]
        wrong += problems
    raise InputError(f"{path}: no checkpoint is whole: {'; '.join(wrong)}")


def _verified(path):
    """Return a `Checkpoint` and what is wrong with it, found by all ranks together."""
    checkpoint, problems = None, {}
    try:
        checkpoint = files.Checkpoint(path)
        own = checkpoint.file_names()[job.rank() :: job.size()]
        problems = checkpoint.problems(own)
    except (InputError, OSError) as error:
        problems = {files.MANIFEST: str(error)}
    lost = {
        name: text
        for theirs in all_gather_json(problems, "checkpoint/verified")
        for name, text in theirs.items()
        if not name.startswith(files.REPLICAS)
    }

    def repair():
        repaired = [name for name in lost if checkpoint is not None and checkpoint.repair(name)]
        for name in repaired:
            print(f"{lost[name]}; replaced by its replica", flush=True)
        return repaired

    repaired = from_chief(repair, "checkpoint/repaired")
    return checkpoint, [text for name, text in lost.items() if name not in repaired]


def _check(found):
    """Raise an InputError where a checkpoint does not fit a trainer."""
    shapes = [
        f"{name} {ours}, there {theirs}" for name, (ours, theirs) in found.other_shapes.items()
    ]
    kinds = {
        "the checkpoint lacks": found.missing,
        "the trainer lacks": found.unexpected,
        "shapes differ": shapes,
    }
    told = [f"{kind} {len(names)}: {_some(names)}" for kind, names in kinds.items() if names]
    if told:
        raise InputError(
            f"{found.path} does not fit this network and optimizer: {'. '.join(told)}. Restore it "
            "with those that it was saved with, or what fits with strict=False"
        )


def _some(names):
    more = len(names) - _NAMES_TOLD
    return ", ".join(names[:_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
