"""`dtransformer train`: from a config file to a run folder."""

import importlib.util
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterable

import keras
import tensorflow as tf

import dtransformer
from dtransformer.cli import needs, runs
from dtransformer.cli.config import load_config, save_config
from dtransformer.datasets.batching import TranslationBatches
from dtransformer.datasets.text import clean_pairs, read_pairs
from dtransformer.datasets.tokenizer import SubwordTokenizer
from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models.translator import Translator
from dtransformer.parallel import job
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.object_collectives import from_chief
from dtransformer.trainers import ModelCheckpoint, Trainer
from dtransformer.trainers.callbacks import MetricsFile, SacreBleu, StepTimer
from dtransformer.trainers.checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.folders import saved_steps
from dtransformer.trainers.checkpoint.retention import best_of


class TimeLimit(keras.callbacks.Callback):
    """Stops training when a time has passed, on all ranks at the same step.

    Args:
        minutes: the time, from the first step on.
    """

    def __init__(self, minutes: float):
        super().__init__()
        self.seconds = minutes * 60

    def on_train_begin(self, logs=None):
        self.end = time.monotonic() + self.seconds

    def on_train_batch_end(self, batch, logs=None):
        over = tf.constant(time.monotonic() > self.end)
        if transport.broadcast(over, 0, job.whole_job(), "time_limit"):  # rank 0's clock decides
            self.model.stop_training = True


class _ConfigFile:
    """A `RunConfig` as an asset of checkpoints."""

    def __init__(self, config):
        self._config = config

    def save(self, path):
        save_config(self._config, path)


def train(
    config_path: str | os.PathLike,
    settings: Iterable[str] = (),
    run_folder: str | os.PathLike | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> pathlib.Path:
    """Train as a config file says, and write a run folder.

    Args:
        config_path: a YAML file.
        settings: texts "section.key=value" that replace values of the file.
        run_folder: where to write; "runs/NAME-OF-THE-CONFIG" by default.
        overwrite: whether a run that is there may be replaced.
        resume: whether to go on from the run's newest checkpoint; without one, training begins.

    Returns:
        The run folder.

    Raises:
        InputError: something in the config or the data is wrong.
    """
    config = load_config(config_path, settings)
    folder = pathlib.Path(run_folder or pathlib.Path("runs") / pathlib.Path(config_path).stem)
    _check_folder(folder, overwrite, resume)  # before any work
    try:
        dtransformer.init(
            config.parallel,
            seed=config.training.seed,
            local_devices=config.training.local_devices,
        )
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"parallel: {error}") from None
    needs.check_model(config, config.tokenizer.vocab_size, job.size())  # before work begins
    runs.optimizer_class(config.training.optimizer)  # the same
    if config.training.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise InputError("training.tensorboard: install it first: pip install tensorboard")
    pairs = _clean(config, _read(config, "source", "target"))
    dev_pairs = _read(config, "dev_source", "dev_target")
    tokenizer = SubwordTokenizer.train(
        [*pairs[0], *pairs[1]],
        config.tokenizer.vocab_size,
        lower_case=config.tokenizer.lower_case,
    )
    resumes = from_chief(
        lambda: _begin_folder(folder, config, tokenizer, overwrite, resume), "run_folder"
    )
    model = runs.make_model(config, tokenizer)
    batches = _batches(config, tokenizer, pairs, training=True)
    dev_batches = _batches(config, tokenizer, dev_pairs, training=False) if dev_pairs else None
    largest = max(part.max_tokens for part in (batches, dev_batches) if part)
    needs.check_batches(config, tokenizer.vocab_size, largest, job.size())

    if job.is_chief():
        print(
            f"Batches: {len(batches):,} an epoch of {batches.num_pairs:,} pairs; "
            f"{batches.num_left_out:,} pairs have more than {config.data.max_length} tokens"
        )

    trainer = Trainer(model)
    options = config.training
    trainer.compile(
        runs.make_optimizer(config, options.epochs * len(batches)),
        CrossEntropyLoss(options.label_smoothing, ignore_id=tokenizer.pad_id),
        jit_compile={"auto": "auto", "true": True, "false": False}[options.jit_compile],
        steps_per_execution=options.steps_per_execution,
    )
    trainer.summary()
    trainer.fit(
        batches,
        epochs=options.epochs,
        validation_data=dev_batches,
        callbacks=_callbacks(config, folder, model, tokenizer, dev_pairs, resumes),
        resume=resumes,
        verbose=1 if sys.stdout.isatty() else 2,  # a bar makes no sense in a log
    )
    if job.is_chief():
        print(
            f"The run is in {folder}. Translate with: dtransformer translate --run {folder} < FILE"
        )
    return folder


