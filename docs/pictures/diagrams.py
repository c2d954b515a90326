"""Diagrams: the package, a training step and the kinds of parallelism."""

from style import (
    BLUE,
    DEVICE_COLORS,
    GRAY,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    arrow,
    box,
    canvas,
    save,
)

WIDTH, HEIGHT = 4.2, 2.9
"""Size of a diagram of one kind of parallelism, in inches."""


def draw_all():
    """Draw every diagram."""
    architecture()
    training_step()
    data_parallel()
    tensor_parallel()
    sequence_parallel()
    context_parallel()
    ulysses_ring()
    expert_parallel()
    pipeline_parallel()


def architecture():
    """Draw the folders of the package, from the command line down to devices."""
    figure, axes = canvas(7.6, 5.3)
    rows = [
        (("cli", "command line"),),
        (("runs", "one YAML file, one run folder"),),
        (("trainers", "step, engines, optimizer, checkpoints"),),
        (
            ("models", "networks, generation,\n51 published families"),
            ("planner", "memory, time and\nlayout search"),
            ("reports", "sharding, communication,\nmemory, throughput"),
        ),
        (("layers", "one layer per file: attention, feed-forward, embedding, loss"),),
        (("parallel", "mesh · ZeRO · pipeline · context · experts · recompute · watchdog"),),
    ]
    y, gap, left, full_width = 5.2, 0.14, 0.2, 7.2
    for row in rows:
        height = 0.86 if len(row) > 1 else 0.6
        y -= height + gap
        width = (full_width - gap * (len(row) - 1)) / len(row)
        for column, (name, content) in enumerate(row):
            x = left + column * (width + gap)
            box(axes, x, y, width, height, "", color=BLUE)
            if len(row) > 1:
                axes.text(
                    x + width / 2,
                    y + height - 0.2,
                    name,
                    color="white",
                    weight="bold",
                    ha="center",
                    va="center",
                )
                axes.text(
                    x + width / 2,
                    y + 0.3,
                    content,
                    color="white",
                    size=8.5,
                    ha="center",
                    va="center",
                )
            else:
                axes.text(x + 0.2, y + height / 2, name, color="white", weight="bold", va="center")
                axes.text(x + 1.35, y + height / 2, content, color="white", size=10, va="center")
    y -= 0.5
    axes.text(
        left,
        y + 0.12,
        "TensorFlow · Keras · DTensor (mesh) · Horovod (data and pipeline ranks)",
        color=MUTED,
    )
    save(figure, "architecture")


def training_step():
    """Draw the path of a batch through the engine and the optimizer step."""
    figure, axes = canvas(9.6, 4.6)
    _part(axes, 0.15, 2.75, 1.55, 0.95, "local batch", "rows of this rank", GRAY)
    _part(axes, 7.85, 3.45, 1.6, 0.95, "metric sums", "loss, accuracy, tokens", GRAY)
    _part(axes, 7.85, 2.1, 1.6, 0.95, "gradients", "of the local weights", GRAY)
    _part(axes, 7.85, 0.5, 1.6, 0.95, "weights", "updated in place", GREEN)
    _part(axes, 0.15, 0.5, 1.55, 0.95, "logs", "loss, norm, tokens/s", GRAY)
    engines = [("one device", ""), ("mesh", "sharded operations"), ("pipeline", "model chunks")]
    steps = [
        ("reduce", "over data-parallel\nranks, in buckets"),
        ("clip", "by the global norm;\nskip if not finite"),
        ("update", "local shards, then\nall-gather"),
    ]
    box(axes, 2.1, 2.1, 5.35, 2.3, "", color=PALE)
    axes.text(2.25, 4.2, "Engine: forward and backward pass", weight="bold", va="center")
    for column, (name, detail) in enumerate(engines):
        _part(axes, 2.25 + 1.72 * column, 3.15, 1.6, 0.8, name, detail, BLUE)
    label = "ForwardStep: outputs, loss, sums and gradients for every engine"
    box(axes, 2.25, 2.25, 5.04, 0.7, label, color=BLUE, filled=False, size=9)
    box(axes, 2.1, 0.15, 5.35, 1.65, "", color=PALE)
    axes.text(2.25, 1.6, "Optimizer step", weight="bold", va="center")
    for column, (name, detail) in enumerate(steps):
        _part(axes, 2.25 + 1.72 * column, 0.3, 1.6, 1.05, name, detail, ORANGE)
    arrow(axes, (1.7, 3.22), (2.1, 3.22))
    arrow(axes, (7.45, 3.92), (7.85, 3.92))
    arrow(axes, (7.45, 2.57), (7.85, 2.57))
    arrow(axes, (8.65, 2.1), (7.45, 1.55), curve=-0.2)
    arrow(axes, (7.45, 0.97), (7.85, 0.97))
    arrow(axes, (2.1, 0.97), (1.7, 0.97))
    save(figure, "step")


