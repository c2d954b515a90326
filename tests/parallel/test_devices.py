"""Which GPUs a rank takes, with lists of GPUs that are not there; and devices after a mesh."""

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
    with tf.device("CPU:1"):  # as of a GPU: what a checkpoint's writer keeps is in the host's memory
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
def cards(monkeypatch):
    """A host of cards that are not there; what was asked of TensorFlow for each."""
    asked = {"visible": [], "growth": [], "logical": {}}
    config = tf.config

    def put(number):
        gpus = [f"GPU:{index}" for index in range(number)]
        monkeypatch.setattr(config, "list_physical_devices", lambda kind: gpus)
        return asked

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_devices_by_index", {})
    monkeypatch.setattr(config, "set_visible_devices", lambda own, kind: asked.update(visible=own))
    monkeypatch.setattr(
        config.experimental, "set_memory_growth", lambda card, on: asked["growth"].append(card)
    )
    monkeypatch.setattr(
        config,
        "set_logical_device_configuration",
        lambda card, parts: asked["logical"].update({card: len(parts)}),
    )
    return put


@pytest.mark.parametrize(
    "local_rank, local_devices, own",
    [(0, 1, ["GPU:0"]), (7, 1, ["GPU:7"]), (1, 4, ["GPU:4", "GPU:5", "GPU:6", "GPU:7"])],
)
def test_a_rank_takes_its_gpus(cards, local_rank, local_devices, own):
    asked = cards(8)
    devices.take_devices(local_rank, 8 // local_devices, local_devices, is_pipeline=False)
    assert asked["visible"] == own == asked["growth"] and not asked["logical"]


def test_the_one_gpu_that_a_rank_sees_is_its_own(cards, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    asked = cards(1)
    devices.take_devices(5, 8, 1, is_pipeline=False)
    assert asked["visible"] == ["GPU:0"]


@pytest.mark.parametrize(
    "local_rank, local_devices, visible, logical",
    [
        (0, 4, ["GPU:0"], {"GPU:0": 4}),
        (3, 1, ["GPU:0"], {"GPU:0": 1}),
        (1, 3, ["GPU:0", "GPU:1"], {"GPU:0": 1, "GPU:1": 2}),
    ],
)
def test_cards_are_cut(cards, monkeypatch, local_rank, local_devices, visible, logical):
    monkeypatch.setenv("DTRANSFORMER_LOGICAL_GPUS", "4")
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    asked = cards(2)
    devices.take_devices(local_rank, 2, local_devices, is_pipeline=False)
    assert (asked["visible"], asked["logical"], asked["growth"]) == (visible, logical, [])


def test_more_ranks_than_gpus_are_refused(cards):
    cards(2)
    with pytest.raises(RuntimeError, match="has 2 GPUs, but 4 ranks with 1 each.*LOGICAL_GPUS"):
        devices.take_devices(2, 4, 1, is_pipeline=False)


def test_more_devices_than_before_are_taken_where_none_has_to_be_another_card(cards):
    asked = cards(8)
    devices.take_devices(0, 2, 1, is_pipeline=False)
    devices.take_devices(0, 2, 4, is_pipeline=False)
    assert asked["visible"] == ["GPU:0", "GPU:1", "GPU:2", "GPU:3"] == asked["growth"][1:]


def test_another_card_than_before_is_refused(cards):
    cards(8)
    devices.take_devices(1, 2, 1, is_pipeline=False)
    with pytest.raises(RuntimeError, match="GPU:0 of this process is GPU:1.*become GPU:4 with"):
        devices.take_devices(1, 2, 4, is_pipeline=False)


@pytest.mark.parametrize("asked", ["0", "two", "-1"])
def test_wrong_numbers_of_logical_gpus(cards, monkeypatch, asked):
    monkeypatch.setenv("DTRANSFORMER_LOGICAL_GPUS", asked)
    cards(1)
    with pytest.raises(ValueError, match="LOGICAL_GPUS` must be a positive integer"):
        devices.take_devices(0, 1, 1, is_pipeline=False)


def test_a_tensor_before_init_is_told(cards, monkeypatch):
    cards(1)

    def refuse(*_):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with pytest.raises(RuntimeError, match=r"Call `dtransformer.init\(\)` before the first tensor"):
        devices.take_devices(0, 1, 1, is_pipeline=False)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with a driver, of whose GPUs TensorFlow sees none."""
    write_driver(tmp_path)
    monkeypatch.setattr(nvidia_driver, "_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_driver_without_gpus_is_told_once(driver, monkeypatch):
    with pytest.warns(
        UserWarning, match=r"NVIDIA driver \(580.159.04\), but TensorFlow sees no GPU"
    ):
        devices.take_devices(0, 1, 1, is_pipeline=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # asked for
    assert devices.unused_driver() is None


@pytest.fixture
def nodes(cards, monkeypatch, tmp_path):
    """A host of two nodes with two GPUs each; the cores that a rank was bound to, by calls."""
    bound, cuda = [], libcuda()
    write_bus(tmp_path, ["0-3,8-11", "0-3,8-11", "4-7", "4-7"])
    cards(4)
    monkeypatch.setattr(nvidia_driver, "_PCI", tmp_path)
    monkeypatch.setattr(nvidia_driver, "_cuda", lambda: (cuda, 0))
    monkeypatch.setattr(devices, "_cores_at_start", lambda: list(range(10)))
    monkeypatch.setattr(devices.os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    monkeypatch.setattr(devices.os, "listdir", lambda _: ["1"])
    return bound


@pytest.mark.parametrize(
    "local_rank, local_devices, near",
    [(0, 1, [0, 1, 2, 3, 8, 9]), (3, 1, [4, 5, 6, 7]), (0, 4, list(range(10)))],
)
def test_a_rank_computes_near_its_gpus(nodes, local_rank, local_devices, near):
    devices.take_devices(local_rank, 4 // local_devices, local_devices, is_pipeline=False)
    assert nodes == [near]


@pytest.mark.parametrize("variable", ["DTRANSFORMER_BIND_CORES", "no bus"])
def test_a_rank_stays_where_it_is(nodes, monkeypatch, tmp_path, variable):
    monkeypatch.setenv(variable, "0")
    if variable == "no bus":
        monkeypatch.setattr(nvidia_driver, "_PCI", tmp_path / "none")
    devices.take_devices(0, 4, 1, is_pipeline=False)
    assert not nodes


@pytest.mark.parametrize(
    "gpus, logical, ranks, each", [(8, 1, 1, 8), (8, 1, 4, 2), (1, 4, 1, 4), (0, 1, 1, 1)]
)
def test_all_gpus_of_a_host(cards, monkeypatch, gpus, logical, ranks, each):
    monkeypatch.setenv("DTRANSFORMER_LOGICAL_GPUS", str(logical))
    cards(gpus)
    assert devices.devices_per_rank(ranks) == each


def test_compiled_kernels_are_kept_on_each_host(monkeypatch, tmp_path):
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


def test_two_ranks_that_see_one_gpu_are_refused(cards, monkeypatch):
    cards(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    told = lambda own, gather: [[{}, "a:1", ["one", "0"]], [{}, "b:1", ["one", "0"]]]
    monkeypatch.setattr(launch_module, "exchange_json", told)
    hvd = types.SimpleNamespace(local_size=lambda: 2, size=lambda: 2)
    with pytest.raises(ValueError, match="Ranks 0 and 1 see the same GPUs of one.*DEVICES=0"):
        launch_module.compare_ranks(hvd, TransformerOpParallelConfig(), 0, 1, 0.0)


def test_a_horovod_without_nccl_is_refused_on_gpus(monkeypatch):
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


def test_the_memory_report_has_nccls_buffers(monkeypatch):
    """Of four ranks, rank 1 is in the group of all, one of data shards, and one of stages."""
    made = types.SimpleNamespace(global_process_set="all", add_process_set=tuple)
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    groups = ProcessGroups(1, 4, made)
    groups.whole_job()
    groups.create_division([(0, 1), (0, 1), (2, 3), (2, 3)])
    groups.create_division([(0, 2), (1, 3), (0, 2), (1, 3)])
    trainer = dense_trainer()
    trainer.train_on_batch(*points())
    assert len(trainer.memory_report().rows) == 4
    monkeypatch.setattr(memory, "device_type", lambda: "GPU")
    now = dataclasses.replace(job.current(), groups=groups)
    monkeypatch.setattr(memory.job, "current", lambda: now)
    mesh = types.SimpleNamespace(dim_names=["data", "model"])
    monkeypatch.setattr(memory.job, "mesh", lambda: None)
    assert trainer.memory_report()["NCCL's buffers"].planned == 3 * 2**28
    monkeypatch.setattr(memory.job, "mesh", lambda: mesh)
    assert memory._num_communicators() == 6
    monkeypatch.setenv("DTRANSFORMER_LOGICAL_GPUS", "2")
    monkeypatch.setattr(memory.job, "mesh", lambda: None)
    assert len(trainer.memory_report().rows) == 4


@pytest.mark.parametrize("name", [name for name, one in DEVICES.items() if one.memory_gb >= 32])
def test_the_planner_leaves_room_for_nccls_buffers(name):
    device = DEVICES[name]  # of data, context, model, two stages, and all of a mesh
    assert device.memory_gb * 1e9 - Cluster(device, 8).memory_bytes >= 6 * NCCL_BYTES


def test_devices_outlive_a_mesh():
    """To leave a mesh starts TensorFlow anew, which forgets devices, memory growth and threads."""
    done = launch(1, ["-c", TWICE], timeout=120)
    assert done.returncode == 0, tail(done.stdout, done.stderr)
    first, second, alone = done.stdout.splitlines()[-3:]
    assert first == second != "threads 0" and alone == "alone 1"
