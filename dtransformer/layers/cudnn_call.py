"""Calls of cuDNN's fused attention as StableHLO text, generated without TensorFlow.

Names, operands, layouts and the config are defined by XLA. JAX lowers
`dot_product_attention(implementation="cudnn")` to the same calls, and a test compares them. Letters
in shapes: b sequences, s queries, t keys, n query heads, m key and value heads, d features per
head.
"""

import dataclasses
import json

# Type -> its name in StableHLO, its name in the config, and the score of masked keys. cuDNN cannot
# subtract lower scores from themselves.
_TYPES = {"bfloat16": ("bf16", "BF16", -(2.0**41)), "float16": ("f16", "F16", -(2.0**15))}
_MAX_HEAD_DIM = 128
# Matrix products of the forward and the backward pass: the contracted dimension of the left and the
# right operand, then the batch dimensions (batch and heads) of each. XLA reads the layout from
# them.
_FORWARD = {"bmm1": ("33", "02", "02"), "bmm2": ("31", "01", "02")}
_BACKWARD = {
    "bmm1_grad_gemm1": ("21", "01", "02"),
    "bmm1_grad_gemm2": ("31", "01", "02"),
    "bmm2_grad_gemm1": ("21", "01", "02"),
    "bmm2_grad_gemm2": ("33", "02", "02"),
}
# Other fields of a layout in the config.
_POINTERS = "index", "pointer"
_SIZES = "element_size_in_bits", "memory_space", "dynamic_shape_metadata_prefix_bytes"


