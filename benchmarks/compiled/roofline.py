"""Roofline of an XLA-optimized module, from the bytes and products of each kernel.

The time of a kernel is the maximum of operations / peak and bytes / bandwidth. Kernels in loops count
once for each iteration. The roofline ignores products inside cuDNN's attention, kernel launches, the
optimizer update, and that real products reach only 70 to 80 % of the peak. It is a lower bound, useful
for comparing two versions of a step.
"""

import collections
import dataclasses
import math
import re

# Dense operations per second by type, and bytes per second, of an H100.
PEAKS = {"bf16": 989e12, "f16": 989e12, "f32": 495e12}
BANDWIDTH = 3.35e12
_BITS = re.compile(r"\d+")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}
_FREE |= {"opt-barrier"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A line of a module: name, type as text, kind, and the rest of the line."""

    name: str
    type: str
    kind: str
    rest: str

    @property
    def operands(self):
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    def computation(self, key):
        match = re.search(rf"{key}=%?([\w.\-]+)", self.rest)
        return match and match[1]

    @property
    def place(self):
        """Path in the network without digits, so that blocks are added up."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return re.sub(r".*block__?|jit\(\w+\)/", "", re.sub(r"\d+", "", match[1] if match else ""))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel: total seconds, number of runs, and place in the network."""

    seconds: float
    times: int
    is_product: bool
    place: str


def parse_kernels(text: str) -> list[Kernel]:
    """Return the kernels of a module in text form."""
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        header = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif match := _LINE.match(line):
            current.append(Operation(*match.groups()))
    return list(_walk(computations, entry, 1))


def _walk(computations, name, times):
    types = {op.name: op.type for op in computations[name]}
    for op in computations[name]:
        if op.kind in _FREE:
            continue
        if op.kind == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', op.rest)
            repetitions = times * int(trips[1]) if trips else times
            yield from _walk(computations, op.computation("body"), repetitions)
        elif op.kind == "call":
            yield from _walk(computations, op.computation("to_apply"), times)
        else:
            work = _work(computations, op, types)
            product_seconds = sum(
                repetitions / PEAKS.get(kind, math.inf) for kind, repetitions in work.items()
            )
            moved = _size(op.type) + sum(_read(computations, op, types))
            seconds = max(product_seconds, moved / BANDWIDTH)
            yield Kernel(times * seconds, times, any(work.values()), op.place)


def _read(computations, op, types):
    """Yield the bytes that a kernel reads from each operand. Slices and gathers read only a part."""
    inner = computations.get(op.computation("calls"), [])
    parameters = {
        int(re.match(r"(\d+)\)", x.rest)[1]): x.name for x in inner if x.kind == "parameter"
    }
    for index, operand in enumerate(op.operands):
        uses = [x for x in inner if parameters.get(index) in x.operands]
        parts = ("slice", "gather", "dynamic-slice")
        if uses and all(x.kind in parts and x.operands[0] == parameters[index] for x in uses):
            yield sum(_size(x.type) for x in uses)
        else:
            yield _size(types.get(operand, ""))


def _work(computations, op, types):
    """Return the operations of the products in a kernel, by dtype of the factors."""
    work = collections.Counter()
    inner = computations.get(op.computation("calls"), [])
    inner_types = {x.name: x.type for x in inner}
    for x in inner:
        work += _work(computations, x, inner_types)
    contracted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)', op.rest)
    if contracted and (op.kind == "dot" or "gemm" in op.rest or "cublas" in op.rest):
        kind, dims = _SHAPE.search(types[op.operands[0]]).groups()
        dims = dims.split(",")
        sizes = [int(dims[int(i)]) for i in _BITS.findall(contracted[1])]
        out = [int(n) for n in _SHAPE.search(op.type)[2].split(",") if n]
        work[kind] += 2 * math.prod(sizes) * math.prod(out)
    return work


def _size(text):
    """Return the bytes of a type in text form. Tuples count all elements."""
    total = 0
    for kind, dims in _SHAPE.findall(text):
        bits = 8 if kind == "pred" else int((_BITS.findall(kind) or [0])[0])
        total += bits / 8 * math.prod(int(n) for n in dims.split(",") if n)
    return total


def summary(kernels: list[Kernel], rows: int = 0) -> dict:
    """Return the number of kernels and the milliseconds in total, of products and of slowest places."""
    places = collections.defaultdict(lambda: [0.0, 0])
    for kernel in kernels:
        place = places["product " * kernel.is_product + kernel.place[-60:]]
        place[0], place[1] = place[0] + kernel.seconds, place[1] + kernel.times
    longest = sorted(places.items(), key=lambda item: -item[1][0])[:rows]

    def milliseconds(seconds):
        return round(seconds * 1e3, 2)

    return {
        "kernels": sum(kernel.times for kernel in kernels),
        "milliseconds": milliseconds(sum(kernel.seconds for kernel in kernels)),
        "products": milliseconds(sum(x.seconds for x in kernels if x.is_product)),
        **({"places": {k: [milliseconds(s), n] for k, (s, n) in longest}} if rows else {}),
    }
