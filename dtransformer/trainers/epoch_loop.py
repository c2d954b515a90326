"""Epoch loops of training and evaluation over Keras' callbacks."""

import sys

import keras

from dtransformer import _compat
from dtransformer.parallel.runtime import job
from dtransformer.trainers.data import as_data, check_batches
from dtransformer.trainers.rank_agreement import RankAgreement
from dtransformer.trainers.row_sharding import RowSharding


class EpochLoop:
    """Training loop of `Trainer.fit`: epochs, validation and callbacks.

    Args:
        model: The trainer, whose attribute `stop_training` callbacks set.
        program: The `Program`, with built steps.
        batches: `EpochBatches` of the training data.
        sharding: `RowSharding` of the training data.
        callbacks: `keras.callbacks.CallbackList`.
        position: `DataPosition` of the training data.
    """

    def __init__(self, model, program, batches, sharding, callbacks, position):
        self._model = model
        self._program = program
        self._runner = program.runner
        self._batches = batches
        self._sharding = sharding
        self._callbacks = callbacks
        self._position = position
        self._agreement = RankAgreement(model)

    def run(self, epochs, validation, verbose):
        """Train up to epoch `epochs`, counted from the beginning of the run.

        Args:
            epochs: Index of the final epoch.
            validation: `Validation`, called after each epoch.
            verbose: Whether this rank prints.
        """
        logs = None
        self._callbacks.on_train_begin()
        for epoch in range(self._batches.start.epoch, epochs):
            self._train_epoch(epoch, verbose)
            logs = dict(self._runner.logs.read())
            logs |= validation(epoch, self._callbacks)
            self._end_epoch(epoch, logs)
            if self._model.stop_training:
                break
        if epochs > 0:
            self._program.optimizer_step.take_averages()
        self._callbacks.on_train_end(logs)
        self._agreement.check_training("after training")

    def _train_epoch(self, epoch, verbose):
        self._model.reset_metrics()
        if self._batches.is_resumed(epoch):
            self._program.resume_metrics(self._batches.start.restored)
        self._runner.new_epoch()
        self._position.begin_epoch(epoch)
        self._callbacks.on_epoch_begin(epoch)
        with self._batches.until_exhausted():
            for first_step, last_step, iterator in self._batches.epoch(epoch):
                self._callbacks.on_train_batch_begin(first_step)
                logs = self._runner.train(iterator, self._sharding, verbose)
                self._position.end_batch(last_step)
                self._callbacks.on_train_batch_end(last_step, logs)
                if self._agreement.should_stop():
                    break

    def _end_epoch(self, epoch, logs):
        self._program.resume_metrics(None)
        self._agreement.check_training(f"after epoch {epoch + 1}")
        self._position.end_epoch(epoch, self._model.stop_training)
        self._callbacks.on_epoch_end(epoch, logs)
        self._agreement.end_epoch()


class Validation:
    """Validation of a `fit`, run after the epochs that `validation_freq` selects.

    Args:
        model: The trainer.
        runner: The `StepRunner`.
        options: `FitOptions`.

    Call arguments:
        epoch: Index of the epoch.
        callbacks: `keras.callbacks.CallbackList` of the training.

    Returns:
        A dict of floats, the logs with the prefix `val_`. Empty if the epoch has no validation.
    """

    def __init__(self, model, runner, options):
        self._model = model
        self._runner = runner
        self._frequency = options.validation_freq
        self._batches = None
        if options.validation_data is None:
            return
        self._sharding = RowSharding.from_data(options.validation_data, options.shard)
        data = as_data(options.validation_data)
        check_batches(data)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        self._batches = _compat.EpochIterator(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=options.validation_batch_size or options.samples.batch_size,
            steps_per_epoch=options.validation_steps,
            steps_per_execution=model.steps_per_execution,
        )

    def __call__(self, epoch, callbacks):
        if self._batches is None or not self._is_due(epoch + 1):
            return {}
        with job.record_activity("validating"):
            logs = run_evaluation(
                self._model, self._runner, self._batches, self._sharding, callbacks
            )
        return {f"val_{name}": value for name, value in logs.items()}

    def _is_due(self, num_epochs):
        if isinstance(self._frequency, int):
            return num_epochs % self._frequency == 0
        return num_epochs in self._frequency


def evaluate(model, runner, data, samples, steps, callbacks, verbose):
    """Evaluate data outside of `fit`.

    Args:
        model: The trainer.
        runner: The `StepRunner`.
        data: `InputData`.
        samples: `Samples`, whose `x` is replaced by `data`.
        steps, callbacks, verbose: As in `Trainer.evaluate`.

    Returns:
        A dict of floats, the logs.
    """
    verbose = chief_verbosity(verbose)
    batches = _compat.EpochIterator(
        **samples._replace(x=data.data)._asdict(),
        steps_per_epoch=steps,
        steps_per_execution=model.steps_per_execution,
    )
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = keras.callbacks.CallbackList(
            callbacks,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=1,
            steps=batches.num_batches,
            model=model,
        )
    return run_evaluation(model, runner, batches, data.sharding, callbacks)


def run_evaluation(model, runner, batches, sharding, callbacks):
    """Evaluate the batches of an iterator.

    Args:
        model: The trainer, whose attribute `stop_evaluating` callbacks set.
        runner: The `StepRunner`.
        batches: Keras' epoch iterator.
        sharding: `RowSharding` of the data.
        callbacks: `keras.callbacks.CallbackList`.

    Returns:
        A dict of floats, the logs.
    """
    batches.reset()
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    step_logs = runner.new_evaluation()
    with batches.catch_stop_iteration():
        for first_step, last_step, iterator in batches:
            callbacks.on_test_batch_begin(first_step)
            logs = runner.test(iterator, sharding, step_logs)
            callbacks.on_test_batch_end(last_step, logs)
            if model.stop_evaluating:
                break
    logs = dict(step_logs.read())
    callbacks.on_test_end(logs)
    return logs


def chief_verbosity(verbose):
    """Return Keras' `verbose` for `evaluate` and `predict` on this rank.

    Ranks other than 0 print nothing. A log file gets one final line instead of a progress bar.
    """
    if not job.is_chief():
        return 0
    return verbose if verbose in (0, 2) or sys.stdout.isatty() else 2
