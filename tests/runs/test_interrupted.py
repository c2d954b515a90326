"""An interrupted run reports its checkpoint and the command that resumes it."""

import shlex

import pytest

from dtransformer.cli import main
from dtransformer.parallel.config.elastic_config import LAUNCHER
from dtransformer.trainers.callbacks import MetricsFile
from tests.runs.small_records import write, write_config


@pytest.fixture
def interrupted(tmp_path, monkeypatch, capsys):
    """A function that interrupts a training at a step. It returns the exit code and the errors."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    write_config("classification", tmp_path)

    def run(step):
        with monkeypatch.context() as patched:
            patched.setattr(MetricsFile, "on_train_batch_end", interrupt_at(step))
            options = ["--set", "training.checkpoint_steps=2", "model.hidden_size=16"]
            code = main(["train", "--config", "classification.yaml", "--run", "my run", *options])
        return code, capsys.readouterr().err

    return run


def interrupt_at(step):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.num_steps == step:
            raise KeyboardInterrupt

    return on_train_batch_end


def test_printed_command_resumes_the_run(interrupted, capsys):
    code, errors = interrupted(5)
    assert code == 130 and errors.count("\n") == 1
    assert "the newest checkpoint has 4 steps (my run/checkpoints/step-00000004)" in errors
    program, *arguments = shlex.split(errors.partition("Resume with: ")[2])
    assert program == "dtransformer"
    assert main(arguments) == 0
    assert "Resuming from my run/checkpoints/step-00000004" in capsys.readouterr().out


def test_nothing_is_resumed_before_the_first_checkpoint(interrupted):
    code, errors = interrupted(1)
    assert code == 130
    assert errors == (
        "dtransformer: interrupted before the first checkpoint, so that nothing was saved\n"
    )


def test_command_includes_the_launcher(interrupted, monkeypatch):
    monkeypatch.setenv(LAUNCHER, "dtransformer launch -np 2 -- ")
    _, errors = interrupted(3)
    assert "Resume with: dtransformer launch -np 2 -- dtransformer train --config" in errors


def test_only_rank_0_reports_an_interrupt(interrupted, monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    assert interrupted(3) == (130, "")
