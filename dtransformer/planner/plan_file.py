"""The YAML file of `dtransformer plan`: a config for `dtransformer train`, or a layout only."""

import dataclasses
import os

import yaml

from dtransformer.architectures import ARCHITECTURES
from dtransformer.planner.models import get_model
from dtransformer.planner.report import get_changed_fields
from dtransformer.planner.search import Plan
from dtransformer.planner.shape import ModelShape
from dtransformer.transformer_config import PAIR, TRANSLATION

_STACK_PATHS = {
    "num_layers": "blocks",
    "encoder_layers": "transformer/encoder",
    "decoder_layers": "transformer/decoder",
}


def plan_to_yaml(plan: Plan, folder: str | os.PathLike | None = None) -> str:
    """Return the best layout of a plan as YAML.

    A published folder or a preset gives a full config, except for the data. Other models, and
    bfloat16 weights without adapters, give only the section `parallel:`, which
    `dtransformer train` does not accept alone. Comments in the file explain how to complete it.

    Args:
        plan: A `Plan`.
        folder: Folder of the model's published weights, or `None`.
    """
    model = plan.model
    job = plan.job
    cluster = plan.cluster
    content = {"parallel": get_changed_fields(plan.best.config)}
    section = _model_section(model, folder)
    if section is None or (job.precision == "bfloat16" and not model.adapter_rank):
        steps = [
            "Only a layout: `dtransformer train` also needs task, data and model.",
            "Copy `parallel:` into a config; `dtransformer new causal_lm` prints one.",
        ]
    else:
        steps = _remaining_steps(section, folder)
        content = {
            "task": _task(model, folder),
            "data": {"length": model.sequence_length},
            "model": section,
            "training": {
                "batch_size": job.global_batch,
                "precision": job.precision,
                "optimizer": job.optimizer,
            },
            **content,
        }
    start = "dtransformer train --config THIS_FILE"
    if cluster.num_devices > 1:
        start = f"dtransformer launch -np {cluster.num_devices} -- {start}"
    lines = [
        f"{model.name} on {cluster}: {plan.best.layout}",
        *steps,
        f"Start it with: {start}",
        "In Python: TransformerOpParallelConfig(**yaml.safe_load(open(THIS_FILE))['parallel'])",
    ]
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + yaml.safe_dump(content, sort_keys=False)


def _remaining_steps(section, folder):
    """Return sentences that explain how to complete a config with this `model` section."""
    steps = ["Add data.train, the file or files to train on."]
    if "preset" in section:
        steps.append("`preset:` starts from random weights. `from: FOLDER` reads published ones.")
    elif folder is None:
        steps.append(f"Put the weights to fine-tune into {section['from']}, or change model.from.")
    return steps


def _model_section(model, folder):
    """Return the config's `model` section, or `None` if no config describes the network."""
    full = dataclasses.replace(model, adapter_rank=0, base_dtype=None, frozen_blocks=0)
    if folder is not None:
        section = {"from": str(folder)}
    elif model.name not in ARCHITECTURES:
        return None
    elif full != get_model(model.name, sequence_length=model.sequence_length):
        return None
    elif model == full:
        section = {"preset": model.name}
    else:
        section = {"from": f"models/{model.name}"}
    if model.adapter_rank:
        section["adapters"] = {"rank": model.adapter_rank}
        if model.base_dtype is not None:
            section["adapters"]["base_dtype"] = model.base_dtype
    if model.frozen_blocks:
        section["freeze"] = _frozen_patterns(model)
    return section


def _task(model, folder):
    if model.config.network in (PAIR, TRANSLATION):
        return "seq2seq" if folder else "span_corruption"
    return "causal_lm" if model.is_causal else "masked_lm"


def _frozen_patterns(model: ModelShape) -> list[str]:
    """Return patterns for the weights of all tables and of the first `frozen_blocks` blocks."""
    patterns = ["*/table", "*embedding*/*"]
    remaining = model.frozen_blocks
    for stack, num_blocks in model.config.stacks.items():
        path = _STACK_PATHS[stack]
        frozen = "|".join(map(str, range(min(remaining, num_blocks))))
        if frozen:
            patterns.append(f"{path}/block_({frozen})/*")
        remaining -= num_blocks
    return patterns
