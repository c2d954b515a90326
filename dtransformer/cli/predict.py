"""`dtransformer predict` and `dtransformer embed`: compute labels, numbers or vectors of texts."""

import argparse
import contextlib
import io
import json
import sys

import numpy as np

from dtransformer.datasets.documents import check_objects, iterate_values
from dtransformer.datasets.records import named_records
from dtransformer.errors import InputError
from dtransformer.files import atomic_write
from dtransformer.inputs.json_file import parse_json
from dtransformer.inputs.text import STANDARD_INPUT, read_input_lines, read_text_lines
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.runs.loading import load_published, open_run
from dtransformer.runs.networks import check_positions
from dtransformer.runs.run import make_trainer


def predict(arguments: argparse.Namespace) -> None:
    """Print the prediction for each text or record.

    Raises:
        InputError: If the run, the model or a record is not usable.
    """
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # Only predictions go to standard output.
        for prediction in _predictions(arguments, "predict"):
            text = (
                json.dumps(prediction, ensure_ascii=False)
                if arguments.json
                else _format_prediction(prediction)
            )
            print(text, file=out)


def embed(arguments: argparse.Namespace) -> None:
    """Write the vectors of texts or records as a NumPy file, or as lines of JSON.

    Raises:
        InputError: If the run, the model or a record is not usable, or if the file would go to a
            terminal.
    """
    out = sys.stdout
    if out.isatty() and not (arguments.json or arguments.out):
        raise InputError(
            "The NumPy file would go to the terminal. Add > FILE, --out FILE or --json."
        )
    with contextlib.redirect_stdout(sys.stderr):
        vectors = [prediction["vector"] for prediction in _predictions(arguments, "embed")]
    if not job.is_chief():
        return
    if arguments.json:
        data = "".join(f"{vector.tolist()}\n" for vector in vectors).encode()
    else:
        file = io.BytesIO()
        np.save(file, np.stack(vectors))
        data = file.getbuffer()
    if arguments.out is None:
        out.buffer.write(data)
    else:
        with atomic_write(arguments.out) as path:
            path.write_bytes(data)


def _predictions(arguments, command):
    """Yield the predictions for all records on rank 0. All ranks call it."""
    task = load_published(arguments.model) if arguments.model else open_run(arguments.run)
    config = task.config
    if not task.command.startswith(command):
        use = task.command.format("FOLDER")
        raise InputError(
            f"{command} does not support models of task {config.task}. Use `dtransformer {use}`."
        )
    if arguments.batch_size is not None:
        config.training.batch_size = arguments.batch_size
    if arguments.max_length is not None:
        check_positions(task.core, arguments.max_length)
        config.data.length = arguments.max_length
    fields = {"text": arguments.field} if arguments.field else config.data.fields
    records = from_chief(lambda: list(_read_records(arguments, fields)), "predict/records")
    if not records:
        raise InputError("No text was given. Write lines to standard input, or add --data FILE.")
    for prediction in task.predict(make_trainer(task, 1), records):
        if job.is_chief():
            yield prediction
    if task.num_cut:
        job.print_once(
            f"dtransformer: warning: {task.num_cut:,} of {len(records):,} texts have more than "
            f"{config.data.length} tokens. The rest of these texts was cut off.",
            sys.stderr,
        )


def _read_records(arguments, fields):
    """Yield a (place, record) pair for each record in the files or in standard input."""
    for path in arguments.data or [STANDARD_INPUT]:
        values = iterate_values(path) if arguments.data else None
        if values is None:
            lines = (
                read_text_lines(path)
                if arguments.data
                else read_input_lines("Write lines to it, or add --data FILE.")
            )
            first = next((line for line in lines if line.strip()), "")
            placed = ((f"{path}, line {i}", line) for i, line in enumerate(lines, start=1))
            if arguments.text or not first.startswith("{"):
                yield from ((place, {"text": line}) for place, line in placed)
                continue
            hint = " (add --text if the lines are not JSON)"
            values = ((place, parse_json(line, place + hint)) for place, line in placed)
        yield from named_records(check_objects(values, ()), fields)


def _format_prediction(prediction):
    """Return a prediction as a readable line."""
    if "words" in prediction:
        return " ".join(f"{word['word']}/{word['label'] or '?'}" for word in prediction["words"])
    if "label" in prediction:
        return f"{prediction['label']}\t{prediction['probability']:.4f}"
    return "\t".join(f"{score:.6g}" for score in prediction.values())
