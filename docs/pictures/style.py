"""One style for all pictures: colors, fonts, and a white card that is legible in dark mode."""

import pathlib

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = pathlib.Path(__file__).parents[1] / "images"

BLUE, ORANGE, GREEN, RED, PURPLE, GRAY = (
    "#3b6fb6",
    "#e08214",
    "#3a9d5d",
    "#c8423b",
    "#7d5ba6",
    "#8a929a",
)
DEVICE_COLORS = (BLUE, ORANGE, GREEN, PURPLE)
INK, MUTED, PALE = "#1f2328", "#57606a", "#eef1f4"

matplotlib.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "text.color": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "legend.frameon": False,
        "svg.fonttype": "path",
        "svg.hashsalt": "dtransformer",
    }
)


def save(figure, name):
    """Write a figure to docs/images as an SVG file that is the same on every run."""
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", facecolor="white", metadata={"Date": None})
    pyplot.close(figure)


def canvas(width, height):
    """Return a figure without axes lines, with one unit per inch.

    Args:
        width, height: Size in inches.
    """
    figure = pyplot.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def box(axes, x, y, width, height, text="", color=BLUE, filled=True, size=11, text_color=None):
    """Draw a rounded box with centered text.

    Args:
        axes: Axes from `canvas`.
        x, y: Lower left corner in inches.
        width, height: Size in inches.
        text: Label.
        color: Color of the face, or of the edge if not filled.
        filled: Whether the face has the color.
        size: Font size in points.
        text_color: Color of the label. Defaults to white on filled boxes.
    """
    patch = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=color if filled else "white",
        edgecolor=color if filled else MUTED,
        linewidth=1.2,
    )
    axes.add_patch(patch)
    text_color = text_color or ("white" if filled else INK)
    axes.text(
        x + width / 2, y + height / 2, text, ha="center", va="center", color=text_color, size=size
    )


def arrow(axes, start, end, color=MUTED, both=False, curve=0.0):
    """Draw an arrow between two points.

    Args:
        axes: Axes from `canvas`.
        start, end: Points `(x, y)` in inches.
        color: Color of the line.
        both: Whether both ends have heads.
        curve: Curvature; 0 is a straight line.
    """
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="<|-|>" if both else "-|>",
            mutation_scale=10,
            color=color,
            linewidth=1.4,
            shrinkA=0,
            shrinkB=0,
            zorder=3,
            connectionstyle=f"arc3,rad={curve}",
        )
    )
