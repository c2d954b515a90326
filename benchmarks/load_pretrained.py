"""Load a large published model on two ranks, fine-tune it with adapters, and print JSON.

    python benchmarks/load_pretrained.py
    python benchmarks/load_pretrained.py --layers 2 --hidden_size 256 --vocab_size 1000

The benchmark first writes random Llama weights with 1 B parameters in bfloat16, in several files, and
removes them at the end. The files are in the page cache when they are read.

Each round starts fresh processes that read or load the files:

- `first_read_seconds`: time in which one process reads all tensors into memory
- `second_read_seconds`: time for reading them again, into memory that the process already has. This
  is much faster on a virtual machine.
- `load_seconds`: time of `from_pretrained` on each rank of model_parallel=2
- `share_bytes`: bytes of the rank's weights
- `peak_bytes`: increase of the peak of anonymous memory during `from_pretrained`, sampled every few
  milliseconds. Memory-mapped files do not count.

The last round trains low-rank adapters of queries and values for three steps. `training_peak_bytes`
is the peak resident memory of each rank.
"""

import argparse
import json
import pathlib
import resource
import tempfile
import threading
import time

import ml_dtypes
import numpy as np
import paths  # noqa: F401
from safetensors.numpy import load_file, save_file

from harness.printed import printed_json

PER_FILE = 4  # Number of blocks in a file.
STEPS, ROWS, LENGTH = 3, 2, 64
# Ranks need about as long to start. In this time, a virtual machine reclaims freed memory.
START_SECONDS = 6


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden_size", type=int, default=2048)
    parser.add_argument("--ffn_hidden_size", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16", help="Keras dtype policy of the network")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="folder of the model, created if it does not exist"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="training steps, or 0 to skip training"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--worker", choices=["read", "load"], help=argparse.SUPPRESS)
    return parser.parse_args()


