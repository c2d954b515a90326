"""Plot of a run's losses: an SVG file, written without matplotlib."""

import json
import math
import os
import pathlib
import statistics
from html import escape

from dtransformer.inputs.files import write_text_atomically

_MAX_POINTS = 400  # per curve; a longer curve shows means of consecutive steps
_CURVES = {"step_loss": ("training", "#3b6fb6"), "val_loss": ("validation", "#e08214")}
# The area of the curves is 600 × 300, with its upper left corner at (70, 50).
_START = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400"
 font-family="sans-serif" font-size="13" fill="#1f2328">
<rect width="720" height="400" fill="white"/>
<text x="370" y="390">step</text>"""
_TICK = """<path d="M70 {y:.1f}h600" stroke="#d8dee4"/>
<text x="20" y="{y:.1f}">{loss:.3g}</text>
<text x="{x:.1f}" y="370">{step:,.0f}</text>"""
_CURVE = """<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"
 stroke-linecap="round"/>
<text x="{x}" y="24" style="fill:{color}">● {name} loss</text>"""


def write_loss_plot(metrics: pathlib.Path, picture: str | os.PathLike, title: str) -> None:
    """Plot the training and validation losses of a metrics file against the step.

    Args:
        metrics: Path of the run's `metrics.jsonl`. Of repeated steps the last line counts.
        picture: Path of the SVG file to write.
        title: Heading of the plot.
    """
    records = list(map(json.loads, metrics.read_text("utf-8").splitlines()))
    curves = {name: _points(records, name) for name in _CURVES}
    steps, losses = zip(*(point for curve in curves.values() for point in curve))
    low = min(losses)
    high = max(losses)

    def place(step, loss):
        return (
            70 + 600 * step / max(steps),
            350 - 300 * (loss - low) / (high - low or 1),
        )

    lines = [_START, f'<text x="70" y="24" font-weight="bold">{escape(title)}</text>']
    for part in (0, 0.25, 0.5, 0.75, 1):
        step = part * max(steps)
        loss = low + part * (high - low)
        x, y = place(step, loss)
        lines.append(_TICK.format(x=x, y=y, step=step, loss=loss))
    for x, (name, (label, color)) in zip((400, 550), _CURVES.items()):
        # SVG draws no line with a single point, so the last point comes twice.
        curve = [*curves[name], *curves[name][-1:]]
        points = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in curve)
        lines.append(_CURVE.format(points=points, color=color, name=label, x=x))
    write_text_atomically(picture, "\n".join([*lines, "</svg>", ""]))


def _points(records, name):
    """Return at most `_MAX_POINTS` finite (step, loss) pairs, the means of equal parts."""
    losses = {record["step"]: float(record[name]) for record in records if name in record}
    points = [point for point in sorted(losses.items()) if math.isfinite(point[1])]
    size = -(-len(points) // _MAX_POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(map(statistics.fmean, zip(*part))) for part in parts]
