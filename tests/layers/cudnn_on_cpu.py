"""Replace calls of cuDNN attention by StableHLO operations that XLA compiles for CPUs."""

import contextlib
import math
import os
from unittest import mock

from dtransformer.layers.cudnn_call import CudnnCall
from dtransformer.parallel.ops import gpu_calls


@contextlib.contextmanager
def gpu_code(shapes):
    """Take the GPU's code path, and append the shapes of each local call to a list."""

    def compute(module):
        def text(call):
            shapes.append((call.queries, call.keys, call.bias))
            return module(call)

        return text

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.dict(os.environ, {"DTRANSFORMER_GPU_BRANCH": "1"}))
        patch(mock.patch.object(gpu_calls, "is_on_gpu", lambda: True))
        patch(mock.patch.object(gpu_calls, "_capability", lambda: (9, 0)))
        for name, module in {"forward": forward, "backward": backward}.items():
            patch(mock.patch.object(CudnnCall, name, compute(module)))
        yield


class _Module:
    """Builder of a module's text. Values are `(name, shape)` tuples of float32 tensors."""

    def __init__(self):
        self.lines = []
        self.arguments = ["%platform: tensor<i32>"]

    def add(self, operation, shape, element="f32"):
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = stablehlo.{operation}{_type(shape, element)}")
        return name, tuple(shape)

    def argument(self, shape, element):
        name = f"%x{len(self.arguments)}"
        self.arguments.append(f"{name}: {_type(shape, element)}")
        return self.convert((name, shape), "f32", element)

    def convert(self, x, element, before="f32"):
        return self.add(f"convert {x[0]} : ({_type(x[1], before)}) -> ", x[1], element)

    def binary(self, name, x, y):
        return self.add(f"{name} {x[0]}, {y[0]} : ", x[1])

    def exp(self, x):
        return self.add(f"exponential {x[0]} : ", x[1])

    def constant(self, value):
        # An exact float32 value in hexadecimal, since there is no literal for infinity.
        text = "0xFF800000" if value == -math.inf else f"{value:e}"
        return self.add(f"constant dense<{text}> : ", ())

    def broadcast(self, x, dims, shape):
        return self.add(
            f"broadcast_in_dim {x[0]}, dims = {list(dims)} : ({_type(x[1])}) -> ", shape
        )

    def reshape(self, x, shape):
        return self.add(f"reshape {x[0]} : ({_type(x[1])}) -> ", shape)

    def reduce(self, name, x, axis):
        start = self.constant(0.0 if name == "add" else -1e30)
        shape = [size for i, size in enumerate(x[1]) if i != axis]
        return self.add(
            f"reduce({x[0]} init: {start[0]}) applies stablehlo.{name} across dimensions = [{axis}]"
            f" : ({_type(x[1])}, tensor<f32>) -> ",
            shape,
        )

    def product(self, x, y, contracted, left, right):
        """Return a batched product with dimensions `(batch, heads, rest of x, rest of y)`."""
        used = {contracted[0], *left}
        shape = [x[1][i] for i in left] + [s for i, s in enumerate(x[1]) if i not in used]
        used = {contracted[1], *right}
        shape += [s for i, s in enumerate(y[1]) if i not in used]
        return self.add(
            f"dot_general {x[0]}, {y[0]}, batching_dims = {left} x {right}, contracting_dims = "
            f"[{contracted[0]}] x [{contracted[1]}] : ({_type(x[1])}, {_type(y[1])}) -> ",
            shape,
        )

    def swap(self, x):
        b, first, second, d = x[1]
        return self.add(
            f"transpose {x[0]}, dims = [0, 2, 1, 3] : ({_type(x[1])}) -> ", (b, second, first, d)
        )

    def text(self, results):
        types = ", ".join(_type(shape, element) for (_, shape), element in results)
        names = ", ".join(x[0] for x, _ in results)
        return (
            f"module @attention {{ func.func public @main({', '.join(self.arguments)}) -> "
            f"({types}) {{\n" + "\n".join(self.lines) + f"\nreturn {names} : {types}\n}} }}"
        )


