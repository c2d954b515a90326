"""Write the tables of docs/hardware.md from the planner.

    python docs/hardware_table.py

A test compares the page with the planner's answer.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from dtransformer.errors import InputError
from dtransformer.planner import Cluster, Job, plan
from dtransformer.planner.clusters import get_device
from dtransformer.planner.layouts import get_recompute_level
from dtransformer.planner.models import get_model

PAGE = pathlib.Path(__file__).with_name("hardware.md")
BEGIN, END = "<!-- Written by docs/hardware_table.py. -->\n", "<!-- End of the written part. -->\n"

MODELS = {
    "1B": "llama3.2_1b",
    "3B": "llama3.2_3b",
    "8B": "llama3.1_8b",
    "14B": "qwen3_14b",
    "32B": "qwen3_32b",
    "70B": "llama3.1_70b",
}
DEVICES = (1, 2, 8, 16)
SEQUENCE_LENGTH, ROWS_PER_DEVICE, ADAPTER_RANK = 2048, 8, 16
METHODS = {
    "full, mixed_bfloat16": ("mixed_bfloat16", {}),
    "full, bfloat16": ("bfloat16", {}),
    "LoRA, bfloat16": ("bfloat16", {"adapter_rank": ADAPTER_RANK}),
    "QLoRA, NF4": ("bfloat16", {"adapter_rank": ADAPTER_RANK, "base_dtype": "nf4"}),
}


def cell(preset, devices, precision, fields):
    """Return the memory per GPU and the layout of the recommended plan, or a dash.

    Args:
        preset: Name of a published size.
        devices: Number of H100 GPUs.
        precision: Precision of the job.
        fields: Dict of other fields of `ModelShape`, such as `adapter_rank`.
    """
    model = get_model(preset, sequence_length=SEQUENCE_LENGTH, **fields)
    cluster = Cluster(get_device("h100"), devices)
    job = Job(ROWS_PER_DEVICE * devices, precision)
    try:
        best = plan(model, cluster, job).best
    except InputError:
        return "–"
    if not best.fits:
        return "–"
    return f"{best.memory_bytes / 1e9:.0f} GB<br>`{short_layout(best.config)}`"


def short_layout(config):
    """Return a layout in the notation of the page, such as `dp4 pp2 zero1 m16`.

    Args:
        config: A `TransformerOpParallelConfig`.
    """
    degrees = {
        "dp": config.data_parallel,
        "tp": config.model_parallel,
        "cp": config.context_parallel,
        "pp": config.pipeline_stage,
    }
    words = [f"{name}{degree}" for name, degree in degrees.items() if (degree or 1) > 1]
    if config.optimizer_shard:
        words.append(f"zero{int(config.optimizer_shard)}")
    if config.gradient_accumulation_shard:
        words.append("gs")
    if config.micro_batch_num > 1:
        words.append(f"m{config.micro_batch_num}")
    if get_recompute_level(config.recompute) != "none":
        words.append("rc")
    return " ".join(words) or "one GPU"


def table(method):
    """Return the Markdown table of a method: one row per model, one column per number of GPUs."""
    precision, fields = METHODS[method]
    header = " | ".join(["model", *(f"{devices} GPU{'s' * (devices > 1)}" for devices in DEVICES)])
    lines = [f"| {header} |", "|---" * (len(DEVICES) + 1) + "|"]
    for size, preset in MODELS.items():
        cells = [cell(preset, devices, precision, fields) for devices in DEVICES]
        lines.append(f"| {size} (`{preset}`) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page():
    """Return the text of the page with the current tables."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    tables = "\n".join(f"### {method}\n\n{table(method)}" for method in METHODS)
    return before + BEGIN + tables + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
