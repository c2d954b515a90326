"""Compile modules and JAX networks with XLA for a GPU that the machine does not have.

    python -m benchmarks.compiled.by_jax hlo FILE
    python -m benchmarks.compiled.by_jax network NAME xla|cudnn OUT
    python -m benchmarks.compiled.by_jax update NAME OUT
    python -m benchmarks.compiled.by_jax calls tests/layers/jax_cudnn_calls.json

The first command compiles a module that TensorFlow exported, the second a network's loss and
gradients, and the third an AdamW update with clipping. They write the optimized module as text (FILE.txt
or OUT) and print its memory in bytes as JSON. benchmarks/gpu_compiled.py runs this file in a separate
environment. The last command updates JAX's calls of cuDNN attention in a JSON file of cases.
"""

import json
import math
import pathlib
import re
import runpy
import sys

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax

from benchmarks.compiled import NETWORKS

_CARD = pathlib.Path(__file__).with_name("h100.textproto").read_text()


def device():
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_CARD, topology="1x1x1", topology_name="h100"
    )
    return topology.devices[0]


def report(text, memory, path):
    pathlib.Path(path).write_text(text)
    names = {"arguments": "argument_size_in_bytes", "temporary": "temp_size_in_bytes"}
    print(json.dumps({name: getattr(memory, field) for name, field in names.items()}))


def compile_hlo(path):
    computation = xla_client.XlaComputation(pathlib.Path(path).read_bytes())
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    # The conversion to StableHLO rejects copies, and XLA removes barriers.
    text = re.sub(r'("?)mhlo\.copy\b', r"\1mhlo.optimization_barrier", str(text))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
    h100, options = device(), xla_client.CompileOptions()
    program = h100.client.compile(module, _jax.DeviceList((h100,)), options)
    text = program.hlo_modules()[0].to_string()
    report(text, program.get_compiled_memory_stats(), path + ".txt")


# The networks have float32 weights and compute in bfloat16, except for norms in float32.


def norm(x, weights):
    wide = x.astype(jnp.float32)
    if len(weights) == 2:
        wide -= wide.mean(-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5) * weights[0]
    return (wide + weights[1] if len(weights) == 2 else wide).astype(jnp.bfloat16)


def dense(x, weights):
    y = x @ weights[0].astype(jnp.bfloat16)
    return y + weights[1].astype(jnp.bfloat16) if len(weights) == 2 else y


