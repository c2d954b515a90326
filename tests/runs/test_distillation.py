"""Runs with a teacher learn from it, save only the student, and reject teachers that do not fit."""

import json
import shutil

import pytest

from dtransformer.cli import main
from dtransformer.errors import InputError
from dtransformer.models import CausalLM, save_pretrained
from dtransformer.runs.automatic import get_run_shape, plan_run
from dtransformer.runs.config import load_config
from dtransformer.runs.run import train
from dtransformer.runs.unread import check_read
from harness.byte_tokenizer import write_byte_tokenizer
from tests.runs.small_records import LLAMA, TEMPLATE, write, write_config

TEACHER = "distillation.teacher=llama"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    return tmp_path


def epochs(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [x for x in map(json.loads, lines) if x["kind"] == "epoch"]


def test_run_learns_from_a_teacher_and_saves_only_the_student(place, capsys):
    config = write_config("chat", place)
    shutil.copytree("llama", "teacher")
    options = ["distillation.teacher=teacher", "distillation.hard_loss_weight=0.2"]
    run = train(config, options, "runs/student")
    (epoch,) = epochs(run)
    assert epoch["kl_loss"] >= 0
    expected = 0.2 * epoch["val_hard_loss"] + 0.8 * 4 * epoch["val_kl_loss"]
    assert epoch["val_loss"] == pytest.approx(expected, rel=1e-4)
    shutil.rmtree("teacher")  # Evaluation needs no teacher.
    capsys.readouterr()
    assert main(["evaluate", "--run", str(run), "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["loss"] == pytest.approx(epoch["val_hard_loss"], rel=1e-4)


@pytest.mark.parametrize("task", ["gpt", "seq2seq"])
def test_teacher_may_be_a_run(task, place):
    config = write_config(task, place)
    quick = ["export.folder=null", "training.max_steps=1"]
    teacher = train(config, quick, "runs/teacher")
    tokenizer = [f"tokenizer.folder={teacher}/tokenizer"]
    if task == "seq2seq":
        tokenizer.append("tokenizer.vocab_size=null")
    run = train(config, [*quick, *tokenizer, f"distillation.teacher={teacher}"], "runs/student")
    (epoch,) = epochs(run)
    # Both networks start equal, and the teacher took one step.
    assert 0 < epoch["val_kl_loss"] < 0.1


def teacher_error(place, vocab_size=290, texts=None):
    """Return the error of a run with a new teacher, which has a tokenizer if there are texts."""
    network = CausalLM(vocab_size, **LLAMA)
    network.build()
    save_pretrained(network, place / "teacher", "llama")
    if texts is not None:
        write_byte_tokenizer(place / "teacher", texts, TEMPLATE)
    config = write_config("chat", place)
    with pytest.raises(InputError) as error:
        train(config, ["distillation.teacher=teacher", "export.folder=null"], "runs/student")
    assert not (place / "runs/student").exists()
    return str(error.value)


def test_teacher_of_another_vocabulary_is_an_error(place):
    message = teacher_error(place, vocab_size=292)
    assert "vocabulary of 292 entries, but the trained network has 290" in message


def test_teacher_with_another_tokenizer_is_an_error(place):
    texts = ["quick brown foxes, quite different words"] * 9
    assert "has another tokenizer than the run" in teacher_error(place, texts=texts)


def test_missing_teacher_is_an_error(place):
    config = write_config("chat", place)
    with pytest.raises(InputError, match="`distillation.teacher`: the folder 'nowhere' does not"):
        train(config, ["distillation.teacher=nowhere"], "runs/student")


def test_options_without_a_teacher_are_an_error():
    settings = ["task=chat", "distillation.temperature=3"]
    with pytest.raises(InputError, match="has no effect without distillation.teacher"):
        check_read(load_config(None, settings))


def test_planned_model_has_the_teacher(place):
    config = load_config(write_config("chat", place), [TEACHER, "parallel=auto"])
    student = get_run_shape(config, config.data.length)
    assert student.teacher.parameters() == student.parameters()
    assert plan_run(config).best.config.pipeline_stage == 1


@pytest.mark.parametrize("task", ["preference", "classification", "next_sentence", "translation"])
def test_other_tasks_have_no_teacher(task):
    with pytest.raises(InputError, match="unknown key `distillation.teacher`"):
        load_config(None, [f"task={task}", TEACHER])
