"""A run writes the requested logs, and reports a missing package before it starts."""

import sys
import types

import pytest

from dtransformer.errors import InputError
from dtransformer.runs.callbacks import check_logs, log_callbacks
from dtransformer.runs.config import load_config


@pytest.fixture
def services(monkeypatch):
    """Fakes of Weights & Biases and MLflow with the same functions and arguments."""
    seen = []
    note = lambda name: lambda *args, **options: seen.append((name, args, options))
    run = types.SimpleNamespace(log=note("log"), finish=note("finish"))
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: seen.append(("init", (), options)) or run
    mlflow = types.ModuleType("mlflow")
    for name in ("set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
        setattr(mlflow, name, note(name))
    known = types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))
    mlflow.search_runs = lambda **options: [known] * ("again" in options["filter_string"])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return seen


def test_log_services_receive_metrics_and_options(services, tmp_path):
    config = load_config(None, ["task=chat", "logs.wandb=mine", "logs.mlflow=ours"])
    for item in log_callbacks(config, tmp_path / "run", "key", resumes=False):
        item.set_model(types.SimpleNamespace(num_steps=3, logs_are_new=True))
        item.on_train_batch_end(0, {"loss": 2})
        item.on_epoch_end(0, {"val_loss": 1})
        item.write("evaluation", {"val_loss": 1})
        item.on_train_end()
    options = next(options for name, _, options in services if name == "init")
    assert options["id"] == "key" and options["resume"] == "allow"
    assert options["project"] == "mine" and options["config"]["training.epochs"] == 1
    calls = [(name, args) for name, args, _ in services]
    for name in ("log", "log_metrics"):
        numbers = [args[0] for called, args in calls if called == name]
        assert numbers == [
            {"step/loss": 2.0},
            {"epoch/val_loss": 1.0},
            {"evaluation/val_loss": 1.0},
        ]
    assert ("set_experiment", ("ours",)) in calls and ("end_run", ()) in calls
    assert ("start_run", (None,)) in calls


def test_resumed_run_continues_the_mlflow_run(services, tmp_path):
    config = load_config(None, ["task=chat", "logs.mlflow=ours"])
    log_callbacks(config, tmp_path / "run", "again", resumes=True)
    started = {"run_name": "run", "tags": {"run_key": "again"}}
    assert ("start_run", ("7",), started) in services
    assert "log_params" not in [name for name, *_ in services]


@pytest.mark.parametrize("key", ["wandb", "mlflow", "tensorboard"])
def test_missing_log_packages_are_reported(key, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = load_config(
        None, ["task=chat", f"logs.{key}={'true' if key == 'tensorboard' else 'x'}"]
    )
    with pytest.raises(InputError, match=f"logs.{key}` need .* pip install {key}"):
        check_logs(config)
