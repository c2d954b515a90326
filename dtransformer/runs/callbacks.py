"""Callbacks of runs: the run's weights, its evaluations and samples, its logs.

Besides `metrics.jsonl` a key of the config's section `logs` writes CSV, TensorBoard, Weights & Biases
or MLflow; packages are imported where a run asks for them. Rank 0 alone writes.
"""

import importlib
import math
import pathlib
import warnings
from collections.abc import Callable, Sequence

import keras

from dtransformer.errors import check_installed, one_line
from dtransformer.parallel.runtime import job
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import CSV, TENSORBOARD


class BestWeights(keras.callbacks.Callback):
    """Saves the weights of the best epoch, or of the last one.

    Args:
        save: a function that writes them, in place of those that are there; all ranks call.
        monitor: name of the log by which the least is best; None to take every epoch.
        best: what the log has to be below of; None for any.
    """

    def __init__(
        self, save: Callable[[], object], monitor: str | None = None, best: float | None = None
    ):
        super().__init__()
        self._save, self.monitor = save, monitor
        self.best = math.inf if best is None else best

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self.monitor is not None:
            value = float(logs[self.monitor])
            if not value < self.best:
                return
            self.best = value
        self._save()


class EverySteps(keras.callbacks.Callback):
    """Looks at the network after every so many steps of the run; a subclass has `look(when)`.

    Args:
        every_steps: the number; None for never.
    """

    def __init__(self, every_steps: int | None):
        super().__init__()
        self.every_steps, self._before = every_steps, 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._before = self.model.num_steps

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        before, self._before = self._before, self.model.num_steps
        if self.every_steps and before // self.every_steps < self._before // self.every_steps:
            with self.model.averaged_weights():
                self.look(f"step: {self._before}")


class Evaluations(EverySteps):
    """Evaluates held-out records every `every_steps` steps, and prints and logs the results.

    Args:
        batches: Batches of the held-out records.
        scores: Function that returns a dict of more results. All ranks call it.
        every_steps: Integer.
        sinks: callbacks with `write(kind, logs)`.
    """

    def __init__(self, batches: object, scores: Callable, every_steps: int, sinks: Sequence):
        super().__init__(every_steps)
        self._batches, self._scores, self._sinks = batches, scores, list(sinks)

    def look(self, when: str) -> None:
        states = [variable for metric in self.model.metrics for variable in metric.variables]
        before = [variable.numpy() for variable in states]  # of the epoch that is running
        results = self.model.evaluate(self._batches, verbose=0, return_dict=True)
        results |= self._scores(self.model)
        for variable, value in zip(states, before):
            variable.assign(value)
        logs = {f"val_{name}": value for name, value in results.items()}
        for sink in self._sinks:
            if hasattr(sink, "write"):
                sink.write("evaluation", logs)
        names = dict.fromkeys(["val_loss", *logs])  # the loss first
        told = ", ".join(f"{name}: {logs[name]:.6g}" for name in names)
        job.print_once(f"{when}, {told}")


class Samples(EverySteps):
    """Prints, at the end of every epoch, how the network goes on with some prompts.

    Args:
        generate: a function of a list of prompts that returns as many texts, on every rank.
        prompts: them.
        every_steps: number of steps after which it prints, too; None for none.
    """

    def __init__(
        self,
        generate: Callable[[list[str]], list[str]],
        prompts: Sequence[str],
        every_steps: int | None = None,
    ):
        super().__init__(every_steps)
        self._generate, self._prompts = generate, list(prompts)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.look(f"epoch: {epoch + 1}")

    def look(self, when: str) -> None:
        try:
            texts = self._generate(self._prompts)
        except ValueError as error:  # too long for the model, on every rank: training goes on
            warnings.warn(f"evaluation.samples: {error}", stacklevel=2)
            return
        for prompt, text in zip(self._prompts, texts):
            job.print_once(f"{when}, {prompt} … {one_line(text)}")


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


def _wandb(project, path, config, run_key, resumes):
    module = importlib.import_module("wandb")
    same = {"id": run_key, "resume": "allow"}  # of a run that goes on, too
    run = module.init(project=project, name=path.name, dir=str(path), config=config, **same)
    return LogSink(lambda numbers, step: run.log(numbers, step=step), run.finish)


def _mlflow(experiment, path, config, run_key, resumes):
    module = importlib.import_module("mlflow")
    module.set_experiment(experiment)
    same = {"filter_string": f"tags.run_key = '{run_key}'", "output_format": "list"}
    ids = [run.info.run_id for run in module.search_runs(experiment_names=[experiment], **same)]
    module.start_run(ids[0] if ids else None, run_name=path.name, tags={"run_key": run_key})
    if not ids:  # which cannot be changed later
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
        if getattr(config.logs, key) and package:
            check_installed(package, f"logs.{key}: they")


def log_callbacks(config: RunConfig, path: pathlib.Path, run_key: str, resumes: bool) -> list:
    """Return the callbacks of the logs that a config asks for.

    Args:
        config: the run's config, whose options the services get.
        path: the run's folder.
        run_key: of its `RunIdentity`.
        resumes: whether what is there is gone on with.
    """
    options = {key: config.option(key) for key in config.keys()}
    asked = [(make, getattr(config.logs, key)) for key, (make, _) in _LOGS.items()]
    return [make(value, path, options, run_key, resumes) for make, value in asked if value]
