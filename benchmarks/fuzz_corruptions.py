"""Cases of benchmarks/fuzz.py that damage checkpoints, runs and folders and then load them."""

import functools
import json
import os
import pathlib
import shutil
import zlib

import fuzz_folders
import numpy as np
from fuzz_damage import Failure, damaged, edit
from fuzz_inputs import SENTENCES, small_network

from dtransformer.cli import main
from dtransformer.datasets.tokenizer import SubwordTokenizer
from dtransformer.runs.tasks import load_run
from dtransformer.trainers import Trainer
from dtransformer.trainers.checkpoint.manifest import MANIFEST

SETTINGS = [
    "tokenizer.vocab_size=36", "model.hidden_size=8", "model.num_heads=2", "model.encoder_layers=1",
    "model.decoder_layers=1", "data.batch_tokens=null", "data.batch_size=8", "data.num_buckets=1",
    "data.max_length=16", "training.epochs=1",
]  # fmt: skip


def prepare(folder):
    """Save two checkpoints and two similar runs, and return kinds with their functions."""
    folder.mkdir()
    trainer, states = new_trainer(), {}
    for step in (2, 4):
        rows = np.random.default_rng(step).normal(size=(8, 4))
        trainer.fit(rows, np.ones((8, 3)), batch_size=4, verbose=0)
        path = folder / "checkpoints" / f"step-{step:08d}"
        trainer.save(path, assets={"tokenizer": SubwordTokenizer.train(SENTENCES, 75)})
        states[path.name] = get_state(trainer)
    (folder / "text").write_text("one cat\ntwo cats\nno dog\n" * 8)
    config = {"data": {"source": str(folder / "text"), "target": str(folder / "text")}}
    (folder / "config.yaml").write_text(json.dumps(config))
    for run_index in range(2):
        arguments = ["train", "--config", str(folder / "config.yaml")]
        arguments += ["--run", str(folder / f"run-{run_index}")]
        if main([*arguments, "--set", *SETTINGS, f"training.seed={run_index}"]):
            raise SystemExit("The run cannot be trained.")
        shutil.rmtree(folder / f"run-{run_index}" / "checkpoints")
    checkpoints = functools.partial(checkpoint, folder / "checkpoints", states, new_trainer())
    return {
        "checkpoint: damage": functools.partial(checkpoints, damage),
        "checkpoint: swaps": functools.partial(checkpoints, swap),
        "checkpoint: right sums": functools.partial(checkpoints, sign),
        "run": functools.partial(run, folder, contents(load_run(folder / "run-0"))),
        **fuzz_folders.prepare(folder),
    }


def new_trainer():
    trainer = Trainer(small_network())
    trainer.compile("adam", "mse", jit_compile=False)
    return trainer


def get_state(trainer):
    trainer.training_state()  # This builds the variables.
    variables = [*trainer.network.variables, *trainer.optimizer.variables]
    return [variable.numpy() for variable in variables]


def list_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def checkpoint(good, states, trainer, inflict, rng, folder):
    """Restore from two checkpoints after damage to the newer one, and compare all values."""
    path = folder / "checkpoints"
    shutil.copytree(good, path)
    inflict(rng, path)
    newest = rng.choice([path, max(path.iterdir())])
    restored = trainer.restore(newest)
    expected = states.get(pathlib.Path(restored.path).name)
    equals_a_state = any(arrays_equal(get_state(trainer), state) for state in states.values())
    if not (equals_a_state if expected is None else arrays_equal(get_state(trainer), expected)):
        raise Failure(f"wrong data: {inflict.__name__} of {restored.path}")


def arrays_equal(arrays, other_arrays):
    return all(np.array_equal(a, b) for a, b in zip(arrays, other_arrays, strict=True))


def damage(rng, path):
    file = rng.choice(list_files(max(path.iterdir())))
    kind = rng.randrange(6)
    if kind <= 2:
        file.write_bytes(damaged(rng, file.read_bytes()))
        return
    content = file.read_bytes()
    file.unlink()
    if kind == 3:
        os.mkfifo(file)
    elif kind == 4:
        file.mkdir()
    else:
        outside = path.parent / "elsewhere"
        outside.write_bytes(content)
        file.symlink_to(outside)


def swap(rng, path):
    older, newer = sorted(path.iterdir())
    kind = rng.randrange(4)
    if kind == 0:  # Swap two files of a checkpoint.
        file_a, file_b = rng.sample(list_files(newer), 2)
    elif kind == 1:  # Swap the same file of two checkpoints.
        file_a = rng.choice(list_files(newer))
        file_b = older / file_a.relative_to(newer)
    elif kind == 2:  # Copy all files except for the manifest.
        for file in list_files(newer):
            if file.name != MANIFEST:
                shutil.copy(older / file.relative_to(newer), file)
        return
    else:
        newer.rename(path / rng.choice(["step-00000009", "step-1", "step-99999999999", "other"]))
        return
    content = file_a.read_bytes()
    file_a.write_bytes(file_b.read_bytes())
    file_b.write_bytes(content)


def sign(rng, path):
    """Edit the manifest or a file and update the checksums."""
    newer = max(path.iterdir())
    body = json.loads((newer / MANIFEST).read_text())["checkpoint"]
    if rng.random() < 0.5:
        name = rng.choice(list(body["files"]))
        content = damaged(rng, (newer / name).read_bytes())
        (newer / name).write_bytes(content)
        body["files"][name] |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    else:
        body = edit(rng, body)
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (newer / MANIFEST).write_text(json.dumps({"crc32": f"{crc:08x}", "checkpoint": body}))


def contents(task):
    return task.config, task.tokenizer.vocabulary, task.network.get_weights()


def run(good, expected, rng, folder):
    """Load a damaged run and compare its config, vocabulary and weights."""
    path = folder / "run"
    shutil.copytree(good / "run-0", path)
    file = rng.choice([file for file in list_files(path) if file.name != "metrics.jsonl"])
    kind = rng.randrange(4)
    if kind == 0:  # Use the file of another run.
        shutil.copy(good / "run-1" / file.relative_to(path), file)
    elif kind == 1:
        file.unlink()
    else:
        file.write_bytes(damaged(rng, file.read_bytes()))
    actual = contents(load_run(path))
    if actual[:2] != expected[:2] or not arrays_equal(actual[2], expected[2]):
        raise Failure(f"wrong data: {file.name} ({['another run', '', 'damage', 'damage'][kind]})")
