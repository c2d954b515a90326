"""Parts of a run, its model and its optimizer, and all of it read from its folder."""

import inspect
import os
import pathlib

import keras

from dtransformer.cli import needs
from dtransformer.cli.config import RunConfig, load_config
from dtransformer.cli.run_folder import replaced_run
from dtransformer.cli.run_identity import CONFIG, RUN, TOKENIZER, WEIGHTS, RunIdentity
from dtransformer.datasets.tokenizer import SubwordTokenizer
from dtransformer.errors import InputError
from dtransformer.inputs.weights_file import load_weights
from dtransformer.models import TranslationTransformer
from dtransformer.parallel.runtime import job
from dtransformer.trainers import lr_schedules


def make_model(config: RunConfig, tokenizer: SubwordTokenizer) -> TranslationTransformer:
    """Return the model of a run, built.

    Raises:
        InputError: the options do not make a model, or one that is too large for this machine.
    """
    needs.check_model(config, tokenizer.vocab_size, job.size())
    options = dict(vars(config.model))
    try:
        model = TranslationTransformer(
            tokenizer.vocab_size,
            **options,
            max_source_length=config.data.max_length,
            max_target_length=config.data.max_length + 1,  # and the start token
            pad_id=tokenizer.pad_id,
            start_id=tokenizer.start_id,
            end_id=tokenizer.end_id,
            dtype=config.training.precision,
        )
        model.build()
    except (TypeError, ValueError) as error:
        raise InputError(f"model: {error}") from None
    return model


def load_run(
    folder: str | os.PathLike,
) -> tuple[RunConfig, TranslationTransformer, SubwordTokenizer]:
    """Read a run's folder.

    Returns:
        Its config, its model with weights, and its tokenizer.

    Raises:
        InputError: the folder or a file in it is missing, damaged, or of another run.
    """
    folder = pathlib.Path(folder)
    if not os.path.isdir(folder):
        raise InputError(f"{folder}: there is no such run folder; 'dtransformer train' makes one")
    if not any((folder / name).exists() for name in (CONFIG, RUN, WEIGHTS, TOKENIZER)):
        raise InputError(_other_run(folder))
    for name in (CONFIG, TOKENIZER, WEIGHTS):
        if not (folder / name).exists():
            old = replaced_run(folder)
            hint = f"; the run that it was to replace is in {old}" if old.is_dir() else ""
            raise InputError(
                f"{folder}: this run folder has no {name}, as its training did not get that far: "
                f"train again, or give another run{hint}"
            )
    RunIdentity.load(folder).check(folder)
    config = load_config(folder / CONFIG)
    config.training.precision = "float32"  # for translating; weights are float32 anyway
    tokenizer = SubwordTokenizer.load(folder / TOKENIZER)
    model = make_model(config, tokenizer)
    load_weights(model, folder / WEIGHTS)
    return config, model, tokenizer


def _other_run(folder):
    """Return what is told of a folder that `dtransformer train` has not written."""
    message = (
        f"{folder}: is no run of dtransformer train, whose translation models alone are taken here"
    )
    for inner in (folder, folder / "model"):
        if (inner / "config.json").is_file():
            return f"{message}: it has a published model: dtransformer generate --model {inner}"
    old = replaced_run(folder)
    if old.is_dir():
        return f"{message}; the run that it was to replace is in {old}"
    found = ", ".join(sorted(x.name for x in folder.iterdir())[:3]) or "nothing"
    return (
        f"{message}: it has {found}; a script's run is evaluated by Trainer.evaluate in the script"
    )


def optimizer_class(name: str) -> type[keras.optimizers.Optimizer]:
    """Return the class of a Keras optimizer.

    Args:
        name: its name, such as `"adamw"`.

    Raises:
        InputError: Keras has none of that name.
    """
    try:
        return type(keras.optimizers.get(name))
    except (TypeError, ValueError):
        raise InputError(
            f"training.optimizer: Keras has no optimizer named {name!r}; try adamw, adam, sgd, lion, "
            "adafactor"
        ) from None


def make_optimizer(config: RunConfig, total_steps: int) -> keras.optimizers.Optimizer:
    """Return the optimizer of a run, with its schedule.

    Args:
        config: the run's config.
        total_steps: number of steps of the training, at which some schedules end.

    Raises:
        InputError: the options do not make an optimizer.
    """
    try:
        return _optimizer(config, total_steps)
    except (TypeError, ValueError) as error:
        raise InputError(f"training: {error}") from None


def _optimizer(config, total_steps):
    options = config.training
    kind = optimizer_class(options.optimizer)
    schedule = {"peak_learning_rate": options.learning_rate, "warmup_steps": options.warmup_steps}
    if options.schedule in ("linear", "cosine"):
        schedule["total_steps"] = max(total_steps, options.warmup_steps + 1)
    keywords = {"learning_rate": lr_schedules.get(options.schedule, **schedule)}
    if options.clip_norm:
        keywords["global_clipnorm"] = options.clip_norm
    if options.weight_decay:
        keywords["weight_decay"] = options.weight_decay
    if "beta_2" in inspect.signature(kind).parameters:
        keywords["beta_2"] = options.beta_2
    optimizer = kind(**keywords)
    if options.weight_decay:
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return optimizer
