"""The trainer: a Keras model whose steps run on every rank of the job."""

import time

import keras
import tensorflow as tf

from dtransformer.layers.base import register
from dtransformer.layers.block import TransformerBlock
from dtransformer.layers.dropout import dropout_seed
from dtransformer.layers.loss import CrossEntropyLoss
from dtransformer.parallel import runtime
from dtransformer.parallel.config import get_parallel_config
from dtransformer.trainers import update
from dtransformer.trainers.objective import as_objective, hits
from dtransformer.trainers.throughput import Throughput, measured_peak
from dtransformer.trainers.weights_file import load_optimizer, save_optimizer


@register
class Trainer(keras.Model):
    """Train a Keras model on every rank of the job.

    The fit loop, its progress bar, history and callbacks are Keras' own. Each rank
    computes its share of the global batch; loss and gradients are those of the mean
    over all tokens that count in the global batch, whatever the number of ranks.

    Args:
        network: the `keras.Model` to train. Where it has the methods
            `num_tokens(inputs)` and `flops_per_step(inputs)`, the logs tell tokens
            and FLOP per second by them.

    Example:

    >>> model = TranslationTransformer(100, hidden_size=16, num_heads=2)
    >>> trainer = Trainer(model)
    >>> trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss(ignore_id=0))
    >>> history = trainer.fit(dataset, epochs=2)  # doctest: +SKIP
    """

    def __init__(self, network, **kwargs):
        super().__init__(**kwargs)
        runtime.check_supported(get_parallel_config())
        self.network = network
        self.objective = None
        self._throughput = None
        self._accuracy_tracker = None
        self._ready = False

    def call(self, inputs, training=False):
        return self.network(inputs, training=training)

    def build(self, input_shape=None):
        if not self.network.built:
            self.network.build(input_shape)
        self.built = True

    def compile(
        self,
        optimizer="adamw",
        loss=None,
        metrics=None,
        weighted_metrics=None,
        run_eagerly=False,
        steps_per_execution=1,
        jit_compile="auto",
        auto_scale_loss=True,
    ):
        """Choose how to train.

        Args:
            optimizer: a Keras optimizer, or its name.
            loss: a `CrossEntropyLoss` (the default), or a Keras loss whose mean over
                the tokens that count is minimized.
            metrics: list of Keras metrics; their states are sums over the ranks.
            weighted_metrics: list of Keras metrics that see the sample weights.
            run_eagerly: whether to run without compiling, to debug.
            steps_per_execution: number of steps of one call of the compiled function.
            jit_compile: whether the forward and backward pass, and the update of the
                weights, are compiled with XLA; `"auto"` is False: on CPUs it takes
                longer to start and is not faster.
            auto_scale_loss: whether the loss is scaled under `mixed_float16`.
        """
        self.objective = as_objective(CrossEntropyLoss() if loss is None else loss)
        super().compile(
            optimizer=optimizer,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=False,  # not the whole step: Horovod's operations cannot be
            auto_scale_loss=False,
        )
        if auto_scale_loss and self.network.dtype_policy.name == "mixed_float16":
            if not isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
                self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
        self._accuracy_tracker = keras.metrics.Mean(name="accuracy")
        self._compute, self._update = self._loss_and_gradients, self._apply
        if jit_compile is True and not run_eagerly:
            self._compute = tf.function(self._compute, jit_compile=True, reduce_retracing=True)
            self._update = tf.function(self._update, jit_compile=True)

    # The compute plane: this rank's share of the batch.

    def _loss_and_gradients(self, inputs, labels, sample_weight, count, seed):
        """Return the gradients of Σ loss / count, the outputs and this rank's sums.

        Without a count it is this rank's own.
        """
        variables = self.network.trainable_variables
        with tf.GradientTape() as tape, dropout_seed(seed):
            outputs = self(inputs, training=True)
            sums = self._sums(inputs, outputs, labels, sample_weight)
            loss = tf.math.divide_no_nan(sums["loss"], sums["count"] if count is None else count)
            for extra in self.losses:  # regularizers, the same on every rank
                loss += tf.cast(extra, "float32") / runtime.data_shard()[1]
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        unused = [v.path for v, gradient in zip(variables, gradients) if gradient is None]
        if unused:
            raise ValueError(f"the loss does not depend on the weights {', '.join(unused)}")
        # Kept where metrics want them only: logits are large.
        return gradients, outputs if self._compile_metrics is not None else None, sums

    def _sums(self, inputs, outputs, labels, sample_weight):
        """Return this rank's sums, float32 scalars: what the logs are made of."""
        values, weights = self.objective.per_token(outputs, labels, sample_weight)
        weights = tf.cast(weights, "float32")
        sums = {
            "loss": tf.reduce_sum(tf.cast(values, "float32") * weights),
            "count": tf.reduce_sum(weights),
        }
        right = hits(outputs, labels)
        if right is not None:
            sums["accuracy"] = tf.reduce_sum(right * weights)
        sums["tokens"] = sums["count"]
        if hasattr(self.network, "num_tokens"):
            sums["tokens"] = tf.cast(self.network.num_tokens(inputs), "float32")
        if hasattr(self.network, "flops_per_step"):
            sums["flops"] = self.network.flops_per_step(inputs)
        return sums

    # The update plane: the gradients of the whole batch.

    def _apply(self, gradients):
        self.optimizer.apply(gradients, self.network.trainable_variables)
        return update.global_norm(gradients)

    def _fusion_groups(self):
        group_of = {
            id(variable): block.comm_fusion
            for block in self.network._flatten_layers()
            if isinstance(block, TransformerBlock)
            for variable in block.trainable_variables
        }
        return update.fusion_groups(
            [group_of.get(id(variable)) for variable in self.network.trainable_variables],
            get_parallel_config().gradient_aggregation_group,
        )

    # Keras calls these with each batch, inside a tf.function of its own.

    def train_step(self, data):
        inputs, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        count = None
        if hasattr(self.objective, "token_weights"):  # known before the forward pass
            count = tf.reduce_sum(self.objective.token_weights(labels, sample_weight))
            count = update.reduce_sum({"count": count}, name="count")["count"]
        gradients, outputs, sums = self._compute(
            inputs, labels, sample_weight, count, self._dropout_seed()
        )
        totals = update.reduce_sum(sums, name="sums")
        if count is None and runtime.size() > 1:
            share = tf.math.divide_no_nan(sums["count"], totals["count"])
            gradients = update.scale(gradients, share)
        gradients = update.reduce_gradients(gradients, self._fusion_groups())
        rate = tf.convert_to_tensor(self.optimizer.learning_rate)
        loss_scale = self.optimizer.scale_loss(1.0)  # both change with the update
        norm = self._update(gradients) / loss_scale
        logs = self._track(totals, labels, outputs, sample_weight)
        logs["step_loss"] = tf.math.divide_no_nan(totals["loss"], totals["count"])
        logs["gradient_norm"] = norm
        logs["learning_rate"] = rate
        return {**logs, **{name: totals[name] for name in ("tokens", "flops") if name in totals}}

    def test_step(self, data):
        inputs, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs = self(inputs, training=False)
        sums = self._sums(inputs, outputs, labels, sample_weight)
        return self._track(update.reduce_sum(sums, "test_sums"), labels, outputs, sample_weight)

    def _track(self, totals, labels, outputs, sample_weight):
        """Update the metrics; return their means since the epoch began."""
        logs = {}
        for name, tracker in (("loss", self._loss_tracker), ("accuracy", self._accuracy_tracker)):
            if name in totals:
                mean = tf.math.divide_no_nan(totals[name], totals["count"])
                tracker.update_state(mean, sample_weight=totals["count"])
                logs[name] = tracker.result()
        if self._compile_metrics is not None:
            if not self._compile_metrics.built:  # their states have to exist before
                self._compile_metrics.build(labels, outputs)
            states = [variable.value for variable in self._compile_metrics.variables]
            before = [tf.identity(state) for state in states]
            self._compile_metrics.update_state(labels, outputs, sample_weight)
            if runtime.size() > 1:  # what each rank added, from all of them
                added = {str(i): s - b for i, (s, b) in enumerate(zip(states, before))}
                added = update.reduce_sum(added, name="metrics")
                for i, (state, start) in enumerate(zip(states, before)):
                    state.assign(start + added[str(i)])
            logs.update(self._compile_metrics.result())
        return logs

    def _dropout_seed(self):
        """Return the seed of this step's dropout masks, int32 [2]."""
        shard, _ = runtime.data_shard()
        start = tf.constant(runtime.derived_seed("dropout", shard))
        return tf.stack([start, tf.cast(self.optimizer.iterations, "int32")])

    # The fit loop around them.

    def make_train_function(self, force=False):
        if self.train_function is not None and not force:
            return self.train_function
        super().make_train_function(force=True)
        step, steps = self.train_function, self.steps_per_execution
        peak = update.reduce_sum({"peak": tf.constant(measured_peak(), "float32")}, "peak")["peak"]
        self._throughput = Throughput(float(peak))
        compiled = False

        def timed_step(iterator):
            nonlocal compiled
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

    def fit(
        self, x=None, y=None, *, verbose="auto", callbacks=None, validation_data=None, **kwargs
    ):
        """Train; as `keras.Model.fit`.

        Args:
            x: this rank's share of the data, as Keras takes it; or an object with
                `as_dataset()` and `set_epoch(epoch)`, such as `TranslationBatches`,
                which shares and shuffles by itself. All ranks have to have the same
                number of batches.
            y, validation_data, and the others: as Keras'.
            verbose: as Keras'; ranks other than 0 print nothing.
            callbacks: list of Keras callbacks.

        Returns:
            A `keras.callbacks.History`.
        """
        callbacks = [_EpochStart(x), *(callbacks or [])]
        data = _as_data(x)
        if isinstance(data, tf.data.Dataset):
            kwargs.setdefault("shuffle", False)  # a dataset shuffles by itself
        self._prepare(data)
        _check_batches(data)
        return super().fit(
            data,
            y,
            verbose=verbose if runtime.is_chief() else 0,
            callbacks=callbacks,
            validation_data=_as_data(validation_data),
            **kwargs,
        )

    def evaluate(self, x=None, y=None, *, verbose="auto", **kwargs):
        """Compute loss and metrics over data; as `keras.Model.evaluate`."""
        self._prepare(_as_data(x))
        verbose = verbose if runtime.is_chief() else 0
        return super().evaluate(_as_data(x), y, verbose=verbose, **kwargs)

    def predict(self, x, *, verbose="auto", **kwargs):
        """Compute the network's outputs; as `keras.Model.predict`.

        Returns:
            NumPy arrays. Logits of a padded vocabulary are cut to its true size.
        """
        verbose = verbose if runtime.is_chief() else 0
        outputs = super().predict(_as_data(x), verbose=verbose, **kwargs)
        vocab_size = getattr(self.network, "vocab_size", None)
        return outputs if vocab_size is None else outputs[..., :vocab_size]

    def train_on_batch(self, x, *args, **kwargs):
        """Train on one batch; as `keras.Model.train_on_batch`."""
        self._prepare(x)
        return super().train_on_batch(x, *args, **kwargs)

    def _prepare(self, data=None):
        """Build the network and the optimizer, and take rank 0's weights, once."""
        self._assert_compile_called("fit")
        if self._ready:
            return
        if not self.network.built:
            self._build_for(data)
        self.built = True
        if not self.optimizer.built:
            self.optimizer.build(self.network.trainable_variables)
        hvd = runtime.horovod()
        if hvd is not None:
            variables = [*self.network.variables, *self.optimizer.variables]
            for number, variable in enumerate(variables):
                value = hvd.broadcast(variable.value, root_rank=0, name=f"weight_{number}")
                variable.assign(value)
        self._ready = True

    def _build_for(self, data):
        """Build the network from the shapes of its inputs."""
        if isinstance(data, tf.data.Dataset):
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data.element_spec)
        elif hasattr(data, "__next__") or isinstance(data, (keras.utils.PyDataset, type(None))):
            raise ValueError("the network is not built: call it on a batch before training")
        else:
            inputs = tf.nest.map_structure(lambda x: tf.convert_to_tensor(x[:1]), data)
        symbols = tf.nest.map_structure(
            lambda x: keras.KerasTensor((None, *x.shape[1:]), x.dtype.name), inputs
        )
        self.network(symbols)

    # What is kept and shown.

    def summary(self, **kwargs):
        """Print the network, and what a rank holds of it; as `keras.Model.summary`."""
        if not runtime.is_chief():
            return
        self.network.summary(**kwargs)
        variables = self.network.variables
        num_bytes = sum(v.value.shape.num_elements() * v.value.dtype.size for v in variables)
        count = sum(variable.value.shape.num_elements() for variable in variables)
        print_fn = kwargs.get("print_fn") or print
        print_fn(
            f" Ranks: {runtime.size()} ({runtime.topology()}); each holds {count:,} parameters "
            f"({num_bytes / 2**20:.2f} MiB)"
        )

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Save weights and the optimizer's state from rank 0; as `keras.Model.save_weights`.

        The network alone can load the file too.
        """
        if runtime.is_chief():
            self.network.save_weights(filepath, overwrite=overwrite, **kwargs)
            if self._has_state() and str(filepath).endswith(".h5"):
                save_optimizer(filepath, self.optimizer)
        runtime.barrier()

    def load_weights(self, filepath, **kwargs):
        """Load weights on every rank; as `keras.Model.load_weights`.

        Once compiled, the optimizer takes the state that the file holds of one alike.
        """
        if not self.network.built:
            self.network.build()
        self.network.load_weights(filepath, **kwargs)
        if self.compiled and str(filepath).endswith(".h5"):
            if not self._has_state():
                self.optimizer.build(self.network.trainable_variables)
            load_optimizer(filepath, self.optimizer)

    def _has_state(self):
        return self.compiled and self.optimizer.built

    def get_compile_config(self):
        """Return nothing: a trainer that is loaded has to be compiled again."""
        return {}

    def get_config(self):
        return {"network": keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["network"]))


class _EpochStart(keras.callbacks.Callback):
    """Tells the data which epoch comes next, so that it shuffles anew; resets the clock."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch, logs=None):
        self.model._throughput.reset()
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)


def _as_data(data):
    return data.as_dataset() if hasattr(data, "as_dataset") else data


def _check_batches(data):
    """Compare the number of batches of all ranks: one that waits for a batch waits for ever."""
    hvd = runtime.horovod()
    if hvd is None or not isinstance(data, tf.data.Dataset):
        return
    numbers = hvd.allgather_object(int(data.cardinality()), name="number_of_batches")
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            raise ValueError(
                f"rank 0 has {numbers[0]} batches and rank {rank} has {number}: give every rank the "
                "same number, its own rows of each global batch"
            )
