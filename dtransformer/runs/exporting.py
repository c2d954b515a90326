"""Export of a run for other programs: a published folder, or adapters apart."""

import os
import pathlib

import keras

from dtransformer.errors import InputError, refusing
from dtransformer.models import check_target, load_lora, merge_lora, save_lora, save_pretrained
from dtransformer.models.lora import adapters_of, only_adapters_are_trained
from dtransformer.models.pretrained.save import config_of
from dtransformer.parallel.runtime import job
from dtransformer.runs.identity import ADAPTERS, WEIGHTS, is_run
from dtransformer.runs.tasks.base import Task


def check_export(task: Task, overwrite: bool) -> None:
    """Check, before training, that what is trained can be written where `export` says.

    Raises:
        InputError: it cannot; says why.
    """
    options = task.config.sections().get("export")
    if options is None:
        return
    if options.saved_model and not overwrite and os.path.lexists(options.saved_model):
        raise InputError(
            f"export.saved_model: {options.saved_model} exists. Choose another path, or add --overwrite."
        )
    if not options.folder:
        return
    check_target(options.folder, overwrite)
    if getattr(task.core, "has_task_head", False) and not options.merge_adapters:
        raise InputError(
            f"export.merge_adapters: adapters alone would lack the head of task {task.config.task}: "
            "leave it out, so that they are added to the weights"
        )
    if options.merge_adapters or not adapters_of(task.core):
        with refusing("export.family"):
            config_of(task.core, options.family)


def export(
    task: Task, trainer: keras.Model, run: str | os.PathLike, overwrite: bool = False
) -> pathlib.Path | None:
    """Write what `export` of a run's config asks for, of the run's best weights; all ranks call.

    Args:
        task: the task, whose network is trained.
        trainer: the trainer of the network.
        run: the run's folder.
        overwrite: whether what is there is replaced.

    Returns:
        The folder that it is in; None where nothing is asked for.

    Raises:
        InputError: the network is of no published family, or the folder cannot be written.
    """
    options = task.config.sections().get("export")
    if options is None or not (options.folder or options.saved_model):
        return None
    run, network = pathlib.Path(run), task.core
    if not only_adapters_are_trained(network):
        trainer.load_weights(run / WEIGHTS)
    else:
        load_lora(network, run / ADAPTERS)
    if options.saved_model:
        trainer.export(options.saved_model, verbose=False)
        _told(options.saved_model, "The SavedModel is", "TensorFlow")
        if not options.folder:
            return None
    if adapters_of(network):
        if not options.merge_adapters:
            base = task.config.model.from_
            # Of a run's weights there is no published folder, beside which peft could load them.
            family, also = ("dtransformer", "") if is_run(base) else (options.family, ", and peft")
            landed = save_lora(network, options.folder, family, overwrite)
            use = f"dtransformer generate --model {base} --adapters {landed}{also}"
            return _told(landed, "The adapters are", use)
        merge_lora(network)
    landed = save_pretrained(
        network, options.folder, options.family, overwrite, task.tokenizer, options.dtype
    )
    command = task.command.replace("--run", "--model").format(landed)
    also = "" if command.startswith("evaluate") else f" and dtransformer {command}"
    return _told(landed, "The model is", f"transformers{also}")


def _told(folder, what, use):
    job.print_once(f"{what} in {folder}, for {use}")
    return folder
