"""The loop that calls a trainer's steps: Keras' own, on every rank of the job."""

import contextlib
import sys
import warnings
from typing import Any

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import format_warning
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.seeds import derived_seed
from dtransformer.trainers.checkpoint.callback import CallbackStates, saved_after_states
from dtransformer.trainers.data import (
    DataPosition,
    all_rows,
    as_data,
    check_batched,
    check_batches,
    check_micro_batches,
    own_rows,
    peek,
    shards_rows,
)
from dtransformer.trainers.host_changes import with_host_changes
from dtransformer.trainers.objective import without_padding
from dtransformer.trainers.preemption import signals_stop
from dtransformer.trainers.resume_state import ResumeState, check_callbacks
from dtransformer.trainers.step_errors import errors_in_one_line
from dtransformer.trainers.step_functions import StepCheck, StepFunctions, StepLogs


class FitLoop(StepFunctions):
    """Fit, evaluate and predict as Keras does, with what several ranks need around it.

    A subclass has Keras' `train_step`, `test_step` and `predict_step`, `_prepare(first)` and
    `_start_engine(first)`, which make it ready, and `_engine` and `_step`, which its steps
    compute with.
    """

    _num_fits = 0  # so far, each of which shuffles arrays in another order
    num_weights_set = 0  # of those that are sharded, when the host's changes were compared last
    _validation_shard = None  # the same for the validation data of the fit that is running

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        validation_split=0.0,
        validation_data=None,
        shuffle=True,
        class_weight=None,
        sample_weight=None,
        initial_epoch=0,
        steps_per_epoch=None,
        *,
        resume=False,
        shard=None,
        **options,
    ):
        """Train; as `keras.Model.fit`.

        Args:
            x: the data, as Keras takes them, the same on every rank: of each batch a data shard
                computes its rows. Or an object with `as_dataset()` and `set_epoch(epoch)`,
                such as `TranslationBatches`, which shuffles by itself.
            y, batch_size, epochs, callbacks, and the others: as Keras'. `batch_size` is that of
                the global batch.
            verbose: as Keras'; ranks other than 0 print nothing. 1 shows a progress bar with
                losses, metrics and tokens per second. If standard output is not a terminal, it
                prints lines with at most six metrics instead. 2 prints one such line for each
                epoch.
            resume: True to go on from the newest checkpoint of the `ModelCheckpoint` in
                `callbacks`, and to begin where it has none; or the path of a checkpoint, or
                of a folder of them. `epochs` counts from the run's beginning. In the middle
                of an epoch, training goes on with the batch after the last one. To get the
                losses of a run without a break, the order of the data has to depend on the
                epoch only, as that of `TranslationBatches` does, or that of a dataset that
                does not shuffle.
            shard: False where the data, and the validation data, are this data shard's share
                already, of `dtransformer.data_shard()`; the ranks of a shard need the same, and
                all ranks the same number of batches. True by default, but for objects with
                `as_dataset()` that make a share: their `num_shards` is not 1.

        Returns:
            A `keras.callbacks.History`.

        Raises:
            InputError: there is no checkpoint to resume from; it is damaged or does not fit;
                the data cannot go on from its position.
            ValueError: the ranks have different data.
            SystemExit: with code 75, after a checkpoint, where a rank has got SIGTERM or SIGUSR1
                and a `ModelCheckpoint` is in `callbacks`.
        """
        callbacks = list(callbacks or [])
        check_callbacks(callbacks)
        callbacks = saved_after_states(callbacks)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = _compat.train_validation_split(
                (x, y, sample_weight), validation_split
            )
        first, data = self._take_data(x, shard, batch_size)
        self._validation_shard = shards_rows(validation_data, shard)
        if validation_data is not None:
            validation_data = as_data(validation_data)
            check_batches(validation_data)
        self._prepare(first)
        if class_weight is not None:
            labels = keras.utils.unpack_x_y_sample_weight(first)[1] if y is None else y
            self.objective.check_class_weight(labels)
            if isinstance(data, tf.data.Dataset):
                data, class_weight = _compat.with_class_weights(data, class_weight), None
        beginning = ResumeState.of(self, x, data, resume, callbacks, steps_per_epoch)
        if beginning.restored is not None:
            initial_epoch = beginning.epoch
        self._num_fits += 1
        order = _compat.ShuffleOrder(derived_seed("shuffle", self._num_fits), initial_epoch)
        data = beginning.data
        if shuffle:
            data = order.adapter(
                data,
                y,
                sample_weight,
                batch_size,
                steps_per_epoch,
                shuffle,
                class_weight,
            )
        self._beginning, self._data_position = beginning, DataPosition(x, beginning.batch)
        self._begin_training()
        verbose = verbose if job.is_chief() else 0
        self._tells = bool(verbose)
        self._callback_states = CallbackStates(
            callbacks, beginning.restored and beginning.restored.path
        )
        try:
            # Keras would give it full weights, of which ranks may have shards.
            ends = _compat.meanwhile(
                self.optimizer,
                finalize_variable_values=lambda _: self.optimizer_step.take_averages(),
            )
            shuffles = _compat.meanwhile(_compat.py_dataset_adapter, random=order)
            short_warnings = _compat.meanwhile(warnings, formatwarning=format_warning)
            stops = signals_stop(callbacks)
            with (
                job.doing("callbacks"),
                errors_in_one_line(),
                short_warnings,
                ends,
                shuffles,
                stops as stopping,
            ):
                shared = with_host_changes([*callbacks, self._callback_states, *stopping])
                return super().fit(
                    data,
                    y,
                    batch_size,
                    epochs,
                    verbose,
                    beginning.callbacks(
                        [self._data_position, *shared],
                        verbose=verbose,
                        epochs=epochs,
                        model=self,
                    ),
                    validation_data=validation_data,
                    shuffle=shuffle and not isinstance(data, tf.data.Dataset),
                    class_weight=class_weight,
                    sample_weight=sample_weight,
                    initial_epoch=initial_epoch,
                    steps_per_epoch=steps_per_epoch,
                    **options,
                )
        finally:
            beginning.end_epoch()
            self._beginning = self._validation_shard = self._callback_states = None
            self.wait_until_saved()

    def evaluate(
        self,
        x=None,
        y=None,
        batch_size=None,
        verbose="auto",
        sample_weight=None,
        *,
        shard=None,
        **options,
    ):
        """Compute loss and metrics over data; as `keras.Model.evaluate`, `shard` as in `fit`."""
        with self._apart_from_fit():
            self._logs = StepLogs(StepCheck(), self._log_every)
            if options.get("_use_cached_eval_dataset"):  # called by `fit`, which has checked them
                self._shards_rows = self._validation_shard
                first, data = None, as_data(x)
            else:
                first, data = self._take_data(x, shard, batch_size, trains=False)
            self._prepare(first)
            return super().evaluate(
                data,
                y,
                batch_size,
                _verbosity(verbose),
                sample_weight,
                **options,
            )

    def predict(
        self, x, batch_size=None, verbose="auto", steps=None, callbacks=None, shard=None
    ) -> Any:
        """Compute the network's outputs; as `keras.Model.predict`.

        Args:
            x, batch_size, verbose, steps, callbacks: as Keras'.
            shard: as in `fit`. Where data are shared, every rank returns the outputs of all
                rows, in their order; where they are this shard's already, those of its own.

        Returns:
            NumPy arrays. Logits of a padded vocabulary have its true size.
        """
        verbose = _verbosity(verbose)
        with self._apart_from_fit():
            first, data = self._take_data(x, shard, batch_size, trains=False)
            self._start_engine(first)
            return super().predict(data, batch_size, verbose, steps, callbacks)

    def train_on_batch(
        self, x, y=None, sample_weight=None, class_weight=None, return_dict=False, shard=None
    ):
        """Train on one batch; as `keras.Model.train_on_batch`, `shard` as in `fit`.

        Returns:
            Keras' list, or the loss alone; with `return_dict` all logs.
        """
        with self._apart_from_fit("compiling"):
            self._shards_rows = shards_rows(x, shard)
            self._prepare((x,))
            if class_weight is not None:
                self.objective.check_class_weight(y)
            self._data_position = self._restored_position = None  # not known any more
            self._begin_training()
            self._logs = StepLogs(self._step_check, 1, self._throughput, self.num_steps)
            with job.doing("compiling", self.num_steps + 1):
                return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)

    def test_on_batch(self, x, y=None, sample_weight=None, return_dict=False, shard=None):
        """Evaluate one batch; as `keras.Model.test_on_batch`, `shard` as in `fit`."""
        with self._apart_from_fit():
            self._logs = StepLogs(StepCheck())
            self._shards_rows = shards_rows(x, shard)
            self._prepare((x,))
            return super().test_on_batch(x, y, sample_weight, return_dict)

    def predict_on_batch(self, x, shard=None):
        """Compute one batch's outputs; as `keras.Model.predict_on_batch`, `shard` as in `predict`."""
        with self._apart_from_fit():
            self._shards_rows = shards_rows(x, shard)
            self._start_engine((x,))
            return super().predict_on_batch(x)

    def _begin_training(self):
        """Take what a checkpoint may have changed: the number of the step, and the seed."""
        self.num_steps = int(self.optimizer.iterations)
        self._step.take_seed()

    # Which rows a rank computes.

    @contextlib.contextmanager
    def _apart_from_fit(self, activity="validating"):
        """Restore the state of a running `fit` after the `with` block, which a callback may be in.

        Args:
            activity: Name of the activity in the block, see `job.doing`.
        """
        kept = _compat.meanwhile(self, _shards_rows=self._shards_rows, _logs=self._logs)
        with kept, job.doing(activity), errors_in_one_line():
            yield

    def _take_data(self, x, shard, batch_size, trains=True):
        """Return a first batch, and the data as Keras takes them, checked between the ranks."""
        first, data = peek(as_data(x))
        check_batched(first, self.network)
        self._shards_rows = shards_rows(x, shard)
        check_batches(data)
        if trains and job.rows_multiple_of() > 1 and not isinstance(data, tf.data.Dataset):
            shares = job.data_shard()[1] if self._shards_rows else 1
            check_micro_batches(data, first, batch_size, shares)
        return first, data

    def _own(self, data):
        """Return this data shard's rows of a batch."""
        return own_rows(data) if self._shards_rows else data

    def _all(self, outputs):
        """Return the outputs of all rows of a batch, from those of this data shard's."""
        outputs = all_rows(outputs) if self._shards_rows else outputs
        return without_padding(outputs, self.network)


def _verbosity(verbose):
    """Return Keras' `verbose` for this rank: one line at the end instead of a bar in a log file."""
    if not job.is_chief():
        return 0
    return verbose if verbose in (0, 2) or sys.stdout.isatty() else 2
