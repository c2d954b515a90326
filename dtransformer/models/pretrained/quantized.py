"""Kernels of experts of published files in MXFP4: four bits an element, a scale for each 32.

Reference: Open Compute Project, 2023, "OCP Microscaling Formats (MX) Specification 1.0", §5.3, §5.4
and §6.3.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from dtransformer.errors import InputError

# The 16 elements of the type E2M1, of which the highest bit is the sign.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_NOT_A_NUMBER, _BIAS = 255, 127  # of scales of the type E8M0
ENDINGS = _BLOCKS, _SCALES = "_blocks", "_scales"  # of the names of a tensor's two parts


def is_quantized(config: Mapping) -> bool:
    """Return whether a published config says that its folder has such tensors."""
    about = config.get("quantization_config")
    return isinstance(about, dict) and about.get("quant_method") == "mxfp4"


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


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """Kernels [experts, inputs, outputs], of which some experts are computed as asked for.

    Args:
        blocks, scales: functions that return the arrays of all experts.
        shape: the kernels'.
    """

    blocks: Callable[[], np.ndarray]
    scales: Callable[[], np.ndarray]
    shape: tuple[int, ...]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return the kernels of some experts."""
        blocks, scales = self.blocks()[part], self.scales()[part]
        result = np.empty((len(blocks), *self.shape[1:]), ml_dtypes.bfloat16)
        for number, own in enumerate(zip(blocks, scales)):  # one at a time, as memory is short
            result[number] = mxfp4_values(*own)
        return result


def quantized_tensors(
    config: Mapping, shapes: Mapping[str, tuple], stored: Callable[[str], np.ndarray]
) -> dict[str, QuantizedTensor]:
    """Return the tensors of a folder that are MXFP4, by their names without endings.

    Args:
        config: the folder's.
        shapes: dict of the names of all tensors and their shapes.
        stored: a function of a name that returns the array.

    Raises:
        InputError: a tensor's scales lack, or are of another shape.
    """
    found = {}
    for name in [x for x in shapes if x.endswith(_BLOCKS) and is_quantized(config)]:
        own, shape = name.removesuffix(_BLOCKS), shapes[name]
        of_scales = shapes.get(own + _SCALES)
        if len(shape) != 4 or shape[:-1] != of_scales or shape[-1] != 16:
            raise InputError(
                f"{name} is {list(shape)}, its scales {own + _SCALES} are "
                f"{of_scales and list(of_scales)}: they do not fit together"
            )
        parts = [functools.partial(stored, own + ending) for ending in ENDINGS]
        found[own] = QuantizedTensor(*parts, (shape[0], shape[2] * 32, shape[1]))
    return found