@dataclasses.dataclass(frozen=True)
class CudnnCall:
    """One variant of the call, with everything that its text depends on.

    Args:
        queries: Tuple `(b, s, n, d)`, the shape of queries.
        keys: Tuple `(b, t, m, d)`, the shape of keys and values.
        dtype: Name of the type of all operands.
        causal: Boolean, whether to hide later positions. Requires s = t. Defaults to `False`.
        window: Integer. Number of visible positions: the query's and those before it. `None` shows
            all (default).
        bias: Tuple `(b or 1, n or 1, s, t)`, the shape of the bias, or `None` (default).
        bias_gradient: Boolean, whether the backward pass returns the bias gradient. Defaults to
            `False`.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    dtype: str
    causal: bool = False
    window: int | None = None
    bias: tuple[int, ...] | None = None
    bias_gradient: bool = False

    @property
    def log_sums(self) -> tuple[int, ...]:
        """Shape `(b, n, s)` of the float32 log-sum-exp of the scores."""
        b, s, n, _ = self.queries
        return b, n, s

    @property
    def masked_score(self) -> float:
        """Value added to a score to mask it."""
        return _TYPES.get(self.dtype, _TYPES["bfloat16"])[2]

    def forward(self) -> str:
        """Return the StableHLO module of `(q, k, v[, bias]) -> (context, log_sums)`."""
        operands = [*self._inputs(), *self._biases()]
        sums = _tensor(self.log_sums, "f32")
        return self._module("", _FORWARD, operands, [self.queries], [sums])

    def backward(self) -> str:
        """Return the module of `(q, k, v, log_sums, dy[, bias], context) -> (dq, dk, dv[, dbias])`."""
        query_type = self._type(self.queries)
        sums = _tensor(self.log_sums, "f32")
        operands = [*self._inputs(), sums, query_type, *self._biases(), query_type]
        biases = self._biases() if self.bias_gradient else []
        results = [self.queries, self.keys, self.keys]
        return self._module("Backward", _BACKWARD, operands, results, biases)

    def name(self, backward: bool = False) -> str:
        """Return XLA's name of the call."""
        bias = "" if self.bias is None else "ScaleBias"
        return f"__cudnn$fmha{bias}Softmax{'Backward' if backward else ''}"

    def config(self, products: dict) -> dict:
        """Return the backend config that XLA reads, as a dictionary.

        Args:
            products: `_FORWARD` or `_BACKWARD`.
        """
        (b, s, n, _) = self.queries
        t = self.keys[1]
        unknown = {"dim_level_types": [], "dim_unique": [], "dim_ordered": [], "tiles": []}
        unknown |= {f"{name}_primitive_type": "PRIMITIVE_TYPE_INVALID" for name in _POINTERS}
        unknown |= dict.fromkeys(_SIZES, "0")
        scores = {
            "element_type": _TYPES[self.dtype][1],
            "dimensions": [str(size) for size in (b, n, s, t)],
            "tuple_shapes": [],
            "layout": {"minor_to_major": ["3", "2", "1", "0"], **unknown},
            "is_dynamic_dimension": [False] * 4,
        }
        algorithm = {"algo_id": "0", "math_type": "TENSOR_OP_MATH", "is_cudnn_frontend": True}
        algorithm |= {"tuning_knobs": {"17": "1", "24": "0"}, "workspace_size": "0"}
        config = {"algorithm": algorithm, "intermediate_tensor_shape": scores, "fmha_scale": 1.0}
        config |= {"mask_type": "CAUSAL" if self.causal else "NO_MASK", "is_flash_attention": True}
        config |= {"dropout_rate": 0.0, "seed": 42, "sliding_window_length": self.window or 0}
        config |= {"max_seg_per_batch": 1, "is_paged_attention": False}
        for name, (contracted, left, right) in products.items():
            config[f"{name}_dot_dimension_numbers"] = {
                "lhs_contracting_dimensions": [contracted[0]],
                "rhs_contracting_dimensions": [contracted[1]],
                "lhs_batch_dimensions": list(left),
                "rhs_batch_dimensions": list(right),
            }
        return {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}

    def _module(self, suffix, products, operands, results, plain_types):
        """Return a module that returns tensors `[b, length, heads, d]`, then other results.

        Args:
            suffix: `"Backward"` for the backward call, otherwise empty.
            products: Argument of `config`.
            operands: List of the operands' StableHLO types.
            results: List of shapes `(b, length, heads, d)`.
            plain_types: List of the types of the other results.
        """
        # cuDNN declares results as [b, heads, length, d], stored in the order [b, length, heads,
        # d].
        swapped = [self._type((b, heads, length, d)) for b, length, heads, d in results]
        rest = [*plain_types, "tensor<0xui8>"]  # The last result is cuDNN's workspace.
        types = [*swapped, *rest]
        layouts = [_layout("3120")] * len(swapped) + [_default_layout(kind) for kind in rest]
        result_types = [self._type(shape) for shape in results] + plain_types
        names = ", ".join(f"%x{i}" for i in range(len(operands)))
        arguments = ", ".join(f"%x{i}: {kind}" for i, kind in enumerate(operands))
        config = json.dumps(self.config(products)).replace('"', "\\22")
        operand_layouts = ", ".join(map(_default_layout, operands))
        call = (
            f"%r:{len(types)} = stablehlo.custom_call @{self.name(bool(suffix))}({names}) {{"
            f'api_version = 2 : i32, backend_config = "{config}", operand_layouts = '
            f"[{operand_layouts}], result_layouts = [{', '.join(layouts)}]}} : "
            f"({', '.join(operands)}) -> ({', '.join(types)})"
        )
        lines = [call]
        for i, (before, after) in enumerate(zip(swapped, result_types)):
            lines.append(
                f"%y{i} = stablehlo.transpose %r#{i}, dims = [0, 2, 1, 3] : ({before}) -> {after}"
            )
        returned = [f"%y{i}" for i in range(len(swapped))]
        returned += [f"%r#{len(swapped) + i}" for i in range(len(plain_types))]
        lines.append(f"return {', '.join(returned)} : {', '.join(result_types)}")
        # The first argument is the index of the platform that the module is compiled for.
        return (
            f"module @attention {{ func.func public @main(%platform: tensor<i32>, {arguments}) -> "
            f"({', '.join(result_types)}) {{\n" + "\n".join(lines) + "\n} }"
        )

    def _inputs(self):
        return [self._type(shape) for shape in (self.queries, self.keys, self.keys)]

    def _biases(self):
        return [] if self.bias is None else [self._type(self.bias)]

    def _type(self, shape):
        return _tensor(shape, _TYPES[self.dtype][0])


def unsupported_reason(call: CudnnCall) -> str | None:
    """Return the reason why cuDNN does not support a call, or `None` if it does."""
    d = call.queries[3]
    s = call.queries[1]
    t = call.keys[1]
    if call.dtype not in _TYPES:
        return f"tensors are {call.dtype}, not {' or '.join(_TYPES)}"
    if d % 8 or d > _MAX_HEAD_DIM:
        return f"heads have {d} features, not a multiple of 8 up to {_MAX_HEAD_DIM}"
    if call.bias is not None and (s % 2 or t % 2):
        return f"lengths must be even with a mask or bias, got {s} queries and {t} keys"
    return None


def _tensor(shape, element):
    return f"tensor<{'x'.join(map(str, shape))}x{element}>"


def _default_layout(kind):
    """Return the layout of a type whose last dimension varies fastest."""
    return _layout("3210"[-kind.count("x") :])


def _layout(order):
    """Return a layout attribute: the dimensions, starting with the fastest-varying."""
    if len(order) == 1:
        return "dense<0> : tensor<1xindex>"
    return f"dense<[{', '.join(order)}]> : tensor<{len(order)}xindex>"
