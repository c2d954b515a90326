"""The loop that calls a trainer's steps: Keras' own, on every rank of the job."""

import time

import keras
import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.reports.throughput import Throughput, measured_peak
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.data import (
    DataPosition,
    as_data,
    check_batches,
    check_micro_batches,
)
from dtransformer.trainers.resume_state import ResumeState, check_callbacks


class FitLoop(keras.Model):
    """Fit, evaluate and predict as Keras does, with what several ranks need around it.

    A subclass has Keras' `train_step`, `test_step` and `predict_step`, `_prepare(data)` and
    `_start_engine(data)`, which make it ready, and `_engine`, which its steps compute with.
    """

    _engine = None
    _throughput = None
    _beginning = None  # of the fit that is running

    def make_train_function(self, force=False):
        if self.train_function is not None and not force:
            return self.train_function
        super().make_train_function(force=True)
        if self._engine.compiles_itself:
            self.train_function = self._each_step(self.train_step)
        step, steps = self.train_function, self.steps_per_execution
        peak = grads.reduce_sum({"peak": tf.constant(measured_peak(), "float32")}, "peak")["peak"]
        self._throughput = Throughput(float(peak))
        compiled = False

        def timed_step(iterator):
            nonlocal compiled
            if self._beginning is not None:
                self._beginning.count_step()
            start = time.perf_counter()
            logs = step(iterator)
            tokens, flops = float(logs.pop("tokens")), float(logs.pop("flops", 0.0))
            if compiled:
                seconds = time.perf_counter() - start
                self._throughput.add(seconds, tokens * steps, flops * steps)
            compiled = True
            return {**logs, **self._throughput.logs()}

        self.train_function = timed_step
        return self.train_function

    def make_test_function(self, force=False):
        if not self._engine.compiles_itself:
            return super().make_test_function(force)
        self.test_function = self._each_step(self.test_step)
        return self.test_function

    def make_predict_function(self, force=False):
        if not self._engine.compiles_itself:
            return super().make_predict_function(force)

        def predict(batches):
            outputs = [self.predict_step(batch) for batch in batches]
            return tf.nest.map_structure(lambda *xs: tf.concat(xs, 0), *outputs)

        self.predict_function = predict
        return self.predict_function

    def _each_step(self, step):
        """Return a function of an iterator that runs a step with each batch.

        What the engine compiles and what follows it are joined in Python.
        """

        def run(iterator):
            logs = None
            for _ in range(self.steps_per_execution):
                try:
                    logs = step(next(iterator))
                except StopIteration:
                    if logs is None:
                        raise
                    break
            return logs

        return run

    def fit(
        self,
        x=None,
        y=None,
        *,
        verbose="auto",
        callbacks=None,
        validation_data=None,
        resume=False,
        **kwargs,
    ):
        """Train; as `keras.Model.fit`.

        Args:
            x: this rank's share of the data, as Keras takes it; or an object with
                `as_dataset()` and `set_epoch(epoch)`, such as `TranslationBatches`,
                which takes the rank's share and shuffles by itself. All ranks need the
                same number of batches.
            y, validation_data, and the others: as Keras'.
            verbose: as Keras'; ranks other than 0 print nothing.
            callbacks: list of Keras callbacks.
            resume: True to go on from the newest checkpoint of the `ModelCheckpoint` in
                `callbacks`, and to begin where it has none; or the path of a checkpoint, or
                of a folder of them. `epochs` counts from the run's beginning. In the middle
                of an epoch, training goes on with the batch after the last one. To get the
                losses of a run without a break, the order of the data has to depend on the
                epoch only, as that of `TranslationBatches` does, or that of a dataset that
                does not shuffle.

        Returns:
            A `keras.callbacks.History`.

        Raises:
            InputError: there is no checkpoint to resume from; it is damaged or does not fit;
                the data cannot go on from its position.
        """
        data, callbacks = as_data(x), list(callbacks or [])
        check_callbacks(callbacks)
        if isinstance(data, tf.data.Dataset):
            kwargs.setdefault("shuffle", False)  # a dataset shuffles by itself
        check_batches(data)
        if job.rows_multiple_of() > 1:
            check_micro_batches(data, kwargs.get("batch_size"))
        self._prepare(data)
        beginning = ResumeState.of(self, x, data, resume, callbacks, kwargs.get("steps_per_epoch"))
        if beginning.restored is not None:
            kwargs["initial_epoch"] = beginning.epoch
        self._beginning, self._data_position = beginning, DataPosition(x, beginning.batch)
        verbose = verbose if job.is_chief() else 0
        try:
            return super().fit(
                beginning.data,
                y,
                verbose=verbose,
                callbacks=beginning.callbacks(
                    [self._data_position, *callbacks],
                    verbose=verbose,
                    epochs=kwargs.get("epochs", 1),
                    model=self,
                ),
                validation_data=as_data(validation_data),
                **kwargs,
            )
        finally:
            beginning.end_epoch()
            self._beginning = None
            self.wait_until_saved()

    def evaluate(self, x=None, y=None, *, verbose="auto", **kwargs):
        """Compute loss and metrics over data; as `keras.Model.evaluate`."""
        self._prepare(as_data(x))
        verbose = verbose if job.is_chief() else 0
        return super().evaluate(as_data(x), y, verbose=verbose, **kwargs)

    def predict(self, x, *, verbose="auto", **kwargs):
        """Compute the network's outputs; as `keras.Model.predict`.

        Returns:
            NumPy arrays. Logits of a padded vocabulary have its true size.
        """
        verbose = verbose if job.is_chief() else 0
        self._start_engine(as_data(x))
        outputs = super().predict(as_data(x), verbose=verbose, **kwargs)
        vocab_size = getattr(self.network, "vocab_size", None)
        return outputs if vocab_size is None else outputs[..., :vocab_size]

    def train_on_batch(self, x, *args, **kwargs):
        """Train on one batch; as `keras.Model.train_on_batch`."""
        self._prepare(x)
        self._data_position = self._restored_position = None  # not known any more
        return super().train_on_batch(x, *args, **kwargs)
