"""Saving: each rank writes its parts at once, while training goes on."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import threading
import time

import keras
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.parallel import job
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.object_collectives import (
    all_gather_json,
    from_chief,
    together,
)
from dtransformer.trainers.checkpoint import files
from dtransformer.trainers.checkpoint.boxes import spec_of
from dtransformer.trainers.checkpoint.parts import plan_parts
from dtransformer.trainers.checkpoint.state import state_of
from dtransformer.version import __version__

_NICENESS = 10  # of the thread that writes, where the system has one for each thread


class CheckpointWriter:
    """Writes checkpoints of a trainer, one at a time.

    A save holds on to the values that variables have; it copies none of them. TensorFlow
    gives a variable new memory when it changes while the old value is held.

    Args:
        trainer: a `Trainer` whose network and optimizer are built.
    """

    _under_way = None  # of this process, whichever trainer's

    def __init__(self, trainer):
        self._trainer = trainer
        self._plan = self._digest = None
        job.before_leaving(CheckpointWriter.finish)

    def start(self, path, info, *, overwrite=True, replicas=False, assets=None):
        """Begin to save; all ranks have to call. One that is under way is waited for.

        Args:
            path: folder of the checkpoint.
            info: dict of what else its manifest holds.
            overwrite: whether a checkpoint there is replaced.
            replicas: whether parts that several ranks have are written twice.
            assets: dict of names of files or folders to add, and objects whose `save(path)`
                writes them.

        Raises:
            InputError: it cannot be written there; on every rank.
        """
        self.finish()
        path = pathlib.Path(path).absolute()
        held, manifest = together(self._state, "checkpoint/state")
        parts, num_bytes = self._plan_of(held, replicas)
        from_chief(lambda: files.begin(path, num_bytes, overwrite), "checkpoint/begin")
        own = {key for part in parts if part.writer == job.rank() for key in part.keys}
        values = {}
        for one in held:
            needed = [piece for piece in one.written_pieces if (one.name, piece.box) in own]
            part = one.read() if needed else None
            values.update({(one.name, piece.box): (one, part, piece) for piece in needed})
        saving = _Saving(path, parts, values, assets or {}, {**manifest, **info})
        CheckpointWriter._under_way = concurrent.futures.Future()
        # No daemon: a process that ends waits for it.
        threading.Thread(target=_run, args=(saving, self._under_way)).start()

    def _state(self):
        """Return what is saved, and what the manifest tells of the trainer."""
        return [one for one in state_of(self._trainer) if one.is_saved], _manifest(self._trainer)

    @classmethod
    def finish(cls):
        """Wait until what is under way is saved.

        Raises:
            InputError: it could not be written; the same on every rank.
        """
        if cls._under_way is not None:
            under_way, CheckpointWriter._under_way = cls._under_way, None
            under_way.result()

    def _plan_of(self, held, replicas):
        """Return the parts that all ranks write, and their bytes; made anew where they differ."""
        own = [
            [one.name, piece.box, one.bytes_of(piece), one.shape, one.dtype]
            for one in held
            for piece in one.written_pieces
        ]
        digest = hashlib.sha256(repr((own, replicas)).encode()).hexdigest()
        if not all(all_gather_json(digest == self._digest, "checkpoint/same")):
            everyone = [
                {(name, _as_tuples(box)): size for name, box, size, _, _ in theirs}
                for theirs in all_gather_json(own, "checkpoint/held")
            ]
            parts = plan_parts(everyone, replicas)
            num_bytes = sum(everyone[part.writer][key] for part in parts for key in part.keys)
            self._digest, self._plan = digest, (parts, num_bytes)
        return self._plan


@dataclasses.dataclass
class _Saving:
    """One save, as this rank sees it.

    Args:
        path: of the checkpoint.
        parts: list of the `Part`s of all ranks.
        values: dict of (name, box), and (`Held`, its value, `Piece`), of what this rank writes.
        assets: see `CheckpointWriter.start`.
        manifest: dict; see `files.Checkpoint`.
    """

    path: pathlib.Path
    parts: list
    values: dict
    assets: dict
    manifest: dict

    @property
    def fresh(self):
        """The folder that is written until the checkpoint is complete."""
        return files.unfinished(self.path)

    def prefix(self, number):
        """Return the prefix of the files of a part before they are merged."""
        return str(self.fresh / f"part-{number:05d}")


def _run(saving, future):
    """Write this rank's parts, and on rank 0 what joins them."""
    with contextlib.suppress(OSError, AttributeError):  # training has the cores first
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    try:
        with tf.device("CPU:0"):
            report, error = _attempt(lambda: _write_parts(saving))
            reports = all_gather_json({"error": error, "files": report}, "checkpoint/written")
            error = _first_error(reports)
            if job.is_chief() and error is None:
                written = {name: row for one in reports for name, row in one["files"].items()}
                _, error = _attempt(lambda: _join(saving, written))
            if job.is_chief() and error is not None:
                shutil.rmtree(saving.fresh, ignore_errors=True)
            error = _first_error(all_gather_json({"error": error}, "checkpoint/committed"))
    except BaseException as failure:  # a rank has left the job
        future.set_exception(failure)
        return
    saving.values.clear()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(
            InputError(f"{saving.path}: the checkpoint could not be written: {error}")
        )


