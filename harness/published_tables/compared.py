"""Comparison of the planner with published tables: each row with both values and the error."""

import dataclasses
from collections.abc import Callable

import numpy as np

from dtransformer.planner.formulas import micro_batches_alive, state_bytes
from dtransformer.planner.layouts import Layouts
from dtransformer.planner.memory import block_activation_bytes
from dtransformer.planner.models import get_model
from harness.published_tables import h100, published
from harness.published_tables.systems import (
    DEEPSPEED,
    MEGATRON,
    OVERLAPPING,
    ZERO_3,
    measured_layouts,
    predicted_seconds,
)

_GIB = 2**30
_HELD_OUT_NOTE = "No constant is fitted to this table."


@dataclasses.dataclass(frozen=True)
class Row:
    """Row of a published table.

    Args:
        what: Description of the measurement.
        published, ours: The published value and the planner's.
        digits: Number of printed decimals if both values must agree exactly, or `None` for
            measured times.
    """

    what: str
    published: float
    ours: float
    digits: int | None = None

    @property
    def error(self) -> float:
        """Relative error of the planner: `ours / published - 1`."""
        return self.ours / self.published - 1

    @property
    def is_same(self) -> bool:
        """True if both values agree in all printed digits."""
        places = 0 if self.digits is None else self.digits
        return abs(self.ours - self.published) <= 0.5000001 * 10**-places


@dataclasses.dataclass(frozen=True)
class Table:
    """Published table next to the planner's values.

    Args:
        title: Content and source of the table.
        unit: Unit of its values.
        rows: Tuple of `Row`s.
        note: A sentence about the table.
        regret: If the rows are layouts of one job, the relative slowdown of the planner's choice
            compared to the fastest layout. Otherwise `None`.
    """

    title: str
    unit: str
    rows: tuple[Row, ...]
    note: str = ""
    regret: float | None = None

    @property
    def mean_error(self) -> float:
        """Mean of the rows' absolute errors."""
        return float(np.mean([abs(row.error) for row in self.rows]))

    @property
    def worst_error(self) -> float:
        """Largest absolute error of a row."""
        return max(abs(row.error) for row in self.rows)


def tables() -> list[Table]:
    """Return all published tables with the planner's values."""
    all_tables = [sizes(), step_seconds(), model_states(), activations(), table_1(), *table_5()]
    all_tables += table_2()
    all_tables += [make_layouts(model) for model in published.LAYOUT_MODELS]
    return all_tables + [h100_steps(), h100_left_out()]


def sizes() -> Table:
    """Return the parameter counts of the models in table 1."""
    rows = [
        Row(row.step.model, row.billions, get_model(row.step.model).parameters() / 1e9, digits=1)
        for row in published.table_1()
    ]
    return Table("Parameters, Narayanan et al., 2021, table 1", "10^9", tuple(rows))


def step_seconds() -> Table:
    """Return the FLOPs of the steps in table 1: the published formula and the planner's count."""
    rows = []
    for row in published.table_1():
        model = get_model(row.step.model)
        # Full recomputation runs the blocks' forward passes twice, a factor of 4/3.
        head = 6.0 * model.sequence_length * model.config.hidden_size * model.config.vocab_size
        counted = (model.flops_per_sequence() - head) * 4 / 3 + head
        formula = published.count_step_flops(row.step.model, row.step.global_batch)
        rows.append(Row(row.step.model, formula / 1e18, counted * row.step.global_batch / 1e18, 6))
    title = "FLOPs per step with full recompute, Narayanan et al., 2021, section 5.1"
    return Table(title, "10^18", tuple(rows))


def model_states() -> Table:
    """Return the model states per device of the ZeRO paper."""
    rows = []
    for billions, devices in published.ZERO_STATES.items():
        for count, levels in devices.items():
            for level, value in enumerate(levels, start=1):
                predicted = sum(float(part) for part in state_bytes(billions, count, level))
                text = f"{value:g}"
                digits = len(text.split(".")[1]) if "." in text else 0
                plural = "" if count == 1 else "s"
                case = f"{billions} B, {count:,} device{plural}, level {level}"
                rows.append(Row(case, value, predicted, digits))
    return Table("Model states per device, Rajbhandari et al., 2020, figure 1", "GB", tuple(rows))


