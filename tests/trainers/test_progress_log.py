"""Progress is a bar on a terminal, and a few short lines in a log file."""

import io
import re
import subprocess
import sys
import warnings

import keras
import pytest

from dtransformer.parallel.runtime import job
from tests.trainers.small import dense_trainer, points

METRIC = re.compile(r"(\w+): [-\d.e+]+")


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self):
        return True


class Score(keras.callbacks.Callback):
    """Prints a score at the end of each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        job.print_once("score: 7")


def fit(num_batches, *callbacks, epochs=1, **options):
    """Train a network with five metrics."""
    metrics = ["mae", "mape", "msle", "cosine_similarity", "mse"]
    trainer = dense_trainer(metrics=metrics)
    x, y = points(2 * num_batches)
    options = {"batch_size": 2, "validation_data": (x, y), **options}
    trainer.fit(x, y, epochs=epochs, callbacks=list(callbacks), **options)
    return trainer


@pytest.mark.parametrize("verbose", ["auto", 1])
def test_log_file_has_ten_lines_per_epoch(verbose, capsys):
    fit(40, epochs=2, verbose=verbose)
    lines = capsys.readouterr().out.splitlines()
    counts = [line.partition(" ")[0] for line in lines]
    epoch = [f"{step}/40" for step in range(4, 44, 4)]
    assert counts == ["Epoch", *epoch, "Epoch", *epoch]


def test_progress_line_has_six_metrics_with_losses_first(capsys):
    fit(10)
    *steps, epoch = capsys.readouterr().out.splitlines()
    for line in steps:
        names = METRIC.findall(line)
        assert len(names) == 6 and names[0] == "loss"
    assert METRIC.findall(epoch)[:2] == ["loss", "val_loss"]
    assert len(METRIC.findall(epoch)) == 6


def test_verbose_2_prints_one_line_for_each_epoch(capsys):
    fit(10, epochs=2, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["Epoch", "10/10"] * 2


def test_terminal_shows_a_bar_with_losses_and_metrics(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    fit(10)
    assert "━" in terminal.getvalue() and "loss: " in terminal.getvalue()
    assert "mse: " in terminal.getvalue() and "gradient_norm" not in terminal.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_printed_score_has_a_separate_line(is_terminal, monkeypatch):
    output = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    fit(10, Score(), epochs=2)
    assert output.getvalue().splitlines().count("score: 7") == 2


def test_evaluate_and_predict_print_one_line_into_a_log_file(capsys):
    trainer = fit(10, verbose=0)
    x, y = points(20)
    trainer.evaluate(x, y, batch_size=2)
    trainer.predict(x, batch_size=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["10/10", "10/10"]


class FormatsWarning(keras.callbacks.Callback):
    """Formats a warning as Python does for warnings of Keras layers."""

    def on_epoch_end(self, epoch, logs=None):
        code = keras.layers.Dense.__init__.__code__
        text = "Do not pass\n`input_shape`"
        arguments = UserWarning, code.co_filename, code.co_firstlineno
        self.text = warnings.formatwarning(text, *arguments)


def test_warning_in_fit_is_one_plain_line():
    before, callback = warnings.formatwarning, FormatsWarning()
    fit(2, callback, verbose=0)
    assert callback.text == "warning: Do not pass `input_shape`\n"
    assert warnings.formatwarning is before


def test_warning_of_the_command_line_is_one_plain_line():
    code = (
        "import warnings; from dtransformer.cli import main; main(); warnings.warn('two\\nlines')"
    )
    command = [sys.executable, "-c", code, "new", "reward"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stderr == "warning: two lines\n"
