"""Dequantize published kernels in MXFP4 and FP8, which have one scale per block.

Reference:
    - Open Compute Project, 2023, "OCP Microscaling Formats (MX) Specification 1.0",
      §5.3, §5.4 and §6.3
    - [DeepSeek-AI, 2024, DeepSeek-V3, §3.3](https://arxiv.org/abs/2412.19437), for FP8
      with blocks of 128 × 128
"""

import dataclasses
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from dtransformer.errors import InputError

# The 16 values of the type E2M1. The highest bit is the sign.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
# scales have the type E8M0
_NOT_A_NUMBER = 255
_BIAS = 127
_SIZE = 128  # side length of an FP8 block


def mxfp4_values(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize an MXFP4 kernel, with a scale 2^(s - 127) per block of 32 inputs.

    Args:
        blocks: Uint8 array [outputs, blocks, 16]. Each byte has two elements, the lower half
            first.
        scales: Uint8 array [outputs, blocks] of exponents s.

    Returns:
        A bfloat16 array [inputs, outputs]. All values are exact. Blocks with the scale 255
        are NaN, and the two largest scales may give infinities.
    """
    values = _E2M1[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*scales.shape, 32)
    with np.errstate(over="ignore"):
        values = np.ldexp(values, scales.astype(np.int32)[..., None] - _BIAS)
    values[scales == _NOT_A_NUMBER] = np.nan
    return values.reshape(len(values), -1).T.astype(ml_dtypes.bfloat16)


def mxfp4_kernels(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize the kernels of several experts to [experts, inputs, outputs].

    Args:
        blocks: Uint8 array [experts, outputs, blocks, 16]; see `mxfp4_values`.
        scales: Uint8 array [experts, outputs, blocks].
    """
    result = np.empty((len(blocks), blocks.shape[2] * 32, blocks.shape[1]), ml_dtypes.bfloat16)
    for index, expert in enumerate(zip(blocks, scales)):  # one expert at a time, to save memory
        result[index] = mxfp4_values(*expert)
    return result


def fp8_values(elements: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize a matrix with one scale per block of 128 × 128 elements.

    Args:
        elements: Array [outputs, inputs] of any type.
        scales: Float32 array [⌈outputs / 128⌉, ⌈inputs / 128⌉].

    Returns:
        A float32 array [outputs, inputs].
    """
    values = elements.astype(np.float32)
    for row, row_scales in enumerate(scales):
        column_scales = np.repeat(row_scales, _SIZE)[: values.shape[1]]
        values[row * _SIZE : (row + 1) * _SIZE] *= column_scales
    return values


def _mxfp4_shape(blocks, scales):
    is_valid = len(blocks) == 4 and blocks[:-1] == scales and blocks[-1] == 16
    return (blocks[0], blocks[2] * 32, blocks[1]) if is_valid else None


def _fp8_shape(elements, scales):
    is_valid = len(elements) == 2 and scales == tuple(-(-size // _SIZE) for size in elements)
    return elements if is_valid else None


# `quant_method` in a config -> suffixes of the names of elements and scales, a function from their
# shapes to the tensor's shape, and a function from their arrays to its values.
_FORMS = {
    "mxfp4": ("_blocks", "_scales", _mxfp4_shape, mxfp4_kernels),
    "fp8": ("", "_scale_inv", _fp8_shape, fp8_values),
}


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """Tensor whose values are dequantized when they are accessed.

    Args:
        parts: Tuple of the names of its elements and scales.
        shape: Shape of the tensor.
        stored: Function from a name to the stored array.
        values: Function from both arrays, or equal slices of them, to values.
    """

    parts: tuple[str, str]
    shape: tuple[int, ...]
    stored: Callable[[str], np.ndarray]
    values: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return the values for a slice of the first dimension, such as some experts."""
        return self.values(*(self.stored(name)[part] for name in self.parts))


def quantization_form(config: Mapping) -> tuple | None:
    """Return the entry of `_FORMS` for a published config, or `None` if it is not supported."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("weight_block_size") not in (
        None,
        [_SIZE] * 2,
    ):
        return None
    return _FORMS.get(quantization.get("quant_method"))


def quantized_tensors(
    config: Mapping, shapes: Mapping[str, tuple], stored: Callable[[str], np.ndarray]
) -> dict[str, QuantizedTensor]:
    """Return the quantized tensors of a folder.

    Args:
        config: Config of the folder.
        shapes: Dict from the names of all stored tensors to their shapes.
        stored: Function from a name to the stored array.

    Returns:
        A dict from names to `QuantizedTensor`s.

    Raises:
        InputError: If the shapes of a tensor and its scales do not match.
    """
    result = {}
    form = quantization_form(config)
    if form is None:
        return result
    suffix, scales_suffix, get_shape, values = form
    for name in [x for x in shapes if x.endswith(scales_suffix)]:
        base_name = name.removesuffix(scales_suffix)
        part_shapes = [shapes.get(base_name + suffix), shapes[name]]
        shape = part_shapes[0] and get_shape(*part_shapes)
        if not shape:
            raise InputError(
                f"{base_name + suffix} has shape {part_shapes[0]}, which does not match its scales "
                f"{name} with shape {part_shapes[1]}."
            )
        result[base_name] = QuantizedTensor((base_name + suffix, name), shape, stored, values)
    return result
