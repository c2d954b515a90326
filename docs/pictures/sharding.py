"""Diagrams of sharding rules, and of two programs with collectives."""

from style import BLUE, GRAY, GREEN, INK, MUTED, ORANGE, PALE, arrow, box, canvas, save

PANEL_WIDTH, PANEL_HEIGHT = 4.6, 1.75


def draw_all():
    """Draw every diagram."""
    sharding_rules()
    parameter_server()
    switch_parallelism()


def sharding_rules():
    """Draw the four places where layers state a layout."""
    figure, axes = canvas(9.6, 3.9)
    panels = (
        ("1  Operations with weights", "product\nkernel [h, f/2]", "[b, s, h]", "[b, s, f/2]"),
        ("2  Axis changes", "reshape,\ntranspose, sum", "[b, s, n/2 · d]", "[b, n/2, s, d]"),
        ("3  Boundaries", "all-gather", "[b, s/2, h]", "[b, s, h]"),
        (
            "4  Fused operations",
            "kernel with a\nwritten gradient",
            "[b, n/2, s, d]",
            "[b, n/2, s, d]",
        ),
    )
    details = (
        "add_weight(axes=...) and column_parallel",
        "constrain the result",
        "constrain where one layer ends and the next begins",
        "constrain_both: inputs, results and gradients",
    )
    colors = BLUE, GREEN, ORANGE, GRAY
    for index, ((title, operation, before, after), detail) in enumerate(zip(panels, details)):
        x = 0.1 + (index % 2) * (PANEL_WIDTH + 0.2)
        y = 2.05 - (index // 2) * (PANEL_HEIGHT + 0.2)
        box(axes, x, y, PANEL_WIDTH, PANEL_HEIGHT, "", color=PALE)
        axes.text(x + 0.15, y + 1.5, title, weight="bold", color=INK, va="center")
        middle = y + 0.82
        axes.text(x + 0.75, middle, before, ha="center", va="center", size=10)
        box(axes, x + 1.6, middle - 0.34, 1.4, 0.68, operation, color=colors[index], size=9)
        axes.text(x + 3.85, middle, after, ha="center", va="center", size=10)
        arrow(axes, (x + 1.35, middle), (x + 1.6, middle), both=index == 3)
        arrow(axes, (x + 3.0, middle), (x + 3.25, middle), both=index == 3)
        axes.text(x + 2.3, y + 0.22, detail, color=MUTED, ha="center", va="center", size=9)
    save(figure, "sharding_rules")


def parameter_server():
    """Draw the weights that go to all ranks and the gradients that come back."""
    figure, axes = canvas(5.6, 3.1)
    box(axes, 0.2, 1.85, 5.2, 1.05, "", color=PALE)
    title = "rank 0: server and worker"
    axes.text(5.3, 2.72, title, size=9, color=MUTED, va="center", ha="right")
    box(axes, 0.4, 2.0, 1.5, 0.5, "weights", color=GREEN)
    box(axes, 2.1, 2.0, 1.5, 0.5, "optimizer", color=ORANGE)
    box(axes, 3.75, 2.0, 1.5, 0.5, "rows 0, 2, …", color=BLUE, size=10)
    box(axes, 0.2, 0.15, 5.2, 0.95, "", color=PALE)
    axes.text(5.3, 0.92, "rank 1: worker", size=9, color=MUTED, va="center", ha="right")
    box(axes, 0.4, 0.27, 1.5, 0.45, "copy of weights", color=GREEN, filled=False, size=9)
    box(axes, 2.1, 0.27, 1.5, 0.45, "gradients", color=ORANGE, filled=False, size=9)
    box(axes, 3.75, 0.27, 1.5, 0.45, "rows 1, 3, …", color=BLUE, size=10)
    arrow(axes, (1.15, 2.0), (1.15, 0.72), color=INK)
    arrow(axes, (2.85, 0.72), (2.85, 2.0), color=INK)
    axes.text(1.22, 1.47, "broadcast", size=9, color=MUTED, va="center")
    axes.text(2.92, 1.47, "reduce_sum", size=9, color=MUTED, va="center")
    save(figure, "parameter_server")


def switch_parallelism():
    """Draw activations that change from shards of rows to shards of features and back."""
    figure, axes = canvas(7.4, 2.9)
    colors = BLUE, ORANGE
    titles = "rows are sharded", "features are sharded", "rows are sharded"
    layers = "small layer,\nreplicated", "large layer,\nsharded", "small layer,\nreplicated"
    side = 1.3
    for column, (title, layer) in enumerate(zip(titles, layers)):
        x = 0.35 + 2.7 * column
        axes.text(x + side / 2, 2.7, title, size=10, ha="center", va="center")
        for rank in range(2):
            if column == 1:
                box(axes, x + rank * side / 2, 1.1, side / 2 - 0.04, side, "", color=colors[rank])
            else:
                lower = 1.1 + (1 - rank) * side / 2
                box(axes, x, lower, side, side / 2 - 0.04, "", color=colors[rank])
        axes.text(x + side / 2, 0.75, layer, size=9, color=MUTED, ha="center", va="center")
        if column < 2:
            arrow(axes, (x + side + 0.2, 1.75), (x + 2.5, 1.75), color=INK)
            axes.text(
                x + side + 0.7, 2.0, "all_to_all", size=9, color=MUTED, ha="center", va="center"
            )
    for rank, x in enumerate((2.6, 3.9)):
        box(axes, x, 0.1, 0.25, 0.25, "", color=colors[rank])
        axes.text(x + 0.35, 0.22, f"rank {rank}", size=9, color=MUTED, va="center")
    save(figure, "switch_parallelism")
