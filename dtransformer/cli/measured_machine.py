"""Measure matrix products, memory and communication of this machine as a `planner.Device`."""

import dataclasses
import math
import os
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import yaml

from dtransformer import nvidia_driver
from dtransformer.inputs.files import write_text_atomically
from dtransformer.layers import TransformerEncoderLayer
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.collectives.transport import all_reduce_together
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.initialize import init, shutdown
from dtransformer.parallel.mesh.axis_rules import relayout
from dtransformer.parallel.mesh.batch import put_replicated
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.pipeline_parallel.p2p import peers
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import device_type
from dtransformer.planner.clusters import Constants, Device, Link
from dtransformer.planner.layouts import Layouts
from dtransformer.planner.machine import this_cpu, this_device
from dtransformer.planner.shape import ModelShape
from dtransformer.planner.work import block_passes
from dtransformer.transformer_config import TransformerConfig


def measure_to(path: str | os.PathLike) -> None:
    """Measure the devices of this job while all ranks are busy. Rank 0 writes and prints the result.

    Args:
        path: Path of the YAML file to write.
    """
    device = measure_device(round(own_memory_gb(), 3))
    if job.is_chief():
        write_text_atomically(path, device_to_yaml(device))
        ranks = "1 rank" if job.size() == 1 else f"{job.size()} ranks"
        print(f"{path}: a device of {ranks}:\n{device_to_yaml(device)}")
    shutdown()


def own_memory_gb() -> float:
    """Return the memory of this rank's device in 10^9 bytes, also for GPUs that no table lists."""
    if device_type() == "CPU":
        return this_cpu().memory_gb
    return nvidia_driver.gpu_memory_bytes() / 1e9 or this_device().memory_gb


def device_to_yaml(device: Device) -> str:
    """Return a device as YAML.

    Example:

    >>> from dtransformer.planner.clusters import get_device
    >>> device_to_yaml(get_device("a100")).splitlines()[:2]
    ['name: a100-80', 'tflops_16_bit: 312']
    """
    fields = dataclasses.asdict(device)
    for name, value in fields.items():
        if isinstance(value, float):
            fields[name] = float(f"{value:.4g}")
    return yaml.safe_dump(fields, sort_keys=False)


