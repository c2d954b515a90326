"""Engine, optimizer step and compiled steps of a trainer, each built when first needed."""

import contextlib
from functools import partial

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.replica_consistency import check_replica_consistency
from dtransformer.parallel.initial_broadcast import initial_broadcast
from dtransformer.parallel.keras_layers.batch_norm import synchronize_batch_norms
from dtransformer.parallel.keras_layers.shard import shard_keras_layers
from dtransformer.parallel.pipeline_parallel.stage_assignment import copied_weights
from dtransformer.parallel.runtime import job
from dtransformer.trainers import compile_checks
from dtransformer.trainers.checkpoint import TrainingState
from dtransformer.trainers.checkpoint.reader import Restored, restore_metrics
from dtransformer.trainers.checkpoint.training_state import variable_names
from dtransformer.trainers.data import element_specs
from dtransformer.trainers.distilled import DistilledModel
from dtransformer.trainers.engines import make_engine
from dtransformer.trainers.engines.output_gradients import training_objective
from dtransformer.trainers.forward_step import ForwardStep
from dtransformer.trainers.layer_states import LayerStates, layer_metrics
from dtransformer.trainers.optimizer.buckets import bucket_ids
from dtransformer.trainers.optimizer.guard import StopOnSpikes
from dtransformer.trainers.optimizer.sharded_optimizer import ShardedOptimizer
from dtransformer.trainers.padded_vocabulary import without_padding
from dtransformer.trainers.rank_agreement import check_same_training
from dtransformer.trainers.reports import check_rules
from dtransformer.trainers.step import Step
from dtransformer.trainers.step_logs import StepCheck
from dtransformer.trainers.step_metrics import StepMetrics
from dtransformer.trainers.step_runner import StepRunner, without_optionals