def _part(axes, x, y, width, height, name, detail, color):
    """Draw a box with a name and a line of details."""
    box(axes, x, y, width, height, "", color=color)
    lift = 0.17 + 0.06 * detail.count("\n") if detail else 0
    x, y = x + width / 2, y + height / 2
    style = {"color": "white", "ha": "center", "va": "center"}
    axes.text(x, y + lift, name, weight="bold", size=11, **style)
    axes.text(x, y - 0.17, detail, size=8.5, **style)


def _title(axes, text):
    axes.text(0.15, HEIGHT - 0.25, text, size=10, color=INK, va="center")


def _device(axes, index, x, y, width, height):
    """Draw the frame of a device and its name."""
    box(axes, x, y, width, height, "", color=PALE)
    axes.text(x + 0.08, y + height - 0.14, f"GPU {index}", size=8, color=MUTED, va="center")


def data_parallel():
    """Each device has the model and trains on other rows."""
    figure, axes = canvas(WIDTH, HEIGHT)
    _title(axes, "Every GPU has the full model and other rows.")
    for index in range(2):
        x = 0.2 + 2.0 * index
        _device(axes, index, x, 0.55, 1.8, 1.75)
        box(axes, x + 0.2, 1.45, 1.4, 0.5, "model", color=GRAY)
        box(
            axes,
            x + 0.2,
            0.75,
            1.4,
            0.5,
            f"rows {16 * index}–{16 * index + 15}",
            color=DEVICE_COLORS[index],
        )
    arrow(axes, (1.3, 0.42), (2.9, 0.42), both=True)
    axes.text(2.1, 0.2, "all-reduce of gradients", size=9, color=MUTED, ha="center", va="center")
    save(figure, "data_parallel")


def tensor_parallel():
    """Each device has a part of every weight matrix."""
    figure, axes = canvas(WIDTH, HEIGHT)
    _title(axes, "Every matrix is split: columns, then rows.")
    for index in range(2):
        x = 0.2 + 2.0 * index
        _device(axes, index, x, 0.55, 1.8, 1.75)
        color = DEVICE_COLORS[index]
        box(axes, x + 0.2, 0.85, 0.45, 1.0, "W₁", color=color, size=10)
        box(axes, x + 0.85, 1.1, 0.75, 0.5, "W₂", color=color, size=10)
        arrow(axes, (x + 0.65, 1.35), (x + 0.85, 1.35))
    arrow(axes, (1.3, 0.42), (2.9, 0.42), both=True)
    axes.text(2.1, 0.2, "all-reduce of activations", size=9, color=MUTED, ha="center", va="center")
    save(figure, "tensor_parallel")


def sequence_parallel():
    """Norms and residuals are split over the sequence between tensor-parallel products."""
    figure, axes = canvas(WIDTH, HEIGHT)
    _title(axes, "Norms and residuals are split over the sequence.")
    for index in range(2):
        y = 1.45 - 0.95 * index
        _device(axes, index, 0.2, y, 3.8, 0.85)
        color = DEVICE_COLORS[index]
        box(axes, 0.35, y + 0.1, 0.95, 0.48, "norm\n½ length", color=color, size=8)
        box(axes, 1.65, y + 0.1, 0.95, 0.48, "product\n½ features", color=color, size=8)
        box(axes, 2.95, y + 0.1, 0.95, 0.48, "residual\n½ length", color=color, size=8)
        arrow(axes, (1.3, y + 0.34), (1.65, y + 0.34))
        arrow(axes, (2.6, y + 0.34), (2.95, y + 0.34))
    axes.text(1.48, 0.28, "all-gather", size=8.5, color=MUTED, ha="center", va="center")
    axes.text(2.78, 0.28, "reduce-scatter", size=8.5, color=MUTED, ha="center", va="center")
    save(figure, "sequence_parallel")


