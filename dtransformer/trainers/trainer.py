"""The trainer: a Keras model whose steps run on every rank of the job."""

import math

import keras
import tensorflow as tf

from dtransformer.layers.base import register
from dtransformer.layers.block import TransformerBlock
from dtransformer.layers.dropout import dropout_seed
from dtransformer.layers.loss import CrossEntropyLoss
from dtransformer.parallel import job, seeds, validators
from dtransformer.parallel.axis_rules import axes_of, check_rules
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.first_values import broadcast_first_values
from dtransformer.parallel.object_collectives import all_gather_json
from dtransformer.parallel.pipeline import placement
from dtransformer.parallel.pipeline.forward_pass import from_last
from dtransformer.parallel.sharded_variable import trained_value
from dtransformer.parallel.zero.gather import (
    current_unsharding,
    unsharding,
)
from dtransformer.parallel.zero.variables import FullyShardedVariable
from dtransformer.reports.communication import communication_report
from dtransformer.reports.memory import memory_report
from dtransformer.reports.plan import WeightPlan
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.checkpointing import Checkpointing
from dtransformer.trainers.data import input_symbols
from dtransformer.trainers.engines.accumulation import in_micro_batches
from dtransformer.trainers.engines.mesh import MeshEngine
from dtransformer.trainers.engines.pipeline import PipelineEngine, check_trainer
from dtransformer.trainers.fit_loop import FitLoop
from dtransformer.trainers.sharded_optimizer import (
    ShardedOptimizer,
    check_elementwise,
    partition_of,
)
from dtransformer.trainers.token_loss import as_token_loss, hits

# Number of entries from which on XLA's start pays.
_LARGE_NETWORK = 2**20


