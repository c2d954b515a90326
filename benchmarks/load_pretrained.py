"""Load a large published model on two ranks, and fine-tune it with adapters; print JSON.

    python benchmarks/load_pretrained.py
    python benchmarks/load_pretrained.py --layers 2 --hidden_size 256 --vocab_size 1000

A folder of random Llama weights in bfloat16 is made first, in several files, and removed in the end;
the sizes are those of 1 B parameters. All figures are of files that lie in the page cache already.

Each round reads, and then loads, in processes that have done nothing before. `first_read_seconds` is
the time in which one process reads all tensors into memory, and `second_read_seconds` what it then
takes to do so again, in memory that the machine gave it the first time: much less on a virtual
machine. Both ranks of model_parallel=2 tell the seconds of `from_pretrained`; what they hold of the
weights, `share_bytes`; and `peak_bytes`, the most memory that it had in `from_pretrained` above what
it had before: anonymous memory, sampled every few milliseconds, which pages of files that it maps are
not a part of. In the last round low-rank adapters of queries and values are trained for three steps;
`training_peak_bytes` is the largest resident memory of each rank, all of it.
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

PER_FILE = 4  # blocks
STEPS, ROWS, LENGTH = 3, 2, 64
# As ranks that start: in this time a virtual machine gives back the memory that others have left.
START_SECONDS = 6


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden_size", type=int, default=2048)
    parser.add_argument("--ffn_hidden_size", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument("--dtype", default="bfloat16", help="of the network: a policy of Keras")
    parser.add_argument("--folder", type=pathlib.Path, help="where the model is; made if it is not")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training; 0 for none")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--worker", choices=["read", "load"], help=argparse.SUPPRESS)
    return parser.parse_args()


def config_of(arguments):
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
    """Write a folder of random weights in bfloat16, in several files with an index."""
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
        numbers = range(first, min(first + PER_FILE, arguments.layers))
        files.append(
            {f"model.layers.{i}.{k}": shape for i in numbers for k, shape in block.items()}
        )
    rng = np.random.default_rng(0)
    some = (rng.standard_normal(2**22, "float32") * 0.02).astype(ml_dtypes.bfloat16)
    places, folder_bytes = {}, 0
    for number, shapes in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        tensors = {}
        for key, shape in shapes.items():
            value = np.resize(np.roll(some, rng.integers(some.size)), shape)
            tensors[f"{key}.weight"] = np.ones(shape, value.dtype) if "norm" in key else value
            places[f"{key}.weight"], folder_bytes = name, folder_bytes + value.nbytes
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": folder_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_of(arguments)))


def read(folder):
    """Read all tensors into memory, twice; print what either has taken."""
    time.sleep(START_SECONDS)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        tensors = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        seconds.append(time.perf_counter() - start)
        sizes = [(tensor.size, tensor.nbytes) for file in tensors for tensor in file.values()]
        del tensors
    numbers, num_bytes = zip(*sizes)
    found = {
        "first_read_seconds": seconds[0],
        "second_read_seconds": seconds[1],
        "parameters": sum(numbers),
        "largest_bytes": max(num_bytes),
    }
    print(json.dumps(found), flush=True)


class Peak:
    """The most anonymous memory that this process has in a `with` block, above that before."""

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
    """Load the folder and train adapters on this rank; rank 0 prints what all have measured."""
    import keras

    import dtransformer
    from dtransformer.models import add_lora, from_pretrained
    from dtransformer.parallel.collectives.objects import all_gather_json
    from dtransformer.parallel.weights.sharded_variable import own_shards

    dtransformer.init(dtransformer.TransformerOpParallelConfig(model_parallel=2))
    keras.Variable(np.ones([256, 256], "float32")).assign(np.ones([256, 256]))  # what starts once
    with Peak() as peak:
        start, cpu_start = time.perf_counter(), time.process_time()
        network = from_pretrained(arguments.folder, dtype=arguments.dtype)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    found = {
        "load_seconds": seconds,
        "load_cpu_seconds": cpu_seconds,
        "share_bytes": sum(
            x.value.dtype.size * int(np.prod(x.shape)) for x in own_shards(network.variables)
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
        found |= {
            "adapters": len(kernels),
            "losses": losses,
            "step_seconds": times,
            "training_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
    everyone = all_gather_json(found, "found")
    if dtransformer.is_chief():
        print(json.dumps({"ranks": everyone}), flush=True)
    dtransformer.shutdown()


def measure(folder, options, steps):
    """Return what a process that reads, and ranks that load, have measured of a folder."""
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
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or pathlib.Path(made)
        if not (folder / "config.json").exists():
            folder.mkdir(exist_ok=True)
            make_folder(folder, arguments)
        steps = [0] * (arguments.rounds - 1) + [arguments.steps]
        rounds = [measure(folder, options, number) for number in steps]
        given = {name: value for name, value in vars(arguments).items() if name != "worker"}
        print(json.dumps({"options": given, "rounds": rounds}, default=str, indent=1))


if __name__ == "__main__":
    main()
