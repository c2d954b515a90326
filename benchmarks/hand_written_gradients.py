"""Measure how much memory each custom gradient saves in a step and print JSON.

    python benchmarks/hand_written_gradients.py
    python benchmarks/hand_written_gradients.py --network llama --without none,gates,norms

A separate process replaces each custom gradient with TensorFlow's gradient. `tensor_mb` is the peak of
TensorFlow's allocator in a step, above the memory before the step, the smaller of two measurements.
Runs differ by 2 %. The network is a language model in mixed precision with more than twelve blocks,
which share one function. Its batches have an unknown number of rows, as in a dataset with a smaller
last batch.
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


def replace_with_autodiff(name):
    """Replace a custom gradient with TensorFlow's gradient."""
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


VARIANTS = ("none", "norms", "gelu", "gates", "biases", "dropout", "masks of scores")
VARIANTS += ("residual sums", "scales", "loss")


def work(args):
    import keras
    import numpy as np
    import tensorflow as tf

    import dtransformer
    from dtransformer.models import CausalLM
    from harness.measure import passing_bytes

    replace_with_autodiff(args.worker)
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

    def step():
        return trainer.fit(batches, epochs=1, verbose=0)

    step()
    step()
    peak = min(passing_bytes(step) for _ in range(2))
    print(json.dumps({"without": args.worker, "tensor_mb": round(peak / 1e6, 1)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="gpt", choices=NETWORKS)
    parser.add_argument("--without", default=",".join(VARIANTS), help="names, separated by commas")
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    for name in args.without.split(","):
        arguments = [__file__, "--network", args.network, "--worker", name]
        completed = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, check=True)
        print(completed.stdout.decode().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
