"""Train dtransformer and `transformers` on PyTorch side by side and compare their losses.

    python benchmarks/training_curves.py [--families gpt2,llama,bert,t5] [--steps 200] [--losses FILE]

`transformers` draws the initial weights; both libraries then train on the same batches without
dropout. GPT-2 and Llama learn packed English text of the embedded corpus, BERT the same text with a
sixth of the tokens masked, and T5 its translations. Prints JSON with each family's first and last
losses, the largest difference of a step, and the seconds of both. `--losses` writes every loss to a
JSON file; `python docs/pictures` draws docs/pictures/results/curves.json. Needs the extra `reference`.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import keras
import numpy as np

from dtransformer import Trainer
from dtransformer.datasets import SubwordTokenizer
from dtransformer.datasets.embedded import sentence_pairs
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import from_pretrained

PEER = pathlib.Path(__file__).parent / "peers" / "curves_of_transformers.py"
# Family -> learning rate. T5 does not scale its queries, so rounding errors grow faster.
FAMILIES = {"gpt2": 3e-4, "llama": 3e-4, "bert": 3e-4, "t5": 1e-4}
ROWS, LENGTH, IGNORED = 16, 64, -100
EPSILON = 1e-10  # The peer uses the same value.
MASKED = 1 / 6


def make_batches(steps):
    """Return the arrays of `batches.npz`, with shape [steps, rows, length] for each family."""
    pairs = sentence_pairs(12_000)
    tokenizer = SubwordTokenizer.train([text for pair in pairs for text in pair], vocab_size=1000)
    english, french = (
        tokenizer.encode([pair[side] for pair in pairs]).to_list() for side in (0, 1)
    )
    stream = np.concatenate([[*ids, tokenizer.end_id] for ids in english]).astype("int32")
    num_rows = steps * ROWS
    tokens = np.resize(stream, num_rows * LENGTH).reshape(steps, ROWS, LENGTH)
    labels = np.concatenate([tokens[:, :, 1:], np.full((steps, ROWS, 1), IGNORED)], axis=2)
    is_masked = np.random.default_rng(0).random(tokens.shape) < MASKED
    source = padded(english, num_rows, tokenizer.pad_id)
    ended = padded([[*ids, tokenizer.end_id] for ids in french], num_rows, tokenizer.pad_id)
    shifted = np.concatenate([np.full((num_rows, 1), tokenizer.pad_id), ended[:, :-1]], axis=1)
    arrays = {
        "gpt2/tokens": tokens,
        "gpt2/labels": labels,
        "bert/tokens": np.where(is_masked, tokenizer.vocab_size, tokens),
        "bert/labels": np.where(is_masked, tokens, IGNORED),
        "t5/source": source.reshape(steps, ROWS, LENGTH),
        "t5/target": shifted.reshape(steps, ROWS, LENGTH),
        "t5/labels": np.where(ended == tokenizer.pad_id, IGNORED, ended).reshape(
            steps, ROWS, LENGTH
        ),
    }
    arrays |= {f"llama/{name}": arrays[f"gpt2/{name}"] for name in ("tokens", "labels")}
    ids = {name: getattr(tokenizer, name) for name in ("pad_id", "start_id", "end_id")}
    mask_tokens = 1
    return {**arrays, **ids, "vocab_size": tokenizer.vocab_size + mask_tokens}


def padded(texts, num_rows, pad_id):
    """Return truncated and padded texts, an int32 array [num_rows, LENGTH]."""
    rows = np.full((num_rows, LENGTH), pad_id, "int32")
    for i in range(num_rows):
        ids = texts[i % len(texts)][:LENGTH]
        rows[i, : len(ids)] = ids
    return rows


def train(folder, family, arrays, steps):
    """Train our model from the peer's weights and return the losses and the seconds."""
    network = from_pretrained(folder / family)
    trainer = Trainer(network)
    optimizer = keras.optimizers.Adam(FAMILIES[family], epsilon=EPSILON)
    trainer.compile(optimizer, CrossEntropyLoss(ignore_id=IGNORED))
    family_arrays = {
        name.partition("/")[2]: x for name, x in arrays.items() if name.startswith(f"{family}/")
    }
    losses, start_time = [], time.perf_counter()
    for step in range(steps):
        batch = {name: x[step] for name, x in family_arrays.items()}
        labels = batch.pop("labels")
        inputs = batch if len(batch) > 1 else batch["tokens"]
        losses.append(float(trainer.train_on_batch(inputs, labels, return_dict=True)["loss"]))
    return losses, time.perf_counter() - start_time


def compare(folder, family, arrays, steps):
    """Train a family with both libraries and return a report and the losses of both."""
    arguments = folder, family, str(steps), str(FAMILIES[family])
    subprocess.run([sys.executable, PEER, *arguments], check=True)
    peer = np.load(folder / f"{family}.npz")
    losses, seconds = train(folder, family, arrays, steps)
    differences = np.abs(peer["losses"] - losses)
    report = {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "largest_difference": float(differences.max()),
        "at_step": int(differences.argmax()),
        "seconds": round(seconds, 1),
        "transformers_seconds": round(float(peer["seconds"]), 1),
    }
    return report, {"dtransformer": losses, "transformers": peer["losses"].tolist()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--losses", type=pathlib.Path, help="write every loss to this JSON file")
    args = parser.parse_args()
    reports, curves = {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder, arrays = pathlib.Path(name), make_batches(args.steps)
        np.savez(folder / "batches.npz", **arrays)
        for family in args.families.split(","):
            reports[family], curves[family] = compare(folder, family, arrays, args.steps)
            print(family, json.dumps(reports[family]), file=sys.stderr)
    print(json.dumps({"steps": args.steps, "families": reports}, indent=2))
    if args.losses:
        write_losses(curves, reports, args.losses)


def write_losses(curves, reports, path):
    """Write the losses, rounded to five decimal places, one line per curve.

    Args:
        curves: Dict of families to dicts of libraries to lists of losses.
        reports: Dict of families to reports.
        path: File to write.
    """
    lines = []
    for family, losses in curves.items():
        parts = [f'"largest_difference": {reports[family]["largest_difference"]:.1e}']
        for library, values in losses.items():
            parts.append(f'"{library}": {json.dumps([round(value, 5) for value in values])}')
        lines.append(f'"{family}": {{\n' + ",\n".join(parts) + "\n}")
    machine = f"{os.cpu_count()} CPU cores"
    date = datetime.date.today().isoformat()
    header = f'"machine": {json.dumps(machine)},\n"date": "{date}",\n"families": {{\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + header + ",\n".join(lines) + "\n}\n}\n", "utf-8")


if __name__ == "__main__":
    main()