def _read(config, source_key, target_key):
    """Return the lines of both languages, or None where no files are given."""
    source, target = getattr(config.data, source_key), getattr(config.data, target_key)
    if source is None and target is None and source_key != "source":
        return None
    for key, path in ((source_key, source), (target_key, target)):
        if path is None:
            raise InputError(f"data.{key} is not given: give a file with one sentence a line")
    return read_pairs(source, target)


def _clean(config, pairs):
    """Leave out pairs that training is better without; print how many."""
    options = config.data
    *pairs, counts = clean_pairs(*pairs, max_ratio=options.max_ratio, distinct=options.distinct)
    if job.is_chief():
        left_out = [
            f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count
        ]
        print(f"Training pairs: {', '.join(left_out)}")
    return pairs


def _check_folder(folder, overwrite, resume):
    """Return whether a run goes on from a checkpoint; refuse to replace one by accident."""
    has_checkpoints = bool(saved_steps(folder / runs.CHECKPOINTS))
    if resume and has_checkpoints:
        return True
    if (has_checkpoints or (folder / runs.WEIGHTS).exists()) and not overwrite:
        ways = "--overwrite, " + "--resume, " * has_checkpoints + "or another --run"
        raise InputError(f"{folder}: holds a run already; give {ways}")
    return False


def _begin_folder(folder, config, tokenizer, overwrite, resume):
    """Begin the run folder anew: the config as run, and the tokenizer.

    Returns:
        Whether the run goes on from a checkpoint instead.
    """
    if _check_folder(folder, overwrite, resume):
        return True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (runs.WEIGHTS, runs.METRICS):
            (folder / name).unlink(missing_ok=True)
        for name in (runs.TOKENIZER, runs.CHECKPOINTS):
            shutil.rmtree(folder / name, ignore_errors=True)
        save_config(config, folder / runs.CONFIG)
        tokenizer.save(folder / runs.TOKENIZER)
    except OSError as error:
        raise InputError(f"{folder}: the run folder cannot be written ({error})") from None
    return False


def _batches(config, tokenizer, pairs, training):
    shard, num_shards = job.data_shard()
    options = config.data
    return TranslationBatches(
        tokenizer.encode(pairs[0]),
        tokenizer.encode(pairs[1]),
        batch_size=options.batch_size,
        batch_tokens=None if options.batch_size else options.batch_tokens,
        max_length=options.max_length,
        num_buckets=options.num_buckets,
        pad_to_bucket=job.compiles_shapes(),
        pad_to_multiple_of=config.parallel.model_parallel,
        pad_rows_to_multiple_of=job.rows_multiple_of(),
        shuffle=options.shuffle and training,
        seed=config.training.seed,
        shard_index=shard,
        num_shards=num_shards,
        training=training,
        pad_id=tokenizer.pad_id,
        start_id=tokenizer.start_id,
        end_id=tokenizer.end_id,
    )


def _callbacks(config, folder, model, tokenizer, dev_pairs, resumes):
    options = config.training
    callbacks = [StepTimer()]
    if options.max_minutes:
        callbacks.append(TimeLimit(options.max_minutes))
    if dev_pairs and options.bleu_sentences:
        translate = Translator(
            model,
            tokenizer,
            beam_size=1,  # greedy: a quick look
            max_source_length=config.data.max_length,
        )
        some = slice(options.bleu_sentences)
        callbacks.append(SacreBleu(dev_pairs[0][some], dev_pairs[1][some], translate))
    callbacks.append(
        keras.callbacks.ModelCheckpoint(
            str(folder / runs.WEIGHTS),
            monitor="val_loss",
            save_best_only=bool(dev_pairs),  # the last epoch's without a dev set
            save_weights_only=True,
            initial_value_threshold=_best_loss(folder) if resumes else None,
        )
    )
    callbacks.append(
        ModelCheckpoint(
            folder / runs.CHECKPOINTS,
            every_steps=options.checkpoint_steps or None,
            every_minutes=options.checkpoint_minutes or None,
            keep=options.keep_checkpoints,
            monitor="val_loss" if dev_pairs else None,
            assets={runs.TOKENIZER: tokenizer, runs.CONFIG: _ConfigFile(config)},
        )
    )
    if job.is_chief():
        callbacks.append(MetricsFile(folder / runs.METRICS))
        if options.tensorboard:
            callbacks.append(keras.callbacks.TensorBoard(folder / "tensorboard"))
    return callbacks


def _best_loss(folder):
    """Return the best loss of the saved checkpoints, which later epochs have to improve on."""
    best = best_of([path for _, path in saved_steps(folder / runs.CHECKPOINTS)], "val_loss")
    return None if best is None else Checkpoint(best).manifest["metrics"]["val_loss"]