_ROUNDS = 5  # rounds per measurement
_ROUND_SECONDS = 0.2
_BLOCKS = 4
_CALLS = 40  # collectives per round
_PAUSE_SECONDS = 0.01  # maximum pause before a collective
_SMALL_BYTES = 2**12
_IN_BUCKET = 16


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Problem sizes of a measurement, large enough that kernel launches take little of the time.

    Args:
        rows: Rows of the matrix products.
        few: Rows or features of small products.
        features: Tuple of feature sizes of the products.
        flops: FLOPs of the products in one call.
        memory_items: Elements of the vector for the memory bandwidth. On CPUs it has the size of an
            activation, which caches may contain.
        block: Rows, length, hidden size and heads of a Transformer block.
        large_bytes: Bytes of a large collective.
    """

    rows: int = 1024
    few: int = 64
    features: tuple = (256, 512, 1024)
    flops: float = 2e9
    memory_items: int = 2**19
    block: tuple = (4, 96, 384, 6)
    large_bytes: int = 2**22


# The CPU's sizes would fit into a GPU's cache of 50 MB, and would take less time than a launch.
_SIZES = {
    "CPU": _Sizes(),
    "GPU": _Sizes(8192, 512, (2048, 4096, 8192), 2e12, 2**28, (4, 768, 3072, 24), 2**25),
}


def _sizes():
    return _SIZES[device_type()]


def measure_device(memory_gb: float) -> Device:
    """Measure the device of each rank while all ranks are busy, and return it as a `Device`.

    One rank measures products and memory. Several ranks also measure their communication. All ranks
    must call it, before `dtransformer.init`, because it calls `init` with several layouts.

    Args:
        memory_gb: Float. Memory of a device in 10^9 bytes.
    """
    cores = len(os.sched_getaffinity(0))
    ranks = int(os.environ.get("HOROVOD_LOCAL_SIZE") or 1)
    init(TransformerOpParallelConfig())
    peak, half_rows, half_features = measure_products()
    links = {}
    if job.size() > 1:
        links["data"] = _link(_all_reduce_seconds, job.size())
    overhead = _overhead_seconds()
    data = links.get("data", Link(1.0, 100.0))
    device = Device(
        name="measured",
        tflops_16_bit=measure_products("bfloat16")[0] / 1e12,
        tflops_32_bit=peak / 1e12,
        memory_gb=memory_gb,
        memory_gb_per_second=_memory_bytes_per_second() / 1e9,
        inside_gb_per_second=data.gb_per_second,
        between_gb_per_second=data.gb_per_second,
        devices_per_node=ranks,
        constants=Constants(
            product_share=1.0,
            half_rows=round(half_rows, 1),
            half_features=round(half_features, 1),
            memory_share=1.0,
            pass_overhead_us=round(overhead * 1e6),
            inside_share=1.0,
            between_share=1.0,
            hop_us=data.latency_us,
            source="measured",
        ),
        source="measured",
        sharing=max(ranks / cores, 1.0),
        hides_reductions=device_type() == "GPU",
    )
    # A disturbed measurement can exceed the memory bandwidth.
    share = min(_block_bytes_per_second(device) / 1e9 / device.memory_gb_per_second, 1.0)
    constants = dataclasses.replace(device.constants, memory_share=round(share, 3))
    if job.size() > 1:
        init(TransformerOpParallelConfig(pipeline_stage=job.size(), micro_batch_num=job.size()))
        links["stage"] = _link(_send_seconds)
        init(TransformerOpParallelConfig(model_parallel=job.size()))
        links["model"] = _link(_mesh_seconds, job.size())
    return dataclasses.replace(device, constants=constants, links=links)


def measure_products(dtype: str = "float32") -> tuple[float, float, float]:
    """Measure matrix products.

    Args:
        dtype: Name of the dtype. Defaults to `"float32"`.

    Returns:
        A `(flops, half_rows, half_features)` tuple: the peak in FLOP/s, and the numbers of rows and
        features that reach half of it. The peak is the best of several sizes, because the largest
        size does not fit into the caches of CPUs.
    """
    rows = _sizes().rows
    few = _sizes().few
    min_features = _sizes().features[0]
    peak = max(_product_flops(rows, features, features, dtype) for features in _sizes().features)
    few_rows = _product_flops(few, min_features, min_features, dtype)
    few_features = _product_flops(rows, few, few, dtype)
    # Solve speed = peak / (1 + half_rows / M) / (1 + half_features / N)² for both halves.
    half_features = max(few * ((peak / few_features) ** 0.5 - 1), 0.0)
    slower = (1 + half_features / min_features) ** 2
    half_rows = max(few * (peak / few_rows / slower - 1), 0.0)
    return peak, half_rows, half_features


def _product_flops(rows, inputs, outputs, dtype="float32"):
    times = int(min(max(_sizes().flops / (2.0 * rows * inputs * outputs), 2), 32))

    def normal(shape, seed):
        return tf.cast(tf.random.stateless_normal(shape, [0, seed]), dtype)

    many = [normal([rows, inputs], seed) for seed in range(times)]
    y = normal([inputs, outputs], 99)
    products = tf.function(lambda many: tf.add_n([tf.matmul(x, y)[0, 0] for x in many]))
    seconds = _seconds(lambda: products(many).numpy())
    return 2.0 * rows * inputs * outputs * times / seconds


def _memory_bytes_per_second():
    num_elements = _sizes().memory_items
    x = tf.Variable(tf.zeros([num_elements]))
    ones = tf.ones([num_elements])
    step = tf.function(lambda: x.assign_add(ones)[0])  # Each element needs two reads and one write.
    return 12.0 * num_elements / _seconds(lambda: step().numpy())


def _overhead_seconds():
    """Return the seconds of a tiny block's forward pass, which is mainly overhead."""
    block, x = _make_block(1, 2, 8, 2)

    @tf.function
    def blocks(x):
        for _ in range(_BLOCKS):
            x = block(x, training=True)
        return x

    return _seconds(lambda: blocks(x).numpy()) / _BLOCKS


def _make_block(rows, length, hidden_size, num_heads):
    """Return a built Transformer block and its inputs."""
    block = TransformerEncoderLayer(hidden_size, num_heads, 4 * hidden_size)
    x = tf.random.stateless_normal([rows, length, hidden_size], [0, 1])
    block(x)
    return block, x


