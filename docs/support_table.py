"""Write the tables of docs/support.md: which techniques each task accepts.

    python docs/support_table.py

Every cell is a dry run of a small config. A test compares the page with the results.
"""

import contextlib
import io
import itertools
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import yaml

from dtransformer.errors import InputError
from dtransformer.models import CausalLM, EncoderDecoderLM, MaskedLM, save_pretrained
from dtransformer.runs.config import RunConfig
from dtransformer.runs.dry_run import dry_run
from dtransformer.runs.tasks import get_task_class
from dtransformer.runs.tasks.documents import DocumentTask
from dtransformer.runs.unread import is_read
from harness.byte_tokenizer import write_byte_tokenizer
from tests.runs.small_records import LLAMA, NUMBERS, TEMPLATE, records

PAGE = pathlib.Path(__file__).with_name("support.md")
BEGIN, END = "<!-- Written by docs/support_table.py. -->\n", "<!-- End of the written part. -->\n"

TEXT = {"train": "text.txt", "length": 32}
PAIRS = {"train": "pairs.jsonl", "length": 32}
# Task -> its data and the folder of its model. The sizes of `translation` are in `translation_model`.
TASKS = {
    "causal_lm": (TEXT, "llama"),
    "masked_lm": (TEXT, "bert"),
    "span_corruption": (TEXT, "t5"),
    "chat": ({"train": "chat.jsonl", "length": 64}, "llama"),
    "preference": (PAIRS, "llama"),
    "kto": ({"train": "answers.jsonl", "length": 32}, "llama"),
    "reward": (PAIRS, "llama"),
    "classification": ({"train": "labels.jsonl", "length": 32}, "bert"),
    "embedding": ({"train": "queries.jsonl", "length": 16}, "bert"),
    "ranking": ({"train": "lists.jsonl", "length": 32}, "bert"),
    "seq2seq": ({"train": "sequences.jsonl", "length": 16}, "t5"),
    "translation": (
        {"source": "source.txt", "target": "target.txt", "max_length": 16, "batch_size": 4}
        | {"batch_tokens": None},
        None,
    ),
}
ZERO = {"data_parallel": 2}
# Technique -> the lines that it adds to a config.
TECHNIQUES = {
    "Data parallel": {"parallel": {"data_parallel": 2}},
    "Tensor": {"parallel": {"model_parallel": 2}},
    "Sequence": {"parallel": {"model_parallel": 2, "sequence_parallel": True}},
    "Context": {"parallel": {"context_parallel": 2}},
    "Pipeline": {"parallel": {"pipeline_stage": 2, "micro_batch_num": 2}},
    "ZeRO 1": {"parallel": {**ZERO, "optimizer_shard": 1}},
    "ZeRO 2": {"parallel": {**ZERO, "optimizer_shard": 2}},
    "ZeRO 3": {"parallel": {**ZERO, "optimizer_shard": 3}},
    "Packed rows": {"data": {"packed": True}},
    "LoRA": {"model": {"adapters": {"rank": 2}}},
    "QLoRA": {"model": {"adapters": {"rank": 2, "base_dtype": "nf4"}}},
    "Distillation": {"distillation": {"teacher": None}},  # The folder of the task's model.
}
PACKED_TRANSLATION = {"data": {"packed_length": 32, "batch_size": None, "batch_tokens": 128}}
TABLES = (
    ("Splitting the batch or a block", ("Data parallel", "Tensor", "Sequence", "Context")),
    ("Splitting the network or the optimizer", ("Pipeline", "ZeRO 1", "ZeRO 2", "ZeRO 3")),
    ("Data and adapters", ("Packed rows", "LoRA", "QLoRA", "Distillation")),
)


def write_inputs(folder):
    """Write records, texts and small published models with tokenizers into a folder."""
    for name, rows in records().items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [f"{a} and {b} are numbers" for a in NUMBERS for b in NUMBERS]
    (folder / "text.txt").write_text("\n\n".join(texts))
    (folder / "source.txt").write_text("\n".join(texts))
    (folder / "target.txt").write_text("\n".join(texts))
    for family, network in small_networks().items():
        network.build()
        save_pretrained(network, folder / family, family)
        write_byte_tokenizer(folder / family, texts, TEMPLATE)


