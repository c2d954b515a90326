"""Callbacks print, write and log the right values during `fit`."""

import json
import math
import re

import keras
import numpy as np
import pytest
import sacrebleu
import tensorflow as tf

from dtransformer.parallel.runtime import job
from dtransformer.trainers.callbacks import (
    LossMonitor,
    MetricsFile,
    SacreBleu,
    TimeMonitor,
)

STEPS = 6
SOURCES = ["un chat dort", "le chien mange une pomme rouge"]
REFERENCES = ["a cat is sleeping here", "the dog eats a red apple today"]


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def other_rank(monkeypatch):
    """Let `is_chief` return `False`, as on all ranks except the first."""
    monkeypatch.setattr(job, "is_chief", lambda: False)


def fit(model, *callbacks, epochs=1, **options):
    x = np.ones((2 * STEPS, 2), np.float32)
    options = dict(batch_size=2, epochs=epochs, verbose=0, callbacks=list(callbacks)) | options
    return model.fit(x, x[:, :1], **options)


def read(path):
    def reject(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=reject) for line in path.read_text().splitlines()]


class TestLossMonitor:
    def test_prints_every_nth_step(self, model, capsys):
        fit(model, LossMonitor(every=4), epochs=2)
        lines = capsys.readouterr().out.splitlines()
        pattern = r"epoch: (\d+) step: (\d+), loss is \d+\.\d{4}"
        printed = [re.fullmatch(pattern, line).groups() for line in lines]
        assert printed == [("1", "4"), ("2", "2"), ("2", "6")]

    def test_prints_the_loss_of_the_logs(self, model, capsys):
        monitor = LossMonitor()
        monitor.set_model(model)
        monitor.on_train_begin()
        monitor.on_epoch_begin(0)
        for batch, loss in enumerate((tf.constant(9.12344), np.float32(math.nan))):
            model.optimizer.iterations.assign_add(1)
            monitor.on_train_batch_end(batch, {"loss": loss})
        assert capsys.readouterr().out.splitlines() == [
            "epoch: 1 step: 1, loss is 9.1234",
            "epoch: 1 step: 2, loss is nan",
        ]

    def test_steps_per_execution_prints_the_last_step_of_a_call(self, model, capsys):
        model.compile("sgd", "mse", steps_per_execution=3)
        fit(model, LossMonitor(every=2))
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(",")[0] for line in lines] == ["epoch: 1 step: 3", "epoch: 1 step: 6"]


class TestTimeMonitor:
    PATTERN = r"Train epoch time: (\d+\.\d{3}) ms, per step time: (\d+\.\d{3}) ms"

    @pytest.mark.parametrize("data_size, num_steps", [(None, STEPS), (2, 2)])
    def test_prints_the_time_of_epochs_and_steps(self, data_size, num_steps, model, capsys):
        fit(model, TimeMonitor(data_size), epochs=2)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2
        for line in lines:
            epoch, step = map(float, re.fullmatch(self.PATTERN, line).groups())
            assert 0 < step == pytest.approx(epoch / num_steps, abs=0.001)

    def test_other_ranks_print_nothing(self, model, other_rank, capsys):
        fit(model, TimeMonitor())
        assert capsys.readouterr().out == ""