def context_parallel():
    """Keys and values of a long sequence travel around a ring."""
    figure, axes = canvas(WIDTH, HEIGHT)
    _title(axes, "One long sequence is split; keys and values travel.")
    width = 0.86
    for index in range(4):
        x = 0.2 + index * (width + 0.12)
        _device(axes, index, x, 0.8, width, 1.35)
        box(axes, x + 0.1, 1.4, width - 0.2, 0.42, f"Q{index}", color=DEVICE_COLORS[index], size=10)
        box(
            axes,
            x + 0.1,
            0.9,
            width - 0.2,
            0.42,
            f"K{index} V{index}",
            color=DEVICE_COLORS[index],
            size=9,
        )
        if index < 3:
            arrow(axes, (x + width - 0.14, 1.1), (x + width + 0.26, 1.1), color=INK)
    middle = 0.2 + width / 2
    arrow(axes, (middle + 3 * (width + 0.12), 0.78), (middle, 0.78), color=INK, curve=-0.18)
    axes.text(
        2.1,
        0.14,
        "ring, or all-to-all over heads (Ulysses)",
        size=9,
        color=MUTED,
        ha="center",
        va="center",
    )
    save(figure, "context_parallel")


def ulysses_ring():
    """Each part of the heads has a separate ring of keys and values."""
    figure, axes = canvas(WIDTH, HEIGHT)
    _title(axes, "Two parts of the heads, each with a ring.")
    for index in range(4):
        ring, place = index % 2, index // 2
        x = 0.95 + 1.7 * place
        y = 1.32 - 1.07 * ring
        color = DEVICE_COLORS[ring]
        _device(axes, index, x, y, 1.35, 0.97)
        positions = "0, 2, 4, …" if place == 0 else "1, 3, 5, …"
        box(axes, x + 0.1, y + 0.37, 1.15, 0.24, f"Q  {positions}", color=color, size=8)
        box(axes, x + 0.1, y + 0.07, 1.15, 0.24, "K V", color=color, size=8)
        if place == 0:
            half = ("first", "second")[ring]
            axes.text(
                0.48, y + 0.48, f"{half} half\nof the\nheads", size=8.5, ha="center", va="center"
            )
            arrow(axes, (x + 1.25, y + 0.23), (x + 1.8, y + 0.23), color=INK)
            arrow(axes, (x + 1.8, y + 0.13), (x + 1.25, y + 0.13), color=INK)
    save(figure, "ulysses_ring")


def expert_parallel():
    """Tokens travel to the device of their expert and back."""
    figure, axes = canvas(WIDTH, HEIGHT)
    _title(axes, "Each GPU has some experts; tokens travel to them.")
    for index in range(2):
        x = 0.2 + 2.0 * index
        _device(axes, index, x, 0.3, 1.8, 2.0)
        box(axes, x + 0.2, 1.5, 1.4, 0.42, "tokens, router", color=GRAY, size=9)
        for expert in range(2):
            name = f"expert {2 * index + expert}"
            box(
                axes,
                x + 0.1 + 0.85 * expert,
                0.45,
                0.75,
                0.5,
                name,
                color=DEVICE_COLORS[index],
                size=8,
            )
    for source in range(2):
        for target in range(4):
            start = (1.1 + 2.0 * source, 1.48)
            end = (0.68 + 0.85 * (target % 2) + 2.0 * (target // 2), 0.97)
            arrow(axes, start, end, color=DEVICE_COLORS[target // 2])
    save(figure, "expert_parallel")


def pipeline_parallel():
    """Each device has some blocks; micro-batches flow through."""
    figure, axes = canvas(WIDTH, HEIGHT)
    _title(axes, "Each GPU has some blocks; micro-batches flow through.")
    width = 0.86
    for index in range(4):
        x = 0.2 + index * (width + 0.12)
        _device(axes, index, x, 0.75, width, 1.5)
        for row in range(3):
            block = 3 * index + row
            box(
                axes,
                x + 0.1,
                0.85 + 0.4 * row,
                width - 0.2,
                0.33,
                f"block {block}",
                color=DEVICE_COLORS[index],
                size=8,
            )
        if index < 3:
            arrow(axes, (x + width - 0.14, 1.4), (x + width + 0.26, 1.4), color=INK)
    axes.text(2.1, 0.5, "activations →", size=9, color=MUTED, ha="center", va="center")
    axes.text(2.1, 0.25, "← gradients", size=9, color=MUTED, ha="center", va="center")
    save(figure, "pipeline_parallel")