class Program:
    """Engine, optimizer step and compiled steps of a trainer.

    Args:
        trainer: The trainer, whose layers are called to find overflows.
        network: The `keras.Model` that is trained.
        parallel_config: Parallel config of the trainer.
        options: `CompileOptions`.

    Attributes:
        engine: The `Engine`, or `None` before the first batch.
        optimizer_step: The `ShardedOptimizer`, or `None` before `build_optimizer`.
        runner: The `StepRunner`, or `None` before `build_steps`.
        metrics: The `StepMetrics`, or `None` before `compile`.
        first_batch: Specs of the first batch, or `None` if it is unknown.
        compiler: The `StepCompiler`.
        forward: The `ForwardStep`.
        teacher: The frozen `keras.Model` of a distillation, or `None`.
    """

    def __init__(self, trainer, network, parallel_config, options):
        self._network = network
        self._parallel_config = parallel_config
        self._options = options
        self.compiler = options.compiler
        self._check = StepCheck(None if self.compiler.in_parts else trainer)
        self._states = LayerStates()
        self._weights = None
        self._resumed = None
        self._is_sharded = False
        self.engine = None
        self.optimizer_step = None
        self.runner = None
        self.first_batch = None
        self.metrics = None
        if options.objective is not None:
            self.metrics = StepMetrics(
                options.objective, options.compiled_metrics, self._restore_built_metrics
            )
        computed = network
        self.teacher = options.teacher
        if self.teacher is not None:
            computed = DistilledModel(network, self.teacher)
        self.forward = ForwardStep(
            computed,
            options.objective,
            training_objective(options.objective),
            options.compiled_metrics is not None,
            self._states,
        )

    def build_network(self, input_shape=None):
        """Build the network under its name, the prefix of its weight paths."""
        if not self._network.built:
            self._network.build(input_shape)

    def build_engine(self, first):
        """Build the engine, and the network with it.

        Args:
            first: First batch, see `trainers.data.peek`. `None` if it is unknown.

        Returns:
            The engine.

        Raises:
            ValueError: If the layout does not support the network, or if the network's weights have
                changed since the first call.
        """
        compile_checks.check_same_config(self._parallel_config)
        if first is not None and hasattr(self._network, "named_inputs"):
            self._network.named_inputs(keras.utils.unpack_x_y_sample_weight(first)[0])
        is_new = self.engine is None
        if is_new:
            self.first_batch = element_specs(first)
            self.engine = make_engine(self.forward, self.compiler.jit_forward)
        self.engine.build(first)
        if self._weights is None:
            self._weights = compile_checks.weight_paths(self._network)
        compile_checks.check_weights_unchanged(self._network, self._weights)
        if is_new and job.mesh() is not None:
            check_rules(self._network)
        self._shard_weights()
        return self.engine

    def _shard_weights(self):
        """Shard the weights of Keras' layers, once, before the optimizer is built for them."""
        if not self._is_sharded and job.mesh() is not None:
            self._is_sharded = True
            shard_keras_layers(self._network)

    def build_optimizer(self):
        """Build the optimizer step, once, for a built network."""
        if self.optimizer_step is None:
            self._shard_weights()
            weights = self._network.trainable_variables
            self.optimizer_step = ShardedOptimizer(
                self._options.optimizer,
                weights,
                bucket_ids(self._network, weights),
                self.compiler,
                copied_weights(self._network),
                self._options.guard,
                partial(variable_names, self._network),
                self._options.log_gradient_norms,
            )

    def build_steps(self, first):
        """Build everything that training and evaluation need, and broadcast rank 0's weights.

        Args:
            first: As in `build_engine`.

        Returns:
            The `StepRunner`.
        """
        engine = self.build_engine(first)
        if self.runner is not None:
            return self.runner
        # The build may have created layers that the first check could not find.
        compile_checks.check_network(self._network)
        synchronize_batch_norms(self._network)
        self._states.find_metrics(self._network)
        check_same_training(self._network, self._options.optimizer)
        initial_broadcast(self.forward.network.variables, [])
        # Optimizer states such as moving averages start from the weights.
        self.build_optimizer()
        if not self.optimizer_step.is_sharded:
            initial_broadcast([], self._options.optimizer.variables)
        step = Step(
            self.forward,
            engine,
            self._options.optimizer,
            self.optimizer_step,
            self.metrics,
            self.compiler,
        )
        self.runner = StepRunner(
            step,
            self._network,
            self.teacher,
            self.compiler,
            self._check,
            self._options.log_every,
            self._options.steps_per_execution,
        )
        return self.runner

    def recompile(self):
        """Trace all steps again in their next calls."""
        if self.runner is not None:
            self.runner.recompile()

    def build_for_call(self, inputs):
        """Build the engine before the first eager call of the trainer with tensors.

        Keras would build the network below the trainer's name.
        """
        is_symbolic = any(isinstance(x, keras.KerasTensor) for x in tf.nest.flatten(inputs))
        if self.engine is None and tf.executing_eagerly() and not is_symbolic:
            self.build_engine((inputs,))

    def call(self, inputs, training):
        """Return the network's outputs without padding of the vocabulary; see `Trainer.call`.

        Raises:
            ValueError: If `training` is true and the engine compiles its functions separately.
        """
        if self.engine is None or not self.compiler.in_parts or not tf.executing_eagerly():
            outputs = ForwardStep(self._network).outputs(inputs, training=training)
            return without_padding(outputs, self._network)
        if training:
            raise ValueError(
                "A trainer on a mesh or in a pipeline cannot be called with `training=True`. Use "
                "`fit` or `train_on_batch` to train, or call it with `training=False`."
            )
        with _compat.without_autocast():  # The layers cast, as in `predict`.
            return without_padding(self.engine.predict(inputs), self._network)

    def predictor(self, first, sharding):
        """Return a compiled function that predicts batches.

        Args:
            first: As in `build_engine`.
            sharding: `RowSharding` of the batches.

        Returns:
            A function of a list of batches, tuples of inputs, labels and sample weights. It returns
            nested tensors [rows, ...], the outputs of all batches. For global batches every rank
            returns all rows.
        """
        engine = self.build_engine(first)

        def predict(batch, sharding):
            if sharding.is_global:
                batch = sharding.local_rows(batch)
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            outputs = sharding.gather_rows(engine.predict(inputs))
            return without_padding(outputs, self._network)

        compiled = self.compiler.compile_step(predict)

        def predict_batches(batches):
            if sharding.is_global:
                batches = without_optionals(batches)
                check_replica_consistency(batches, job.data_parallel_group(), "a prediction")
            outputs = [compiled(batch, None, sharding) for batch in batches]
            return tf.nest.map_structure(lambda *xs: tf.concat(xs, 0), *outputs)

        return predict_batches

    def shown_metrics(self):
        """Return the metrics of `Trainer.metrics`, in Keras' order."""
        metrics = [] if self.metrics is None else self.metrics.keras_metrics
        return [*metrics, *layer_metrics(self._network)]

    def as_list(self, logs):
        """Return the logs of metrics as a list in Keras' order, or the loss alone."""
        results = [logs[name] for name in self._log_names() if name in logs]
        return results if len(results) > 1 else results[0]

    def _log_names(self):
        names = {*self.metrics.names, *self._states.metric_results()}
        ordered = []
        for metric in self.shown_metrics():
            members = getattr(metric, "metrics", [metric])  # Keras' container has several metrics.
            ordered += [member.name for member in members if member.name in names]
        return [*ordered, *sorted(names.difference(ordered))]

    def averaged_weights(self):
        """Return the context manager of `Trainer.averaged_weights`."""
        if self.optimizer_step is None:
            return contextlib.nullcontext()
        return self.optimizer_step.averaged_weights()

    def callbacks(self):
        """Return the callbacks that the options of `compile` add to a `fit`."""
        guard = self._options.guard
        return [] if guard is None else [StopOnSpikes(guard.stop_after)]

    def saved_metrics(self):
        """Return all metrics with states, in the order of checkpoints."""
        if self.metrics is None:
            return layer_metrics(self._network)
        layers = layer_metrics(self._network)
        return [*self.metrics.means, *layers, *self.metrics.output_losses]

    def reset_metrics(self):
        """Reset the states of all metrics."""
        for metric in self.saved_metrics():
            metric.reset_state()

    def training_state(self):
        """Return the `TrainingState` for checkpoints; build the network and optimizer for it."""
        self.build_network()
        self.build_optimizer()
        return TrainingState(
            network=self._network,
            optimizer=self._options.optimizer,
            optimizer_shards=[
                (unit.weight, unit.bounds, unit.flat_range) for unit in self.optimizer_step.units
            ],
            skipped_steps=self.optimizer_step.loss_scale.skipped_steps,
            metrics=self.saved_metrics(),
            guard=self.optimizer_step.guard,
        )

    def resume_metrics(self, restored: Restored | None):
        """Restore the metric states of an interrupted epoch.

        Metrics that are built later in the epoch are restored then.

        Args:
            restored: The checkpoint. `None` ends the epoch.
        """
        self._resumed = restored
        self._restore_built_metrics()

    def _restore_built_metrics(self):
        if self._resumed is not None:
            with tf.init_scope():
                restore_metrics(self.training_state(), self._resumed)
