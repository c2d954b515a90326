"""`dtransformer train`: from a config file to a run folder."""

import dataclasses
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterable

import keras

import dtransformer
from dtransformer.cli import needs, runs
from dtransformer.cli.automatic import plan_of_run
from dtransformer.cli.config import RunConfig, load_config
from dtransformer.cli.run_callbacks import Beginning, BestWeights, FiniteWeights, TimeLimit
from dtransformer.cli.run_folder import RunFolder
from dtransformer.cli.run_identity import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    PLAN,
    TENSORBOARD,
    TOKENIZER,
    WEIGHTS,
    RunIdentity,
    digest_of,
)
from dtransformer.datasets.batching import TranslationBatches
from dtransformer.datasets.text import clean_pairs, read_pairs
from dtransformer.datasets.text_files import write_text_atomically
from dtransformer.datasets.tokenizer import SubwordTokenizer
from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models.translator import Translator
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.planner.automatic import summary
from dtransformer.planner.report import text_of
from dtransformer.trainers import ModelCheckpoint, Trainer
from dtransformer.trainers.callbacks import MetricsFile, SacreBleu, StepTimer
from dtransformer.trainers.checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.folders import saved_steps
from dtransformer.trainers.checkpoint.retention import best_of
from dtransformer.trainers.checkpoint.seal import RUN

# What `--resume` may change: where the data lie, and all that changes neither the model nor the
# tokens nor their order.
_MAY_MOVE = ("source", "target", "dev_source", "dev_target")


class _Text:
    """A text file as an asset of checkpoints."""

    def __init__(self, text):
        self._text = text

    def save(self, path):
        pathlib.Path(path).write_text(self._text, encoding="utf-8", newline="")


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
    folder = RunFolder(run_folder or pathlib.Path("runs") / pathlib.Path(config_path).stem)
    if folder.is_in_order():
        folder.check(config_path, overwrite, resume)  # before any work
    found = None
    if config.training.layout == "auto":
        found = plan_of_run(config)
        config.parallel = found.best.config
    try:
        dtransformer.init(
            config.parallel,
            seed=config.training.seed,
            local_devices=config.training.local_devices,
        )
    except ValueError as error:
        raise InputError(f"parallel: {error}") from None

    def resumes_from():
        folder.recover()
        return folder.check(config_path, overwrite, resume)

    if found is not None and job.is_chief():
        print(summary(found))
    resumes = from_chief(resumes_from, "run/resumes")
    # Everything is made, so that what is wrong is told, before the folder is touched.
    prepared = _prepare(config, folder.path if resumes else None)
    try:
        from_chief(lambda: _begin(folder, prepared, resumes), "run/begin")
        if found is not None and job.is_chief():
            write_text_atomically(folder.path / PLAN, text_of(found) + "\n")
        _fit(prepared, folder, RunIdentity.load(folder.path), resumes)
    finally:
        if job.is_chief() and not resumes:
            folder.settle()
    if job.is_chief():
        print(
            f"The run is in {folder.path}. Translate with: dtransformer translate --run "
            f"{folder.path} < FILE"
        )
    return folder.path


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """All that a training consists of."""

    config: RunConfig
    tokenizer: SubwordTokenizer
    trainer: Trainer
    batches: TranslationBatches
    dev_batches: TranslationBatches | None
    dev_pairs: tuple | None
    data: dict  # checksums of the sentence pairs


def _prepare(config, old_run):
    """Make everything; the tokenizer of an old run that is resumed is taken."""
    options = config.training
    needs.check_model(config, config.tokenizer.vocab_size, job.size())  # before work begins
    runs.optimizer_class(options.optimizer)  # the same
    if options.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise InputError("training.tensorboard: install it first: pip install tensorboard")
    if old_run is not None:
        RunIdentity.load(old_run).check(old_run)
        _check_same(config, load_config(old_run / CONFIG))
    read = _read(config, "source", "target")
    pairs, dev_pairs = _clean(config, read), _read(config, "dev_source", "dev_target")
    if old_run is not None:
        tokenizer = SubwordTokenizer.load(old_run / TOKENIZER)
    else:
        tokenizer = SubwordTokenizer.train(
            [*pairs[0], *pairs[1]],
            config.tokenizer.vocab_size,
            lower_case=config.tokenizer.lower_case,
        )
    model = runs.make_model(config, tokenizer)
    batches = _batches(config, tokenizer, pairs, training=True)
    dev_batches = _batches(config, tokenizer, dev_pairs, training=False) if dev_pairs else None
    largest = max(part.max_tokens for part in (batches, dev_batches) if part)
    needs.check_batches(config, tokenizer.vocab_size, largest, job.size())
    if job.is_chief():
        print(f"Batches: {len(batches):,} an epoch of {batches.num_pairs:,} pairs")
    trainer = Trainer(model)
    optimizer = runs.make_optimizer(config, options.epochs * len(batches))
    try:
        trainer.compile(
            optimizer,
            CrossEntropyLoss(options.label_smoothing, ignore_id=tokenizer.pad_id),
            jit_compile={"auto": "auto", "true": True, "false": False}[options.jit_compile],
            steps_per_execution=options.steps_per_execution,
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"training: {error}") from None
    trainer.summary()
    data = {"train": digest_of(read), "dev": digest_of(dev_pairs)}
    return _Prepared(config, tokenizer, trainer, batches, dev_batches, dev_pairs, data)


