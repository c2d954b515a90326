"""Each rank uses its GPUs and nearby cores. The GPUs are simulated."""

import dataclasses
import os
import platform
import sys
import types

import pytest
import tensorflow as tf

from dtransformer import TransformerOpParallelConfig, nvidia_driver
from dtransformer.parallel.runtime import devices, job
from dtransformer.parallel.runtime import launch as launch_module
from dtransformer.parallel.runtime.process_groups import ProcessGroups
from dtransformer.planner.clusters import DEVICES, Cluster
from dtransformer.planner.formulas import NCCL_BYTES
from dtransformer.reports import memory
from harness.gpus import libcuda, write_bus, write_driver
from harness.launch import launch, tail
from tests.trainers.small import dense_trainer, points

TWICE = """
import os, tensorflow as tf, dtransformer
from dtransformer import TransformerOpParallelConfig as Config
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor
assert os.environ["CUDA_CACHE_MAXSIZE"] == "4294967296"
dtransformer.init(Config())
tf.ones([2]).numpy()
for _ in range(2):
    dtransformer.init(Config(model_parallel=2), local_devices=2)
    tf.ones([2]).numpy()
    with tf.device("CPU:1"):  # checkpoints copy variables of every device to host memory
        variable = tf.Variable([1.0])
    value = ShardedTensor("x", (1,), variable, ()).read()
    assert "CPU:1" in variable.device and "CPU:0" in value.device, (variable.device, value.device)
    print("threads", tf.config.threading.get_intra_op_parallelism_threads())
dtransformer.init(Config(), local_devices="all", deterministic=True)
try:
    tf.random.uniform([2])
except RuntimeError as error:
    assert "determinism" in str(error)
else:
    raise AssertionError("numbers without a seed")
print("alone", dtransformer.get_parallel_config().model_parallel)
"""


@pytest.fixture
def fake_gpus(monkeypatch):
    """Return a function that simulates GPUs and returns the recorded TensorFlow settings."""
    calls = {"visible": [], "growth": [], "logical": {}}
    config = tf.config

    def set_count(count):
        gpus = [f"GPU:{index}" for index in range(count)]
        monkeypatch.setattr(config, "list_physical_devices", lambda kind: gpus)
        return calls

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_devices_by_index", {})
    monkeypatch.setattr(
        config, "set_visible_devices", lambda visible, kind: calls.update(visible=visible)
    )
    monkeypatch.setattr(
        config.experimental, "set_memory_growth", lambda gpu, enabled: calls["growth"].append(gpu)
    )
    monkeypatch.setattr(
        config,
        "set_logical_device_configuration",
        lambda gpu, parts: calls["logical"].update({gpu: len(parts)}),
    )
    return set_count


