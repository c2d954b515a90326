"""Steps wait for the device only to read logs, every `log_every` steps."""

import json

import keras
import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.parallel.collectives import replica_consistency
from dtransformer.reports.throughput import tokens_and_flops
from dtransformer.trainers.callbacks import LossMonitor, MetricsFile
from harness.host_reads import HostReads
from tests.trainers.small import (
    Record,
    dataset,
    dense_network,
    dense_trainer,
    points,
    small_model,
    translation_trainer,
)


def test_host_reads_nothing_between_log_steps():
    """The second step also reads the number of FLOP of its batch."""
    trainer, reads = translation_trainer(log_every=4), HostReads()
    trainer.fit(dataset().repeat(3), verbose=0, callbacks=[reads])
    assert [len(step_bytes) for step_bytes in reads.bytes][2:] == [0, 1, 0, 0, 0, 1, 0]


@pytest.fixture(scope="module")
def run_with_log_every_1():
    trainer, record = dense_trainer(), Record()
    return record, trainer.fit(*points(), 2, epochs=2, verbose=0, shuffle=False, callbacks=[record])


def test_callbacks_receive_the_last_logs_that_were_read(run_with_log_every_1, tmp_path):
    every_step, expected = run_with_log_every_1
    trainer, record = dense_trainer(log_every=3, metrics=[]), Record()
    file = MetricsFile(tmp_path / "metrics.jsonl")
    history = trainer.fit(
        *points(), 2, epochs=2, verbose=0, shuffle=False, callbacks=[record, file]
    )
    read_steps = [0, 0, 2, 2, 2, 5, 5, 5]
    for epoch in (0, 8):
        losses = record["step_loss"][epoch : epoch + 8]
        assert losses == pytest.approx([every_step["step_loss"][epoch + i] for i in read_steps])
    for name in ("loss", "step_loss"):
        assert history.history[name] == pytest.approx(expected.history[name])
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    steps = [(line["step"], line["step_loss"]) for line in lines if line["kind"] == "step"]
    assert [step for step, _ in steps] == [1, 3, 6, 9, 11, 14]
    assert [loss for _, loss in steps] == pytest.approx(
        [every_step["step_loss"][step - 1] for step, _ in steps]
    )


def test_loss_monitor_prints_steps_with_new_logs(capsys):
    dense_trainer(log_every=4).fit(*points(), 2, verbose=0, callbacks=[LossMonitor(every=3)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch: 1 step: 4", "epoch: 1 step: 8"]


def test_evaluation_within_an_epoch_keeps_its_logs():
    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(*points(4), verbose=0)

    record = Record()
    dense_trainer(log_every=5).fit(*points(), 2, verbose=0, callbacks=[Evaluates(), record])
    assert all("step_loss" in logs for logs in record.logs)


def test_nonscalar_metrics_are_logged_as_arrays():
    trainer = dense_trainer(network=dense_network(2), metrics=[keras.metrics.F1Score(name="f1")])
    x, _ = points()
    logs = trainer.train_on_batch(x, np.eye(2)[np.arange(16) % 2], return_dict=True)
    assert logs["f1"].shape == (2,) and isinstance(logs["loss"], float)


@pytest.mark.parametrize("log_every", [0, 2.5])
def test_invalid_log_every_raises_an_error(log_every):
    with pytest.raises(
        InputError, match=f"log_every must be an integer of at least 1, got {log_every}"
    ):
        dense_trainer(log_every=log_every)


def test_token_count_follows_from_shapes():
    model = small_model()
    inputs = {"source": np.zeros((4, 6), "int32"), "target": np.zeros((4, 5), "int32")}
    tokens, flops = tokens_and_flops(model, inputs, inputs["target"])
    assert tokens == 4 * (6 + 5) and flops > 0
    x, y = points(8, 4)
    assert tokens_and_flops(keras.Sequential([]), x, y) == (8, 0)
    assert tokens_and_flops(keras.Sequential([]), x, None) == (8, 0)


def test_replicas_are_compared_in_steps_1_and_2_and_every_hundredth(monkeypatch):
    compared = []
    monkeypatch.setattr(
        replica_consistency,
        "check_replica_consistency",
        lambda batch, group, name: compared.append((batch, name)),
    )
    batches = replica_consistency.ReplicaConsistency()
    for step in range(1, 202):
        batches.check(step, "train")
    batches.check("dev", "test")
    expected = [
        (step, name) for step in (1, 2, 100, 200, "dev") for name in ("a mesh", "a pipeline")
    ]
    assert compared == expected