def _check_same(config, old):
    """Refuse options that a run that is resumed cannot change."""
    kept = [("training", "seed")]
    for section in ("model", "tokenizer", "data"):
        fields = dataclasses.fields(getattr(config, section))
        kept += [(section, field.name) for field in fields if field.name not in _MAY_MOVE]
    for section, name in kept:
        own, its = getattr(getattr(config, section), name), getattr(getattr(old, section), name)
        if own != its:
            raise InputError(
                f"--resume: {section}.{name} is {own!r}, and the run began with {its!r}: give what it "
                "began with, or train another --run"
            )


def _begin(folder, prepared, resumes):
    """Begin the run folder anew, or see that what is there belongs together."""
    if not resumes:
        folder.begin(prepared.config, prepared.tokenizer, prepared.data)
        return
    run = RunIdentity.load(folder.path)
    run.check_checkpoints(folder.path)
    for name, its in run.data.items():
        if its != prepared.data[name]:
            raise InputError(
                f"--resume: the {name} sentences are not those that the run began with: give the same "
                "files, or train another --run"
            )


def _fit(prepared, folder, run, resumes):
    prepared.trainer.fit(
        prepared.batches,
        epochs=prepared.config.training.epochs,
        validation_data=prepared.dev_batches,
        callbacks=_callbacks(prepared, folder, run, resumes),
        resume=resumes,
        verbose=1 if sys.stdout.isatty() else 2,  # a bar makes no sense in a log
    )


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
        packed_length=options.packed_length,
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


def _callbacks(prepared, folder, run, resumes):
    config, path, dev_pairs = prepared.config, folder.path, prepared.dev_pairs
    options, monitor = config.training, "val_loss" if dev_pairs else None
    callbacks = [StepTimer()]
    if resumes:
        callbacks.append(FiniteWeights(path / CHECKPOINTS))
    if options.max_minutes:
        callbacks.append(TimeLimit(options.max_minutes))
    if dev_pairs and options.bleu_sentences:
        translate = Translator(
            prepared.trainer.network,
            prepared.tokenizer,
            beam_size=1,  # greedy: a quick look
            max_source_length=config.data.max_length,
        )
        some = slice(options.bleu_sentences)
        callbacks.append(SacreBleu(dev_pairs[0][some], dev_pairs[1][some], translate))
    own_config = (path / CONFIG).read_text(encoding="utf-8")  # which `--resume` does not change
    callbacks += [
        BestWeights(path / WEIGHTS, run.key, monitor, _best_loss(path) if resumes else None),
        ModelCheckpoint(
            path / CHECKPOINTS,
            every_steps=options.checkpoint_steps or None,
            every_minutes=options.checkpoint_minutes or None,
            keep=options.keep_checkpoints,
            monitor=monitor,
            assets={RUN: run, CONFIG: _Text(own_config), TOKENIZER: prepared.tokenizer},
        ),
        Beginning(folder),
    ]
    if job.is_chief():
        callbacks.append(MetricsFile(path / METRICS))
        if options.tensorboard:
            callbacks.append(keras.callbacks.TensorBoard(path / TENSORBOARD))
    return callbacks


def _best_loss(folder):
    """Return the best loss of the saved checkpoints, which later epochs have to improve on.

    None where there are no weights that they could be better than.
    """
    best = best_of([path for _, path in saved_steps(folder / CHECKPOINTS)], "val_loss")
    if best is None or not (folder / WEIGHTS).exists():
        return None
    return Checkpoint(best).manifest["metrics"]["val_loss"]
