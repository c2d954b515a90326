"""Rotary position embedding (RoPE) and its extensions to longer sequences."""

import dataclasses
import functools
import math

import numpy as np
import tensorflow as tf

from dtransformer.layers import elementwise

_LENGTH = "original_max_position_embeddings"
# Required fields of each type of scaling.
_SCALING = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": ("factor", _LENGTH),
}
_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": None,
    "mscale_all_dim": None,
    "attention_factor": None,
    "truncate": True,
    "llama_4_scaling_beta": None,
}


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of queries and keys.

    Args:
        base: Float. Base of the angles, see `rotary_frequencies`. Defaults to `10000.0`.
        fraction: Float. Fraction of the features to rotate. Defaults to `1.0`.
        scaling: Dictionary. Extension to longer sequences, see `rotary_frequencies`. Defaults to
            `None`.
    """

    base: float = 10000.0
    fraction: float = 1.0
    scaling: dict | None = None

    @property
    def query_beta(self) -> float | None:
        """Beta of `query_factor`, or `None`. With it, scores depend on absolute positions."""
        return (self.scaling or {}).get("llama_4_scaling_beta")

    def frequencies(self, num_features: int) -> np.ndarray:
        """Return `rotary_frequencies` for heads of `num_features` features."""
        return rotary_frequencies(num_features, self.base, self.fraction, self.scaling)

    def apply(
        self, q: tf.Tensor, k: tf.Tensor, positions: tf.Tensor, num_features: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Rotate queries and keys.

        Args:
            q, k: Tensors of shape `[b, n, s, d]` and `[b, m, s, d]`.
            positions: Integer tensor of shape `[b or 1, s]`.
            num_features: Integer. Number of leading features of a head with positions.

        Returns:
            A `(q, k)` tuple of tensors of the same shapes.
        """
        frequencies = self.frequencies(num_features)
        factor = attention_factor(self.scaling)
        q = rotate(q, positions, frequencies, factor)
        k = rotate(k, positions, frequencies, factor)
        if self.query_beta:
            factors = tf.cast(query_factor(positions, self.scaling), q.dtype)
            q = elementwise.scale(q, factors[:, None, :, None])
        return q, k


def rotary_frequencies(
    head_dim: int, base: float = 10000.0, fraction: float = 1.0, scaling: dict | None = None
) -> np.ndarray:
    """Return the angle by which each pair of features rotates per position.

    Types of scaling, which extend a model to longer sequences:

    - `"linear"` divides all angles by `factor`
    ([Chen et al., 2023](https://arxiv.org/abs/2306.15595)).
    - `"ntk"` increases the base, so the longest wavelength grows by `factor` and the shortest is
    unchanged ([Peng et al., 2023](https://arxiv.org/abs/2309.00071), section 3.1).
    - `"llama3"` divides angles by `factor` if the wavelength fits fewer than `low_freq_factor`
    times into the original length, keeps those that fit more than `high_freq_factor` times, and
    interpolates in between ([Grattafiori et al., 2024](https://arxiv.org/abs/2407.21783)).
    - `"yarn"` does the same with the limits `beta_slow` and `beta_fast`, and interpolates by
    feature index (Peng et al., 2023, section 3.2). See also `attention_factor`.

    Reference: [Su et al., 2021](https://arxiv.org/abs/2104.09864), section 3.2

    Args:
        head_dim: Integer. Features d per head.
        base: Float above 1. The longest wavelength is about 2π·base positions. Defaults to
            `10000.0`.
        fraction: Float in (0, 1]. Fraction of the features to rotate, starting with the first.
            Defaults to `1.0`.
        scaling: Dictionary with `"type"`, `"factor"`, and for `"llama3"` also `"low_freq_factor"`,
            `"high_freq_factor"` and `"original_max_position_embeddings"`. `"yarn"` requires
            `"original_max_position_embeddings"` and accepts `"beta_fast"` (default 32),
            `"beta_slow"` (1), `"truncate"` (True: round to entire features), `"attention_factor"`,
            `"mscale"`, `"mscale_all_dim"`, and `"llama_4_scaling_beta"` of `query_factor`. Defaults
            to `None`.

    Returns:
        A float64 array of shape `[r / 2]` in radians, where r is the number of rotated features.

    Raises:
        ValueError: If an argument is out of range or the type of scaling is unknown.
    """
    if not (base > 1 and 0 < fraction <= 1):
        raise ValueError(
            f"`rotary_base={base}` must be above 1, and `rotary_fraction={fraction}` must be in "
            "(0, 1]."
        )
    num_rotated = int(head_dim * fraction)
    if num_rotated % 2 or not num_rotated:
        raise ValueError(
            f"`rotary_fraction={fraction}` of `head_dim={head_dim}` rotates {num_rotated} features, "
            "expected an even number above 0."
        )
    kind = None if scaling is None else _check_scaling(scaling)
    if kind == "ntk":
        base = ntk_base(base, scaling["factor"], num_rotated)
    frequencies = base ** (-np.arange(0, num_rotated, 2) / num_rotated)
    if kind in (None, "ntk"):
        return frequencies
    factor = scaling["factor"]
    if kind == "linear":
        return frequencies / factor
    if kind == "yarn":
        unscaled = 1 - _interpolation_ramp({**_YARN, **scaling}, base, num_rotated)
    else:
        rotations = scaling[_LENGTH] * frequencies / (2 * math.pi)
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        unscaled = np.clip((rotations - low) / (high - low), 0, 1)
    return frequencies * (unscaled + (1 - unscaled) / factor)


