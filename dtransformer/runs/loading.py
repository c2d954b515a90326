"""Load the config, the tokenizer and the trained network of a run or a published folder."""

import os
import pathlib

import keras

import dtransformer
from dtransformer import _compat
from dtransformer.datasets.tokenizer_folder import load_tokenizer
from dtransformer.errors import InputError, refusing
from dtransformer.inputs.json_file import read_object
from dtransformer.inputs.weights_file import load_weights
from dtransformer.models.lora import adapters_of, merge_lora
from dtransformer.models.lora_folder import load_lora
from dtransformer.models.pretrained.families.task_heads import SEQUENCE, TOKENS, read_labels
from dtransformer.models.pretrained.folder import MODULES
from dtransformer.models.pretrained.load import architecture_of, from_pretrained
from dtransformer.parallel.config.elastic_config import refit
from dtransformer.planner.machine import num_ranks
from dtransformer.runs import needs
from dtransformer.runs.config import RunConfig, load_config, set_option
from dtransformer.runs.folder import replaced_run
from dtransformer.runs.identity import ADAPTERS, CONFIG, TOKENIZER, WEIGHTS, RunIdentity, is_run
from dtransformer.runs.tasks import task_of
from dtransformer.runs.tasks.base import Task
from dtransformer.runs.unread import like


@refusing("parallel", ValueError)
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


def load_run(
    folder: str | os.PathLike,
    precision: str = "float32",
    task: str | None = None,
    trained: bool = True,
) -> Task:
    """Load a run. All ranks call it.

    Args:
        folder: Path of the run folder.
        precision: Name of the dtype policy of the network. Its weights are float32, except with
            `"bfloat16"`.
        task: Name of the expected task. `None` accepts every task.
        trained: Boolean. Load the run's weights. Otherwise the network has its initial weights.

    Returns:
        A `Task` with tokenizer and network. Records are not read.

    Raises:
        InputError: If the folder or a file in it is missing or damaged, belongs to another run, or
            has another task.
    """
    folder = pathlib.Path(folder)
    config = check_run(folder)
    if task is not None and like(config.task) != task:
        raise InputError(f"`{folder}` is a run of task {config.task}, expected task {task}.")
    loaded = task_of(config, old_run=folder, folder=folder)
    loaded.load_tokenizer(folder)
    loaded.make_network(precision)
    if trained and _compat.makes_values():
        load_trained(loaded)
    return loaded


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
    positions = architecture_of(folder).arguments.get("max_length") or config.data.length
    config.data.length = min(config.data.length, positions)
    config.model.from_ = folder
    start_job(config)
    task = task_of(config)
    task.find_tokenizer(list)
    task.make_network()
    return task


def load_trained(task: Task) -> None:
    """Load the run's weights or adapters into the network of its task. All ranks call it."""
    folder = task.old_run
    if (folder / ADAPTERS).exists():
        load_lora(task.core, folder / ADAPTERS)
    else:
        load_weights(task.network, folder / WEIGHTS)


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
        if like(run.config.task) == "translation":
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
        if adapters_of(model):  # The new adapters were trained on the merged weights of the run.
            merge_lora(model)
        load_lora(model, adapters)
    return tokenizer, model


def check_run(folder: pathlib.Path) -> RunConfig:
    """Compare the files of a run folder with their checksums, and return the run's config.

    Raises:
        InputError: If a file is missing, damaged, or belongs to another run.
    """
    if not os.path.isdir(folder):
        raise InputError(
            f"The run folder `{folder}` does not exist. Create it with `dtransformer train`."
        )
    if not (is_run(folder) or any((folder / x).exists() for x in (CONFIG, WEIGHTS, TOKENIZER))):
        raise InputError(_other_run(folder))
    for name in (CONFIG, TOKENIZER, WEIGHTS):
        exists = (folder / name).exists() or (name == WEIGHTS and (folder / ADAPTERS).exists())
        if not exists:
            replaced = replaced_run(folder)
            hint = f" The replaced run is in `{replaced}`." if replaced.is_dir() else ""
            raise InputError(
                f"The run folder `{folder}` has no {name}, because its training ended too early. "
                f"Train again, or choose another run.{hint}"
            )
    RunIdentity.load(folder).check(folder)
    return load_config(folder / CONFIG)


def _other_run(folder):
    """Return the error message for a folder that `dtransformer train` did not write."""
    message = f"`{folder}` is not a run of `dtransformer train`."
    for inner in (folder, folder / "model"):
        if (inner / "config.json").is_file():
            hint = "Pass it as --model to dtransformer generate, predict or embed."
            return f"{message} `{inner}` contains a published model. {hint}"
    old = replaced_run(folder)
    if old.is_dir():
        return f"{message} The replaced run is in `{old}`."
    names = ", ".join(sorted(x.name for x in folder.iterdir())[:3]) or "nothing"
    return f"{message} It contains {names}."
