"""Charts of measured results, read from the tables of the pages that show them."""

import pathlib
import re

from matplotlib import pyplot
from style import BLUE, GRAY, GREEN, ORANGE, save

PAGES = pathlib.Path(__file__).parents[1]


def draw_all():
    """Draw every chart of this module."""
    h200()
    faults()


def read_table(page, first_header):
    """Return the rows of a Markdown table, without the header, as lists of texts.

    Args:
        page: Name of the file in docs.
        first_header: Text of the first header cell.
    """
    lines = (PAGES / page).read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def numbers(text):
    """Return the numbers of a text, such as `[20.0, 63.0]` for "20–63"."""
    return [float(digits) for digits in re.findall(r"\d+(?:\.\d+)?", text)]


def h200():
    """Draw the time per step of one H200 for each setting, the median of three rounds."""
    rows = read_table("gpus.md", "setting")
    names = [row[0].replace("`", "") for row in rows]
    times = [sorted(numbers(row[1]))[1] for row in rows]
    colors = [GRAY if name.startswith("PyTorch") else BLUE for name in names]
    figure, axes = pyplot.subplots(figsize=(7.5, 3.2), constrained_layout=True)
    bars = axes.barh(names, times, color=colors)
    axes.bar_label(bars, [f"{time:.0f} ms" for time in times], padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=9)
    axes.set_xlim(0, 1.12 * max(times))
    axes.set_xlabel("ms per step, median of three rounds")
    save(figure, "h200")


def faults():
    """Draw the seconds until a fault ends the job, and until the next training step."""
    rows = sorted(read_table("reliability.md", "fault"), key=lambda row: numbers(row[3])[-1])
    figure, axes = pyplot.subplots(figsize=(7.5, 5.2), constrained_layout=True)
    for row, cells in enumerate(rows):
        for text, color in ((cells[2], ORANGE), (cells[3], GREEN)):
            low, *rest = numbers(text)
            high = rest[0] if rest else low
            axes.plot([low, high], [row, row], color=color, linewidth=6, solid_capstyle="round")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=9)
    axes.set_xlim(0)
    axes.set_xlabel("seconds after the fault (range of all drills on two CPU cores)")
    handles = [pyplot.Line2D([], [], color=color, linewidth=6) for color in (ORANGE, GREEN)]
    axes.legend(handles, ["job ended, fault named", "training resumed"], loc="lower right")
    save(figure, "faults")
