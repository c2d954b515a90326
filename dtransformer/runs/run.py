"""Train any task: read a config file and write a run folder."""

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

from dtransformer.errors import InputError, raise_as_input_error
from dtransformer.inputs.files import write_text_atomically
from dtransformer.models import save_lora
from dtransformer.models.base import TokenModel
from dtransformer.models.lora import only_adapters_are_trained
from dtransformer.parallel.collectives.objects import call_on_all, from_chief
from dtransformer.parallel.config.elastic_config import FITS_LAYOUT
from dtransformer.parallel.runtime import job
from dtransformer.planner.automatic import summary
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.machine import num_ranks, this_device
from dtransformer.planner.report import get_changed_fields, plan_to_text
from dtransformer.planner.search import Plan
from dtransformer.runs.automatic import plan_run
from dtransformer.runs.callbacks import (
    BestWeights,
    Evaluations,
    callback_on,
    check_logs,
    limit_callbacks,
    log_callbacks,
)
from dtransformer.runs.config import RunConfig, load_config
from dtransformer.runs.distillation import distillation_loss, load_teacher
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
from dtransformer.runs.records import rank_log, write_environment
from dtransformer.runs.stopped import explained
from dtransformer.runs.tasks import make_task
from dtransformer.runs.tasks.base import Task
from dtransformer.runs.unread import check_read
from dtransformer.trainers import ModelCheckpoint, SpikeGuard, Trainer
from dtransformer.trainers.callbacks import MetricsFile, ProgressLog
from dtransformer.trainers.checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.callback import find_best
from dtransformer.trainers.checkpoint.export import RUN, check_finite, network_values, seal
from dtransformer.trainers.checkpoint.folders import saved_steps