@pytest.mark.parametrize(
    "local_rank, local_devices, expected",
    [(0, 1, ["GPU:0"]), (7, 1, ["GPU:7"]), (1, 4, ["GPU:4", "GPU:5", "GPU:6", "GPU:7"])],
)
def test_rank_uses_its_local_gpus(fake_gpus, local_rank, local_devices, expected):
    calls = fake_gpus(8)
    devices.take_devices(local_rank, 8 // local_devices, local_devices, is_pipeline=False)
    assert calls["visible"] == expected == calls["growth"] and not calls["logical"]


def test_rank_uses_its_only_visible_gpu(fake_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    calls = fake_gpus(1)
    devices.take_devices(5, 8, 1, is_pipeline=False)
    assert calls["visible"] == ["GPU:0"]


@pytest.mark.parametrize(
    "local_rank, local_devices, visible, logical",
    [
        (0, 4, ["GPU:0"], {"GPU:0": 4}),
        (3, 1, ["GPU:0"], {"GPU:0": 1}),
        (1, 3, ["GPU:0", "GPU:1"], {"GPU:0": 1, "GPU:1": 2}),
    ],
)
def test_gpus_are_split_into_logical_gpus(
    fake_gpus, monkeypatch, local_rank, local_devices, visible, logical
):
    monkeypatch.setenv("DTRANSFORMER_LOGICAL_GPUS", "4")
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    calls = fake_gpus(2)
    devices.take_devices(local_rank, 2, local_devices, is_pipeline=False)
    assert (calls["visible"], calls["logical"], calls["growth"]) == (visible, logical, [])


def test_rejects_more_ranks_than_gpus(fake_gpus):
    fake_gpus(2)
    with pytest.raises(RuntimeError, match="has 2 GPUs, but 4 ranks with 1 each.*LOGICAL_GPUS"):
        devices.take_devices(2, 4, 1, is_pipeline=False)


def test_later_layout_may_add_gpus_if_existing_ones_stay(fake_gpus):
    calls = fake_gpus(8)
    devices.take_devices(0, 2, 1, is_pipeline=False)
    devices.take_devices(0, 2, 4, is_pipeline=False)
    assert calls["visible"] == ["GPU:0", "GPU:1", "GPU:2", "GPU:3"] == calls["growth"][1:]


def test_rejects_a_layout_that_moves_a_gpu(fake_gpus):
    fake_gpus(8)
    devices.take_devices(1, 2, 1, is_pipeline=False)
    with pytest.raises(RuntimeError, match="GPU:0 of this process is GPU:1.*become GPU:4 with"):
        devices.take_devices(1, 2, 4, is_pipeline=False)


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_rejects_invalid_numbers_of_logical_gpus(fake_gpus, monkeypatch, value):
    monkeypatch.setenv("DTRANSFORMER_LOGICAL_GPUS", value)
    fake_gpus(1)
    with pytest.raises(ValueError, match="LOGICAL_GPUS` must be a positive integer"):
        devices.take_devices(0, 1, 1, is_pipeline=False)


def test_tensor_before_init_raises_a_hint(fake_gpus, monkeypatch):
    fake_gpus(1)

    def refuse(*_):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with pytest.raises(RuntimeError, match=r"Call `dtransformer.init\(\)` before the first tensor"):
        devices.take_devices(0, 1, 1, is_pipeline=False)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Simulate a machine with an NVIDIA driver, but without GPUs for TensorFlow."""
    write_driver(tmp_path)
    monkeypatch.setattr(nvidia_driver, "_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_warns_if_tensorflow_sees_no_gpu_despite_a_driver(driver, monkeypatch):
    with pytest.warns(
        UserWarning, match=r"NVIDIA driver \(580.159.04\), but TensorFlow sees no GPU"
    ):
        devices.take_devices(0, 1, 1, is_pipeline=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # the user hides the GPUs
    assert devices.unused_driver() is None


@pytest.fixture
def bound_cores(fake_gpus, monkeypatch, tmp_path):
    """Simulate a host with two NUMA nodes of two GPUs. Return the list of core bindings."""
    calls, cuda = [], libcuda()
    write_bus(tmp_path, ["0-3,8-11", "0-3,8-11", "4-7", "4-7"])
    fake_gpus(4)
    monkeypatch.setattr(nvidia_driver, "_PCI", tmp_path)
    monkeypatch.setattr(nvidia_driver, "_cuda", lambda: (cuda, 0))
    monkeypatch.setattr(devices, "_cores_at_start", lambda: list(range(10)))
    monkeypatch.setattr(devices.os, "sched_setaffinity", lambda _, cores: calls.append(cores))
    monkeypatch.setattr(devices.os, "listdir", lambda _: ["1"])
    return calls


@pytest.mark.parametrize(
    "local_rank, local_devices, near",
    [(0, 1, [0, 1, 2, 3, 8, 9]), (3, 1, [4, 5, 6, 7]), (0, 4, list(range(10)))],
)
def test_rank_is_bound_to_cores_near_its_gpus(bound_cores, local_rank, local_devices, near):
    devices.take_devices(local_rank, 4 // local_devices, local_devices, is_pipeline=False)
    assert bound_cores == [near]


@pytest.mark.parametrize("variable", ["DTRANSFORMER_BIND_CORES", "no bus"])
def test_rank_is_not_bound_if_disabled_or_unknown(bound_cores, monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, "0")
    if variable == "no bus":
        monkeypatch.setattr(nvidia_driver, "_PCI", tmp_path / "none")
    devices.take_devices(0, 4, 1, is_pipeline=False)
    assert not bound_cores


@pytest.mark.parametrize(
    "gpus, logical, ranks, expected", [(8, 1, 1, 8), (8, 1, 4, 2), (1, 4, 1, 4), (0, 1, 1, 1)]
)
def test_all_devices_divides_gpus_among_ranks(
    fake_gpus, monkeypatch, gpus, logical, ranks, expected
):
    monkeypatch.setenv("DTRANSFORMER_LOGICAL_GPUS", str(logical))
    fake_gpus(gpus)
    assert devices.devices_per_rank(ranks) == expected


def test_compiled_kernels_are_cached_on_each_host(monkeypatch, tmp_path):
    for name in ("CUDA_CACHE_MAXSIZE", "CUDA_CACHE_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(nvidia_driver, "_FILES", tmp_path / "none")
    nvidia_driver.keep_compiled_kernels()
    assert int(os.environ["CUDA_CACHE_MAXSIZE"]) == 2**32 and "CUDA_CACHE_PATH" not in os.environ
    monkeypatch.setattr(nvidia_driver, "_FILES", tmp_path)
    nvidia_driver.keep_compiled_kernels()
    folder = os.environ["CUDA_CACHE_PATH"]
    assert os.path.isdir(folder) and folder.startswith(str(tmp_path))
    assert folder.endswith(platform.node())
    monkeypatch.setenv("CUDA_CACHE_PATH", "/given")
    nvidia_driver.keep_compiled_kernels()
    assert os.environ["CUDA_CACHE_PATH"] == "/given"


def test_rejects_ranks_that_share_a_gpu(fake_gpus, monkeypatch):
    fake_gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    exchange = lambda local, gather: [[{}, "a:1", ["one", "0"]], [{}, "b:1", ["one", "0"]]]
    monkeypatch.setattr(launch_module, "exchange_json", exchange)
    hvd = types.SimpleNamespace(local_size=lambda: 2, size=lambda: 2)
    with pytest.raises(ValueError, match="Ranks 0 and 1 see the same GPUs of one.*DEVICES=0"):
        launch_module.compare_ranks(hvd, TransformerOpParallelConfig(), 0, 1, 0.0)


def test_rejects_horovod_without_nccl_on_gpus(monkeypatch):
    hvd = types.SimpleNamespace(nccl_built=lambda: 0)
    monkeypatch.setitem(sys.modules, "horovod", types.SimpleNamespace(tensorflow=hvd))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", hvd)
    monkeypatch.setattr(launch_module, "device_type", lambda: "GPU")
    for name, value in {"SIZE": "2", "RANK": "0", "GLOO_RENDEZVOUS_ADDR": "localhost"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    for name in ("DYNAMIC_PROCESS_SETS", "DISABLE_GROUP_FUSION", "ENABLE_ASYNC_COMPLETION"):
        monkeypatch.setenv(f"HOROVOD_{name}", "1")
    with pytest.raises(RuntimeError, match="without NCCL.*local_devices.*LOGICAL_GPUS"):
        launch_module.start_horovod()


def test_memory_report_includes_nccl_buffers(monkeypatch):
    """Rank 1 of four is in the world group, a data-parallel group and a pipeline group."""
    hvd = types.SimpleNamespace(global_process_set="all", add_process_set=tuple)
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    groups = ProcessGroups(1, 4, hvd)
    groups.world_group()
    for ranks in ((0, 1), (2, 3), (0, 2), (1, 3)):
        groups.agreed(ranks)
    trainer = dense_trainer()
    trainer.train_on_batch(*points())
    assert len(trainer.memory_report().rows) == 4
    monkeypatch.setattr(memory, "device_type", lambda: "GPU")
    current = dataclasses.replace(job.current(), groups=groups)
    monkeypatch.setattr(memory.job, "current", lambda: current)
    mesh = types.SimpleNamespace(dim_names=["data", "model"])
    monkeypatch.setattr(memory.job, "mesh", lambda: None)
    assert trainer.memory_report()["NCCL's buffers"].planned == 3 * 2**28
    monkeypatch.setattr(memory.job, "mesh", lambda: mesh)
    assert memory._num_communicators() == 6
    monkeypatch.setenv("DTRANSFORMER_LOGICAL_GPUS", "2")
    monkeypatch.setattr(memory.job, "mesh", lambda: None)
    assert len(trainer.memory_report().rows) == 4


@pytest.mark.parametrize(
    "name", [name for name, device in DEVICES.items() if device.memory_gb >= 32]
)
def test_planner_reserves_nccl_buffers(name):
    # Up to six groups need buffers: data, context, model, two stages and the full mesh.
    device = DEVICES[name]
    assert device.memory_gb * 1e9 - Cluster(device, 8).memory_bytes >= 6 * NCCL_BYTES


def test_device_settings_survive_a_new_mesh():
    """Leaving a mesh resets TensorFlow, including devices, memory growth and threads."""
    done = launch(1, ["-c", TWICE], timeout=120)
    assert done.returncode == 0, tail(done.stdout, done.stderr)
    first, second, alone = done.stdout.splitlines()[-3:]
    assert first == second != "threads 0" and alone == "alone 1"