@register
class Trainer(FitLoop, Checkpointing):
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
        validators.check_supported(get_parallel_config())
        job.check_joined(get_parallel_config())
        self.network = network
        self.objective = None
        self._accuracy_tracker = None
        self._plane = None
        self._update = None
        self._ready = False
        self._update_graph = None
        self._jit = "auto"

    def call(self, inputs, training=False):
        if self._plane is not None and tf.executing_eagerly():
            return self._plane.predict(inputs)
        if current_unsharding() is not None:
            return self.network(inputs, training=training)
        with unsharding("call"):
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
                weights, are compiled with XLA. `"auto"` compiles the update alone,
                and only that of a large network: there it takes a quarter of the
                time, elsewhere it is not faster on CPUs but longer to start.
            auto_scale_loss: whether the loss is scaled under `mixed_float16`: twice as
                much after every 2,000 good steps, and half as much after a step whose
                gradients overflow on any rank, which all of them skip. The logs have
                `loss_scale` and the number of `skipped_steps`. For other numbers give a
                `keras.optimizers.LossScaleOptimizer`.
        """
        # TensorFlow would reorder sums and products by what else a step computes: recompute
        # changes that, and is not to change one bit of the results.
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
        loss = CrossEntropyLoss() if loss is None else loss
        self.objective = as_token_loss(loss, getattr(self.network, "vocab_size", None))
        check_trainer(self.objective, run_eagerly, jit_compile)
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
        self._ready, self._plane, self._update = False, None, None
        self._compute = self._loss_and_gradients
        self._evaluate = self._outputs_and_sums
        self._finish, self._finish_test = self._update_and_track, self._track_test
        if job.mesh() is not None:
            check_elementwise(self.optimizer)
            if run_eagerly or jit_compile is True:
                option = "run_eagerly" if run_eagerly else "jit_compile"
                raise ValueError(
                    f"{option}=True does not work where operations are cut over a mesh"
                )
        elif jit_compile is True and not run_eagerly:
            self._compute = tf.function(self._compute, jit_compile=True, reduce_retracing=True)
        self._jit = jit_compile
        self._compute = self._in_micro_batches(self._compute)

    # The compute plane: this rank's share of the batch.

    def _loss_and_gradients(self, inputs, labels, sample_weight, count, loss_scale, seed):
        """Return the gradients of Σ loss / count · scale, the outputs and this rank's sums.

        Without a count it is this rank's own.
        """
        weights = self.network.trainable_variables
        values = [trained_value(weight) for weight in weights]
        with tf.GradientTape() as tape, dropout_seed(seed), unsharding("train"):
            tape.watch(values)
            outputs = self(inputs, training=True)
            sums = self._sums(inputs, outputs, labels, sample_weight)
            if count is None and self._sums_early():
                count = grads.reduce_sum({"count": sums["count"]}, name="count")["count"]
            loss = tf.math.divide_no_nan(sums["loss"], sums["count"] if count is None else count)
            # Regularizers: each part of the batch has the same, and sums are sums of all parts.
            num_parts = job.data_shard()[1] * get_parallel_config().micro_batch_num
            for extra in self.losses:
                loss += tf.cast(extra, "float32") / (1 if count is None else num_parts)
            loss *= loss_scale
        gradients = tape.gradient(loss, values)
        grads.check_used(weights, gradients)
        # Kept where metrics want them only: logits are large.
        return gradients, outputs if self._compile_metrics is not None else None, sums

    def _check_early_sums(self):
        """Raise a ValueError where gradients cannot be summed as soon as they are known."""
        if self._jit is True and self._sums_early():
            raise ValueError(
                "jit_compile=True does not work with optimizer_shard=3, which sends messages while "
                "the network is computed: leave it at 'auto'"
            )
        early = self._sums_early() or self._accumulates_slices()
        in_parts = get_parallel_config().micro_batch_num > 1
        if early and in_parts and not hasattr(self.objective, "token_weights"):
            raise ValueError(
                "with optimizer_shard=3 or gradient_accumulation_shard=True, micro-batches need a "
                "loss whose weights do not depend on the outputs: use dtransformer.layers."
                "CrossEntropyLoss, or micro_batch_num=1"
            )

    def _sums_early(self):
        """Return whether some gradients are summed over the ranks as soon as they are known."""
        return any(isinstance(w, FullyShardedVariable) for w in self.network.weights)

    def _outputs_and_sums(self, inputs, labels, sample_weight):
        """Return the outputs, where metrics want them, and this rank's sums."""
        outputs = self(inputs, training=False)
        sums = self._sums(inputs, outputs, labels, sample_weight)
        return outputs if self._compile_metrics is not None else None, sums

    def _sums(self, inputs, outputs, labels, sample_weight):
        """Return this rank's sums, float32 scalars: what the logs are made of."""
        with tf.name_scope("loss"):
            values, weights = self.objective.per_token(outputs, labels, sample_weight)
        weights = tf.cast(weights, "float32")
        sums = {
            "loss": tf.reduce_sum(tf.cast(values, "float32") * weights),
            "count": tf.reduce_sum(weights),
        }
        with tf.name_scope("accuracy"):
            right = hits(outputs, labels)
        if right is not None:
            sums["accuracy"] = tf.reduce_sum(right * weights)
        sums["tokens"] = sums["count"]
        if hasattr(self.network, "num_tokens"):
            sums["tokens"] = tf.cast(self.network.num_tokens(inputs), "float32")
        if hasattr(self.network, "flops_per_step"):
            sums["flops"] = self.network.flops_per_step(inputs)
        return sums

    # Keras calls these with each batch: without a mesh inside a tf.function of its own.

    def train_step(self, data):
        inputs, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        count = None
        if hasattr(self.objective, "token_weights"):  # known before the forward pass
            count = tf.reduce_sum(self.objective.token_weights(labels, sample_weight))
            count = grads.reduce_sum({"count": count}, name="count")["count"]
        loss_scale = tf.convert_to_tensor(self.optimizer.scale_loss(1.0), "float32")
        gradients, outputs, sums = self._compute(
            inputs, labels, sample_weight, count, loss_scale, self._dropout_seed()
        )
        self._build_metrics(labels, outputs)
        return self._finish(gradients, sums, count, *self._seen(labels, outputs, sample_weight))

    def _update_and_track(self, gradients, sums, count, labels, outputs, sample_weight):
        """Reduce and apply the gradients; return the logs."""
        if not tf.executing_eagerly():
            self._update_graph = tf.compat.v1.get_default_graph()
        totals = grads.reduce_sum(sums, name="sums")
        if count is None and not self._sums_early():
            share = tf.math.divide_no_nan(sums["count"], totals["count"])
            gradients = grads.scale(gradients, share)
        rate = tf.convert_to_tensor(self.optimizer.learning_rate)  # changes with the update
        loss_scale = self._update.loss_scale
        scale = loss_scale.value()
        if not self._accumulates_slices():
            gradients = self._update.reduce(gradients)
        norm = self._update.apply(gradients)
        seen = totals
        if loss_scale.is_used:  # a step that is skipped does not count
            is_finite = tf.math.is_finite(norm)
            seen = {name: tf.where(is_finite, total, 0.0) for name, total in totals.items()}
        logs = self._track(seen, labels, outputs, sample_weight)
        if loss_scale.is_used:
            logs["loss_scale"] = scale
            logs["skipped_steps"] = tf.identity(loss_scale.skipped_steps)
        logs["step_loss"] = tf.math.divide_no_nan(totals["loss"], totals["count"])
        logs["gradient_norm"] = norm
        logs["learning_rate"] = rate
        return {**logs, **{name: totals[name] for name in ("tokens", "flops") if name in totals}}

    def test_step(self, data):
        inputs, labels, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        outputs, sums = self._evaluate(inputs, labels, sample_weight)
        self._build_metrics(labels, outputs)
        return self._finish_test(sums, *self._seen(labels, outputs, sample_weight))

    def _track_test(self, sums, labels, outputs, sample_weight):
        return self._track(grads.reduce_sum(sums, "test_sums"), labels, outputs, sample_weight)

    def predict_step(self, data):
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self(inputs, training=False) if self._plane is None else self._plane.predict(inputs)

    def _seen(self, *batch):
        """Return what metrics look at; None where there are none, so that shapes do not matter."""
        return batch if self._compile_metrics is not None else (None,) * len(batch)

    def _build_metrics(self, labels, outputs):
        """Make the metrics' states, which have to exist before they are read."""
        if self._compile_metrics is not None and not self._compile_metrics.built:
            if outputs is None:  # the last stage of a pipeline has them
                outputs = self._plane.example_of_outputs()
            self._compile_metrics.build(labels, outputs)
            if self._beginning is not None:
                with tf.init_scope():
                    self._beginning.restore_metrics(self)

    def _track(self, totals, labels, outputs, sample_weight):
        """Update the metrics; return their means since the epoch began."""
        logs = {}
        for name, tracker in (("loss", self._loss_tracker), ("accuracy", self._accuracy_tracker)):
            if name in totals:
                mean = tf.math.divide_no_nan(totals[name], totals["count"])
                tracker.update_state(mean, sample_weight=totals["count"])
                logs[name] = tracker.result()
        if self._compile_metrics is not None:
            states = [variable.value for variable in self._compile_metrics.variables]
            before = [tf.identity(state) for state in states]
            if outputs is not None:
                self._compile_metrics.update_state(labels, outputs, sample_weight)
            if job.data_shard()[1] > 1:  # what each rank added, from all of them
                added = {str(i): s - b for i, (s, b) in enumerate(zip(states, before))}
                added = grads.reduce_sum(added, name="metrics")
                for i, (state, start) in enumerate(zip(states, before)):
                    state.assign(start + added[str(i)])
            if job.stage()[1] > 1:
                values = from_last([tf.identity(state) for state in states], "metrics")
                for state, value in zip(states, values):
                    state.assign(value)
            logs.update(self._compile_metrics.result())
        return logs

    def _dropout_seed(self):
        """Return the seed of this step's dropout masks, int32 [2]."""
        shard, _ = job.data_shard()
        start = tf.constant(seeds.derived_seed("dropout", shard))
        return tf.stack([start, tf.cast(self.optimizer.iterations, "int32")])

    # What comes before the first step.

    def _in_micro_batches(self, compute):
        number = get_parallel_config().micro_batch_num
        if number == 1:
            return compute

        def reduced(*args):
            gradients, outputs, sums = compute(*args)
            return self._update.reduce(gradients), outputs, sums

        return in_micro_batches(reduced if self._accumulates_slices() else compute, number)

    @staticmethod
    def _accumulates_slices():
        config = get_parallel_config()
        accumulates = config.gradient_accumulation_shard and config.micro_batch_num > 1
        return accumulates and config.optimizer_shard >= 2

    def _prepare(self, data=None):
        """Build the network and the optimizer, and take rank 0's weights, once."""
        self._assert_compile_called("fit")
        if self._ready:
            return
        self._start_plane(data)
        self.built = True
        self._check_early_sums()
        self._start_update()
        states = [] if any(self._update.is_sliced) else self.optimizer.variables
        broadcast_first_values(self.network.variables, states)
        self._ready = True

    def _start_update(self):
        if self._update is None:
            weights = self.network.trainable_variables
            self._update = ShardedOptimizer(
                self.optimizer,
                weights,
                self._fusion_groups(weights),
                self._compiles_update(),
                placement.copies(self.network),
            )

    def _fusion_groups(self, weights):
        """Return for each weight the group that its gradient is reduced with, or None."""
        layers = self.network._flatten_layers()
        blocks = [layer for layer in layers if isinstance(layer, TransformerBlock)]
        if get_parallel_config().optimizer_shard >= 2:
            # Each block for itself: as soon as its gradients are there, they are cut.
            groups = [
                f"block {i}" if block.comm_fusion is None else block.comm_fusion
                for i, block in enumerate(blocks)
            ]
        else:
            groups = [block.comm_fusion for block in blocks]
        group_of = {
            id(weight): group
            for block, group in zip(blocks, groups)
            for weight in block.trainable_variables
        }
        return [group_of.get(id(weight)) for weight in weights]

    def _compiles_update(self):
        if self._jit != "auto" or self.run_eagerly:
            return self._jit is True and not self.run_eagerly
        return sum(math.prod(v.shape) for v in self.network.trainable_variables) >= _LARGE_NETWORK

    def _start_plane(self, data):
        """Build the network; where there is a mesh, compute on it from now on."""
        if self._plane is not None:
            return
        if job.stage()[1] > 1:
            self._plane = PipelineEngine(self)
            self._plane.build(data)
            self._compute = self._plane.train
        elif not self.network.built:
            self.network(input_symbols(data))
        if job.mesh() is not None:
            self._check_rules()
        if job.mesh() is not None and self._plane is None:
            self._plane = MeshEngine(self)
            self._compute = self._in_micro_batches(self._plane.train)
        if self._plane is None:
            return
        self._evaluate = self._plane.test
        if self.compiled:
            self._finish = tf.function(
                self._update_and_track, reduce_retracing=True, autograph=False
            )
            self._finish_test = tf.function(
                self._track_test, reduce_retracing=True, autograph=False
            )

    def _check_rules(self):
        if get_parallel_config().parallel_rules:
            used = axes_of(self.network.variables)
            if job.stage()[1] > 1:  # each stage has some of the weights
                used = set().union(*all_gather_json(sorted(filter(None, used)), "axes"))
            check_rules(used)

    # What is kept and shown.

    def summary(self, **kwargs):
        """Print the network, and what a rank holds of it; as `keras.Model.summary`."""
        if not job.is_chief():
            return
        self.network.summary(**kwargs)
        plan = WeightPlan.of(self.network.variables)
        print_fn = kwargs.get("print_fn") or print
        print_fn(
            f" Ranks: {job.size()} ({job.topology()}); each device holds "
            f"{plan.entries_per_device:,} parameters ({plan.bytes_per_device / 2**20:.2f} MiB)"
        )

    def plan(self):
        """Return how every weight is cut, and what a device holds; print it.

        Returns:
            A `dtransformer.reports.plan.WeightPlan`.

        Raises:
            ValueError: the network is not built, or a row of `parallel_rules` matches no
                weight.

        Example:

        >>> print(trainer.plan())  # doctest: +SKIP
        """
        if not self.network.built:
            raise ValueError("the network has no weights yet: build it, or call it on a batch")
        self._check_rules()
        shard = partition_of(self.network.trainable_variables)
        return WeightPlan.of(self.network.variables, shard if shard.level else None)

    def communication_report(self):
        """Return which collectives the last compiled training step sends; print it.

        Those of the mesh are read from the functions that DTensor lowered for the
        devices, those over Horovod from the update's graph; messages between pipeline
        stages are those of the plan.

        Returns:
            A `dtransformer.reports.communication.CommunicationReport`. Where the network has the
            method `stream_shapes(inputs)`, it has the theory's numbers for each block.

        Raises:
            ValueError: no step was compiled yet.
        """
        is_pipeline = isinstance(self._plane, PipelineEngine) and self._update_graph is not None
        messages = self._plane.messages_sent() if is_pipeline else []
        return communication_report(self.network, self._plane, self._update_graph, messages)

    def memory_report(self, inputs=None):
        """Return what this rank's memory is needed for; print it.

        Args:
            inputs: a batch of inputs, as `call` takes them, for which the activations
                that blocks keep are worked out; on a mesh by default the last batch.

        Returns:
            A `dtransformer.reports.memory.MemoryReport`: bytes of weights, gradients,
            optimizer states and activations, by the plan and the theory, next to those
            of the tensors that there are.

        Raises:
            ValueError: no step was run yet.

        Example:

        >>> print(trainer.memory_report(batch))  # doctest: +SKIP
        """
        if self._update is None or self._update.gradient_bytes is None:
            raise ValueError("no training step was run yet: call fit or train_on_batch first")
        shapes = None if self._plane is None else self._plane.input_shapes
        num_kept = getattr(self._plane, "num_kept", 1)
        if inputs is not None:
            shapes = tf.nest.map_structure(lambda x: tuple(x.shape), inputs)
            num_kept /= get_parallel_config().micro_batch_num
        return memory_report(self.network, self.optimizer, self._update, shapes, num_kept)

    def timeline(self, path=None):
        """Return what the stages of the pipeline did in the last training step.

        All ranks have to call. Clocks of different hosts are taken as they are.

        Args:
            path: where rank 0 writes it: a .json file in the Trace Event Format, which
                Perfetto shows, or a .png picture of the measured and of the ideal step.

        Returns:
            A `dtransformer.parallel.pipeline.timeline.Timeline`; its `bubble` is the part of
            the step that the stages spend without computing.

        Raises:
            ValueError: there is no pipeline, or no step was run yet.

        Example:

        >>> print(trainer.timeline("step.png").bubble)  # doctest: +SKIP
        """
        if not isinstance(self._plane, PipelineEngine):
            raise ValueError("there is no pipeline: train with pipeline_stage=2 or more")
        return self._plane.timeline(path)

    def get_compile_config(self):
        """Return nothing: a trainer that is loaded has to be compiled again."""
        return {}

    def get_config(self):
        return {"network": keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["network"]))
