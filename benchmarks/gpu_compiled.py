"""Compile forward and backward passes for an H100 without a GPU; print one line of JSON each.

    make bench-compiled
    python benchmarks/gpu_compiled.py [--networks gpt_355m,...] [--rows 20] [--recompute] [--update]
        [--model-parallel 2]

TensorFlow exports the module that XLA would compile. XLA from JAX's packages compiles this module, and
a JAX network of the same sizes, for the GPU. The make target installs these packages in a separate
environment (1.2 GB). Prints kernels, their roofline and memory. See docs/gpus.md for the results and
for the limits of a roofline.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import paths  # noqa: F401

from benchmarks.compiled import NETWORKS
from benchmarks.compiled.roofline import parse_kernels, summary

_ROOT = pathlib.Path(__file__).parents[1]
_FOLDER = _ROOT / "build/compiled"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ",".join(name for name in NETWORKS if name != "tiny")
    parser.add_argument("--networks", default=names, help="names, separated by commas")
    parser.add_argument("--attention", default="cudnn,reference", help="ours, or none")
    parser.add_argument("--jax", default="cudnn,xla", help="JAX's implementations, or none")
    parser.add_argument("--environment", default=".venv-jax", help="see make .venv-jax/ready")
    parser.add_argument("--recompute", action="store_true", help="add runs with recomputed blocks")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout rate of our network")
    parser.add_argument("--rows", type=int, default=0, help="number of slowest places to print")
    parser.add_argument("--update", action="store_true", help="add the optimizer updates")
    parser.add_argument(
        "--model-parallel",
        type=int,
        default=1,
        help="degree of tensor parallelism of our network; adds the program of one device, without "
        "its all-reduces",
    )
    parser.add_argument("--export", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--export-lowered", help=argparse.SUPPRESS)
    parser.add_argument("--export-update", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def implementations(text):
    """Return the names in a list with commas, or no names for `"none"`."""
    return [] if text == "none" else text.split(",")


def make_network(dropout, kind, attention, blocks, h, n, m, f, length, rows, vocab_size):
    """Return our network with sizes from `NETWORKS`."""
    from dtransformer import models

    sizes = {"hidden_size": h, "num_heads": n, "ffn_hidden_size": f, "dropout_rate": dropout}
    if kind == "bert":
        return models.MaskedLM(vocab_size, num_layers=blocks, pad_id=None, **sizes)
    if kind == "t5":
        options = {
            "positions": "relative",
            "norm": "rms_norm",
            "use_bias": False,
            "hidden_act": "relu",
        }
        options |= {"post_layernorm_residual": False, "query_scale": 1.0, "scales_output": True}
        options |= {"encoder_layers": blocks, "decoder_layers": blocks, "start_id": 0}
        return models.EncoderDecoderLM(vocab_size, **sizes, **options)
    options = {
        "num_layers": blocks,
        "max_length": length,
        "pad_id": None,
        "implementation": attention,
    }
    if kind == "llama":
        options |= {"positions": "rotary", "norm": "rms_norm", "gated": True, "hidden_act": "silu"}
        options |= {"num_kv_heads": m, "use_bias": False}
    return models.CausalLM(vocab_size, **sizes, **options)


def export(path, name, attention, recompute, dropout, model_parallel):
    """Write the XLA module of a network's loss and gradients, traced as on a GPU."""
    import keras
    import numpy as np

    import dtransformer
    from benchmarks.compiled.mesh_program import lower, start_mesh
    from dtransformer.parallel.ops import gpu_calls

    if attention == "cudnn":  # Replace the queries to the GPU.
        gpu_calls.is_on_gpu = gpu_calls.takes_gpu_branch = lambda: True
        gpu_calls._capability = lambda: (9, 0)
    keras.config.set_dtype_policy("mixed_bfloat16")
    sizes = NETWORKS[name]
    on_mesh = int(model_parallel) > 1
    if on_mesh:
        start_mesh(int(model_parallel), recompute == "True")
    else:
        dtransformer.init(dtransformer.TransformerOpParallelConfig(recompute=recompute == "True"))
    implementation = "auto" if attention == "cudnn" else attention
    network = make_network(float(dropout), attention=implementation, **sizes)
    network.build()

    def inputs(ids):
        return {"source": ids, "target": ids} if sizes["kind"] == "t5" else ids

    shape = sizes["rows"], sizes["length"]
    if on_mesh:
        ids = np.ones(shape, "int32")
        pathlib.Path(path).write_bytes(lower(network, inputs(ids), ids))
        os._exit(0)  # The step may still be running.
    module = network_module(network, inputs, shape)
    if attention == "cudnn" and b"__cudnn$fmha" not in module:
        raise ValueError(f"The module of {name} does not call cuDNN's attention.")
    pathlib.Path(path).write_bytes(module)


def export_lowered(path):
    """Replace a function that `export` lowered for a mesh by its XLA module."""
    from benchmarks.compiled.mesh_program import compile_lowered

    path = pathlib.Path(path)
    path.write_bytes(compile_lowered(path.read_bytes()))