def activations() -> Table:
    """Return the bytes per device of Korthikanti et al.'s figure 1."""
    rows, steps = [], {step.model: step for step in published.table_5("full")}
    choices = ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    names = ("nothing recomputed", "sequence parallel", "attention recomputed", "both", "full")
    for name, (states, *saved) in published.FIGURE_1.items():
        step, model = steps[name], get_model(name)
        (kind,) = model.kinds
        products = model.attention_parameters() + model.expert_parameters(model.kinds[0])
        share = kind.count / (step.tensor * step.stages)
        state_gib = sum(map(float, state_bytes(share * products, 1, 0, 2, 4, 12))) / _GIB
        rows.append(Row(f"{name}, states", states, state_gib, digits=2))
        schedule = "interleaved" if step.chunks > 1 else "1f1b"
        numbers = step.stages, 0, step.global_batch, step.chunks
        alive = float(micro_batches_alive(schedule, *numbers))
        for (recompute, sequence), what, value in zip(choices, names, saved, strict=True):
            layout = Layouts.from_columns(
                model=step.tensor,
                micro_batch=step.micro_batch,
                recompute=recompute,
                sequence=sequence,
            )
            block_bytes = float(block_activation_bytes(model, kind, layout)[0])
            total_bytes = block_bytes * kind.count / step.stages * alive
            rows.append(Row(f"{name}, {what}", value, total_bytes / _GIB, digits=2))
    title = "Memory per device, Korthikanti et al., 2022, figure 1"
    return Table(title, "GiB", tuple(rows))


def table_1() -> Table:
    """Return the step times of Narayanan et al.'s table 1."""
    rows = [
        _row(row.step, OVERLAPPING if row.step.overlaps else MEGATRON)
        for row in published.table_1()
    ]
    note = "The planner's constants are fitted to this table."
    title = "Step time of Megatron-LM, Narayanan et al., 2021, table 1"
    return Table(title, "s", tuple(rows), note)


def table_5() -> list[Table]:
    """Return the step times of Korthikanti et al.'s table 5, one table per column."""
    titles = {
        "full": "Step time with full recompute, Korthikanti et al., 2022, table 5",
        "attention": "Step time with attention recompute and sequence parallelism, the same table",
    }
    return [
        Table(
            title,
            "s",
            tuple(_row(step, MEGATRON) for step in published.table_5(recompute)),
            _HELD_OUT_NOTE,
        )
        for recompute, title in titles.items()
    ]


def table_2() -> list[Table]:
    """Return the step times of Narayanan et al.'s table 2, for tensor × pipeline and for ZeRO-3."""
    tables = []
    for scheme, system, level in (("PTD", MEGATRON, 0), ("ZeRO-3", ZERO_3, 3)):
        rows = [_row(step, system, level) for step, _ in published.table_2(scheme)]
        kind = "tensor and pipeline parallelism" if scheme == "PTD" else "ZeRO-3 only"
        title = f"Step time with {kind}, Narayanan et al., 2021, table 2"
        tables.append(Table(title, "s", tuple(rows), _HELD_OUT_NOTE))
    return tables


def make_layouts(model: str) -> Table:
    """Return the step times of a model's measured layouts."""
    steps = published.make_layouts(model)
    predicted = predicted_seconds(steps, DEEPSPEED)
    rows = tuple(
        Row(_describe(step), step.seconds, float(seconds))
        for step, seconds in zip(steps, predicted)
    )
    chosen = min(rows, key=lambda row: row.ours)
    best = min(row.published for row in rows)
    use = "fitted" if model in published.FITTED_MODELS else "held out"
    title = f"{len(rows)} layouts of {model}, VIA-Research/vTrain ({use})"
    return Table(title, "s", rows, "", chosen.published / best - 1)


def h100_steps() -> Table:
    """Return the H100 step times of Megatron-LM, planned for the reference system."""
    rows = []
    for step in h100.make_steps():
        seconds, layout = h100.reference_step(step)
        rows.append(Row(f"{step.model.name} on {step.devices}: {layout}", step.seconds, seconds))
    note = (
        "`product_share` is fitted to this table. The layouts' micro-batches and chunks are ours."
    )
    return Table("Step time of Megatron-LM on H100", "s", tuple(rows), note)


def h100_left_out() -> Table:
    """Return the same table with each row planned by a fit to the other rows."""
    rows = []
    for step, error in zip(h100.make_steps(), h100.left_out_errors()):
        rows.append(Row(step.model.name, step.seconds, step.seconds * (1 + error)))
    title = "Step time of Megatron-LM on H100, each row left out of the fit"
    return Table(title, "s", tuple(rows))


