"""Metrics of a step: means since the epoch began."""

import keras
import tensorflow as tf

from dtransformer.trainers.compiled_metrics import CompiledMetrics


class StepMetrics:
    """Epoch means over the global batch, and the metrics passed to `Trainer.compile`.

    Args:
        objective: The `Objective`, which specifies the weight of a batch in an epoch's mean.
        compiled: Keras' container of the compiled metrics, or `None` without any.
        on_build: Function that is called when metrics have created states for the first batch.

    Attributes:
        compiled: `CompiledMetrics`, or `None` without any.
        names: Set of the log names of the last traced `update` that Keras' lists contain. The
            accuracy is among them only without compiled metrics.
    """

    def __init__(self, objective, compiled, on_build):
        self._objective = objective
        self.compiled = None if compiled is None else CompiledMetrics(compiled, on_build)
        self._on_build = on_build
        self._loss = keras.metrics.Mean(name="loss")
        self._accuracy = keras.metrics.Mean(name="accuracy")
        self._output_losses = {}  # Key in the sums -> mean, if the network has several losses.
        self.names = set()

    @property
    def means(self):
        """The loss, the accuracy and the container of the compiled metrics, if any."""
        metrics = [self._loss, self._accuracy]
        return metrics if self.compiled is None else [*metrics, self.compiled.container]

    @property
    def output_losses(self):
        """The means of the outputs' losses, if the network has several."""
        return list(self._output_losses.values())

    @property
    def keras_metrics(self):
        """The metrics that Keras shows, in Keras' order."""
        metrics = [self._loss]
        if self.compiled is not None:
            metrics.append(self.compiled.container)
        elif self._objective.is_token_loss:
            metrics.append(self._accuracy)
        return [*metrics, *self.output_losses]

    def update(self, loss, totals, counts, labels, outputs, sample_weight):
        """Add a batch and return the logs. Batches of skipped steps also count.

        Args:
            loss: Scalar, the loss of the global batch.
            totals: Dict of float32 scalars, sums over the global batch; see `ForwardStep.sums`.
            counts: Counts of the global batch, see `Objective.counts`.
            labels, outputs, sample_weight: Local rows, or `None` if no metric needs them. Outputs
                come with their masks, see `ForwardStep.metric_outputs`.

        Returns:
            A dict of scalar tensors, the means since the epoch began.
        """
        self._build_output_losses(totals)
        rows = self._objective.num_rows(counts)
        weight = totals["counted"] if self._objective.weights_epoch_means else rows
        logs = {"loss": self._mean(self._loss, loss, weight)}
        if "right" in totals:
            counted = totals["counted"]
            accuracy = tf.math.divide_no_nan(totals["right"], counted)
            logs["accuracy"] = self._mean(self._accuracy, accuracy, counted)
        for key, mean in self._output_losses.items():
            logs[mean.name] = self._mean(mean, totals[key], weight)
        self.names = set(logs)
        if self.compiled is not None:
            results = self.compiled.update(labels, outputs, sample_weight)
            self.names = self.names - {"accuracy"} | set(results)
            logs |= results
        return logs

    def _build_output_losses(self, totals):
        """Create a mean for each output's loss when they first appear in the sums."""
        names = {
            key: f"{key.removeprefix('loss/')}_loss" for key in totals if key.startswith("loss/")
        }
        if self._output_losses.keys() != names.keys():
            with tf.init_scope():
                self._output_losses = {
                    key: keras.metrics.Mean(name=name) for key, name in names.items()
                }
            self._on_build()

    @staticmethod
    def _mean(mean, value, weight):
        # A non-finite value with weight 0 must not turn the mean into NaN.
        mean.update_state(tf.where(weight > 0, value, 0.0), sample_weight=weight)
        return mean.result()
