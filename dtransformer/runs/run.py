"""A run: from a config file to a run folder, whatever its task is."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import types
import warnings
from collections.abc import Iterable

import keras

from dtransformer.errors import InputError, refusing
from dtransformer.inputs.files import write_text_atomically
from dtransformer.models import save_lora
from dtransformer.models.lora import only_adapters_are_trained
from dtransformer.parallel.collectives.objects import from_chief, together
from dtransformer.parallel.config.elastic_config import FITS_LAYOUT
from dtransformer.parallel.runtime import job
from dtransformer.planner.automatic import summary
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.machine import num_ranks, this_device
from dtransformer.planner.report import fields_of, text_of
from dtransformer.planner.search import Plan
from dtransformer.runs.automatic import plan_of_run
from dtransformer.runs.callbacks import BestWeights, Evaluations, check_logs, log_callbacks
from dtransformer.runs.config import RunConfig, load_config
from dtransformer.runs.exporting import check_export, export
from dtransformer.runs.folder import RunFolder
from dtransformer.runs.identity import (
    ADAPTERS,
    CHECKPOINTS,
    CONFIG,
    LOSS_PLOT,
    METRICS,
    PLAN,
    PROFILE,
    TOKENIZER,
    WEIGHTS,
    RunIdentity,
)
from dtransformer.runs.loading import start_job
from dtransformer.runs.loss_plot import write_loss_plot
from dtransformer.runs.optimizers import group_weights, make_optimizer, optimizer_class
from dtransformer.runs.options import Source
from dtransformer.runs.stopped import explained
from dtransformer.runs.tasks import task_of
from dtransformer.runs.tasks.base import Task
from dtransformer.runs.unread import check_read
from dtransformer.trainers import ModelCheckpoint, Trainer
from dtransformer.trainers.callbacks import MetricsFile, ProgressLog
from dtransformer.trainers.checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.callback import SharedTimer, best_of
from dtransformer.trainers.checkpoint.export import RUN, check_finite, network_values, seal
from dtransformer.trainers.checkpoint.folders import saved_steps

# What `--resume` may change: where the data lie, and all that changes neither the model nor the
# tokens nor their order.
_MAY_MOVE = (
    *("data.source", "data.target", "data.dev_source", "data.dev_target", "data.dev"),
    *("tokenizer.folder", "model.from_"),
)
# Fields of `parallel` that are another layout's, where fewer ranks are left; all others stay.
_FREE = (
    *("data_parallel", "model_parallel", "context_parallel", "expert_parallel"),
    *("pipeline_stage", "pipeline_schedule", "pipeline_chunks", "micro_batch_num"),
    *("sequence_parallel", "vocab_emb_dp", "recompute"),
)
_KEPT = (
    *("data", "tokenizer", "model", "training.seed", "training.batch_size", "training.beta"),
    *("training.loss", "training.smoothing", "training.temperature", "training.label_smoothing"),
    *("training.z_loss", "training.neftune_alpha", "training.ema", "training.center_rewards"),
)


def train(
    config_path: str | os.PathLike,
    settings: Iterable[str] = (),
    run_folder: str | os.PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
    profile: tuple[int, int] | None = None,
) -> pathlib.Path:
    """Train the model of a config file, write a run folder, and return its path.

    Args:
        config_path: A YAML file.
        settings: Texts "section.key=value", which replace values of the file.
        run_folder: Folder to write. Defaults to "runs/NAME-OF-THE-CONFIG".
        overwrite: Whether to replace an existing run.
        resume: Whether to resume from the newest checkpoint, if any.
        profile: First and last step of a TensorFlow profile. The first step of this call is 1.

    Raises:
        InputError: If the config or the data is wrong.
    """
    config = load_config(config_path, settings, needs_task=True)
    check_read(config)
    folder = RunFolder(run_folder or pathlib.Path("runs") / pathlib.Path(config_path).stem)
    if folder.is_in_order():
        folder.check(config_path, overwrite, resume)  # before any work
    found = layout_plan(config)
    if found is not None:
        config.parallel = found.best.config
    start_job(config)

    def resumes_from():
        folder.recover()
        return folder.check(config_path, overwrite, resume)

    if found is not None:
        job.print_once(summary(found))
    resumes = from_chief(resumes_from, "run/resumes")
    try:
        # Everything is made, so that what is wrong is told, before the folder is touched.
        task, trainer, batches = _prepare(config, folder, resumes)
        # By all ranks, which have read all files, before the folder that they are in is moved.
        together(lambda: check_export(task, overwrite or resumes), "run/export")
        from_chief(lambda: _begin(folder, task, resumes), "run/begin")
        task.moved(folder.path)
        if found is not None and job.is_chief():
            write_text_atomically(folder.path / PLAN, text_of(found) + "\n")
        run = RunIdentity.load(folder.path)
        if not (resumes and _has_ended(folder.path, config)):
            callbacks = _callbacks(task, trainer, folder, run, resumes, batches, profile)
            with explained(config, config_path, folder.path, settings):
                trainer.fit(
                    batches["train"],
                    epochs=config.training.epochs,
                    validation_data=batches["dev"],
                    callbacks=callbacks,
                    resume=resumes,
                )
    finally:
        if job.is_chief() and not resumes:
            folder.settle()
    if job.is_chief():
        print(_describe_result(folder.path, task), flush=True)
    export(task, trainer, folder.path, overwrite or resumes)
    return folder.path


def _describe_result(path, task):
    """Plot the losses. Return lines with the files of the run and the next command."""
    places = {
        "Run folder": path,
        "Loss plot": path / LOSS_PLOT,
        "Checkpoint": saved_steps(path / CHECKPOINTS)[-1][1],
        "Next": f"dtransformer {task.command.format(path)}",
    }
    try:
        write_loss_plot(path / METRICS, path / LOSS_PLOT, f"Loss of {path}")
    except (OSError, TypeError, ValueError) as error:
        places["Loss plot"] = f"none, because {METRICS} cannot be plotted ({error})"
    return "\n".join(f"{name + ':':<11} {place}" for name, place in places.items())


def layout_plan(config: RunConfig) -> Plan | None:
    """Return the plan of a run whose layout is the planner's, the same on every rank; else None.

    With `parallel: auto` it is; and under `dtransformer launch`, where the config's own layout does
    not fit the ranks that are left. What the planner then finds nothing for goes by the rule of
    `parallel.config.elastic_config`.
    """
    local, per_host = config.training.local_devices, num_ranks(FITS_LAYOUT)
    if config.training.layout == "auto":
        return plan_of_run(config)
    number = num_ranks() * local
    try:
        config.parallel.resolve(number, local)
    except ValueError:
        # The optimizer may not be one that can update shards.
        given = fields_of(config.parallel)
        given["optimizer_shard"] = int(config.parallel.optimizer_shard)
        fixed = {name: value for name, value in given.items() if name not in _FREE}
        with contextlib.suppress(InputError):
            cluster = Cluster(this_device(per_host), number, per_host * local, local_devices=local)
            return plan_of_run(config, cluster, fixed) if FITS_LAYOUT in os.environ else None
    return None


def _has_ended(path, config):
    """Return whether a run has made all steps that `training.max_steps` asks for."""
    last, limit = saved_steps(path / CHECKPOINTS)[-1][0], config.training.max_steps
    return from_chief(lambda: limit is not None and last >= limit, "run/ended")


def make_trainer(task: Task, total_steps: int) -> Trainer:
    """Return a trainer of a task's network, compiled.

    Args:
        task: the task, whose `make_network` was called.
        total_steps: number of steps of the training.

    Raises:
        InputError: the options of `training` do not fit.
    """
    options, trainer = task.config.training, Trainer(task.network)
    group_weights(task.network, task.config)
    optimizer = make_optimizer(task.config, total_steps)
    with refusing("training"):
        trainer.compile(
            optimizer,
            task.loss(),
            jit_compile=options.jit_compile,
            steps_per_execution=options.steps_per_execution,
            **task.metrics(),
        )
    return trainer


def _prepare(config, folder, resumes):
    """Return the task, the trainer and the batches by parts; all is read and made."""
    options, old_run = config.training, folder.path if resumes else None
    optimizer_class(options.optimizer)  # before work begins
    check_logs(config)
    if old_run is not None:
        RunIdentity.load(old_run).check(old_run)
        old = load_config(old_run / CONFIG)
        # Labels that the config does not name were found in the records when the run began.
        if not getattr(config.data, "labels", True):
            config.data.labels = getattr(old.data, "labels", [])
        _check_same(config, old)
    task = task_of(config, old_run=old_run, folder=old_run or folder.fresh)
    task.read()
    if job.is_chief():
        print("\n".join(task.told()), flush=True)
    task.make_network()
    batches = {part: task.batches(part) for part in ("train", "dev")}
    job.print_once(f"Batches per epoch: {len(batches['train']):,}")
    steps = options.epochs * len(batches["train"])
    trainer = make_trainer(task, min(steps, options.max_steps or steps))
    trainer.summary()
    task.before_training(trainer)
    return task, trainer, batches


def _check_same(config, old):
    """Refuse options that a run that is resumed cannot change."""
    if config.task != old.task:
        raise InputError(f"--resume: the run is of task {old.task}, and the config's {config.task}")
    for section, values in config.sections().items():
        for field in dataclasses.fields(values):
            name = f"{section}.{field.name}"
            if name in _MAY_MOVE or not {section, name} & set(_KEPT):
                continue
            own, its = (_placeless(getattr(x, field.name)) for x in (values, getattr(old, section)))
            if own != its:
                raise InputError(
                    f"--resume: {name} is {own!r}, but the run began with {its!r}. Restore this "
                    "value, or train another --run."
                )


def _placeless(value):
    """Return an option's value; of sources the weights alone, as files may move."""
    is_sources = isinstance(value, tuple) and value and isinstance(value[0], Source)
    return tuple(source.weight for source in value) if is_sources else value