def small_networks():
    """Return small networks of the published families llama, bert and t5."""
    sizes = {"hidden_size": 64, "num_heads": 4}  # NF4 needs a multiple of 64.
    t5 = {key: LLAMA[key] for key in ("norm", "use_bias", "gated", "tied_head", "embedding_scale")}
    t5 |= {"positions": "relative", "relative_ranges": 8, "relative_max_distance": 16}
    t5 |= {"post_layernorm_residual": False, "query_scale": 1.0, "hidden_act": "gelu_tanh"}
    t5 |= {"encoder_layers": 2, "decoder_layers": 2, "pad_id": 0, "start_id": 0, "end_id": 2}
    return {
        "llama": CausalLM(300, **{**LLAMA, **sizes, "num_layers": 2}),
        "bert": MaskedLM(300, **sizes, num_layers=2, max_length=64, pad_id=0),
        "t5": EncoderDecoderLM(300, **sizes, **t5),
    }


def make_config(task, *techniques):
    """Return the config of a task with the lines of some techniques.

    Args:
        task: One of `TASKS`.
        techniques: Some of `TECHNIQUES`.
    """
    data, folder = TASKS[task]
    training = {"optimizer": "adamw", "max_steps": 1, "epochs": 1}
    if folder is None:
        model = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    else:
        model, training["batch_size"] = {"from": folder}, 4
    config = {"task": task, "data": dict(data), "model": model, "training": training}
    if folder is None:
        config["tokenizer"] = {"vocab_size": 60}
    for technique in techniques:
        for section, lines in added_lines(task, technique).items():
            config.setdefault(section, {}).update(lines)
    return config


def added_lines(task, technique):
    """Return the lines that a technique adds to the config of a task."""
    if technique == "Distillation":
        return {"distillation": {"teacher": TASKS[task][1]}}
    is_packed_translation = (task, technique) == ("translation", "Packed rows")
    return PACKED_TRANSLATION if is_packed_translation else TECHNIQUES[technique]


def refusal(task, *techniques):
    """Return why a dry run refuses a task with some techniques, or `None` if it accepts them.

    The working directory must contain the files of `write_inputs`.
    """
    config = RunConfig(task)
    for technique in techniques:
        for section, lines in added_lines(task, technique).items():
            for key in lines:
                name = f"{section}.{key}"
                if name not in config.keys() or not is_read(task, name):
                    return f"The task does not have the option `{name}`."
    path = pathlib.Path("config.yaml")
    path.write_text(yaml.safe_dump(make_config(task, *techniques)))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            dry_run(path)
    except InputError as error:
        return " ".join(str(error).split())
    return None


def anchor(technique):
    """Return the anchor of the section with the lines of a technique."""
    return "zero" if technique.startswith("ZeRO") else technique.lower().replace(" ", "-")


def cell(task, technique, reasons):
    """Return the text of a table cell.

    Args:
        task: One of `TASKS`.
        technique: One of `TECHNIQUES`.
        reasons: List of the reasons so far. A new reason is appended.
    """
    if technique == "Packed rows" and issubclass(get_task_class(RunConfig(task)), DocumentTask):
        return "[always](#packed-rows)"
    reason = refusal(task, technique)
    if reason is None:
        return f"[yes](#{anchor(technique)})"
    if reason not in reasons:
        reasons.append(reason)
    return f"no[^{reasons.index(reason) + 1}]"


def pairs():
    """Return all pairs of techniques, except for two levels of ZeRO."""
    return [
        (first, second)
        for first, second in itertools.combinations(TECHNIQUES, 2)
        if anchor(first) != anchor(second)
    ]


def tables():
    """Return the tables of all tasks and the footnotes."""
    reasons, lines = [], []
    for title, techniques in TABLES:
        lines += [f"### {title}", "", f"| task | {' | '.join(techniques)} |"]
        lines.append("|---" * (len(techniques) + 1) + "|")
        for task in TASKS:
            cells = " | ".join(cell(task, technique, reasons) for technique in techniques)
            lines.append(f"| `{task}` | {cells} |")
        lines.append("")
    lines += [f"[^{footnote}]: {reason}" for footnote, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n"


def refused_pairs():
    """Return a list of the pairs of techniques that the task `chat` refuses."""
    lines = []
    for first, second in pairs():
        reason = refusal("chat", first, second)
        if reason is not None:
            lines.append(f"- **{first} with {second}.** {reason}")
    return "\n".join(lines) + "\n"


def page():
    """Return the text of the page with the current tables and pairs."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        write_inputs(pathlib.Path(name))
        parts = [tables(), refused_pairs()]
    pieces = PAGE.read_text("utf-8").split(BEGIN)
    text = pieces[0]
    for part, piece in zip(parts, pieces[1:], strict=True):
        text += BEGIN + part + END + piece.partition(END)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
