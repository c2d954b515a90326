"""Load the config, the tokenizer and the trained network of a run or a published folder."""

import os
import pathlib

import keras

import dtransformer
from dtransformer.datasets.tokenizer_folder import load_tokenizer
from dtransformer.errors import InputError, raise_as_input_error
from dtransformer.inputs.json_file import read_object
from dtransformer.models.lora import get_adapters, merge_lora
from dtransformer.models.lora_folder import load_lora
from dtransformer.models.pretrained.families.task_heads import SEQUENCE, TOKENS, read_labels
from dtransformer.models.pretrained.folder import MODULES
from dtransformer.models.pretrained.load import from_pretrained, read_architecture
from dtransformer.parallel.config.elastic_config import refit
from dtransformer.planner.machine import num_ranks
from dtransformer.runs import needs
from dtransformer.runs.config import RunConfig, set_option
from dtransformer.runs.identity import is_run
from dtransformer.runs.run_files import check_run
from dtransformer.runs.tasks import load_run, make_task
from dtransformer.runs.tasks.base import Task
from dtransformer.runs.unread import get_base_task


@raise_as_input_error("parallel", ValueError)
def start_job(config: RunConfig) -> None:
    """Initialize the job with the layout, seed and devices of a config.

    Raises:
        InputError: If the layout does not fit the number of ranks.
    """
    fields = ("seed", "local_devices", "deterministic")
    options = {name: getattr(config.training, name) for name in fields}
    dtransformer.init(config.parallel, **options)


def open_run(folder: str | os.PathLike, trained: bool = True) -> Task:
    """Initialize the job with a run's layout, adapted to the number of ranks, and load the run.

    All ranks call it. Arguments and errors are the same as in `load_run`. The network computes in
    `training.precision`.
    """
    config = check_run(pathlib.Path(folder))
    config.parallel = refit(config.parallel, num_ranks() * config.training.local_devices)
    start_job(config)
    return load_run(folder, config.training.precision, trained=trained)


def load_published(folder: str) -> Task:
    """Return the task of a published folder whose network predicts labels, numbers or vectors.

    Texts may have up to 512 tokens, or fewer if the network has fewer positions. All ranks call it.

    Raises:
        InputError: If the folder is unusable, or its network has no suitable head.
    """
    fields = read_object(f"{folder}/config.json")
    labels = read_labels(fields, folder)
    architecture = str(fields.get("architectures"))
    if os.path.exists(f"{folder}/{MODULES}"):
        kind = "embedding"
    elif TOKENS in architecture:
        kind = "token_classification"
    elif SEQUENCE in architecture:
        kind = "regression" if len(labels) == 1 else "classification"
    else:
        raise InputError(
            f"`{folder}` contains {architecture}, which predicts neither labels nor vectors."
        )
    config = RunConfig(kind)
    set_option(config, "data.labels", labels, folder)
    positions = read_architecture(folder).arguments.get("max_length") or config.data.length
    config.data.length = min(config.data.length, positions)
    config.model.from_ = folder
    start_job(config)
    task = make_task(config)
    task.find_tokenizer(list)
    task.make_network()
    return task


def opened(
    folder: str | os.PathLike, precision: str, adapters: str | os.PathLike | None = None
) -> tuple[object, keras.Model]:
    """Return the tokenizer and the network of a published folder or a run, to generate text.

    Args:
        folder: Path of the folder.
        precision: Name of the dtype policy to compute in.
        adapters: Path of a folder of low-rank adapters to add, or `None`.

    Raises:
        InputError: If the folder is unusable, or its network does not generate text.
    """
    folder = pathlib.Path(folder)
    if is_run(folder):
        run = load_run(folder, precision)
        if get_base_task(run.config.task) == "translation":
            raise InputError(
                f"`{folder}` is a translation run. Use `dtransformer translate --run {folder}`."
            )
        tokenizer = run.tokenizer
        model = run.core
    else:
        tokenizer = load_tokenizer(folder)
        needs.check_published(folder)
        model = from_pretrained(folder, dtype=precision)
    if not hasattr(model, "generate") or getattr(model, "has_task_head", False):
        raise InputError(
            f"`{folder}` contains a {type(model).__name__}, which does not generate text. Use "
            "`dtransformer predict` for labels and numbers, or `dtransformer embed` for vectors."
        )
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"The tokenizer in `{folder}` has {tokenizer.vocab_size} ids, but the model has only "
            f"{model.vocab_size}. Use the tokenizer of this model."
        )
    if adapters is not None:
        if get_adapters(model):  # The new adapters were trained on the merged weights of the run.
            merge_lora(model)
        load_lora(model, adapters)
    return tokenizer, model
