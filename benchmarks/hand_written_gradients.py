"""Measure what each gradient that is written by hand saves of a step's memory; print JSON.

    python benchmarks/hand_written_gradients.py
    python benchmarks/hand_written_gradients.py --network llama --without none,gates,norms

Each is taken away in a process of its own, so that TensorFlow's takes its place. `tensor_mb` is the
peak of TensorFlow's allocator in a step, above what stays, the least of two: runs differ by 2 %. The
network is a language model of more than twelve blocks, which call one function, in mixed precision;
its batches have an open number of rows, as a dataset's whose last one is smaller.
"""

import argparse
import json
import subprocess
import sys

import paths  # noqa: F401

NETWORKS = {
    "gpt": {"dropout_rate": 0.1},
    "llama": {
        "dropout_rate": 0.0,
        "norm": "rms_norm",
        "gated": True,
        "hidden_act": "silu",
        "rotary_base": 10000.0,
        "num_kv_heads": 2,
        "use_bias": False,
    },
}


def take_away(name):
    """Let TensorFlow's gradient take the place of one that is written by hand."""
    import keras
    import tensorflow as tf

    from dtransformer.layers import activations, attention_core, dropout, elementwise, encoder, norm
    from dtransformer.layers import feed_forward as ffn
    from dtransformer.parallel.ops import feature_reductions
    from dtransformer.parallel.tensor_parallel import cross_entropy

    modules = {
        "dropout": dropout,
        "norms": norm,
        "biases": feature_reductions,
        "loss": cross_entropy,
    }
    if name in modules:
        modules[name].custom_gradient = lambda function: lambda *args: function(*args)[0]
    elif name == "residual sums":
        encoder.add = lambda x, y: x + y
    elif name == "masks of scores":
        attention_core.select = lambda mask, x, other: tf.where(
            mask, x, tf.constant(other, x.dtype)
        )
    elif name == "scales":
        attention_core.scale = elementwise.scale = lambda x, factor: x * factor
    elif name == "gelu":
        activations._ACTIVATIONS["gelu"] = keras.activations.gelu
    elif name == "gates":
        ffn.gated_product = lambda activation, gate, x: activation(gate) * x


WAYS = ("none", "norms", "gelu", "gates", "biases", "dropout", "masks of scores")
WAYS += ("residual sums", "scales", "loss")


def work(args):
    import keras
    import numpy as np
    import tensorflow as tf

    import dtransformer
    from dtransformer.models import CausalLM
    from harness.measure import passing_bytes

    take_away(args.worker)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    dtransformer.init()
    network = CausalLM(
        1000, hidden_size=256, num_heads=4, num_layers=14, max_length=128, **NETWORKS[args.network]
    )
    trainer = dtransformer.Trainer(network)
    trainer.compile("adamw")
    ids = np.random.default_rng(0).integers(4, 1000, (8, 129)).astype("int32")
    specs = (tf.TensorSpec([None, 128], tf.int32),) * 2
    batches = tf.data.Dataset.from_generator(
        lambda: iter([(ids[:, :-1], ids[:, 1:])]), output_signature=specs
    )
    step = lambda: trainer.fit(batches, epochs=1, verbose=0)
    step()
    step()
    peak = min(passing_bytes(step) for _ in range(2))
    print(json.dumps({"without": args.worker, "tensor_mb": round(peak / 1e6, 1)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="gpt", choices=NETWORKS)
    parser.add_argument("--without", default=",".join(WAYS), help="names, with commas")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    for name in args.without.split(","):
        arguments = [__file__, "--network", args.network, "--worker", name]
        done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, check=True)
        print(done.stdout.decode().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
