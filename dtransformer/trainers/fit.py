"""One call of `Trainer.fit`: data, start point, callbacks and the epoch loop."""

import contextlib
import dataclasses
import warnings

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import format_warning
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.seeds import derived_seed
from dtransformer.trainers.callbacks import with_progress_log
from dtransformer.trainers.checkpoint.callback import CallbackStates, order_callbacks
from dtransformer.trainers.data import DataPosition, check_micro_batches, prepare_data
from dtransformer.trainers.epoch_batches import EpochBatches
from dtransformer.trainers.epoch_loop import EpochLoop, Validation
from dtransformer.trainers.loss_checks import check_class_weight
from dtransformer.trainers.preemption import stop_on_signals
from dtransformer.trainers.rank_agreement import prepare_callbacks
from dtransformer.trainers.sample_preprocessing import Samples, preprocess_data
from dtransformer.trainers.start_point import check_callbacks, find_start
from dtransformer.trainers.step_errors import convert_step_errors


@dataclasses.dataclass(kw_only=True)
class FitOptions:
    """Arguments of `Trainer.fit`, see there. Options that only Keras documents have its defaults."""

    samples: Samples
    epochs: int
    verbose: int | str
    callbacks: list | None
    validation_split: float
    validation_data: object
    shuffle: bool
    class_weight: dict | None
    initial_epoch: int
    steps_per_epoch: int | None
    resume: object
    shard: bool | None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: object = 1

    def __post_init__(self):
        self.callbacks = order_callbacks(list(self.callbacks or []))
        check_callbacks(self.callbacks)
        if not job.is_chief():
            self.verbose = 0
        max_epochs = keras.config.max_epochs()
        if max_epochs and max_epochs < self.epochs:
            self.epochs = max_epochs
        if self.validation_split and self.validation_data is None:
            arrays, self.validation_data = _compat.train_validation_split(
                self.samples[:3], self.validation_split
            )
            self.samples = Samples(*arrays, self.samples.batch_size)

    def preprocessed(self, network):
        """Return options with the data that the network's `preprocess_samples` returns."""
        samples = preprocess_data(network, self.samples)
        validation_data = self.validation_data
        if validation_data is not None:
            arrays = keras.utils.unpack_x_y_sample_weight(validation_data)
            batch_size = self.validation_batch_size or self.samples.batch_size
            rows = preprocess_data(network, Samples(*arrays, batch_size))
            validation_data = keras.utils.pack_x_y_sample_weight(*rows[:3])
        return dataclasses.replace(self, samples=samples, validation_data=validation_data)


def run_fit(trainer, program, checkpoints, options, fit_index):
    """Train a network; see `Trainer.fit`.

    Args:
        trainer: The `Trainer`, compiled.
        program: Its `Program`.
        checkpoints: Its `Checkpoints`.
        options: `FitOptions`.
        fit_index: Number of earlier calls. Each call shuffles arrays differently.
    """
    options = options.preprocessed(trainer.network)
    samples = options.samples
    data = prepare_data(samples.x, options.shard, trainer.network)
    check_micro_batches(data, samples.batch_size)
    runner = program.build_steps(data.first)
    validation = Validation(trainer, runner, options)
    if options.class_weight is not None:
        labels = keras.utils.unpack_x_y_sample_weight(data.first)[1]
        check_class_weight(trainer.objective, labels if samples.y is None else samples.y)
    if options.class_weight is not None and isinstance(data.data, tf.data.Dataset):
        weighted = _compat.with_class_weights(data.data, options.class_weight)
        data = data._replace(data=weighted)
        options = dataclasses.replace(options, class_weight=None)
    start = find_start(trainer.restore, data.data, trainer.steps_per_execution, options)
    order = _compat.ShuffleOrder(derived_seed("shuffle", fit_index), start.epoch)
    batches = EpochBatches(start, options, trainer.steps_per_execution, order)
    position = DataPosition(samples.x, start.batch, batches.num_batches)
    states = CallbackStates(options.callbacks, start.restored and start.restored.path)
    checkpoints.track(position.value, states.assets)
    runner.start_training()
    try:
        with _fit_context(options.callbacks, order) as stopping:
            callbacks = keras.callbacks.CallbackList(
                with_progress_log(
                    prepare_callbacks(
                        [*program.callbacks(), *options.callbacks, states, *stopping]
                    ),
                    options.verbose,
                ),
                add_history=True,
                add_progbar=options.verbose != 0,
                verbose=options.verbose,
                epochs=options.epochs,
                steps=batches.num_batches,
                model=trainer,
            )
            loop = EpochLoop(trainer, program, batches, data.sharding, callbacks, position)
            loop.run(options.epochs, validation, bool(options.verbose))
    finally:
        program.resume_metrics(None)
        checkpoints.track(position.value)
        checkpoints.wait()
    return trainer.history


@contextlib.contextmanager
def _fit_context(callbacks, order):
    """Convert errors, shorten warnings, handle signals and shuffle in the given order.

    Yields:
        Additional callbacks.
    """
    with (
        job.record_activity("callbacks"),
        convert_step_errors(),
        _compat.patched(warnings, formatwarning=format_warning),
        order.for_py_datasets(),
        stop_on_signals(callbacks) as stopping,
    ):
        yield stopping
