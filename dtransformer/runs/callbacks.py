"""Callbacks of runs: best weights, evaluations, samples and logs.

The config section `logs` adds logs to `metrics.jsonl`: CSV, TensorBoard, Weights & Biases and MLflow.
Their packages are imported only if a run uses them. Only rank 0 writes logs.
"""

import importlib
import math
import pathlib
import warnings
from collections.abc import Callable, Sequence

import keras

from dtransformer.errors import check_installed, to_one_line
from dtransformer.parallel.runtime import job
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import CSV, TENSORBOARD
from dtransformer.trainers.checkpoint.callback import SharedTimer


class BestWeights(keras.callbacks.Callback):
    """Callback that saves the weights after each epoch that improves a log.

    Args:
        save: Function without arguments that writes the weights and replaces the previous ones. All
            ranks call it.
        monitor: Name of a log; lower is better. `None` saves after every epoch.
        best: Float. Best value so far. `None` accepts any value of the first epoch.
    """

    def __init__(
        self, save: Callable[[], object], monitor: str | None = None, best: float | None = None
    ):
        super().__init__()
        self._save = save
        self.monitor = monitor
        self.best = math.inf if best is None else best

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self.monitor is not None:
            value = float(logs[self.monitor])
            if not value < self.best:
                return
            self.best = value
        self._save()


class EverySteps(keras.callbacks.Callback):
    """Base of callbacks that inspect the network every `every_steps` steps of the run.

    Subclasses define `look(when)`, where `when` is a text such as "step: 100". During this call the
    weights have their moving averages, if the optimizer keeps any.

    Args:
        every_steps: Integer. `None` disables the calls.
    """

    def __init__(self, every_steps: int | None):
        super().__init__()
        self.every_steps = every_steps
        self._last_step = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._last_step = self.model.num_steps

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        previous = self._last_step
        self._last_step = self.model.num_steps
        if self.every_steps and previous // self.every_steps < self._last_step // self.every_steps:
            with self.model.averaged_weights():
                self.look(f"step: {self._last_step}")


class Evaluations(EverySteps):
    """Callback that evaluates held-out records every `every_steps` steps.

    It prints the results and sends them to the logs. The metrics of the running epoch keep their
    values.

    Args:
        batches: Batches of the held-out records.
        scores: Function of the trainer that returns a dict of additional results. All ranks call it.
        every_steps: Integer.
        sinks: Callbacks. Each callback with a `write(kind, logs)` method receives the results.
    """

    def __init__(self, batches: object, scores: Callable, every_steps: int, sinks: Sequence):
        super().__init__(every_steps)
        self._batches = batches
        self._scores = scores
        self._sinks = list(sinks)

    def look(self, when: str) -> None:
        variables = [variable for metric in self.model.metrics for variable in metric.variables]
        # `evaluate` resets the metrics, so the values of the running epoch are restored below.
        saved_values = [variable.numpy() for variable in variables]
        results = self.model.evaluate(self._batches, verbose=0, return_dict=True)
        results |= self._scores(self.model)
        for variable, value in zip(variables, saved_values):
            variable.assign(value)
        logs = {f"val_{name}": value for name, value in results.items()}
        for sink in self._sinks:
            if hasattr(sink, "write"):
                sink.write("evaluation", logs)
        names = dict.fromkeys(["val_loss", *logs])  # the loss first
        text = ", ".join(f"{name}: {logs[name]:.6g}" for name in names)
        job.print_once(f"{when}, {text}")


class Samples(EverySteps):
    """Callback that prints the network's continuations of prompts after every epoch.

    Prompts that are too long for the model cause a warning, and training continues.

    Args:
        generate: Function from a list of prompts to a list of texts, one per prompt. All ranks call
            it.
        prompts: List of prompts.
        every_steps: Integer. Also print every `every_steps` steps. `None` prints after epochs only.
    """

    def __init__(
        self,
        generate: Callable[[list[str]], list[str]],
        prompts: Sequence[str],
        every_steps: int | None = None,
    ):
        super().__init__(every_steps)
        self._generate = generate
        self._prompts = list(prompts)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.look(f"epoch: {epoch + 1}")

    def look(self, when: str) -> None:
        try:
            texts = self._generate(self._prompts)
        except ValueError as error:  # All ranks raise it, so all of them continue.
            warnings.warn(f"evaluation.samples: {error}", stacklevel=2)
            return
        for prompt, text in zip(self._prompts, texts):
            job.print_once(f"{when}, {prompt} … {to_one_line(text)}")


