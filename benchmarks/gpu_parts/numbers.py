"""Compare the results of tasks on a GPU with the results on a CPU."""

import pathlib
import tempfile
import threading

import keras
import numpy as np
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss
from dtransformer.layers.attention_core import attention
from dtransformer.parallel.mesh.random_numbers import kept_elements
from dtransformer.trainers import Trainer
from harness.launch import launch, tail
from harness.layouts import ALONE
from harness.networks import make, make_loss
from harness.runs import Run
from harness.training import _data

NETWORKS = ("untied", "causal", "llama", "bert", "moe", "dropout")
_MODULE = "benchmarks.gpu_parts.numbers"
_CASES = {"causal": {"causal": True}, "window": {"causal": True, "window": 64}}
_NOT_COMPARED = ("bytes", "planned", "measured", "sent", "taken")  # These results describe the run.
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "-1"}


def compare(smoke, seconds, **_):
    """Yield relative differences between GPU and CPU, and between two runs on the GPU."""
    networks = NETWORKS[:2] if smoke else NETWORKS
    tasks = [f"{_MODULE}:{name}" for name in TASKS] + list(networks)
    with tempfile.TemporaryDirectory() as folder:
        places = {"cpu": ON_CPUS, "gpu": {}, "again": {}}
        folders = {place: pathlib.Path(folder) / place for place in places}
        runs = [
            threading.Thread(target=run_tasks, args=(tasks, folders[place], environment, seconds))
            for place, environment in places.items()
        ]
        for thread in runs:
            thread.start()
        for thread in runs:
            thread.join()
        for task in tasks:
            run = Run(task, ALONE)
            errors = {place: run.errors(folders[place])[-300:] for place in places}
            if any(errors.values()) or not all(run.has_ended(f) for f in folders.values()):
                yield {"task": task, "errors": {k: v for k, v in errors.items() if v}}
                continue
            results = {place: run.read(folders[place])[0] for place in places}
            yield {
                "task": task.removeprefix(_MODULE + ":"),
                "gpu_to_cpu": differences(results["gpu"], results["cpu"]),
                "two_runs": differences(results["again"], results["gpu"]),
                **{k: v for k, v in results["gpu"].items() if isinstance(v, float)},
            }


def run_tasks(tasks, folder, environment, seconds):
    """Run tasks with harness/rank.py within the time limit. Errors are stored in the folder."""
    folder.mkdir(parents=True)
    names = [Run(task, ALONE).name for task in tasks]
    completed = launch(1, ["-m", "harness.rank", folder, *names], seconds - 20, environment)
    (folder / "log").write_text(tail(completed.stdout, completed.stderr, 20000))


def differences(actual, expected):
    """Return the relative error of all arrays named "KIND/..." by kind."""
    squares = {}
    for name, value in expected.items():
        kind = name.split("/")[0]
        if (
            isinstance(value, np.ndarray)
            and value.dtype.kind in "fiu"
            and kind not in _NOT_COMPARED
        ):
            sums = squares.setdefault(kind, np.zeros(2))
            sums += np.sum((np.float64(actual[name]) - value) ** 2), np.sum(np.float64(value) ** 2)
    return {
        kind: float((difference / max(total, 1e-60)) ** 0.5)
        for kind, (difference, total) in squares.items()
    }


def _gradients(policy="float32", implementation="auto"):
    """Return logits and all gradients of a language model."""
    keras.config.set_dtype_policy(policy)
    from dtransformer.models import CausalLM

    network = CausalLM(
        500,
        hidden_size=128,
        num_heads=4,
        num_layers=2,
        ffn_hidden_size=256,
        max_length=128,
        dropout_rate=0.0,
        implementation=implementation,
    )
    network.build()
    ids = tf.constant(np.random.default_rng(0).integers(1, 500, [4, 128]), "int32")
    loss = CrossEntropyLoss()

    @tf.function
    def compute():
        with tf.GradientTape() as tape:
            logits = network(ids, training=True)
            value = tf.reduce_mean(loss(logits, ids))
        return logits, tape.gradient(value, [v.value for v in network.trainable_variables])

    logits, gradients = compute()
    results = {"logits": np.array(tf.cast(logits, "float32"))}
    for variable, gradient in zip(network.trainable_variables, gradients):
        results[f"gradients/{variable.path}"] = np.array(
            tf.cast(tf.convert_to_tensor(gradient), "float32")
        )
    keras.config.set_dtype_policy("float32")
    return results


def _attention():
    """Return outputs and gradients of each implementation of attention, and their difference."""
    draw = np.random.default_rng(1).normal
    arrays = [tf.constant(draw(size=[2, 4, 256, 64]), "float32") for _ in range(4)]
    results = {}
    for name in ("reference", "blockwise"):
        for case, options in _CASES.items():
            with tf.GradientTape() as tape:
                tape.watch(arrays)
                q, k, v, _ = arrays
                y = attention(q, k, v, implementation=name, **options)
            outputs = [y, *tape.gradient(y, arrays[:3], arrays[3])]
            results |= {f"{name}/{case}{i}": np.array(x) for i, x in enumerate(outputs)}
    differences_to_reference = [
        np.abs(results[f"blockwise/{rest}"] - results[name]).max()
        for name in results
        if name.startswith("reference")
        for rest in [name.removeprefix("reference/")]
    ]
    return {**results, "blocks_to_reference": float(max(differences_to_reference))}


def _masks():
    """Return a dropout mask."""
    return {"masks": np.array(tf.cast(kept_elements([64, 1000], 0.1, tf.constant([3, 5])), "int8"))}


def _compiled(jit_compile):
    """Return the losses of 10 steps with this `jit_compile`. "auto" forms clusters on GPUs."""
    model, optimizer = make("causal")
    model.build()
    trainer = Trainer(model)
    trainer.compile(optimizer, make_loss("causal"), jit_compile=jit_compile)
    losses = [
        trainer.train_on_batch(x, y, shard=False) for x, y in _data("causal", 10, model, seed=0)
    ]
    tf.config.optimizer.set_jit(False)
    return {"losses": np.array([np.ravel(loss)[0] for loss in losses])}


TASKS = {
    "gradients": _gradients,
    "gradients_bf16": lambda: _gradients("mixed_bfloat16"),
    "gradients_blockwise": lambda: _gradients(implementation="blockwise"),
    "attention": _attention,
    "masks": _masks,
    "jit_false": lambda: _compiled(False),
    "jit_true": lambda: _compiled(True),
    "jit_auto": lambda: _compiled("auto"),
}