def _type(shape, element="f32"):
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def _repeat(module, x, n):
    """Repeat the heads of x [b, t, m, d] to [b, t, n, d]."""
    b, t, m, d = x[1]
    wide = module.broadcast(x, [0, 1, 2, 4], (b, t, m, n // m, d))
    return module.reshape(wide, (b, t, n, d))


def _sum_groups(module, x, m):
    """Sum gradients [b, t, n, d] over the heads that share one of m heads."""
    b, t, n, d = x[1]
    return module.reduce("add", module.reshape(x, (b, t, m, n // m, d)), 3)


def _scores(module, call, q, k, bias):
    scores = module.product(q, k, (3, 3), [0, 2], [0, 2])
    shape = scores[1]
    if bias is not None:
        dims = [i for i, size in enumerate(bias[1]) if size == shape[i]]
        flat = module.reshape(bias, [bias[1][i] for i in dims])
        scores = module.binary("add", scores, module.broadcast(flat, dims, shape))
    if call.causal:
        rows, columns = (module.add(f"iota dim = {axis} : ", shape) for axis in (2, 3))
        distance = module.binary("subtract", rows, columns)
        hidden = {"LT": 0.0} | ({"GE": float(call.window)} if call.window else {})
        for operator, limit in hidden.items():
            bound = module.broadcast(module.constant(limit), [], shape)
            condition = module.add(
                f"compare {operator}, {distance[0]}, {bound[0]} : ({_type(shape)}, {_type(shape)})"
                " -> ",
                shape,
                "i1",
            )
            low = module.broadcast(module.constant(-math.inf), [], shape)
            scores = module.add(
                f"select {condition[0]}, {low[0]}, {scores[0]} : {_type(shape, 'i1')}, ", shape
            )
    return scores


def _inputs(module, call, element):
    q, k, v = (module.argument(shape, element) for shape in (call.queries, call.keys, call.keys))
    n = call.queries[2]
    return q, _repeat(module, k, n), _repeat(module, v, n)


def forward(call: CudnnCall) -> str:
    """Return a module that computes the results of `call.forward()`."""
    module = _Module()
    element = {"bfloat16": "bf16", "float16": "f16"}[call.dtype]
    q, k, v = _inputs(module, call, element)
    bias = module.argument(call.bias, element) if call.bias else None
    scores = _scores(module, call, q, k, bias)
    shape = scores[1]
    largest = module.reduce("maximum", scores, 3)
    wide = module.broadcast(largest, [0, 1, 2], shape)
    exponentials = module.exp(module.binary("subtract", scores, wide))
    total = module.reduce("add", exponentials, 3)
    p = module.binary("divide", exponentials, module.broadcast(total, [0, 1, 2], shape))
    context = module.swap(module.product(p, v, (3, 1), [0, 1], [0, 2]))
    log_sums = module.binary("add", largest, module.add(f"log {total[0]} : ", total[1]))
    return module.text([(module.convert(context, element), element), (log_sums, "f32")])


def backward(call: CudnnCall) -> str:
    """Return a module that computes the results of `call.backward()`."""
    module = _Module()
    element = {"bfloat16": "bf16", "float16": "f16"}[call.dtype]
    q, k, v = _inputs(module, call, element)
    log_sums = module.argument(call.log_sums, "f32")
    dy = module.argument(call.queries, element)
    bias = module.argument(call.bias, element) if call.bias else None
    context = module.argument(call.queries, element)
    scores = _scores(module, call, q, k, bias)
    shape = scores[1]
    wide = module.broadcast(log_sums, [0, 1, 2], shape)
    p = module.exp(module.binary("subtract", scores, wide))
    means = module.reduce("add", module.swap(module.binary("multiply", dy, context)), 3)
    dp = module.product(dy, v, (3, 3), [0, 2], [0, 2])
    dp = module.binary("subtract", dp, module.broadcast(means, [0, 1, 2], shape))
    ds = module.binary("multiply", p, dp)
    dq = module.swap(module.product(ds, k, (3, 1), [0, 1], [0, 2]))
    m = call.keys[2]
    gradients = [dq]
    for weights, x in ((ds, q), (p, dy)):
        dx = module.swap(module.product(weights, x, (2, 1), [0, 1], [0, 2]))
        gradients.append(_sum_groups(module, dx, m))
    if call.bias_gradient:
        dbias = ds
        for axis in (1, 0):
            if call.bias[axis] == 1 and shape[axis] > 1:
                dbias = module.reduce("add", dbias, axis)
        gradients.append(module.reshape(dbias, call.bias))
    return module.text([(module.convert(x, element), element) for x in gradients])
