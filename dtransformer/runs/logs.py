"""Logs of a run beside its `metrics.jsonl`: CSV, TensorBoard, Weights & Biases, MLflow.

Each is a key of the config's section `logs`; packages are imported where a run asks for them. Rank 0
alone writes.
"""

import importlib
import importlib.util
import pathlib
from collections.abc import Callable

import keras

from dtransformer.errors import InputError
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import CSV, TENSORBOARD


class LogSink(keras.callbacks.Callback):
    """Hands numbers to a service: those of steps, of epochs, and of evaluations between them.

    Args:
        log: a function of a dict of floats and the number of steps of the run.
        end: a function that is called when training ends.
    """

    def __init__(self, log: Callable[[dict, int], None], end: Callable[[], None]):
        super().__init__()
        self._log, self._end = log, end

    def write(self, kind: str, logs: dict | None) -> None:
        """Write logs, of the kind "step", "epoch" or "evaluation"."""
        numbers = {f"{kind}/{name}": float(value) for name, value in (logs or {}).items()}
        self._log(numbers, self.model.num_steps)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self.model.logs_are_new:
            self.write("step", logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.write("epoch", logs)

    def on_train_end(self, logs: dict | None = None) -> None:
        self._end()


def _wandb(project, path, config, resumes):
    module = importlib.import_module("wandb")
    run = module.init(project=project, name=path.name, dir=str(path), config=config)
    return LogSink(lambda numbers, step: run.log(numbers, step=step), run.finish)


def _mlflow(experiment, path, config, resumes):
    module = importlib.import_module("mlflow")
    module.set_experiment(experiment)
    module.start_run(run_name=path.name)
    module.log_params({name: str(value)[:500] for name, value in config.items()})
    return LogSink(lambda numbers, step: module.log_metrics(numbers, step=step), module.end_run)


def _tensorboard(_, path, *also):
    return keras.callbacks.TensorBoard(path / TENSORBOARD)


# Key of `logs` -> what makes its callback, and the package that it needs.
_LOGS = {
    "csv": (lambda _, path, *also: keras.callbacks.CSVLogger(path / CSV, append=also[-1]), None),
    "tensorboard": (_tensorboard, "tensorboard"),
    "wandb": (_wandb, "wandb"),
    "mlflow": (_mlflow, "mlflow"),
}


def check_logs(config: RunConfig) -> None:
    """Refuse logs whose package is not installed; nothing is imported.

    Raises:
        InputError: names the key and the package.
    """
    for key, (_, package) in _LOGS.items():
        if getattr(config.logs, key) and package and not importlib.util.find_spec(package):
            raise InputError(f"logs.{key}: install it first: pip install {package}")


def log_callbacks(config: RunConfig, path: pathlib.Path, resumes: bool) -> list:
    """Return the callbacks of the logs that a config asks for.

    Args:
        config: the run's config, whose options the services get.
        path: the run's folder.
        resumes: whether what is there is gone on with.
    """
    options = {key: config.option(key) for key in config.keys()}
    asked = [(make, getattr(config.logs, key)) for key, (make, _) in _LOGS.items()]
    return [make(value, path, options, resumes) for make, value in asked if value]
