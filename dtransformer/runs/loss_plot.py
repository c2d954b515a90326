"""Plot of a run's losses: an SVG file, written without matplotlib."""

import json
import math
import os
import pathlib
from html import escape

from dtransformer.inputs.files import write_text_atomically

_MAX_POINTS = 400  # per curve; a longer curve shows means of consecutive steps
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 400, 70, 50, 350
_CURVES = (("training loss", "#3b6fb6"), ("validation loss", "#e08214"))


def write_loss_plot(metrics: pathlib.Path, picture: str | os.PathLike, title: str) -> None:
    """Plot the training and validation losses of a metrics file against the step.

    Args:
        metrics: Path of the run's `metrics.jsonl`. Of repeated steps the last line counts.
        picture: Path of the SVG file to write.
        title: Heading of the plot.
    """
    losses = {}, {}
    with open(metrics, encoding="utf-8") as file:
        for record in map(json.loads, file):
            for curve, name in zip(losses, ("step_loss", "val_loss")):
                value = float(record.get(name, "nan"))
                if math.isfinite(value):
                    curve[float(record.get("step"))] = value
    curves = [_averaged(sorted(curve.items())) for curve in losses]
    write_text_atomically(picture, _svg(curves, title))


def _averaged(points):
    """Return at most `_MAX_POINTS` points, the means of equal parts."""
    size = -(-len(points) // _MAX_POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(sum(axis) / len(part) for axis in zip(*part)) for part in parts]


def _svg(curves, title):
    points = [point for curve in curves for point in curve] or [(0.0, 0.0)]
    last = max(step for step, _ in points) or 1.0
    low = min(loss for _, loss in points)
    high = max(loss for _, loss in points)
    to_x = lambda step: _LEFT + (_WIDTH - _LEFT - 20) * step / last
    to_y = lambda loss: _BOTTOM - (_BOTTOM - _TOP) * (loss - low) / (high - low or 1.0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="13" fill="#1f2328">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 24, title, 'font-weight="bold"'),
        _text(_WIDTH / 2, _HEIGHT - 8, "step", 'text-anchor="middle"'),
    ]
    for i in range(5):
        loss, step = low + (high - low) * i / 4, last * i / 4
        y = to_y(loss)
        lines += [
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 20}" stroke="#d8dee4"/>',
            _text(_LEFT - 8, y + 4, f"{loss:.3g}", 'text-anchor="end"'),
            _text(to_x(step), _BOTTOM + 20, f"{step:,.0f}", 'text-anchor="middle"'),
        ]
    for i, ((name, color), curve) in enumerate(zip(_CURVES, curves)):
        if curve:
            path = " ".join(f"{to_x(step):.1f},{to_y(loss):.1f}" for step, loss in curve)
            style = f'fill="none" stroke="{color}" stroke-width="2"'
            lines.append(f'<polyline points="{path}" {style}/>')
            lines += [_dot(to_x(step), to_y(loss), color) for step, loss in curve[-1:]]
            lines.append(_text(_WIDTH - 145, 24 + 18 * i, f"● {name}", f'style="fill:{color}"'))
    return "\n".join([*lines, "</svg>", ""])


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _dot(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'