def _begin(folder, task, resumes):
    """Begin the run folder anew, or see that what is there belongs together."""
    if not resumes:
        folder.begin(task.config, task.tokenizer, task.digests)
        return
    run = RunIdentity.load(folder.path)
    run.check_checkpoints(folder.path)
    for name, its in run.data.items():
        if its != task.digests[name]:
            raise InputError(
                f"--resume: the {name} records have changed since the run began. Give the same files, "
                "or train another --run."
            )


def _callbacks(task, trainer, folder, run, resumes, batches, profile):
    options, path, monitor = task.config.training, folder.path, task.monitor
    callbacks = []
    if resumes:
        callbacks.append(_when(lambda: refuse_nan(trainer, path / CHECKPOINTS), "on_train_begin"))
    callbacks += limits(trainer, options.max_minutes, options.max_steps)
    sinks = []
    if job.is_chief():
        sinks = [MetricsFile(path / METRICS), *log_callbacks(task.config, path, run.key, resumes)]
    if options.ema:
        swap = lambda: trainer.optimizer_step.take_averages(exchanges=True)
        callbacks.append(_when(swap, "on_epoch_end"))
    callbacks += task.callbacks(trainer)
    if every_steps := getattr(task.config.sections().get("evaluation"), "every_steps", None):
        callbacks.append(Evaluations(batches["dev"], task.scores_of_dev, every_steps, sinks))
    if profile and job.is_chief():
        callbacks.append(keras.callbacks.TensorBoard(path / PROFILE, profile_batch=profile))
        callbacks.append(_when(lambda: _tell_profile(path / PROFILE, profile[0]), "on_train_end"))
    if options.early_stopping:
        callbacks.append(keras.callbacks.EarlyStopping(monitor, patience=options.early_stopping))
    # The config that the run began with, which `--resume` does not change.
    own_config = types.SimpleNamespace(save=lambda out: shutil.copyfile(path / CONFIG, out))
    best = _best_loss(path) if resumes else None
    seals = lambda fresh: seal(fresh, run.key)
    save = functools.partial(trainer.save_weights, path / WEIGHTS, before=seals)
    if only_adapters_are_trained(task.network):
        own = {"family": "dtransformer", "overwrite": True}
        save = functools.partial(save_lora, task.core, path / ADAPTERS, **own)
    callbacks.append(BestWeights(save, monitor, best))
    if options.ema:  # checkpoints have the weights themselves, and are saved before a validation
        callbacks.append(_when(swap, "on_epoch_end"))
        sinks.append(_when(swap, "on_test_begin", "on_test_end"))
    callbacks += [
        ModelCheckpoint(
            path / CHECKPOINTS,
            every_steps=options.checkpoint_steps or None,
            every_minutes=options.checkpoint_minutes or None,
            keep=options.keep_checkpoints,
            monitor=monitor,
            assets={RUN: run, CONFIG: own_config, TOKENIZER: task.tokenizer},
        ),
        # It comes after what saves.
        _when(lambda: job.is_chief() and folder.remove_replaced(), "on_epoch_end"),
    ]
    if job.is_chief():
        sinks.append(ProgressLog(has_metrics=False))
    return callbacks + sinks