def network_module(network, inputs, shape):
    """Return the serialized XLA module of a network's loss and gradients.

    Args:
        network: A network.
        inputs: Function of ids that returns the network's inputs.
        shape: Shape `(rows, length)` of the ids.
    """
    import tensorflow as tf

    from dtransformer.layers import CrossEntropyLoss

    loss, values = CrossEntropyLoss(), [v.value for v in network.trainable_variables]

    def step(ids, labels):
        with tf.GradientTape() as tape:
            value = loss(network(inputs(ids), training=True), labels)
        return value, tape.gradient(value, values)

    spec = tf.TensorSpec(shape, "int32")
    step = tf.function(step, jit_compile=True, autograph=False)
    return step.experimental_get_compiler_ir(spec, spec)(stage="hlo_serialized")


def export_update(path, name):
    """Write the XLA module of a network's gradient norm, clipping and AdamW update."""
    import keras
    import tensorflow as tf

    import dtransformer
    from dtransformer.trainers.optimizer.sharded_optimizer import ShardedOptimizer
    from dtransformer.trainers.step_runner import StepCompiler

    dtransformer.init()
    network = make_network(0.0, attention="auto", **NETWORKS[name])
    network.build()
    weights = network.trainable_variables
    optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
    compiler = StepCompiler(jit_compile=True)
    optimizer_step = ShardedOptimizer(optimizer, weights, [None] * len(weights), compiler)

    def update(*gradients):
        gradients, values, norm, _ = optimizer_step.reduce_and_clip(list(gradients))
        optimizer_step.apply(gradients, values, norm)
        return norm

    specs = [tf.TensorSpec(weight.shape, "float32") for weight in weights]
    update = tf.function(update, jit_compile=True, autograph=False)
    module = update.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")
    pathlib.Path(path).write_bytes(module)


def print_summary(text, memory, rows, **description):
    sizes = {f"{name}_GB": round(num_bytes / 1e9, 2) for name, num_bytes in memory.items()}
    print(json.dumps({**description, **summary(parse_kernels(text), rows), **sizes}), flush=True)


def run(command, description):
    """Run a process and return the JSON it prints. If it fails, print the error and return `None`."""
    completed = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    if completed.returncode:
        print(json.dumps({**description, "failed": completed.stderr[-600:]}), flush=True)
        return None
    lines = [line for line in completed.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def run_updates(name, jax):
    """Print the update of our library and the update of JAX."""
    out = str(_FOLDER / f"{name}-update.pb")
    description = {"network": name, "by": "ours", "part": "update"}
    if run([sys.executable, __file__, "--export-update", out, name], description) is not None:
        memory = run([*jax, "hlo", out], description)
        if memory is not None:
            print_summary(pathlib.Path(out + ".txt").read_text(), memory, 0, **description)
    description["by"] = "JAX"
    out = str(_FOLDER / f"{name}-update-jax.txt")
    memory = run([*jax, "update", name, out], description)
    if memory is not None:
        print_summary(pathlib.Path(out).read_text(), memory, 0, **description)


def main():
    arguments = parse_arguments()
    if arguments.export:
        export(*arguments.export)
        return
    if arguments.export_lowered:
        export_lowered(arguments.export_lowered)
        return
    if arguments.export_update:
        export_update(*arguments.export_update)
        return
    _FOLDER.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(arguments.environment)
    (nvcc,) = folder.glob("lib/python3*/site-packages/nvidia/cuda_nvcc/bin")
    path = f"{folder / 'bin'}:{nvcc}:/usr/bin:/bin"
    variables = [f"PATH={path}", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"]
    jax = ["env", *variables, str(folder / "bin/python"), "-m", "benchmarks.compiled.by_jax"]
    for name in arguments.networks.split(","):
        for attention in implementations(arguments.attention):
            for recompute in (False, True) if arguments.recompute else (False,):
                description = {"network": name, "by": "ours", "attention": attention}
                description |= {"recompute": True} if recompute else {}
                if arguments.model_parallel > 1:
                    description["model_parallel"] = arguments.model_parallel
                description |= {"dropout": arguments.dropout} if arguments.dropout else {}
                out = str(_FOLDER / f"{name}-{attention}-{recompute}.pb")
                command = [sys.executable, __file__, "--export", out, name, attention]
                options = recompute, arguments.dropout, arguments.model_parallel
                if run([*command, *map(str, options)], description) is None:
                    continue
                if arguments.model_parallel > 1:
                    lowered = [sys.executable, __file__, "--export-lowered", out]
                    if run(lowered, description) is None:
                        continue
                memory = run([*jax, "hlo", out], description)
                if memory is not None:
                    print_summary(
                        pathlib.Path(out + ".txt").read_text(),
                        memory,
                        arguments.rows,
                        **description,
                    )
        for attention in implementations(arguments.jax):
            description = {"network": name, "by": "JAX", "attention": attention}
            out = str(_FOLDER / f"{name}-{attention}-jax.txt")
            memory = run([*jax, "network", name, attention, out], description)
            if memory is not None:
                print_summary(pathlib.Path(out).read_text(), memory, arguments.rows, **description)
        if arguments.update:
            run_updates(name, jax)


if __name__ == "__main__":
    main()
