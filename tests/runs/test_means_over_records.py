"""Held-out losses and metrics are means over records, for every batch size and layout."""

import contextlib
import json
import pathlib

import numpy as np
import pytest

from dtransformer.parallel.runtime import job
from dtransformer.runs.config import load_config
from dtransformer.runs.run import make_trainer
from dtransformer.runs.tasks import make_task
from harness.byte_tokenizer import write_byte_tokenizer
from harness.tolerances import PARITY_LOSS
from tests.runs.small_records import NUMBERS, SIZES, TEMPLATE, records, write, write_config
from tests.shared_runs import on_ranks

NUM_RECORDS = 20
FILES = {"reward": "pairs", "preference": "pairs", "regression": "numbers", "embedding": "queries"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("means")
    write(folder)
    write_few_records(folder)
    with contextlib.chdir(folder):
        yield folder


def write_few_records(folder):
    """Write 20 held-out records of each task, with margins that differ."""
    for name in FILES.values():
        few = (records()[name] * 3)[:NUM_RECORDS]
        rows = [{**row, "margin": i / 10} if name == "pairs" else row for i, row in enumerate(few)]
        path = folder / f"few_{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))


def start(name, folder, *settings):
    """Return a task with random reference values, and its trainer."""
    path = write_config(name, folder)
    data_settings = [f"data.dev=few_{FILES[name]}.jsonl"]
    if name == "preference":
        data_settings += ["model.from=llama", "model.adapters=null"]
    task = make_task(load_config(path, [*data_settings, *settings]))
    task.read()
    task.make_network()
    trainer = make_trainer(task, 1)
    if name == "preference":  # at the start of training every margin would be 0
        values = task.predictions(trainer, "dev")
        noise = np.random.default_rng(0).normal(size=values.shape)
        task.records["dev"].targets = (values + noise).astype("float32")
    return task, trainer


def log_sigmoid(x):
    return -np.logaddexp(0, -np.float64(x))


def expected(name, task, trainer):
    """Return the loss and metrics of all held-out records in NumPy, by the formulas of the papers."""
    outputs = np.float64(task.predictions(trainer, "dev"))
    targets = np.float64(task.records["dev"].targets)
    assert len(outputs) == len(targets) == NUM_RECORDS
    if name == "regression":
        return {"loss": np.mean((outputs - targets) ** 2)}
    if name == "reward":
        margins = outputs[:, 0] - outputs[:, 1]
        losses = -log_sigmoid(margins - targets[:, 0])
        accuracy = (margins > 0).mean()
        return {"loss": losses.mean(), "accuracy": accuracy, "margin": margins.mean()}
    options = task.config.training
    gained = outputs - targets
    margins = gained[:, 0] - gained[:, 1]
    losses = {
        "sigmoid": -log_sigmoid(options.beta * margins),
        "ipo": (margins - 1 / (2 * options.beta)) ** 2,
        "hinge": np.maximum(0, 1 - options.beta * margins),
    }
    return {
        "loss": losses[options.loss].mean(),
        "accuracy": (margins > 0).mean(),
        "margin": options.beta * margins.mean(),
        "chosen_reward": options.beta * gained[:, 0].mean(),
        "rejected_reward": options.beta * gained[:, 1].mean(),
    }


def check(name, folder, batch_size, *settings):
    task, trainer = start(name, folder, f"training.batch_size={batch_size}", *settings)
    results = trainer.evaluate(task.batches("dev"), verbose=0, return_dict=True)
    for key, value in expected(name, task, trainer).items():
        assert results[key] == pytest.approx(value, rel=PARITY_LOSS, abs=1e-6), (key, batch_size)


@pytest.mark.parametrize("batch_size", [3, 8, NUM_RECORDS])
@pytest.mark.parametrize(
    "name, settings",
    [
        ("reward", []),
        ("preference", []),
        ("preference", ["training.loss=ipo"]),
        ("preference", ["training.loss=hinge"]),
        ("regression", []),
    ],
)
def test_held_out_means_do_not_depend_on_the_batch_size(name, settings, batch_size, place):
    check(name, place, batch_size, *settings)


def test_in_batch_losses_are_means_over_queries(place):
    task, trainer = start("embedding", place, "training.batch_size=8")
    losses, weights = [], []
    for batch in task.batches("dev").as_dataset():
        weights.append(batch[2].numpy().sum())
        losses.append(trainer.test_on_batch(*batch, return_dict=True)["loss"])
    assert weights == [8, 8, 4] and losses[0] != pytest.approx(losses[2], rel=1e-3)
    results = trainer.evaluate(task.batches("dev"), verbose=0, return_dict=True)
    assert results["loss"] == pytest.approx(np.average(losses, weights=weights), rel=PARITY_LOSS)


def test_center_rewards_adds_a_penalty_on_the_sum_of_rewards(place):
    task, trainer = start("reward", place, "training.center_rewards=0.5")
    plain = expected("reward", task, trainer)["loss"]
    rewards = np.float64(task.predictions(trainer, "dev"))
    results = trainer.evaluate(task.batches("dev"), verbose=0, return_dict=True)
    value = plain + 0.5 * np.mean(rewards.sum(1) ** 2)
    assert results["loss"] == pytest.approx(value, rel=PARITY_LOSS)


def check_on_ranks(folder, layout):
    """Check tasks on ranks. Each rank writes and reads separate files."""
    place = pathlib.Path(folder) / f"means-{layout.name}-{job.rank()}"
    (place / "llama").mkdir(parents=True, exist_ok=True)
    write_few_records(place)
    write_byte_tokenizer(place / "llama", NUMBERS, TEMPLATE)
    sizes = [f"model.{key}={value}" for key, value in {**SIZES, "num_layers": 2}.items()]
    train = f"data.train=few_{FILES['reward']}.jsonl"
    settings = [train, "model.from=null", "tokenizer.folder=llama", *sizes]
    with contextlib.chdir(place):
        for name, batch_size in (("reward", 8), ("reward", 17), ("preference", 8)):
            check(name, place, batch_size, *settings)


@on_ranks("dp2m2@2x1")
def test_means_on_data_ranks_with_micro_batches_are_over_records(folder, layout):
    """With batches of 17 rows, rank 0 gets two of the last three records and rank 1 gets one."""
    check_on_ranks(folder, layout)


@pytest.mark.long
@on_ranks("pp2m2-1f1b@2x1")
def test_means_of_a_pipeline_are_over_records(folder, layout):
    check_on_ranks(folder, layout)
