"""Derive the size, batch and learning rate of a language model from its depth."""

import math

from dtransformer.architectures import Architecture
from dtransformer.errors import InputError
from dtransformer.planner import Cluster, Job, plan
from dtransformer.planner.budget import optimal_batch_tokens
from dtransformer.planner.models import from_architecture
from dtransformer.planner.report import plan_to_text
from dtransformer.runs.options import DEFAULT_VOCAB_SIZE
from dtransformer.runs.preview import new_config

# GPT-2's row length in tokens
_TASK = "causal_lm"
_LENGTH = 1024


def make_depth_options(depth: int) -> dict[str, dict]:
    """Return the options of a run that trains a decoder with `depth` blocks, as a dict by section.

    For d blocks of width h with N weights, D training tokens and C training FLOPs:

    - h = 64 d, with heads of size 64, as in GPT-3's smallest model with 12 blocks (Brown et al., 2020,
      arXiv 2005.14165, table 2.1). The loss depends little on the ratio of depth and width (Kaplan et
      al., 2020, arXiv 2001.08361, §3.1).
    - D = 20 N, with N = 12 d h² (Hoffmann et al., 2022, arXiv 2203.15556, table 3).
    - The batch has 0.2920 C^0.3271 tokens, rounded to a power of two of rows. The peak learning rate
      is 0.3118 C^-0.1250. C = (72 d h² + 12 d h s) D for rows of s tokens. The weight decay is 0.1,
      and the warm-up takes 2,000 steps or a tenth of all steps, if that is less (DeepSeek-AI, 2024,
      arXiv 2401.02954, §2.3 and §3.1).

    Args:
        depth: Integer. Number of blocks, d.

    Example:

    >>> make_depth_options(12)["model"]
    {'hidden_size': 768, 'num_heads': 12, 'num_layers': 12}
    """
    width = 64 * depth
    tokens = 20 * 12 * depth * width**2
    flops = (72 * depth * width**2 + 12 * depth * width * _LENGTH) * tokens
    rows = 2 ** max(round(math.log2(optimal_batch_tokens(flops) / _LENGTH)), 0)
    steps = math.ceil(tokens / (rows * _LENGTH))
    rate = float(f"{0.3118 * flops**-0.1250:.2g}")
    training = {"batch_size": rows, "learning_rate": rate, "weight_decay": 0.1}
    return {
        "data": {"train": "data/train.txt", "length": _LENGTH},
        "model": {"hidden_size": width, "num_heads": depth, "num_layers": depth},
        "training": {**training, "max_steps": steps, "warmup_steps": min(2000, steps // 10)},
    }


def make_depth_config(task: str, depth: int, cluster: Cluster) -> str:
    """Return the text of a config file for a decoder with `depth` blocks.

    The planner's table of layouts follows in comments.

    Args:
        task: Name of the task. Only "causal_lm" is supported.
        depth: Integer. Number of blocks.
        cluster: Devices that the table is computed for.

    Raises:
        InputError: If the task is not "causal_lm".
    """
    if task != _TASK:
        raise InputError(f"--depth only supports task {_TASK}, got {task}.")
    options = make_depth_options(depth)
    rows = options["training"]["batch_size"]
    on_cpu = cluster.device.name == "cpu"
    job = Job(rows, "float32" if on_cpu else None).on(cluster.device)
    options["training"]["precision"] = job.precision
    arguments = {**options["model"], "vocab_size": DEFAULT_VOCAB_SIZE, "max_length": _LENGTH}
    model = from_architecture(f"depth {depth}", Architecture("CausalLM", arguments, ""))
    table = "\n".join(
        f"# {x}".rstrip() for x in plan_to_text(plan(model, cluster, job)).splitlines()
    )
    head = (
        f"# A language model of {depth} blocks. Width, heads, batch, rate and steps follow from them:\n"
        "# Brown et al., 2020, table 2.1; Hoffmann et al., 2022, table 3; DeepSeek-AI, 2024, §3.1.\n"
        "# No token is to be seen twice: of fewer than the steps ask for, training ends earlier.\n"
    )
    return f"{head}{new_config(task, options)}\nparallel: auto  # the planner's layout\n\n{table}\n"