# `--resume` accepts new paths of the data, and new values of all options outside `_FIXED_ON_RESUME`.
_PATHS = (
    *("data.source", "data.target", "data.dev_source", "data.dev_target", "data.dev"),
    *("tokenizer.folder", "model.from_", "distillation.teacher"),
)
# Fields of `parallel` that the planner may change if the layout does not fit the remaining ranks.
_LAYOUT_FIELDS = (
    *("data_parallel", "model_parallel", "context_parallel", "expert_parallel"),
    *("pipeline_stage", "pipeline_schedule", "pipeline_chunks", "micro_batch_num"),
    *("sequence_parallel", "vocab_emb_dp", "recompute"),
)
_FIXED_ON_RESUME = (
    *(
        "data",
        "tokenizer",
        "model",
        "distillation",
        "training.seed",
        "training.batch_size",
        "training.beta",
    ),
    *("training.loss", "training.smoothing", "training.temperature", "training.label_smoothing"),
    *("training.z_loss", "training.neftune_alpha", "training.ema", "training.center_rewards"),
    *("training.simpo_gamma", "training.reference_free", "training.matryoshka"),
    *("training.desirable_weight", "training.undesirable_weight"),
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
        folder.check(config_path, overwrite, resume)
    plan = layout_plan(config)
    if plan is not None:
        config.parallel = plan.best.config
    start_job(config)

    def resumes_from():
        folder.recover()
        return folder.check(config_path, overwrite, resume)

    if plan is not None:
        job.print_once(summary(plan))
    resumes = from_chief(resumes_from, "run/resumes")
    try:
        # Create everything before the folder is changed, so that errors leave it as it was.
        task, trainer, batches = _prepare(config, folder, resumes)
        # All ranks must have read their files before rank 0 renames the folder.
        call_on_all(lambda: check_export(task, overwrite or resumes), "run/export")
        from_chief(lambda: _begin(folder, task, resumes), "run/begin")
        task.set_folder(folder.path)
        if plan is not None and job.is_chief():
            write_text_atomically(folder.path / PLAN, plan_to_text(plan) + "\n")
        run = RunIdentity.load(folder.path)
        if not (resumes and _has_ended(folder.path, config)):
            write_environment(folder.path, run.files[CONFIG])
            callbacks = _callbacks(task, trainer, folder, run, resumes, batches, profile)
            context = explained(config, config_path, folder.path, settings)
            with rank_log(folder.path), context:
                trainer.fit(
                    batches["train"],
                    epochs=config.training.epochs,
                    validation_data=batches["dev"],
                    callbacks=callbacks,
                    resume=resumes,
                )
    finally:
        if job.is_chief() and not resumes:
            folder.keep_or_restore()
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
    """Return the planner's plan for a run, or `None` if the config's layout is used.

    The planner is used for `parallel: auto`. It is also used under `dtransformer launch` if the
    config's layout does not fit the remaining ranks. If it finds no layout then, the result is `None`,
    and `parallel.config.elastic_config` adapts the layout. All ranks compute the same plan.

    Raises:
        InputError: If `parallel` is `auto` and no layout fits in memory.
    """
    local_devices = config.training.local_devices
    per_host = num_ranks(FITS_LAYOUT)
    if config.training.layout == "auto":
        return plan_run(config)
    num_devices = num_ranks() * local_devices
    try:
        config.parallel.resolve(num_devices, local_devices)
    except ValueError:
        # The optimizer may not be one that can update shards.
        fields = get_changed_fields(config.parallel)
        fields["optimizer_shard"] = int(config.parallel.optimizer_shard)
        fixed = {name: value for name, value in fields.items() if name not in _LAYOUT_FIELDS}
        with contextlib.suppress(InputError):
            cluster = Cluster(
                this_device(per_host),
                num_devices,
                per_host * local_devices,
                local_devices=local_devices,
            )
            return plan_run(config, cluster, fixed) if FITS_LAYOUT in os.environ else None
    return None


def _has_ended(path, config):
    """Return whether the newest checkpoint has reached `training.max_steps`."""
    last = saved_steps(path / CHECKPOINTS)[-1][0]
    limit = config.training.max_steps
    return from_chief(lambda: limit is not None and last >= limit, "run/ended")


def make_trainer(task: Task, total_steps: int, teacher: TokenModel | None = None) -> Trainer:
    """Create and compile the trainer of a task's network.

    Args:
        task: Task with a network, after `make_network`.
        total_steps: Integer. Number of training steps, for the learning rate schedule.
        teacher: Teacher that the network learns from. Defaults to `None`.

    Raises:
        InputError: If the options of `training` are invalid.
    """
    options = task.config.training
    trainer = Trainer(task.network)
    group_weights(task.network, task.config)
    optimizer = make_optimizer(task.config, total_steps)
    loss = task.loss()
    if teacher is not None:
        loss = distillation_loss(task.config, loss)
    guard = None
    if options.guard is not None:
        guard = SpikeGuard(options.guard.skip_spikes, options.guard.stop_after)
    with raise_as_input_error("training"):
        trainer.compile(
            optimizer,
            loss,
            jit_compile=options.jit_compile,
            steps_per_execution=options.steps_per_execution,
            guard=guard,
            log_gradient_norms=options.log_gradient_norms,
            teacher=teacher,
            **task.metrics(),
        )
    return trainer


def _prepare(config, folder, resumes):
    """Read the data, create network and trainer, and return (task, trainer, batches by part)."""
    options = config.training
    old_run = folder.path if resumes else None
    optimizer_class(options.optimizer)  # Report a wrong name before the data is read.
    check_logs(config)
    if old_run is not None:
        RunIdentity.load(old_run).check(old_run)
        old = load_config(old_run / CONFIG)
        # Without `data.labels`, the labels were collected from the records when the run began.
        if not getattr(config.data, "labels", True):
            config.data.labels = getattr(old.data, "labels", [])
        _check_same(config, old)
    task = make_task(config, old_run=old_run, folder=old_run or folder.fresh)
    task.read()
    if job.is_chief():
        print("\n".join(task.summary_lines()), flush=True)
    task.make_network()
    teacher = load_teacher(task)
    batches = {part: task.batches(part) for part in ("train", "dev")}
    job.print_once(f"Batches per epoch: {len(batches['train']):,}")
    steps = options.epochs * len(batches["train"])
    trainer = make_trainer(task, min(steps, options.max_steps or steps), teacher)
    trainer.summary()
    task.before_training(trainer)
    return task, trainer, batches


def _check_same(config, old):
    """Check that the config equals the old config in all options that a resumed run must keep."""
    if config.task != old.task:
        raise InputError(
            f"--resume: the run has task {old.task}, but the config has task {config.task}."
        )
    for section, values in config.sections().items():
        for field in dataclasses.fields(values):
            name = f"{section}.{field.name}"
            if name in _PATHS or not {section, name} & set(_FIXED_ON_RESUME):
                continue
            value = _without_paths(getattr(values, field.name))
            old_value = _without_paths(getattr(getattr(old, section), field.name))
            if value != old_value:
                raise InputError(
                    f"--resume: {name} is {value!r}, but the run began with {old_value!r}. Restore this "
                    "value, or train another --run."
                )


def _without_paths(value):
    """Return an option's value, or the mixture weights of sources, whose paths may change."""
    is_sources = isinstance(value, tuple) and value and isinstance(value[0], Source)
    return tuple(source.weight for source in value) if is_sources else value


def _begin(folder, task, resumes):
    """Create the run folder, or check that checkpoints and data of a resumed run belong to it."""
    if not resumes:
        folder.begin(task.config, task.tokenizer, task.digests)
        return
    run = RunIdentity.load(folder.path)
    run.check_checkpoints(folder.path)
    for name, digest in run.data.items():
        if digest != task.digests[name]:
            raise InputError(
                f"--resume: the {name} records have changed since the run began. Give the same files, "
                "or train another --run."
            )


def _callbacks(task, trainer, folder, run, resumes, batches, profile):
    options = task.config.training
    path = folder.path
    monitor = task.monitor
    callbacks = []
    if resumes:
        callbacks.append(
            callback_on(lambda: check_weights_finite(trainer, path / CHECKPOINTS), "on_train_begin")
        )
    callbacks += limit_callbacks(trainer, options.max_minutes, options.max_steps)
    sinks = []
    if job.is_chief():
        sinks = [MetricsFile(path / METRICS), *log_callbacks(task.config, path, run.key, resumes)]
    if options.ema:

        def swap():  # `fit` creates the optimizer step.
            trainer.optimizer_step.take_averages(exchanges=True)

        callbacks.append(callback_on(swap, "on_epoch_end"))
    callbacks += task.callbacks(trainer)
    if every_steps := getattr(task.config.sections().get("evaluation"), "every_steps", None):
        callbacks.append(Evaluations(batches["dev"], task.score_dev, every_steps, sinks))
    if profile and job.is_chief():
        callbacks.append(keras.callbacks.TensorBoard(path / PROFILE, profile_batch=profile))
        callbacks.append(
            callback_on(lambda: _report_profile(path / PROFILE, profile[0]), "on_train_end")
        )
    if options.early_stopping:
        callbacks.append(keras.callbacks.EarlyStopping(monitor, patience=options.early_stopping))
    # Checkpoints store the initial config of the run, even if `--resume` changes options.
    initial_config = types.SimpleNamespace(save=lambda out: shutil.copyfile(path / CONFIG, out))
    best = _best_loss(path) if resumes else None
    save = functools.partial(
        trainer.save_weights, path / WEIGHTS, before=lambda fresh: seal(fresh, run.key)
    )
    if only_adapters_are_trained(task.network):
        lora_options = {"family": "dtransformer", "overwrite": True}
        save = functools.partial(save_lora, task.core, path / ADAPTERS, **lora_options)
    callbacks.append(BestWeights(save, monitor, best))
    if options.ema:  # Checkpoints need the weights themselves, validation their averages.
        callbacks.append(callback_on(swap, "on_epoch_end"))
        sinks.append(callback_on(swap, "on_test_begin", "on_test_end"))
    callbacks += [
        ModelCheckpoint(
            path / CHECKPOINTS,
            every_steps=options.checkpoint_steps or None,
            every_minutes=options.checkpoint_minutes or None,
            keep=options.keep_checkpoints,
            monitor=monitor,
            assets={RUN: run, CONFIG: initial_config, TOKENIZER: task.tokenizer},
        ),
        # The old run is removed only after the callbacks above have saved the new one.
        callback_on(lambda: job.is_chief() and folder.remove_replaced(), "on_epoch_end"),
    ]
    if job.is_chief():
        sinks.append(ProgressLog(has_metrics=False))
    return callbacks + sinks


def _report_profile(path, first):
    """Print the path of the profile, or warn if training ended before its first step."""
    if any(path.rglob("*.xplane.pb")):
        print(f"The profile is in {path}: tensorboard --logdir {path}", flush=True)
    else:
        warnings.warn(f"No profile was written: training ended before step {first}.", stacklevel=2)


def check_weights_finite(trainer: Trainer, path: pathlib.Path) -> None:
    """Check that all weights of the network are finite. All ranks call it.

    Args:
        trainer: Trainer of the network.
        path: Source of the weights, for the error message.

    Raises:
        InputError: If a weight is NaN or infinite.
    """
    values = network_values(trainer.network)
    call_on_all(lambda: check_finite(path, values), "run/finite")


def _best_loss(folder):
    """Return the lowest `val_loss` of the checkpoints, or `None` if the next epoch must be saved."""
    best = find_best([path for _, path in saved_steps(folder / CHECKPOINTS)], "val_loss")
    if best is None or not any((folder / name).exists() for name in (WEIGHTS, ADAPTERS)):
        return None
    return Checkpoint(best).manifest["metrics"]["val_loss"]