def apply_rotary(x):
    _, s, _, d = x.shape
    angles = jnp.arange(s)[:, None] * 10000.0 ** (-jnp.arange(d // 2) / (d // 2))
    cos, sin = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def hide_padding(bias, mask):
    """Return a bias `[1, n, s, t]` as `[b, n, s, t]` with low scores where a mask `[b, t]` is False."""
    return jnp.where(mask[:, None, None], bias, jnp.bfloat16(-(2.0**41)))


def relative(table, s, t, causal):
    """Return T5's position bias [1, n, s, t] from a table [32, n]."""
    distance = jnp.arange(t)[None] - jnp.arange(s)[:, None]
    ranges = 32 if causal else 16
    magnitude = jnp.maximum(-distance, 0) if causal else jnp.abs(distance)
    log_bucket = (
        jnp.log(jnp.maximum(magnitude, 1) / (ranges // 2)) / math.log(256 / ranges) * (ranges // 2)
    )
    bucket = jnp.where(magnitude < ranges // 2, magnitude, ranges // 2 + log_bucket.astype("int32"))
    bucket = jnp.minimum(bucket, ranges - 1) + (0 if causal else 16 * (distance > 0))
    return table[bucket].transpose(2, 0, 1)[None].astype(jnp.bfloat16)


class Network:
    def __init__(self, kind, implementation, blocks, h, n, m, f, length, rows, vocab_size):
        self.kind, self.implementation, self.n, self.m, self.d = kind, implementation, n, m, h // n
        self.rows, self.length = rows, length

        def one(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        plain = kind in ("llama", "t5")

        def norms():
            return (one(h),) if plain else (one(h), one(h))

        def product(a, b):
            return (one(a, b),) if plain else (one(a, b), one(b))

        width = (n + 2 * m) * self.d

        def block(cross):
            weights = {"qkv": product(h, width), "o": product(h, h), "n1": norms(), "n2": norms()}
            weights |= {"w1": product(h, f), "w2": product(f, h)}
            if kind == "llama":
                weights["gate"] = product(h, f)
            if cross:
                weights |= {"q": product(h, h), "kv": product(h, 2 * h), "co": product(h, h)}
                weights["n3"] = norms()
            return weights

        stacks = 2 if kind == "t5" else 1
        self.weights = {
            "e": one(vocab_size, h),
            "final": [norms() for _ in range(stacks)],
            "blocks": [[block(i == 1) for _ in range(blocks)] for i in range(stacks)],
        }
        if kind in ("gpt", "bert"):
            self.weights["p"] = one(length, h)
        if kind == "bert":
            self.weights |= {"types": one(2, h), "head": product(h, h), "head_norm": norms()}
            self.weights["head_bias"] = one(vocab_size)
        if kind == "t5":
            self.weights["tables"] = [one(32, n), one(32, n)]

    def attend(self, q, k, v, bias, causal):
        scale = 1.0 if self.kind == "t5" else self.d**-0.5
        if self.implementation == "cudnn":
            mask = fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK
            return fused.dot_product_attention(q, k, v, bias, scale=scale, mask_type=mask)
        options = {"is_causal": causal, "implementation": "xla", "scale": scale}
        return jax.nn.dot_product_attention(q, k, v, bias, **options)

    def heads(self, x):
        return x.reshape(self.rows, self.length, -1, self.d)

    def attention(self, x, w, bias, causal):
        sizes = [self.n * self.d, (self.n + self.m) * self.d]
        q, k, v = (self.heads(y) for y in jnp.split(dense(x, w["qkv"]), sizes, -1))
        if self.kind == "llama":
            q, k = apply_rotary(q), apply_rotary(k)
        return dense(self.attend(q, k, v, bias, causal).reshape(x.shape), w["o"])

    def cross(self, x, memory, w, bias):
        k, v = (self.heads(y) for y in jnp.split(dense(memory, w["kv"]), 2, -1))
        y = self.attend(self.heads(dense(x, w["q"])), k, v, bias, False)
        return dense(y.reshape(x.shape), w["co"])

    def feed_forward(self, x, w):
        y = dense(x, w["w1"])
        if self.kind == "llama":
            return dense(jax.nn.silu(dense(x, w["gate"])) * y, w["w2"])
        y = jax.nn.relu(y) if self.kind == "t5" else jax.nn.gelu(y, approximate=False)
        return dense(y, w["w2"])

    def stack(self, x, blocks, final, bias=None, causal=False, memory=None, cross_bias=None):
        for w in blocks:
            if self.kind == "bert":
                x = norm(x + self.attention(x, w, bias, causal), w["n1"])
                x = norm(x + self.feed_forward(x, w), w["n2"])
                continue
            x = x + self.attention(norm(x, w["n1"]), w, bias, causal)
            if memory is not None:
                x = x + self.cross(norm(x, w["n3"]), memory, w, cross_bias)
            x = x + self.feed_forward(norm(x, w["n2"]), w)
        return x if self.kind == "bert" else norm(x, final)

    def loss(self, w, ids, labels):
        x = w["e"][ids]
        if self.kind in ("gpt", "bert"):
            x += w["p"][None]
        if self.kind == "bert":
            x = norm(x + w["types"][0], w["final"][0])
        x = x.astype(jnp.bfloat16)
        if self.kind == "t5":
            source_bias, target = (
                relative(table, self.length, self.length, causal)
                for table, causal in zip(w["tables"], (False, True))
            )
            source_bias = hide_padding(source_bias, ids != 0)
            memory = self.stack(x, w["blocks"][0], w["final"][0], source_bias)
            no_bias = jnp.zeros((1, 1, self.length, self.length), jnp.bfloat16)
            cross_bias = hide_padding(no_bias, ids != 0)
            target = hide_padding(target, labels != 0)
            x = w["e"][labels].astype(jnp.bfloat16)
            x = self.stack(x, w["blocks"][1], w["final"][1], target, True, memory, cross_bias)
            x *= x.shape[-1] ** -0.5
        else:
            x = self.stack(x, w["blocks"][0], w["final"][0], causal=self.kind != "bert")
        if self.kind == "bert":
            x = norm(jax.nn.gelu(dense(x, w["head"]), approximate=False), w["head_norm"])
        logits = x @ w["e"].astype(jnp.bfloat16).T
        if self.kind == "bert":
            logits += w["head_bias"].astype(jnp.bfloat16)
        logits = logits.astype(jnp.float32)
        source_bias = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - source_bias).mean()


def replace_gpu_queries():
    """Replace JAX's queries to the installed GPU."""
    fused.check_cudnn_version = lambda: 91000
    fused.check_compute_capability = lambda *_: True
    fused.is_cuda_compute_capability_equal = lambda *_: False


def update_calls(path):
    replace_gpu_queries()
    # The package `harness` imports TensorFlow.
    custom_calls = runpy.run_path("harness/stablehlo.py")["custom_calls"]
    path = pathlib.Path(path)
    cases = json.loads(path.read_text())
    for case in cases.values():
        mask = fused.MaskType.CAUSAL if case["causal"] else fused.MaskType.NO_MASK
        options = {"mask_type": mask, "sliding_window_length": case["window"]}
        shapes = [case["queries"], case["keys"], case["keys"], case["bias"]]
        inputs = [jax.ShapeDtypeStruct(shape, case["dtype"]) for shape in shapes if shape]

        def loss(q, k, v, bias=None, options=options):
            return fused.dot_product_attention(q, k, v, bias, **options).sum()

        gradient = jax.jit(jax.grad(loss, argnums=tuple(range(len(inputs)))))
        lowered = gradient.trace(*inputs).lower(lowering_platforms=("cuda",))
        case["calls"] = custom_calls(lowered.as_text())
    path.write_text(json.dumps(cases, indent=1) + "\n")


def compile_network(name, implementation, path):
    replace_gpu_queries()
    network = Network(implementation=implementation, **NETWORKS[name])
    ids = jax.ShapeDtypeStruct((network.rows, network.length), jnp.int32)
    compile_function(jax.jit(jax.value_and_grad(network.loss)), (network.weights, ids, ids), path)


def compile_update(name, path):
    weights = Network(implementation="cudnn", **NETWORKS[name]).weights
    step = jax.ShapeDtypeStruct((), jnp.float32)
    function = jax.jit(adamw, donate_argnums=(0, 1, 2))
    compile_function(function, (weights, weights, weights, weights, step), path)


def adamw(weights, means, squares, gradients, step):
    """Return new weights, first moments and second moments."""
    norm = jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(gradients)))
    factor = 1.0 / jnp.maximum(norm, 1.0)
    rate = 1e-3 * jnp.sqrt(1.0 - 0.999**step) / (1.0 - 0.9**step)

    def update(w, m, v, g):
        g *= factor
        m += (g - m) * 0.1
        v += (g * g - v) * 0.001
        return w - 4e-6 * w - rate * m / (jnp.sqrt(v) + 1e-7), m, v

    return jax.tree.map(update, weights, means, squares, gradients)


def compile_function(function, arguments, path):
    single_device = jax.sharding.SingleDeviceSharding(device())

    def on_card(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=single_device)

    traced = function.trace(*jax.tree.map(on_card, arguments))
    program = traced.lower(lowering_platforms=("cuda",)).compile()
    report(program.as_text(), program.memory_analysis(), path)


if __name__ == "__main__":
    commands = {"hlo": compile_hlo, "network": compile_network, "update": compile_update}
    commands["calls"] = update_calls
    commands[sys.argv[1]](*sys.argv[2:])
