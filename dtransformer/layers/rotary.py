"""Rotary positions: queries and keys are turned by angles that grow with the position."""

import functools
import math

import numpy as np
import tensorflow as tf

_LENGTH = "original_max_position_embeddings"
# What each way of scaling has to be told, and what it may be told.
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


def rotary_frequencies(
    head_dim: int, base: float = 10000.0, fraction: float = 1.0, scaling: dict | None = None
) -> np.ndarray:
    """Return by how much each pair of features turns from one position to the next.

    References: Su et al., 2021, "RoFormer", arXiv 2104.09864, §3.2; Chen et al., 2023, arXiv
    2306.15595, for linear scaling. NTK-aware scaling, as Peng et al., 2023, arXiv 2309.00071,
    §3.1, define it, takes a larger base: the longest wavelength grows by `factor`, the shortest
    stays. Llama 3's is that of Grattafiori et al., 2024, arXiv 2407.21783, as its configs give
    it: wavelengths that fit into the original length less than `low_freq_factor` times grow by
    `factor`, those that fit more than `high_freq_factor` times stay, and those between do a part
    of both. YaRN (Peng et al., §3.2) does so, too, by numbers of turns `beta_slow` and `beta_fast`
    within the original length, along the numbers of the features; see also `attention_factor`.

    Args:
        head_dim: number d of features of a head.
        base: the longest wavelength is about 2π·base positions.
        fraction: share of the features that turn, the first ones; in (0, 1].
        scaling: None; `{"type": "linear", "factor": …}`; `{"type": "ntk", "factor": …}`;
            `{"type": "llama3", "factor": …, "low_freq_factor": …, "high_freq_factor": …,
            "original_max_position_embeddings": …}`; or `{"type": "yarn", "factor": …,
            "original_max_position_embeddings": …}`, with `"beta_fast"` (32), `"beta_slow"` (1),
            `"truncate"` (True: to whole features), `"attention_factor"`, `"mscale"` and
            `"mscale_all_dim"` where they are given, and `"llama_4_scaling_beta"` of `query_factor`.

    Returns:
        A float64 array [r / 2], r being the number of features that turn; radians.

    Raises:
        ValueError: an argument is out of its range, or the scaling is unknown.
    """
    if not (base > 1 and 0 < fraction <= 1):
        raise ValueError(
            f"rotary_base must be more than 1 and rotary_fraction in (0, 1], got {base} and "
            f"{fraction}"
        )
    turning = int(head_dim * fraction)
    if turning % 2 or not turning:
        raise ValueError(
            f"rotary positions turn pairs of features, but rotary_fraction={fraction} of "
            f"head_dim={head_dim} are {turning}"
        )
    kind = None if scaling is None else _check_scaling(scaling)
    if kind == "ntk":
        base = ntk_base(base, scaling["factor"], turning)
    frequencies = base ** (-np.arange(0, turning, 2) / turning)
    if kind in (None, "ntk"):
        return frequencies
    factor = scaling["factor"]
    if kind == "linear":
        return frequencies / factor
    if kind == "yarn":
        kept = 1 - _ramp_of_features({**_YARN, **scaling}, base, turning)
    else:
        times = scaling[_LENGTH] * frequencies / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = np.clip((times - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def _ramp_of_features(scaling, base, turning):
    """Return the share of each pair's angle that YaRN interpolates: [r / 2], in [0, 1]."""

    def feature(turns):
        """Return which feature turns so many times within the original length."""
        return turning * math.log(scaling[_LENGTH] / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = feature(scaling["beta_fast"]), feature(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turning - 1)
    high += 0.001 * (low == high)
    return np.clip((np.arange(turning // 2) - low) / (high - low), 0, 1)


def attention_factor(scaling: dict | None) -> float:
    """Return what cosines and sines are multiplied with, and so scores with its square.

    YaRN's is 0.1·ln(factor) + 1 (Peng et al., 2023, arXiv 2309.00071, §3.4), or the quotient of two
    such numbers, of `"mscale"` and `"mscale_all_dim"` (DeepSeek-V2, arXiv 2405.04434, as published
    in its code); or `"attention_factor"`. Of other ways of scaling it is 1.

    Args:
        scaling: as `rotary_frequencies`' scaling.
    """
    if scaling is None or scaling["type"] != "yarn":
        return 1.0
    given = {**_YARN, **scaling}
    of = functools.partial(yarn_magnitude, given["factor"])
    if given["attention_factor"] is not None:
        return float(given["attention_factor"])
    if given["mscale"] and given["mscale_all_dim"]:
        return of(given["mscale"]) / of(given["mscale_all_dim"])
    return of(1)


def yarn_magnitude(factor: float, scale: float) -> float:
    """Return 0.1·scale·ln(factor) + 1, or 1 where texts are not longer; see `attention_factor`."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def query_factor(positions: tf.Tensor, scaling: dict) -> tf.Tensor:
    """Return what queries are multiplied with: 1 + β·ln(1 + ⌊p / L⌋), which grows with the position.

    β is the scaling's `"llama_4_scaling_beta"`, L its original length. Llama 4's queries are scaled so
    (Nakanishi, 2025, arXiv 2501.19399, has the reason), and Ministral 3's, by its published code.

    Args:
        positions: int tensor of positions p; those before 0 count as 0.
        scaling: as `rotary_frequencies`' scaling, with a β.

    Returns:
        A float32 tensor of the positions' shape.
    """
    lengths = tf.cast(tf.maximum(positions, 0), "float32") / scaling[_LENGTH]
    return 1 + scaling["llama_4_scaling_beta"] * tf.math.log1p(tf.floor(lengths))


def ntk_base(base: float, factor: float, turning: int) -> float:
    """Return the base of NTK-aware scaling, by which the longest wavelength grows by a factor.

    Args:
        base: the base without scaling.
        factor: how much longer texts are.
        turning: number of features that turn, more than 2.

    Raises:
        ValueError: a single pair turns, whose wavelength no base changes.
    """
    if turning < 4:
        raise ValueError(
            f"rotary_scaling of the type 'ntk' needs 4 features that turn, got {turning}: take "
            "'linear', or larger heads"
        )
    return base * factor ** (turning / (turning - 2))


def _check_scaling(scaling):
    """Return the kind of scaling, whose fields are all there."""
    kind = scaling.get("type")
    if kind not in _SCALING:
        raise ValueError(f"rotary_scaling has the type {kind!r}, expected one of {list(_SCALING)}")
    fields, optional = _SCALING[kind], _YARN if kind == "yarn" else {}
    numbers = [*fields, *(name for name in optional if scaling.get(name) is not None)]
    wrong = [x for x in numbers if x != "truncate" and not _is_positive(scaling.get(x))]
    if wrong or not {"type", *fields} <= set(scaling) <= {"type", *fields, *optional}:
        besides = f", and may have {', '.join(optional)}" * bool(optional)
        raise ValueError(
            f"rotary_scaling of the type {kind!r} has the fields {', '.join(fields)}{besides}, "
            f"numbers of more than 0; got {scaling}"
        )
    return kind


def _is_positive(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def rotate(
    x: tf.Tensor, positions: tf.Tensor, frequencies: np.ndarray, factor: float = 1.0
) -> tf.Tensor:
    """Turn the pairs (i, i + r / 2) of the first r features of each position.

    Products of queries and keys then depend on the distance of their positions alone, so that
    positions may begin anywhere: those of packed sequences need not begin anew.

    Args:
        x: tensor [b, n, s, d].
        positions: int tensor [s], or [b or 1, s].
        frequencies: array [r / 2], from `rotary_frequencies`.
        factor: what cosines and sines are multiplied with; see `attention_factor`.
    """
    half = len(frequencies)
    # Angles in float32 are off by 1e-7 of themselves; 16 bits would lose far positions.
    angles = tf.cast(positions, "float32")[..., None] * tf.constant(frequencies, "float32")
    of_angles = [tf.cos(angles), tf.sin(angles)]
    if factor != 1:
        of_angles = [factor * values for values in of_angles]
    cos, sin = (tf.expand_dims(tf.cast(values, x.dtype), -3) for values in of_angles)
    # Split, not sliced: its gradient puts parts together, where slices' fill up with zeros and add.
    others = x.shape[-1] - 2 * half
    first, second, *rest = tf.split(x, [half, half, others] if others else 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return tf.concat([*turned, *rest], axis=-1)