def make_config(arguments):
    return {
        "model_type": "llama",
        "vocab_size": arguments.vocab_size,
        "hidden_size": arguments.hidden_size,
        "intermediate_size": arguments.ffn_hidden_size,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def make_folder(folder, arguments):
    """Write random bfloat16 weights to several files with an index."""
    h, f, shared = arguments.hidden_size, arguments.ffn_hidden_size, arguments.hidden_size // 4
    block = {
        "input_layernorm": (h,),
        "self_attn.q_proj": (h, h),
        "self_attn.k_proj": (shared, h),
        "self_attn.v_proj": (shared, h),
        "self_attn.o_proj": (h, h),
        "post_attention_layernorm": (h,),
        "mlp.gate_proj": (f, h),
        "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
    }
    tables = {"model.embed_tokens": (arguments.vocab_size, h), "lm_head": (arguments.vocab_size, h)}
    files = [{**tables, "model.norm": (h,)}]
    for first in range(0, arguments.layers, PER_FILE):
        block_indices = range(first, min(first + PER_FILE, arguments.layers))
        files.append(
            {f"model.layers.{i}.{k}": shape for i in block_indices for k, shape in block.items()}
        )
    rng = np.random.default_rng(0)
    random_values = (rng.standard_normal(2**22, "float32") * 0.02).astype(ml_dtypes.bfloat16)
    file_by_tensor, folder_bytes = {}, 0
    for file_index, shapes in enumerate(files):
        name = f"model-{file_index + 1:05}-of-{len(files):05}.safetensors"
        tensors = {}
        for key, shape in shapes.items():
            value = np.resize(np.roll(random_values, rng.integers(random_values.size)), shape)
            tensors[f"{key}.weight"] = np.ones(shape, value.dtype) if "norm" in key else value
            file_by_tensor[f"{key}.weight"], folder_bytes = name, folder_bytes + value.nbytes
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": folder_bytes}, "weight_map": file_by_tensor}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(make_config(arguments)))


def read(folder):
    """Read all tensors into memory twice and print the seconds of both reads."""
    time.sleep(START_SECONDS)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        tensors = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        seconds.append(time.perf_counter() - start)
        sizes = [(tensor.size, tensor.nbytes) for file in tensors for tensor in file.values()]
        del tensors
    sizes_of_tensors, num_bytes = zip(*sizes)
    report = {
        "first_read_seconds": seconds[0],
        "second_read_seconds": seconds[1],
        "parameters": sum(sizes_of_tensors),
        "largest_bytes": max(num_bytes),
    }
    print(json.dumps(report), flush=True)


class Peak:
    """Context manager that measures the peak increase of the process' anonymous memory."""

    def __enter__(self):
        self._before = self._most = anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._ended.wait(0.003):
            self._most = max(self._most, anonymous_bytes())

    def __exit__(self, *error):
        self._ended.set()
        self._thread.join()
        self.bytes = max(self._most, anonymous_bytes()) - self._before


def anonymous_bytes():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def load(arguments):
    """Load the folder and train adapters on this rank. Rank 0 prints the results of all ranks."""
    import keras

    import dtransformer
    from dtransformer.models import add_lora, from_pretrained
    from dtransformer.parallel.collectives.objects import all_gather_json
    from dtransformer.parallel.weights.sharded_variable import get_local_shards

    dtransformer.init(dtransformer.TransformerOpParallelConfig(model_parallel=2))
    keras.Variable(np.ones([256, 256], "float32")).assign(np.ones([256, 256]))  # Start TensorFlow.
    with Peak() as peak:
        start, cpu_start = time.perf_counter(), time.process_time()
        network = from_pretrained(arguments.folder, dtype=arguments.dtype)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    report = {
        "load_seconds": seconds,
        "load_cpu_seconds": cpu_seconds,
        "share_bytes": sum(
            x.value.dtype.size * int(np.prod(x.shape)) for x in get_local_shards(network.variables)
        ),
        "peak_bytes": peak.bytes,
    }
    if arguments.steps:
        kernels = add_lora(network)
        trainer = dtransformer.Trainer(network)
        trainer.compile(keras.optimizers.AdamW(1e-3))
        ids = np.random.default_rng(0).integers(3, arguments.vocab_size, (ROWS, LENGTH + 1))
        losses, times = [], []
        for _ in range(arguments.steps):
            start = time.perf_counter()
            logs = trainer.train_on_batch(ids[:, :-1], ids[:, 1:], return_dict=True)
            losses.append(float(logs["loss"]))
            times.append(time.perf_counter() - start)
        report |= {
            "adapters": len(kernels),
            "losses": losses,
            "step_seconds": times,
            "training_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
    reports = all_gather_json(report, "found")
    if dtransformer.is_chief():
        print(json.dumps({"ranks": reports}), flush=True)
    dtransformer.shutdown()


def measure(folder, options, steps):
    """Start a process that reads the folder and ranks that load it, and return their results."""
    arguments = [__file__, "--folder", folder, *options, "--steps", str(steps), "--worker"]
    reading = printed_json("reading", 1, [*arguments, "read"], "parameters", timeout=600)
    ranks = printed_json("loading", 2, [*arguments, "load"], "ranks", timeout=1800)["ranks"]
    slowest = max(rank["load_seconds"] for rank in ranks)
    return {
        "load_over_first_read": slowest / reading["first_read_seconds"],
        "load_over_second_read": slowest / reading["second_read_seconds"],
        "peak_above_share": [rank["peak_bytes"] - rank["share_bytes"] for rank in ranks],
        **reading,
        "ranks": ranks,
    }


def main():
    arguments = parse_arguments()
    if arguments.worker == "read":
        return read(arguments.folder)
    if arguments.worker:
        return load(arguments)
    options = [
        text
        for name in ("hidden_size", "ffn_hidden_size", "layers", "vocab_size", "dtype")
        for text in (f"--{name}", str(getattr(arguments, name)))
    ]
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = arguments.folder or pathlib.Path(temporary_folder)
        if not (folder / "config.json").exists():
            folder.mkdir(exist_ok=True)
            make_folder(folder, arguments)
        steps = [0] * (arguments.rounds - 1) + [arguments.steps]
        rounds = [measure(folder, options, num_steps) for num_steps in steps]
        options_report = {
            name: value for name, value in vars(arguments).items() if name != "worker"
        }
        print(json.dumps({"options": options_report, "rounds": rounds}, default=str, indent=1))


if __name__ == "__main__":
    main()