def _tell_profile(path, first):
    """Say where the profile is, or that there is none."""
    if any(path.rglob("*.xplane.pb")):
        print(f"The profile is in {path}: tensorboard --logdir {path}", flush=True)
    else:
        warnings.warn(f"--profile: training ended before step {first}", stacklevel=2)


def _when(act, *events):
    """Return a callback that acts at some events."""
    return keras.callbacks.LambdaCallback(**dict.fromkeys(events, lambda *_, **also: act()))


def limits(trainer: Trainer, minutes: float | None, steps: int | None) -> list:
    """Return callbacks that stop training after a time, and after a number of the run's steps.

    Args:
        trainer: the trainer.
        minutes: the time, from the first step on; None for none.
        steps: the number; None for none.
    """
    found = []
    if minutes:
        timer = SharedTimer(60 * minutes)
        found.append(_when(lambda: timer.start(trainer.num_steps), "on_train_begin"))
        found.append(_stops(trainer, timer.is_over))
    if steps:  # of which the optimizer may have skipped some; it is asked when all are made
        made = lambda step: step >= steps and int(trainer.optimizer.iterations) >= steps
        found.append(_stops(trainer, made))
    return found


def _stops(trainer, is_over):
    """Return a callback that stops training once a function of the number of its steps is true."""

    def stop():
        if is_over(trainer.num_steps):
            trainer.stop_training = True

    return _when(stop, "on_train_batch_end")


def refuse_nan(trainer: Trainer, path: pathlib.Path) -> None:
    """Refuse to go on from weights that are not numbers; all ranks call.

    Args:
        trainer: the trainer, which has them.
        path: where they come from, for the error.
    """
    values = network_values(trainer.network)
    together(lambda: check_finite(path, values), "run/finite")


def _best_loss(folder):
    """Return the best loss of the saved checkpoints, which later epochs have to improve on.

    None where there are no weights that they could be better than.
    """
    best = best_of([path for _, path in saved_steps(folder / CHECKPOINTS)], "val_loss")
    if best is None or not any((folder / name).exists() for name in (WEIGHTS, ADAPTERS)):
        return None
    return Checkpoint(best).manifest["metrics"]["val_loss"]
