"""On a terminal, training shows a short progress bar and names the results."""

import os
import pty
import re
import subprocess
import sys

import pytest

CONFIG = """
task: causal_lm
data: {train: train.txt, dev: dev.txt, documents: line, length: 16}
model: {hidden_size: 16, num_heads: 2, num_layers: 1}
training: {epochs: 2, batch_size: 8}
"""
TEXT = "one cat sees one dog\none dog eats one cat\n"
ESCAPES = re.compile(r"\x1b\[[0-9;]*[mK]|\x08")
NOISE = re.compile(r"(?i)warning|absl|xla|cuda|onednn|traceback|^[IWEF]\d{4} ", re.MULTILINE)
BAR = re.compile(r"\d+/\d+ ━+ (.*)")
NAMES = re.compile(r" - ([\w/]+): ")


def read_terminal(command, folder):
    """Run a command in a pseudo-terminal. Return its exit code and the text without escapes."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=environment
    )
    os.close(terminal)
    parts = []
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:  # Linux reports the end of the process as an error.
            break
        if not part:
            break
        parts.append(part)
    os.close(controller)
    text = b"".join(parts).decode().replace("\r\n", "\n")
    return process.wait(), ESCAPES.sub("", text)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Text of a short training, and its folder."""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "first.yaml").write_text(CONFIG)
    (folder / "train.txt").write_text(TEXT * 100)
    (folder / "dev.txt").write_text(TEXT * 10)
    command = [sys.executable, "-m", "dtransformer.cli", "train", "--config", "first.yaml"]
    code, text = read_terminal(command, folder)
    assert code == 0, text
    return text, folder


def test_no_notes_of_tensorflow_or_python_reach_the_terminal(output):
    text, _ = output
    assert not NOISE.search(text), text


def test_bar_shows_loss_speed_and_remaining_time_only(output):
    text, _ = output
    bars = BAR.findall(text.replace("\r", "\n"))
    assert len(bars) > 2
    for bar in bars:
        assert re.match(r"[\d:]+s? \d+(us|ms|s)/step", bar)
        assert set(NAMES.findall(bar)) <= {"loss", "val_loss", "tokens/s"}
        assert len(bar) < 100
    finished = [bar for bar in bars if "val_loss" in bar]
    assert len(finished) == 2
    assert re.search(r"tokens/s: \d[\d,]* - val_loss: [\d.]+$", finished[-1])


def test_last_lines_name_the_results_and_the_next_command(output):
    text, folder = output
    *_, run, plot, checkpoint, following = text.splitlines()
    assert run == "Run folder: runs/first"
    assert plot == "Loss plot:  runs/first/loss.svg"
    assert re.fullmatch(r"Checkpoint: runs/first/checkpoints/step-\d{8}", checkpoint)
    assert following == "Next:       dtransformer generate --model runs/first --prompt TEXT"
    assert (folder / checkpoint.split()[1]).is_dir()


def test_loss_plot_shows_both_losses(output):
    _, folder = output
    picture = (folder / "runs/first/loss.svg").read_text()
    training, validation = re.findall(r'<polyline points="([^"]+)"', picture)
    assert len(training.split()) > len(validation.split()) > 1
    assert "training loss" in picture and "validation loss" in picture
