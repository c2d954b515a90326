"""Forward and backward passes compiled for an H100, on a machine without one; a line of JSON each.

    make bench-compiled
    python benchmarks/gpu_compiled.py [--networks gpt_355m,...] [--rows 20] [--recompute]

TensorFlow gives the module that XLA would compile; XLA of JAX's packages, in an environment of its own
(1.2 GB, which the make target makes), compiles it for the card, as it does JAX's network of the same
sizes. Printed are kernels, the roofline of these, and memory. docs/gpus.md has the results, and what
a roofline leaves out.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import paths  # noqa: F401

from benchmarks.compiled import NETWORKS
from benchmarks.compiled.roofline import kernels_of, summary

_ROOT = pathlib.Path(__file__).parents[1]
_FOLDER = _ROOT / "build/compiled"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ",".join(name for name in NETWORKS if name != "tiny")
    parser.add_argument("--networks", default=names, help="names, with commas")
    parser.add_argument("--attention", default="cudnn,reference", help="ours, with commas")
    parser.add_argument("--jax", default="cudnn,xla", help="JAX's, with commas; none for none")
    parser.add_argument("--environment", default=".venv-jax", help="made by make .venv-jax/ready")
    parser.add_argument("--recompute", action="store_true", help="ours with recomputed blocks, too")
    parser.add_argument("--dropout", type=float, default=0.0, help="the rate of ours")
    parser.add_argument("--rows", type=int, default=0, help="of places that take longest")
    parser.add_argument("--export", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_network(dropout, kind, attention, blocks, h, n, m, f, length, rows, vocab_size):
    """Return our network of the sizes in `NETWORKS`."""
    from dtransformer import models

    sizes = {"hidden_size": h, "num_heads": n, "ffn_hidden_size": f, "dropout_rate": dropout}
    if kind == "bert":
        return models.MaskedLM(vocab_size, num_layers=blocks, pad_id=None, **sizes)
    if kind == "t5":
        own = {"positions": "relative", "norm": "rms_norm", "use_bias": False, "hidden_act": "relu"}
        own |= {"post_layernorm_residual": False, "query_scale": 1.0, "scales_output": True}
        own |= {"encoder_layers": blocks, "decoder_layers": blocks, "start_id": 0}
        return models.EncoderDecoderLM(vocab_size, **sizes, **own)
    own = {"num_layers": blocks, "max_length": length, "pad_id": None, "implementation": attention}
    if kind == "llama":
        own |= {"positions": "rotary", "norm": "rms_norm", "gated": True, "hidden_act": "silu"}
        own |= {"num_kv_heads": m, "use_bias": False}
    return models.CausalLM(vocab_size, **sizes, **own)


def export(path, name, attention, recompute, dropout):
    """Write the module of a network's loss and gradients, traced as on a GPU."""
    import keras
    import tensorflow as tf

    import dtransformer
    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.parallel.ops import gpu_calls

    if attention == "cudnn":  # what asks the card is answered for it
        gpu_calls.is_on_gpu = gpu_calls.takes_gpu_branch = lambda: True
        gpu_calls._capability = lambda: (9, 0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    dtransformer.init(dtransformer.TransformerOpParallelConfig(recompute=recompute == "True"))
    sizes = NETWORKS[name]
    own = "auto" if attention == "cudnn" else attention
    network = make_network(float(dropout), attention=own, **sizes)
    network.build()
    loss, values = CrossEntropyLoss(), [v.value for v in network.trainable_variables]

    def step(ids, labels):
        with tf.GradientTape() as tape:
            inputs = {"source": ids, "target": labels} if sizes["kind"] == "t5" else ids
            value = tf.reduce_mean(loss(network(inputs, training=True), labels))
        return value, tape.gradient(value, values)

    spec = tf.TensorSpec((sizes["rows"], sizes["length"]), "int32")
    step = tf.function(step, jit_compile=True, autograph=False)
    module = step.experimental_get_compiler_ir(spec, spec)(stage="hlo_serialized")
    if attention == "cudnn" and b"__cudnn$fmha" not in module:
        raise ValueError(f"attention of {name} was asked of cuDNN, and its module has no such call")
    pathlib.Path(path).write_bytes(module)


def say(text, memory, rows, **what):
    sizes = {f"{name}_GB": round(number / 1e9, 2) for name, number in memory.items()}
    print(json.dumps({**what, **summary(kernels_of(text), rows), **sizes}), flush=True)


def run(command, what):
    """Return the JSON of a process' last line, or None and say what it was."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    if done.returncode:
        print(json.dumps({**what, "failed": done.stderr[-600:]}), flush=True)
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def main():
    arguments = parse_arguments()
    if arguments.export:
        export(*arguments.export)
        return
    _FOLDER.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(arguments.environment)
    (nvcc,) = folder.glob("lib/python3*/site-packages/nvidia/cuda_nvcc/bin")
    path = f"{folder / 'bin'}:{nvcc}:/usr/bin:/bin"
    variables = [f"PATH={path}", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"]
    jax = ["env", *variables, str(folder / "bin/python"), "-m", "benchmarks.compiled.by_jax"]
    for name in arguments.networks.split(","):
        for attention in arguments.attention.split(","):
            for recompute in (False, True) if arguments.recompute else (False,):
                what = {"network": name, "by": "ours", "attention": attention}
                what |= {"recompute": True} if recompute else {}
                what |= {"dropout": arguments.dropout} if arguments.dropout else {}
                out = str(_FOLDER / f"{name}-{attention}-{recompute}.pb")
                command = [sys.executable, __file__, "--export", out, name, attention]
                if run([*command, str(recompute), str(arguments.dropout)], what) is None:
                    continue
                memory = run([*jax, "hlo", out], what)
                if memory is not None:
                    say(pathlib.Path(out + ".txt").read_text(), memory, arguments.rows, **what)
        for attention in filter(None, arguments.jax.replace("none", "").split(",")):
            what = {"network": name, "by": "JAX", "attention": attention}
            out = str(_FOLDER / f"{name}-{attention}-jax.txt")
            memory = run([*jax, "network", name, attention, out], what)
            if memory is not None:
                say(pathlib.Path(out).read_text(), memory, arguments.rows, **what)


if __name__ == "__main__":
    main()
