"""Export a run for other programs, as a published folder, adapters or a SavedModel."""

import os
import pathlib

import keras

from dtransformer.errors import InputError, raise_as_input_error
from dtransformer.models import check_target, load_lora, merge_lora, save_lora, save_pretrained
from dtransformer.models.lora import get_adapters, only_adapters_are_trained
from dtransformer.models.pretrained.save import hf_config
from dtransformer.parallel.runtime import job
from dtransformer.runs.identity import ADAPTERS, WEIGHTS, is_run
from dtransformer.runs.tasks.base import Task


def check_export(task: Task, overwrite: bool) -> None:
    """Check before training that the run's `export` options can be carried out.

    Args:
        task: Task of the run, with its network.
        overwrite: Boolean. Whether existing exports may be replaced.

    Raises:
        InputError: If a target exists, cannot be written, or cannot store this network.
    """
    options = task.config.sections().get("export")
    if options is None:
        return
    if options.saved_model and not overwrite and os.path.lexists(options.saved_model):
        raise InputError(
            f"`export.saved_model`: {options.saved_model} exists. Choose another path, or add "
            "--overwrite."
        )
    if not options.folder:
        return
    check_target(options.folder, overwrite)
    if getattr(task.core, "has_task_head", False) and not options.merge_adapters:
        raise InputError(
            "`export.merge_adapters=false` would leave out the trained head of task "
            f"{task.config.task}. Set it to true."
        )
    if options.merge_adapters or not get_adapters(task.core):
        with raise_as_input_error("export.family"):
            hf_config(task.core, options.family)


def export(
    task: Task, trainer: keras.Model, run: str | os.PathLike, overwrite: bool = False
) -> pathlib.Path | None:
    """Write the exports that the run's config requests, with the run's best weights.

    All ranks call it. Adapters are merged into the network if `export.merge_adapters` is set.

    Args:
        task: Task of the run, with the trained network.
        trainer: Trainer of the network.
        run: Folder of the run.
        overwrite: Boolean. Replace existing exports.

    Returns:
        Path of the exported folder, or `None` if `export.folder` is not set.

    Raises:
        InputError: If the network belongs to no published family, or a target cannot be written.
    """
    options = task.config.sections().get("export")
    if options is None or not (options.folder or options.saved_model):
        return None
    run = pathlib.Path(run)
    network = task.core
    if not only_adapters_are_trained(network):
        trainer.load_weights(run / WEIGHTS)
    else:
        load_lora(network, run / ADAPTERS)
    if options.saved_model:
        trainer.export(options.saved_model, verbose=False)
        _print_use(options.saved_model, "The SavedModel is", "TensorFlow")
        if not options.folder:
            return None
    if get_adapters(network):
        if not options.merge_adapters:
            base = task.config.model.from_
            # peft needs a published folder as the base, which a run folder is not.
            family, more_uses = (
                ("dtransformer", "") if is_run(base) else (options.family, ", and peft")
            )
            exported = save_lora(network, options.folder, family, overwrite)
            use = f"dtransformer generate --model {base} --adapters {exported}{more_uses}"
            return _print_use(exported, "The adapters are", use)
        merge_lora(network)
    exported = save_pretrained(
        network, options.folder, options.family, overwrite, task.tokenizer, options.dtype
    )
    command = task.command.replace("--run", "--model").format(exported)
    more_uses = "" if command.startswith("evaluate") else f" and dtransformer {command}"
    return _print_use(exported, "The model is", f"transformers{more_uses}")


def _print_use(folder, what, use):
    job.print_once(f"{what} in {folder}, for {use}")
    return folder
