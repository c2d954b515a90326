"""Create networks with quantized kernels, such as the frozen base of QLoRA."""

import contextlib
from collections.abc import Iterable, Iterator

from dtransformer.models.weight_paths import is_matched
from dtransformer.parallel.ops.block_quantization import KINDS
from dtransformer.parallel.variable_factory import quantization


@contextlib.contextmanager
def quantize(kind: str = "nf4", targets: str | Iterable[str] = "*_kernel") -> Iterator[None]:
    """Context manager that builds networks with frozen, quantized kernels.

    `"nf4"` stores 4 bits per element (NormalFloat), `"int8"` 8 bits. Both have an absolute maximum
    per block of 64 elements, which is also quantized to 8 bits. An element of a large kernel takes
    0.516 or 1.016 bytes. Kernels are quantized while they are loaded, one at a time. A product
    dequantizes its kernel in both passes; the result is not stored in between. Add adapters with
    `add_lora` to train the network (QLoRA).

    Reference:
        - [Dettmers et al., 2023](https://arxiv.org/abs/2305.14314)

    Args:
        kind: `"nf4"` or `"int8"`. Defaults to `"nf4"`.
        targets: String or iterable of strings. Patterns of kernel paths without the network's
            name; see `freeze`. Kernels of attention, feed-forward layers, experts and `Linear`
            qualify. Defaults to `"*_kernel"`, all kernels of the blocks.

    Raises:
        ValueError: If `kind` is unknown, a kernel does not consist of full blocks, or `targets`
            matches no kernel.

    Example:

        with models.quantize("nf4"):
            network = models.from_pretrained("models/llama-3.1-8b", dtype="bfloat16")
        models.add_lora(network, rank=16, targets="*_kernel")
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {', '.join(KINDS)}, got {kind!r}.")
    targets = [targets] if isinstance(targets, str) else list(targets)
    matches = []

    def select(path):
        if not is_matched(path.partition("/")[2], targets):
            return None
        matches.append(path)
        return kind

    with quantization.set(select):
        yield
    if not matches:
        raise ValueError(
            f"`targets={targets!r}` matches no kernel that was built. Build the network inside of "
            "the `with` block, and use patterns such as '*_kernel'."
        )