def _interpolation_ramp(scaling, base, num_rotated):
    """Return the fraction of each pair's angle that YaRN interpolates: `[r / 2]`, in [0, 1]."""

    def feature(rotations):
        """Return the index of the pair with this number of rotations in the original length."""
        return (
            num_rotated
            * math.log(scaling[_LENGTH] / (rotations * 2 * math.pi))
            / (2 * math.log(base))
        )

    low = feature(scaling["beta_fast"])
    high = feature(scaling["beta_slow"])
    if scaling["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, num_rotated - 1)
    high += 0.001 * (low == high)
    return np.clip((np.arange(num_rotated // 2) - low) / (high - low), 0, 1)


def attention_factor(scaling: dict | None) -> float:
    """Return the factor of cosines and sines. Scores grow with its square.

    For YaRN this is `"attention_factor"` if set, otherwise 0.1·ln(factor) + 1 (Peng et al., 2023,
    section 3.4), or with both `"mscale"` and `"mscale_all_dim"` the quotient of their
    `yarn_magnitude` ([DeepSeek-AI, 2024](https://arxiv.org/abs/2405.04434), published code). Other
    types of scaling have the factor 1.

    Args:
        scaling: Dictionary or `None`, see `rotary_frequencies`.
    """
    if scaling is None or scaling["type"] != "yarn":
        return 1.0
    options = {**_YARN, **scaling}
    magnitude = functools.partial(yarn_magnitude, options["factor"])
    if options["attention_factor"] is not None:
        return float(options["attention_factor"])
    if options["mscale"] and options["mscale_all_dim"]:
        return magnitude(options["mscale"]) / magnitude(options["mscale_all_dim"])
    return magnitude(1)


def yarn_magnitude(factor: float, scale: float) -> float:
    """Return 0.1·scale·ln(factor) + 1, or 1 for a factor of at most 1. See `attention_factor`."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def query_factor(positions: tf.Tensor, scaling: dict) -> tf.Tensor:
    """Return the factor 1 + β·ln(1 + ⌊p / L⌋) of queries at position p.

    β is `"llama_4_scaling_beta"` of the scaling, and L its original length. Llama 4 and Ministral 3
    scale queries this way. [Nakanishi, 2025](https://arxiv.org/abs/2501.19399) gives the reason.

    Args:
        positions: Integer tensor of positions. Negative positions count as 0.
        scaling: Dictionary, see `rotary_frequencies`.

    Returns:
        A float32 tensor of the positions' shape.
    """
    lengths = tf.cast(tf.maximum(positions, 0), "float32") / scaling[_LENGTH]
    return 1 + scaling["llama_4_scaling_beta"] * tf.math.log1p(tf.floor(lengths))


def ntk_base(base: float, factor: float, num_rotated: int) -> float:
    """Return a base that makes the longest wavelength `factor` times longer.

    Args:
        base: Float. Base without scaling.
        factor: Float. Ratio of the new to the original sequence length.
        num_rotated: Integer, at least 4. Number of rotated features.

    Raises:
        ValueError: If only one pair rotates, since its wavelength does not depend on the base.
    """
    if num_rotated < 4:
        raise ValueError(
            f"`rotary_scaling` of type 'ntk' requires at least 4 rotated features, got {num_rotated}. "
            "Use type 'linear' or larger heads."
        )
    return base * factor ** (num_rotated / (num_rotated - 2))


def _check_scaling(scaling):
    """Return the type of a scaling dictionary after a check of its fields."""
    kind = scaling.get("type")
    if kind not in _SCALING:
        raise ValueError(f"`rotary_scaling` has type {kind!r}, expected one of {list(_SCALING)}.")
    fields = _SCALING[kind]
    optional = _YARN if kind == "yarn" else {}
    numeric_fields = [*fields, *(name for name in optional if scaling.get(name) is not None)]
    invalid = [x for x in numeric_fields if x != "truncate" and not _is_positive(scaling.get(x))]
    if invalid or not {"type", *fields} <= set(scaling) <= {"type", *fields, *optional}:
        accepted = f" and accepts {', '.join(optional)}" if optional else ""
        raise ValueError(
            f"`rotary_scaling` of type {kind!r} requires the fields {', '.join(fields)}{accepted}, "
            f"all above 0, got {scaling}."
        )
    return kind


def _is_positive(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def rotate(
    x: tf.Tensor, positions: tf.Tensor, frequencies: np.ndarray, factor: float = 1.0
) -> tf.Tensor:
    """Apply the rotary embedding: rotate the pairs (i, i + r / 2) of the first r features.

    Products of queries and keys then depend only on the distance of their positions. Positions may
    therefore start anywhere and need not restart in packed sequences.

    Args:
        x: Tensor of shape `[b, n, s, d]`.
        positions: Integer tensor of shape `[s]` or `[b or 1, s]`.
        frequencies: Array of shape `[r / 2]`, from `rotary_frequencies`.
        factor: Float. Factor of cosines and sines, see `attention_factor`. Defaults to `1.0`.

    Returns:
        A tensor of the same shape.
    """
    half = len(frequencies)
    # Angles in float32 have a relative error of 1e-7. 16 bits would confuse distant positions.
    angles = tf.cast(positions, "float32")[..., None] * tf.constant(frequencies, "float32")
    waves = [tf.cos(angles), tf.sin(angles)]
    if factor != 1:
        waves = [factor * values for values in waves]
    cos, sin = (tf.expand_dims(tf.cast(values, x.dtype), -3) for values in waves)
    # The gradient of a split is a concatenation. The gradient of slices pads with zeros and adds.
    num_unrotated = x.shape[-1] - 2 * half
    first, second, *rest = tf.split(x, [half, half, num_unrotated] if num_unrotated else 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return tf.concat([*rotated, *rest], axis=-1)
