"""Wrong options and environments of the command line cause an error of one line."""

import json
import os
import subprocess
import sys

import pytest

from dtransformer.architectures import ARCHITECTURES
from dtransformer.cli import main
from dtransformer.errors import MAX_MESSAGE
from dtransformer.runs import needs
from dtransformer.runs.config import load_config
from dtransformer.runs.options import DEFAULT_VOCAB_SIZE
from dtransformer.runs.tasks import make_task
from tests.inputs.bounded import refusal

HUGE = "9" * 5000


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["trian"], "trian"),
        (["train"], "--config"),
        (["train", "--config", "x", "--over"], "--over"),
        (["train", "--config", ""], "must be a nonempty path"),
        (["train", "--config", "a\0b"], "NUL"),
        (["train", "--config", "a" * 5000], "too long"),
        (["train", "--config", "/".join(["a"] * 4000)], "too long"),
        (["train", "--config", "a" * 256], "too long"),
        (["train", "--config", "/dev/zero"], "neither a file nor a pipe"),
        (["train", "--config", os.sep], "folder"),
        (["train", "--config", "\udce9\n\x1b[2J"], "does not exist"),
        (["translate", "--run", "x", "--beam-size", "0"], "from 1 to 1000"),
        (["translate", "--run", "x", "--beam-size", "1000000"], "from 1 to 1000"),
        (["translate", "--run", "x", "--beam-size", HUGE], "18 digits"),
        (["translate", "--run", "x", "--beam-size", "1.5"], "an integer"),
        (["translate", "--run", "x", "--length-penalty", "x"], "invalid float"),
        (["translate", "--run", "a" * 300], "too long"),
        (["evaluate", "--run", "x", "--src", "", "--ref", "y"], "must be a nonempty path"),
        (["evaluate", "--run", "x", "--beam-size", "2"], "--beam-size has no effect without --src"),
        (
            ["evaluate", "--run", "x", "--src", "a", "--ref", "b", "--data", "c"],
            "--data has no effect with --src",
        ),
        (["prepare", "--embedded", "--out", "x", "--seed", "-1"], "from 0"),
        (["prepare", "--embedded", "--out", "x", "--num-train", "1000000000"], "from 0"),
        (["prepare", "--embedded", "--out", "/dev/full/x"], "cannot be written"),
        (["checkpoint", "verify", ""], "must be a nonempty path"),
        (["checkpoint", "verify", "\n".join("abc")], "does not exist"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode().replace("\0", "0"),
)
def test_wrong_options_are_one_line_errors(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("dtransformer: ") and error.count("\n") == 1 and message in error
    assert len(error) <= MAX_MESSAGE + 1 and error[:-1].isprintable()


@pytest.mark.parametrize(
    "setting, message",
    [
        ("model.hidden_size=1000000", "GiB of memory"),
        ("model.moe_config={expert_num: 1000000}", "GiB of memory"),
        ("model.encoder_layers=100000", "at most 200"),
        ("model.num_heads=.inf", "finite"),
        ("data.max_length=100000000", "GiB of memory"),
        ("data.num_buckets=1000000000", "at most 1000"),
        ("data.source=" + "a" * 5000, "4095"),
        ("search.beam_size=1000000", "at most 1000"),
        ("search.max_length=1000", "data.max_length=128"),
        ("tokenizer.vocab_size=1000000000", "must be at most"),
        ("parallel.micro_batch_num=1000000000", "at most"),
        ("parallel.pipeline_stage=1000000000", "at most"),
        ("parallel.optimizer_shard=99999999999", "at most"),
        ("parallel.parallel_optimizer_threshold=.nan", "finite"),
        ("parallel.parallel_optimizer_exclude=['a{99999999999}']", "parallel_optimizer_exclude"),
        ("training.local_devices=100000", "at most 128"),
        ("training.epochs=" + HUGE, "18 digits"),
        ("training.learning_rate=.nan", "finite"),
        ("training.learning_rate=1e400", "finite"),
        ("training.learning_rate=-1", "at least 0"),
        ("training.beta_2=1", "less than 1"),
        ("training.weight_decay=.inf", "finite"),
        ("training.clip_norm=nan", "must be a number"),
        ("training.seed=-1", "at least 0"),
        ("training.jit_compile=maybe", "'auto' or true or false"),
        ("data.source=2014-05-01", ""),
        ("data.source=2014", "in quotes"),
        ("data.shuffle=no", "must be true or false"),
    ],
    ids=lambda text: text[:50],
)
def test_settings_are_limited(setting, message):
    def read():
        config = load_config(None, [setting])
        make_task(config).unbuilt(config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE)

    if message:
        assert message in refusal(read)
    else:
        read()


def test_search_memory_counts_beams_and_sentences(monkeypatch):
    config = load_config(None, ["model.hidden_size=256", "search.max_length=50"])
    monkeypatch.setattr(needs, "free_memory", lambda: 2**30)
    needs.check_search(config, 8000, 4, 64)
    for beams, sentences in ((4, 10**4), (1000, 64)):
        message = refusal(lambda: needs.check_search(config, 8000, beams, sentences))
        assert f"beam_size={beams}, max_length=50 and {sentences} sentences" in message


COMMAND = [sys.executable, "-m", "dtransformer.cli"]
TRANSLATE = [*COMMAND, "translate", "--run", "é"]


@pytest.mark.parametrize(
    "command, environment, streams, message",
    [
        (COMMAND, {"KERAS_BACKEND": "jax"}, "", "KERAS_BACKEND=tensorflow"),
        (TRANSLATE, {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}, "", "folder `é` does not exist"),
        ([*COMMAND, "doctor"], {}, ">/dev/full", "No space left"),
    ],
    ids=["backend", "locale", "full disk"],
)
def test_unusual_environments_are_one_line_errors(command, environment, streams, message):
    result = subprocess.run(
        ["sh", "-c", f'exec "$@" {streams}', "sh", *command],
        env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    error = result.stderr.decode()
    assert result.returncode == 2
    assert error.startswith("dtransformer: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_closed_standard_streams_are_one_line_errors(stream, monkeypatch, capsys):
    monkeypatch.setattr(sys, stream, None)
    assert main(["translate", "--run", "x"]) == 2
    assert "is closed" in capsys.readouterr().err


def test_unexpected_errors_are_one_line(monkeypatch, capsys):
    def fail(_):
        raise RuntimeError("one\ntwo " + "x" * 1000)

    monkeypatch.setattr("dtransformer.cli._run", fail)
    assert main(["doctor"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dtransformer: RuntimeError: one two xxx") and error.count("\n") == 1
    assert len(error) <= MAX_MESSAGE + 1 and "DTRANSFORMER_TRACEBACK=1" in error
    monkeypatch.setenv("DTRANSFORMER_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main(["doctor"])


def test_healthy_ranks_report_a_failed_rank_in_one_line(monkeypatch, capsys):
    def fail(_):
        raise RuntimeError("gloo/transport/tcp/pair.cc:589] Read error: reset by peer")

    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setattr("dtransformer.cli._run", fail)
    assert main(["doctor"]) == 1
    assert "Another rank has failed or left the job" in capsys.readouterr().err


def test_models_command_lists_families_and_presets(capsys):
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "124,439,808" in printed and "LlamaForCausalLM" in printed
    assert main(["models", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (bert,) = [x for x in result["families"] if x["family"] == "bert"]
    assert bert["heads"] == ["SequenceClassification", "TokenClassification"]
    assert {x["preset"] for x in result["presets"]} == set(ARCHITECTURES)
