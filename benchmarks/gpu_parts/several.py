"""Run sums, layouts and a long pipeline on several GPUs, with one rank per GPU or one process."""

import pathlib
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

from benchmarks.gpu_parts.layouts import parity
from dtransformer import nvidia_driver
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.mesh import axis_rules
from dtransformer.parallel.mesh.batch import put_sharded
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import device_type
from dtransformer.trainers import Trainer
from harness.layouts import parse_layout
from harness.networks import make, make_loss
from harness.runs import Run, launch_runs
from harness.training import _data

_SIZES = [2**power for power in range(10, 31, 2)]  # Sizes in bytes.
_SMOKE_SIZES = [2**10, 2**16]
_TIMES = 20
# Runs on n GPUs.
_LAYOUTS = """
    adamw/dp{n}@{n}x1 adamw/dp{n}@{n}x1+shard3 causal/mp2@2x1+rows+sp llama/dp{n}@{n}x1+shard2
    long_causal/cp2@2x1+ring moe/dp{n}ep2@{n}x1 deep_causal/pp2m4-1f1b@2x1 causal/mp2@1x2+rows+sp
    adamw/dp{n}@1x{n}
""".split()
_FOUR_GPUS = ["deep_tied/mp2pp2m2-1f1b@2x2", "untied/dp2mp2@4x1+rows"]
_STRESS, _STRESS_SECONDS = "mp2pp2m2-1f1b@2x2", 600


def sums(smoke, **_):
    """Yield the seconds of an all-reduce by size, with Horovod and on a mesh of one process."""
    n = _count_gpus(smoke)
    if n < 2:
        yield {"left_out": f"{n} cards"}
        return
    for layout in (f"dp{n}@{n}x1", f"dp{n}@1x{n}"):
        uses_ranks = parse_layout(layout).ranks > 1
        task = f"{__name__}:{'smoke_' * smoke}sums"
        for size, seconds in _results(f"{task}/{layout}", 300)["seconds"].items():
            sent = 2 * (n - 1) / n * int(size)  # Bytes sent by a ring algorithm.
            by = "horovod" if uses_ranks else "mesh"
            yield {"all_reduce": by, "bytes": int(size), "seconds": seconds, "bus": sent / seconds}


def layouts(smoke, **_):
    """Yield differences between the losses of layouts on all GPUs and of a CPU."""
    n = _count_gpus(smoke)
    if n < 2:
        yield {"left_out": f"{n} cards"}
        return
    names = [name.format(n=n) for name in _LAYOUTS] + _FOUR_GPUS * (n >= 4)
    by_ranks = {}
    for name in names[:1] if smoke else names:
        by_ranks.setdefault(Run.from_name(name).layout.ranks, []).append(name)
    for rank_names in by_ranks.values():
        yield from parity(rank_names)


def stress(smoke, **_):
    """Yield the steps of a pipeline of meshes in ten minutes. It uses two NCCL libraries together."""
    n = _count_gpus(smoke)
    if n < 4 and not smoke:
        yield {"left_out": f"{n} cards of 4"}
        return
    task = f"{__name__}:{'smoke_' * smoke}stress"
    yield _results(f"{task}/{'pp2m2-1f1b@2x1' if smoke else _STRESS}", _STRESS_SECONDS + 300)


def _count_gpus(smoke):
    return 2 if smoke else len(nvidia_driver.gpu_names())


def _results(name, seconds):
    """Run a task of `TASKS` on the ranks of its layout and return the results of rank 0."""
    run = Run.from_name(name)
    with tempfile.TemporaryDirectory() as folder:
        launch_runs(run.layout.ranks, [run], pathlib.Path(folder), seconds_of_a_run=seconds)
        if errors := run.errors(folder):
            raise RuntimeError(errors[-2000:])
        return run.read(folder)[0]


# Tasks of the ranks.


def _sums(layout, sizes=_SIZES):
    return {"seconds": {size: _median_seconds(_make_sum(layout, size)) for size in sizes}}


def _make_sum(layout, size):
    """Return a function that all-reduces tensors of a size in bytes and waits for the result."""
    if layout.ranks == 1:
        x = put_sharded(np.ones([layout.data, size // 4], "float32"))

        def add():
            return axis_rules.relayout(tf.reduce_sum(x, 0), (None,))
    else:
        with tf.device(f"{device_type()}:0"):
            x = tf.ones([size // 4])

        def add():
            return job.horovod().allreduce(x, op=job.horovod().Sum, name=f"sums{size}")

    function = tf.function(add, autograph=False)

    def call():
        with tf.device(f"{device_type()}:0"):
            function()
        tf.test.experimental.sync_devices()

    return call


def _median_seconds(call):
    """Return the median seconds of a call. Every rank makes the same number of calls."""
    call()
    seconds = []
    for _ in range(_TIMES):
        start_time = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start_time)
    return float(np.median(seconds))


def _stress(layout, seconds=_STRESS_SECONDS):
    model, optimizer = make("deep_tied", num_blocks=layout.num_blocks)
    model.build()
    trainer = Trainer(model)
    trainer.compile(optimizer, make_loss("deep_tied"))
    data, start_time = _data("deep_tied", 8, model, seed=0).repeat(), time.monotonic()

    class Stop(keras.callbacks.Callback):
        """Callback that stops all ranks once the time limit has passed on any rank."""

        def on_epoch_end(self, epoch, logs=None):
            if max(all_gather_json(time.monotonic() - start_time, "stress")) > seconds:
                self.model.stop_training = True

    history = trainer.fit(
        data, steps_per_epoch=20, epochs=10**6, callbacks=[Stop()], verbose=0, shard=False
    )
    losses = history.history["loss"]
    return {"steps": trainer.num_steps, "is_finite": bool(np.isfinite(losses).all())}


TASKS = {
    "sums": _sums,
    "smoke_sums": lambda layout: _sums(layout, _SMOKE_SIZES),
    "stress": _stress,
    "smoke_stress": lambda layout: _stress(layout, seconds=2),
}