def _attempt(action):
    """Return what an action returns, and its error as a text, or None."""
    try:
        return action(), None
    except Exception as error:
        text = " ".join(str(error).split("\n")[0].split())
        place = f"rank {job.rank()}: " if job.size() > 1 else ""
        return None, f"{place}{type(error).__name__}: {text}"


def _first_error(reports):
    return next((report["error"] for report in reports if report["error"]), None)


def _write_parts(saving):
    """Write this rank's parts; return what manifests tell of their files, and their tensors."""
    numbers = [n for n, part in enumerate(saving.parts) if part.writer == job.rank()]
    described = {}
    for number in numbers:
        found = [saving.values[key] for key in saving.parts[number].keys]
        tf.raw_ops.SaveV2(
            prefix=saving.prefix(number),
            tensor_names=[one.name for one, _, _ in found],
            shape_and_slices=[spec_of(one.shape, piece.box) for one, _, piece in found],
            tensors=[one.cut(part, piece) for one, part, piece in found],
        )
        data = files.describe(pathlib.Path(f"{saving.prefix(number)}.data-00000-of-00001"))
        tensors = {one.name: [list(one.shape), one.dtype] for one, _, _ in found}
        described[number] = {**data, "rank": job.rank(), "tensors": tensors}
    return described


def _join(saving, written):
    """Make one checkpoint of all ranks' parts, and let it be the one of its path."""
    parts, fresh = saving.parts, saving.fresh
    numbers = [number for number, part in enumerate(parts) if part.copy_of is None]
    missing = [
        n for n in range(len(parts)) if not pathlib.Path(f"{saving.prefix(n)}.index").exists()
    ]
    if missing:
        ranks = sorted({parts[number].writer for number in missing})
        raise FileNotFoundError(
            f"what ranks {', '.join(map(str, ranks))} have written is not here: the folder has to "
            "be on a file system that all hosts share"
        )
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[saving.prefix(number) for number in numbers],
        destination_prefix=str(fresh / files.PREFIX),
        delete_old_dirs=False,
    )
    tensors, described = {}, {}
    for row in written.values():
        tensors.update(row.pop("tensors"))
    for position, number in enumerate(numbers):
        described[files.data_file(position, len(numbers))] = written[str(number)]
    for number, part in enumerate(parts):
        if part.copy_of is None:
            continue
        name = files.data_file(numbers.index(part.copy_of), len(numbers))
        (fresh / files.REPLICAS).mkdir(exist_ok=True)
        os.rename(f"{saving.prefix(number)}.data-00000-of-00001", fresh / files.REPLICAS / name)
        os.remove(f"{saving.prefix(number)}.index")
        described[f"{files.REPLICAS}/{name}"] = written[str(number)]
    (fresh / files.LATEST).write_text(f'model_checkpoint_path: "{files.PREFIX}"\n')
    for name in (f"{files.PREFIX}.index", files.LATEST):
        described[name] = {**files.describe(fresh / name), "rank": 0}
    for name, asset in saving.assets.items():
        asset.save(fresh / name)
        paths = [fresh / name, *(fresh / name).rglob("*")]
        for path in (path for path in paths if path.is_file()):
            described[str(path.relative_to(fresh))] = {**files.describe(path), "rank": 0}
    files.commit(saving.path, {**saving.manifest, "files": described, "tensors": tensors})


def _manifest(trainer):
    """Return what checkpoints tell of a trainer."""
    config = get_parallel_config()
    return {
        "dtransformer": __version__,
        "tensorflow": tf.__version__,
        "saved_at": time.time(),
        "step": int(trainer.optimizer.iterations),
        "seed": job.seed(),
        "network": _serialized(trainer.network),
        "optimizer": _serialized(trainer.optimizer),
        "parallel": dataclasses.asdict(config),
        "ranks": job.size(),
        "devices_of_a_rank": job.topology().local_devices,
    }


def _serialized(thing):
    """Return a Keras config, or None of what has none."""
    try:
        return json.loads(json.dumps(keras.saving.serialize_keras_object(thing)))
    except Exception:  # of a user's get_config
        return None


def _as_tuples(box):
    return tuple(tuple(ends) for ends in box)
