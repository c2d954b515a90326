"""Kernels of published files in MXFP4 and FP8: few bits an element, and a scale for each block.

References: Open Compute Project, 2023, "OCP Microscaling Formats (MX) Specification 1.0", §5.3, §5.4
and §6.3; DeepSeek-AI, 2024, "DeepSeek-V3", arXiv 2412.19437, §3.3, for blocks of 128 × 128 in FP8.
"""

import dataclasses
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from dtransformer.errors import InputError

# The 16 elements of the type E2M1, of which the highest bit is the sign.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_NOT_A_NUMBER, _BIAS = 255, 127  # of scales of the type E8M0
_SIZE = 128  # of a block's sides in FP8


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the kernel of blocks of 32 inputs, which have one scale 2^(s - 127): bfloat16.

    Args:
        blocks: uint8 [outputs, blocks, 16], two elements each, the lower half first.
        scales: uint8 [outputs, blocks].

    Returns:
        An array [inputs, outputs]. All values are exact in bfloat16; those of a scale that is no
        number are NaN, those of the two largest ones may be infinite.
    """
    values = _E2M1[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*scales.shape, 32)
    with np.errstate(over="ignore"):
        values = np.ldexp(values, scales.astype(np.int32)[..., None] - _BIAS)
    values[scales == _NOT_A_NUMBER] = np.nan
    return values.reshape(len(values), -1).T.astype(ml_dtypes.bfloat16)


def mxfp4_kernels(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the kernels [experts, inputs, outputs] of several; see `mxfp4_values`."""
    result = np.empty((len(blocks), blocks.shape[2] * 32, blocks.shape[1]), ml_dtypes.bfloat16)
    for number, own in enumerate(zip(blocks, scales)):  # one at a time, as memory is short
        result[number] = mxfp4_values(*own)
    return result


def fp8_values(elements: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values, float32, of a matrix of which each block of 128 × 128 has a scale.

    Args:
        elements: [outputs, inputs] of any type.
        scales: float32 [⌈outputs / 128⌉, ⌈inputs / 128⌉].
    """
    values = elements.astype(np.float32)
    for row, of_row in enumerate(scales):
        own = np.repeat(of_row, _SIZE)[: values.shape[1]]
        values[row * _SIZE : (row + 1) * _SIZE] *= own
    return values


def _mxfp4_shape(blocks, scales):
    is_one = len(blocks) == 4 and blocks[:-1] == scales and blocks[-1] == 16
    return (blocks[0], blocks[2] * 32, blocks[1]) if is_one else None


def _fp8_shape(elements, scales):
    is_one = len(elements) == 2 and scales == tuple(-(-size // _SIZE) for size in elements)
    return elements if is_one else None


# `quant_method` of a config -> endings of the names of elements and scales, a function of their shapes
# that returns the tensor's, and one of their arrays that returns its values.
_FORMS = {
    "mxfp4": ("_blocks", "_scales", _mxfp4_shape, mxfp4_kernels),
    "fp8": ("", "_scale_inv", _fp8_shape, fp8_values),
}


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A tensor whose values are computed where they are asked for.

    Args:
        parts: the names of its elements and its scales.
        shape: its shape.
        stored: a function of a name that returns the array.
        values: a function of both arrays, or of the same entries of them.
    """

    parts: tuple[str, str]
    shape: tuple[int, ...]
    stored: Callable[[str], np.ndarray]
    values: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return the values of some entries of the first dimension: of some experts, or all."""
        return self.values(*(self.stored(name)[part] for name in self.parts))


def form_of(config: Mapping) -> tuple | None:
    """Return the form of `_FORMS` that a published config says its tensors have; None for none."""
    about = config.get("quantization_config")
    if not isinstance(about, dict) or about.get("weight_block_size") not in (None, [_SIZE] * 2):
        return None
    return _FORMS.get(about.get("quant_method"))


def quantized_tensors(
    config: Mapping, shapes: Mapping[str, tuple], stored: Callable[[str], np.ndarray]
) -> dict[str, QuantizedTensor]:
    """Return the tensors of a folder that have scales, by their names.

    Args:
        config: the folder's.
        shapes: dict of the names of all tensors and their shapes.
        stored: a function of a name that returns the array.

    Raises:
        InputError: a tensor's scales are of another shape.
    """
    found, form = {}, form_of(config)
    if form is None:
        return found
    ending, of_scales, shape_of, values = form
    for name in [x for x in shapes if x.endswith(of_scales)]:
        own = name.removesuffix(of_scales)
        both = [shapes.get(own + ending), shapes[name]]
        shape = both[0] and shape_of(*both)
        if not shape:
            raise InputError(f"{own + ending} is {both[0]}, its scales {name} are {both[1]}")
        found[own] = QuantizedTensor((own + ending, name), shape, stored, values)
    return found