class LogSink(keras.callbacks.Callback):
    """Callback that sends the logs of steps, epochs and evaluations to a logging service.

    Args:
        log: Function of a dict of floats and the number of steps of the run. Keys begin with "step/",
            "epoch/" or "evaluation/".
        end: Function without arguments, called when training ends.
    """

    def __init__(self, log: Callable[[dict, int], None], end: Callable[[], None]):
        super().__init__()
        self._log = log
        self._end = end

    def write(self, kind: str, logs: dict | None) -> None:
        """Send a dict of logs.

        Args:
            kind: "step", "epoch" or "evaluation".
            logs: Dict of numbers. `None` is an empty dict.
        """
        values = {f"{kind}/{name}": float(value) for name, value in (logs or {}).items()}
        self._log(values, self.model.num_steps)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self.model.logs_are_new:
            self.write("step", logs)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.write("epoch", logs)

    def on_train_end(self, logs: dict | None = None) -> None:
        self._end()


def _wandb(project, path, config, run_key, resumes):
    module = importlib.import_module("wandb")
    options = {"id": run_key, "resume": "allow"}  # Append if the run is resumed.
    run = module.init(project=project, name=path.name, dir=str(path), config=config, **options)
    return LogSink(lambda logs, step: run.log(logs, step=step), run.finish)


def _mlflow(experiment, path, config, run_key, resumes):
    module = importlib.import_module("mlflow")
    module.set_experiment(experiment)
    query = {"filter_string": f"tags.run_key = '{run_key}'", "output_format": "list"}
    ids = [run.info.run_id for run in module.search_runs(experiment_names=[experiment], **query)]
    module.start_run(ids[0] if ids else None, run_name=path.name, tags={"run_key": run_key})
    if not ids:  # MLflow rejects changed parameters of an existing run.
        module.log_params({name: str(value)[:500] for name, value in config.items()})
    return LogSink(lambda logs, step: module.log_metrics(logs, step=step), module.end_run)


def _csv(_, path, config, run_key, resumes):
    return keras.callbacks.CSVLogger(path / CSV, append=resumes)


def _tensorboard(_, path, config, run_key, resumes):
    return keras.callbacks.TensorBoard(path / TENSORBOARD)


# Keys of `logs`, each with a function that creates the callback and the required package.
_LOGS = {
    "csv": (_csv, None),
    "tensorboard": (_tensorboard, "tensorboard"),
    "wandb": (_wandb, "wandb"),
    "mlflow": (_mlflow, "mlflow"),
}


def check_logs(config: RunConfig) -> None:
    """Check that the packages of all requested logs are installed, without importing them.

    Raises:
        InputError: If a package is missing. The message names the key and the package.
    """
    for key, (_, package) in _LOGS.items():
        if getattr(config.logs, key) and package:
            check_installed(package, f"The logs of `logs.{key}`")


def log_callbacks(config: RunConfig, path: pathlib.Path, run_key: str, resumes: bool) -> list:
    """Return one callback for each log that the config requests.

    Args:
        config: Config of the run. Services receive all its options.
        path: Folder of the run.
        run_key: `key` of the run's `RunIdentity`. Services find a resumed run by it.
        resumes: Boolean. Append to existing logs.
    """
    options = {key: config.option(key) for key in config.keys()}
    requested = [(make, getattr(config.logs, key)) for key, (make, _) in _LOGS.items()]
    return [make(value, path, options, run_key, resumes) for make, value in requested if value]


def callback_on(action: Callable[[], object], *events: str) -> keras.callbacks.Callback:
    """Return a callback that calls `action()` at events such as `"on_epoch_end"`."""
    return keras.callbacks.LambdaCallback(**dict.fromkeys(events, lambda *_, **also: action()))


def limit_callbacks(trainer: keras.Model, minutes: float | None, steps: int | None) -> list:
    """Return callbacks that stop training after a time or a number of steps.

    Args:
        trainer: Trainer of the run.
        minutes: Float. Time limit in minutes, from the start of this training. `None` disables it.
        steps: Integer. Limit on the steps of the run, including steps before a resume. `None`
            disables it.
    """
    callbacks = []
    if minutes:
        timer = SharedTimer(60 * minutes)
        callbacks.append(callback_on(lambda: timer.start(trainer.num_steps), "on_train_begin"))
        callbacks.append(_stop_when(trainer, timer.is_over))
    if steps:

        def is_done(step):
            # Skipped steps do not count. Reading the optimizer's counter blocks the host.
            return step >= steps and int(trainer.optimizer.iterations) >= steps

        callbacks.append(_stop_when(trainer, is_done))
    return callbacks


def _stop_when(trainer, is_over):
    """Return a callback that stops training as soon as `is_over(num_steps)` is true."""

    def stop():
        if is_over(trainer.num_steps):
            trainer.stop_training = True

    return callback_on(stop, "on_train_batch_end")