class TestMetricsFile:
    def test_writes_every_nth_step_and_every_epoch(self, model, tmp_path):
        path = tmp_path / "new" / "metrics.jsonl"
        x = np.ones((2, 2), np.float32)
        data = (x, x[:, :1])
        history = fit(model, MetricsFile(path, every=4), epochs=2, validation_data=data).history
        records = read(path)
        printed = [(record["kind"], record["epoch"], record["step"]) for record in records]
        assert printed == [
            ("step", 1, 4),
            ("epoch", 1, STEPS),
            ("step", 2, 8),
            ("step", 2, 12),
            ("epoch", 2, 2 * STEPS),
        ]
        times = [record["time"] for record in records]
        assert times == sorted(times) and times[0] > 1.7e9
        epochs = [record for record in records if record["kind"] == "epoch"]
        for name in ("loss", "val_loss"):
            assert [record[name] for record in epochs] == history[name]

    def test_lines_are_written_immediately(self, model, tmp_path):
        path, line_counts = tmp_path / "metrics.jsonl", []
        count_lines = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: line_counts.append(len(read(path)))
        )
        fit(model, MetricsFile(path), count_lines)
        assert line_counts == list(range(1, STEPS + 1))

    def test_resumed_run_appends_and_continues_the_step_count(self, model, tmp_path):
        path = tmp_path / "metrics.jsonl"
        fit(model, MetricsFile(path))
        fit(model, MetricsFile(path), epochs=2, initial_epoch=1)
        steps = [record for record in read(path) if record["kind"] == "step"]
        assert [record["step"] for record in steps] == list(range(1, 2 * STEPS + 1))
        assert [record["epoch"] for record in steps] == [1] * STEPS + [2] * STEPS

    def test_incomplete_last_line_is_removed(self, model, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
        fit(model, MetricsFile(path, every=STEPS))
        assert [(record["kind"], record["step"]) for record in read(path)] == [
            ("step", 1),
            ("step", STEPS),
            ("epoch", STEPS),
        ]

    def test_nonfinite_values_are_written_as_strings(self, model, tmp_path):
        path = tmp_path / "metrics.jsonl"
        metrics = MetricsFile(path)
        metrics.set_model(model)
        metrics.on_train_begin()
        metrics.on_epoch_begin(0)
        logs = {
            "a": math.nan,
            "b": np.float32(np.inf),
            "c": tf.constant(-np.inf),
            "d": np.int64(3),
            "e": tf.constant(0.5, tf.bfloat16),
            "step": 7.0,
        }
        metrics.on_epoch_end(0, logs)
        metrics.on_train_end()
        (record,) = read(path)
        assert record["step"] == 0 and record["logs.step"] == 7.0
        assert [record[name] for name in "abcde"] == ["NaN", "Infinity", "-Infinity", 3.0, 0.5]
        assert math.isnan(float(record["a"])) and float(record["c"]) == -math.inf

    def test_writes_the_logs_of_earlier_callbacks(self, model, tmp_path):
        path = tmp_path / "metrics.jsonl"
        bleu = SacreBleu(SOURCES, REFERENCES, lambda sentences: REFERENCES)
        fit(model, bleu, MetricsFile(path, every=100))
        (record,) = read(path)
        assert record["val_bleu"] == pytest.approx(100.0)


class TestSacreBleu:
    def test_prints_the_score_and_the_signature(self, model, capsys):
        received = []

        def translate(sentences):
            received.append(sentences)
            return ["a cat is sleeping there", "the dog eats a red apple"]

        bleu = SacreBleu(SOURCES, REFERENCES, translate)
        history = fit(model, bleu, epochs=2).history
        expected = sacrebleu.corpus_bleu(translate(SOURCES), [REFERENCES]).score
        assert history["val_bleu"] == pytest.approx([expected, expected])
        assert bleu.score == pytest.approx(expected)
        assert "nrefs:1" in bleu.signature and "tok:13a" in bleu.signature
        assert received[0] == SOURCES
        line = capsys.readouterr().out.splitlines()[0]
        assert line == f"epoch: 1, BLEU = {expected:.2f} ({bleu.signature})"

    def test_bleu_uses_several_references(self, model):
        second_references = ["one cat sleeps now here", "a dog is eating the red apple"]
        bleu = SacreBleu(
            SOURCES, [REFERENCES, second_references], lambda sentences: second_references
        )
        fit(model, bleu)
        assert bleu.score == pytest.approx(100.0) and "nrefs:2" in bleu.signature

    def test_scores_only_every_second_epoch(self, model):
        scored = []

        def translate(sentences):
            scored.append(len(model.history.epoch) + 1)
            return REFERENCES

        fit(model, SacreBleu(SOURCES, REFERENCES, translate, every=2), epochs=5)
        assert scored == [2, 4]

    def test_early_stopping_and_checkpoints_can_monitor_bleu(self, model, tmp_path):
        outputs = iter([REFERENCES, ["", ""], ["", ""], ["", ""]])
        bleu = SacreBleu(SOURCES, REFERENCES, lambda sentences: next(outputs))
        early_stopping = keras.callbacks.EarlyStopping("val_bleu", mode="max", patience=2)
        best_checkpoint = keras.callbacks.ModelCheckpoint(
            str(tmp_path / "{epoch}.weights.h5"),
            monitor="val_bleu",
            mode="max",
            save_best_only=True,
            save_weights_only=True,
        )
        history = fit(model, bleu, early_stopping, best_checkpoint, epochs=9)
        assert len(history.epoch) == 3
        assert [p.name for p in tmp_path.iterdir()] == ["1.weights.h5"]

    @pytest.mark.parametrize(
        "sources, references, numbers",
        [
            (SOURCES, REFERENCES[:1], ("2", "1")),
            (SOURCES, [REFERENCES, REFERENCES + ["more"]], ("2", "3")),
            (SOURCES, [], ("2", "0")),
            ([], [], ("0", "0")),
        ],
    )
    def test_lists_of_different_lengths_raise_errors(self, sources, references, numbers):
        with pytest.raises(ValueError) as error:
            SacreBleu(sources, references, lambda sentences: sentences)
        assert all(index in str(error.value) for index in numbers)

    def test_missing_translation_raises_an_error(self, model):
        bleu = SacreBleu(SOURCES, REFERENCES, lambda sentences: sentences[:1])
        with pytest.raises(ValueError, match="received 2 sentences and returned 1"):
            fit(model, bleu)


def test_other_ranks_print_nothing_but_log_the_score(model, other_rank, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    bleu = SacreBleu(SOURCES, REFERENCES, lambda sentences: REFERENCES)
    history = fit(model, LossMonitor(), bleu, MetricsFile(path)).history
    assert capsys.readouterr().out == ""
    assert not path.exists()
    assert history["val_bleu"] == pytest.approx([100.0])


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_every_must_be_a_positive_integer(every, tmp_path):
    for make_callback in (
        lambda: LossMonitor(every=every),
        lambda: MetricsFile(tmp_path / "metrics.jsonl", every=every),
        lambda: SacreBleu(SOURCES, REFERENCES, len, every=every),
    ):
        with pytest.raises(ValueError, match=f"every.*{every!r}"):
            make_callback()