def _block_bytes_per_second(device):
    """Return the memory bandwidth of a block's forward and backward pass in bytes per second.

    The time beyond the matrix products, as predicted for `device`, is attributed to the bytes that
    `planner.work` counts.
    """
    rows, length, hidden, heads = _sizes().block
    config = TransformerConfig(hidden_size=hidden, num_heads=heads, vocab_size=4, num_layers=1)
    model = ModelShape("block", config, length)
    block, x = _make_block(rows, length, hidden, heads)

    @tf.function
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(block(x, training=True))
        return tf.add_n([tf.reshape(g, [-1])[0] for g in tape.gradient(loss, [x, *block.weights])])

    layouts = Layouts.from_columns(micro_batch=rows)

    def planned(rate):
        infinite = dataclasses.replace(device, memory_gb_per_second=rate)
        return float(block_passes(infinite, model, model.kinds[0], layouts, False).total[0])

    products = planned(math.inf)
    beyond = max(_seconds(lambda: both(x).numpy()) - products, 0.01 * products)
    return (planned(1.0) - products) * 1e9 / beyond


def _all_reduce_seconds(size):
    """Return the seconds of an all-reduce of `size` bytes in a bucket of 16 tensors."""
    x = [tf.zeros([size // 4 // _IN_BUCKET])] * _IN_BUCKET
    group = job.world_group()
    step = tf.function(lambda x: all_reduce_together(x, group, f"measure_{size}")[0][0])
    return _collective_seconds(lambda: step(x).numpy())


def _send_seconds(size):
    """Return half the round-trip seconds of `size` bytes between stages 0 and 1. Others wait."""
    link = peers()
    x = tf.zeros([size // 4])
    specs = [([size // 4], "float32")]

    def there_and_back():
        if job.stage()[0] == 0:
            link.send([x], 1, "measure_there")
            link.receive(specs, 1, "measure_back").result()
        elif job.stage()[0] == 1:
            link.receive(specs, 0, "measure_there").result()
            link.send([x], 0, "measure_back").result()

    return _collective_seconds(there_and_back) / 2


def _mesh_seconds(size):
    """Return the seconds of a sum of `size` bytes over a mesh's model axis with all ranks."""
    x = put_replicated(np.ones([job.size(), size // 4], np.float32))

    def sums(x):
        return relayout(tf.reduce_sum(relayout(x, ("model", None)), axis=0), (None,))

    step = MeshFunction(sums, [])
    return _collective_seconds(lambda: step(x))


def _link(seconds_of, members=1):
    """Fit a `Link` to the seconds of a small and a large collective.

    Args:
        seconds_of: Function from a size in bytes to seconds.
        members: Number of ranks in the ring of an all-reduce, or 1 for a send.
    """
    size = _sizes().large_bytes
    small = seconds_of(_SMALL_BYTES)
    large = seconds_of(size)
    sent = 2 * (members - 1) / members * size if members > 1 else size
    rate = sent / max(large - small, 0.1 * large)
    return Link(round(rate / 1e9, 4), 0.0, round(small * 1e6, 1))


def _seconds(run: Callable) -> float:
    """Return the seconds of one call of `run`, which all ranks repeat equally often.

    Equal numbers keep all ranks busy, so that none uses the cores of ranks that wait.
    """
    run()
    start = time.perf_counter()
    run()
    once = max(time.perf_counter() - start, 1e-6)
    times = max(all_gather_json(max(int(_ROUND_SECONDS / once), 1), "measure/times"))
    return _min_of_rounds(run, np.zeros(times))


def _collective_seconds(run: Callable) -> float:
    """Return the mean seconds of a collective that starts at a random time.

    Horovod starts collectives at fixed intervals. A collective directly after another one would wait
    for a full interval, and the fastest of many for none. Therefore all ranks pause for the same
    random time before each call.
    """
    run()
    return _min_of_rounds(run, np.random.default_rng(0).uniform(0, _PAUSE_SECONDS, _CALLS))


def _min_of_rounds(run, pauses):
    """Return the mean seconds per call in the fastest round, measured on its slowest rank.

    Other programs on the machine only add time, so the minimum is the best estimate. All ranks start
    a round together.

    Args:
        run: Function without arguments.
        pauses: Array of seconds to pause before each call.
    """
    rounds = []
    for _ in range(_ROUNDS):
        job.barrier()
        seconds = 0.0
        for pause in pauses:
            if pause:
                time.sleep(pause)
            start = time.perf_counter()
            run()
            seconds += time.perf_counter() - start
        rounds.append(seconds / len(pauses))
    return min(
        max(seconds_of_ranks)
        for seconds_of_ranks in zip(*all_gather_json(rounds, "measure/rounds"))
    )