def h100_rows() -> list[tuple]:
    """Return rows with seconds and TFLOP/s per GPU of both systems on H100, the header first."""
    header = "model, H100s", "published", "reference system", "left out", "this library"
    rows = [header]
    for step, left_out in zip(h100.make_steps(), h100_left_out().rows):
        cells = [f"{step.model.name}, {step.devices:,}"]
        planned = [h100.reference_step(step)[0], h100.library_step(step)[0]]
        for seconds in (step.seconds, *planned):
            tflops = step.flops / (step.devices * seconds * 1e12)
            error = "" if seconds == step.seconds else f", {seconds / step.seconds - 1:+.0%}"
            cells.append(f"{seconds:.2f} s, {tflops:.0f}{error}")
        cells.insert(3, f"{left_out.error:+.1%}")
        rows.append(tuple(cells))
    return rows


def held_out_error(models=published.HELD_OUT_MODELS) -> float:
    """Return the mean error on the measured layouts of models, by default of all held-out models."""
    errors = [abs(row.error) for model in models for row in make_layouts(model).rows]
    return float(np.mean(errors))


def _row(step, system, level=0):
    return Row(
        _describe(step), step.seconds, float(predicted_seconds([step], system, level=level)[0])
    )


def _describe(step) -> str:
    devices = step.tensor * step.stages * step.data
    layout = measured_layouts([step]).describe(0)
    layout = layout.removesuffix(" · recompute full").removesuffix(" · recompute attention")
    return f"{step.model} on {devices}: {layout.replace('model', 'tensor')}"


def format_lines(tables: list[Table], form: Callable) -> list[str]:
    """Return all tables as lines of Markdown.

    Args:
        tables: List of `Table`s.
        form: Function from a list of rows of cells, the header first, to lines.
    """
    lines = []
    for table in tables:
        is_exact = table.rows[0].digits is not None
        verdict = "equal" if is_exact else "error"
        cells = [("case", f"published, {table.unit}", f"planner, {table.unit}", verdict)]
        for row in table.rows:

            def number(value):
                return f"{value:,.{2 if row.digits is None else row.digits}f}"

            message = ("yes" if row.is_same else "no") if is_exact else f"{row.error:+.1%}"
            cells.append((row.what, number(row.published), number(row.ours), message))
        lines += ["", f"## {table.title}", "", *form(cells), ""]
        if is_exact:
            num_equal = sum(row.is_same for row in table.rows)
            lines.append(f"{num_equal} of {len(table.rows)} rows agree to the last printed digit.")
        else:
            message = f"Mean error {table.mean_error:.1%}, largest {table.worst_error:.1%}."
            if table.regret is not None:
                message += f" The planner's choice is {table.regret:.1%} slower than the fastest."
            lines.append(f"{message} {table.note}".strip())
    return lines


def summary(tables: list[Table]) -> list[tuple]:
    """Return the rows of a summary table, the header first: errors and regret of each table."""
    rows = [("table", "rows", "mean error", "largest error", "choice slower by")]
    for table in tables:
        if table.rows[0].digits is not None:
            num_equal = sum(row.is_same for row in table.rows)
            rows.append((table.title, len(table.rows), f"{num_equal} rows equal", "", ""))
        else:
            regret = "" if table.regret is None else f"{table.regret:.1%}"
            errors = f"{table.mean_error:.1%}", f"{table.worst_error:.1%}"
            rows.append((table.title, len(table.rows), *errors, regret))
    num_held_out = sum(len(published.make_layouts(model)) for model in published.HELD_OUT_MODELS)
    rows.append(("all held-out layouts", num_held_out, f"{held_out_error():.1%}", "", ""))
    return rows


# Both pages have a generated part between these marks.
BEGIN = "<!-- Written by benchmarks/planner_page.py. -->"
END = "<!-- End of the written part. -->"


def pages() -> dict[str, str]:
    """Return the generated part of each page as a dict by file name in docs/."""
    all_tables = tables()
    rows = "\n".join(format_lines(all_tables, _markdown)).strip()
    return {
        "planner.md": "\n".join(
            [*_markdown(summary(all_tables)), "", _H100, *_markdown(h100_rows())]
        ),
        "planner-tables.md": rows,
    }


_H100 = """### H100

Seconds per step and TFLOP/s per GPU of [Megatron-LM's](https://github.com/NVIDIA/Megatron-LM) H100
table: sequences of 4,096 tokens, a vocabulary of 131,072, no recompute. "Left out" is the error of the
reference system if the constant is fitted to the other three rows. The table does not state
micro-batches and chunks, so the planner chooses the fastest. This library's estimate is for the same
degrees of parallelism. The 314B model needs recomputation there.
"""


def with_written_part(page: str, part: str) -> str:
    """Return a page with its generated part replaced."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def _markdown(rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    rule = "|" + "|".join([" --- ", *[" ---: "] * (len(rows[0]) - 1)]) + "|"
    return [lines[0], rule, *lines[1:]]
