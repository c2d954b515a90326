"""The trainer: a Keras model whose steps run on every rank of the job."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import check_int
from dtransformer.layers.base import register
from dtransformer.layers.loss import CrossEntropyLoss
from dtransformer.parallel.config import validators
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.initial_broadcast import initial_broadcast
from dtransformer.parallel.pipeline_parallel.stage_assignment import copied_weights
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.devices import takes_gpu_branch
from dtransformer.reports.throughput import Throughput
from dtransformer.trainers import checkpointing, compile_checks
from dtransformer.trainers.checkpoint import TrainingState
from dtransformer.trainers.checkpointing import Checkpointing
from dtransformer.trainers.data import element_specs
from dtransformer.trainers.engines import make_engine
from dtransformer.trainers.engines.base import ForwardStep
from dtransformer.trainers.fit_loop import FitLoop
from dtransformer.trainers.host_changes import check_trained_alike
from dtransformer.trainers.layer_states import LayerStates, layer_metrics
from dtransformer.trainers.objective import Objective, of_classes, without_padding
from dtransformer.trainers.optimizer.reduce import bucket_ids
from dtransformer.trainers.optimizer.sharded_optimizer import ShardedOptimizer
from dtransformer.trainers.reporting import Reporting, check_rules, warn_of_replicated_layers
from dtransformer.trainers.step import Step
from dtransformer.trainers.step_compiler import StepCompiler, set_tensorflow_options
from dtransformer.trainers.step_functions import StepCheck
from dtransformer.trainers.step_metrics import StepMetrics


@register
class Trainer(FitLoop, Checkpointing, Reporting):
    """Train a Keras model on every rank of the job.

    The fit loop, its progress bar, history and callbacks are Keras' own. Each rank
    computes its share of the global batch; loss and gradients are those of the mean
    over all tokens that count in the global batch, whatever the number of ranks.

    Args:
        network: the `keras.Model` to train. Logs have FLOP per second of networks of
            `dtransformer.models`, and where there is the method `flops_per_step(inputs)`, of which
            nothing but shapes counts.

    Example:

    >>> from dtransformer.models import CausalLM
    >>> texts = np.random.default_rng(0).integers(4, 50, (8, 6))
    >>> data = tf.data.Dataset.from_tensor_slices((texts[:, :-1], texts[:, 1:])).batch(4)
    >>> trainer = Trainer(CausalLM(50, hidden_size=8, num_heads=2, num_layers=1))
    >>> trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss(ignore_id=0))
    >>> history = trainer.fit(data, epochs=2, verbose=0)
    >>> len(history.history["loss"])
    2
    """

    def __init__(self, network: keras.Model, **kwargs):
        super().__init__(**kwargs)
        compile_checks.check_launch()
        self._parallel_config = copy.copy(get_parallel_config())
        validators.check_supported(self._parallel_config)
        validators.check_joined(self._parallel_config, job.topology(), job.placement())
        compile_checks.check_network(network)
        compile_checks.warn_of_loops(network)
        self.network = network
        self._share_saving()
        self.objective = None
        self._accuracy_tracker = keras.metrics.Mean(name="accuracy")
        self._compiler = StepCompiler()
        self._engine = self.optimizer_step = self._step = self._weights = self._first = None

    def __call__(self, inputs: Any, *args, **kwargs) -> Any:
        symbolic = any(isinstance(x, keras.KerasTensor) for x in tf.nest.flatten(inputs))
        if self._engine is None and tf.executing_eagerly() and not symbolic:
            self._start_engine((inputs,))  # which builds the network, under its own name
        return super().__call__(inputs, *args, **kwargs)

    def call(self, inputs: Any, training: bool | None = False) -> Any:
        if self._engine is not None and self._compiler.in_parts and tf.executing_eagerly():
            if training:
                raise ValueError(
                    "a trainer whose network is on a mesh or in a pipeline is called without "
                    "gradients: use fit or train_on_batch to train, and call it with training=False"
                )
            with _compat.without_autocast():  # as from `predict`: the layers cast
                return without_padding(self._engine.predict(inputs), self.network)
        return without_padding(
            ForwardStep(self.network).outputs(inputs, training=training), self.network
        )

    def build(self, input_shape: tuple | None = None) -> None:
        if not self.network.built:
            self.network.build(input_shape)
        self.built = True

    def compile(
        self,
        optimizer: str | keras.optimizers.Optimizer = "adamw",
        loss: str | Callable | dict | list | None = None,
        loss_weights: float | dict | list | None = None,
        metrics: list | None = None,
        weighted_metrics: list | None = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
        log_every: int | None = None,
    ) -> None:
        """Choose how to train.

        Args:
            optimizer: a Keras optimizer, or its name.
            loss: a `CrossEntropyLoss`, or what Keras takes: a Keras loss, its name, a function of
                (y_true, y_pred), or lists or dicts of them, one for each output. A loss is reduced
                over the global batch with its own `reduction`. `None` takes the loss and
                `loss_weights` of the network's own `compile`. Without one it is
                `CrossEntropyLoss()` if the network has the method `logits_vocab_size`, as in
                `dtransformer.models`, else the sum of the layers' `add_loss`.
            loss_weights: the factors of several losses; as Keras'.
            metrics: list of Keras metrics; their states are sums over the ranks. `None`, here and
                for `weighted_metrics`, takes the metrics of the network's own `compile`, as a
                KerasHub task has them. `[]` disables them.
            weighted_metrics: list of Keras metrics that see the sample weights.
            run_eagerly: whether to run without compiling, to debug.
            steps_per_execution: number of steps of one call of the compiled function.
            jit_compile: whether the forward and backward pass, and the update of the
                weights, are compiled with XLA. `"auto"` compiles the update alone,
                and only that of a large network, where it takes a quarter of the
                time; a small network's would be no faster on CPUs, and start later. On
                GPUs it lets XLA compile what lies between collectives as well
                (docs/gpus.md): steps take a third of the time, the first one longer.
            auto_scale_loss: whether the loss is scaled under `mixed_float16`: twice as
                much after every 2,000 good steps, and half as much after a step whose
                gradients overflow on any rank, which all of them skip. The logs have
                `loss_scale` and the number of `skipped_steps`. For other numbers give a
                `keras.optimizers.LossScaleOptimizer`.
            log_every: number of steps between two reads of the logs, for which the host waits;
                meanwhile callbacks get those that were read last. Those of an epoch's first
                and last step are read, too. None is 1 on CPUs and 10 on GPUs.

        Raises:
            ValueError: the layout cannot do what is asked for.
        """
        set_tensorflow_options(jit_compile)
        compiled = _compat.compile_options(self.network)
        if loss is None:
            loss = compiled.get("loss")
            loss_weights = loss_weights or compiled.get("loss_weights")
        if metrics is None and weighted_metrics is None:
            metrics, weighted_metrics = compiled.get("metrics"), compiled.get("weighted_metrics")
        if loss is None and hasattr(self.network, "logits_vocab_size"):
            loss = CrossEntropyLoss()
        loss = of_classes(loss, self.network)
        self.objective = Objective(loss, loss_weights, self.output_names)
        super().compile(
            optimizer=optimizer,
            metrics=compile_checks.of_rows(metrics),
            weighted_metrics=compile_checks.of_rows(weighted_metrics),
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=False,  # not the whole step: Horovod's operations cannot be
            auto_scale_loss=False,
        )
        if auto_scale_loss and self.network.dtype_policy.name == "mixed_float16":
            if not isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
                self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
        self._compiler = StepCompiler(jit_compile, run_eagerly)
        self._step_check = StepCheck(None if self._compiler.in_parts else self)
        self._work = {}  # shapes of a batch -> its tokens and FLOP
        if log_every is None:
            log_every = 10 if takes_gpu_branch() else 1
        self._log_every = check_int("log_every", log_every)
        self._throughput = Throughput()
        compile_checks.check_compile_options(
            self.objective, self.optimizer, run_eagerly, jit_compile
        )
        self._engine = self.optimizer_step = self._step = self._weights = None

    # Keras calls these with each batch: in a tf.function of its own, but where the engine
    # compiles itself.

    def train_step(self, data: tuple) -> dict:
        return self._step.train(*self._batch(data))

    def test_step(self, data: tuple) -> dict:
        return self._step.test(*self._batch(data))

    def predict_step(self, data: tuple) -> Any:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(self._own(data))
        return self._all(self._engine.predict(inputs))

    def _batch(self, data):
        """Return the local rows, and the arguments of `fingerprint_table`; try the layers first."""
        batch = keras.utils.unpack_x_y_sample_weight(self._own(data))
        if self._states.are_tried:
            with tf.init_scope():
                self._states.try_layers(self.network, self.objective, *batch[:2])
        return *batch, data, self._shards_rows

    def _metrics_built(self):
        """Set the metrics of an epoch that is resumed in its middle."""
        if self._beginning is not None:
            with tf.init_scope():
                self._beginning.restore_metrics(self)

    @property
    def metrics(self) -> list:
        """The list of all metrics, in Keras' order; the accuracy where none was asked for."""
        accuracy, means = self._accuracy_tracker, []
        found = [one for one in super().metrics if one is not accuracy]
        if self._step is not None:
            means = self._step.metrics.of_outputs
        if self.objective is not None and self.objective.is_of_tokens and len(found) == 1:
            found.append(accuracy)
        return [*found, *means, *layer_metrics(self.network)]

    @property
    def output_names(self) -> list | None:
        """The names of the network's outputs, by which Keras names metrics; None without."""
        return getattr(self.network, "output_names", None)

    def reset_metrics(self) -> None:
        super().reset_metrics()
        self._accuracy_tracker.reset_state()

    def _flatten_metrics_in_order(self, logs):
        names = {*self._step.metrics.names, *self._states.results()}
        return super()._flatten_metrics_in_order(
            {name: logs[name] for name in logs if name in names}
        )

    # What comes before the first step.

    def _prepare(self, first=None):
        """Build the network, the engine and the optimizer step, and take rank 0's weights, once."""
        self._assert_compile_called("fit")
        step = self._start_engine(first)
        if self._step is not None:
            return
        self.built = True
        compile_checks.check_network(self.network)  # with the layers that came when it was built
        self._states.find(self.network)
        check_trained_alike(self)
        initial_broadcast(self.network.variables, [])
        self._start_optimizer()  # whose states may begin as the weights
        trackers = self._loss_tracker, self._accuracy_tracker, self._compile_metrics
        metrics = StepMetrics(*trackers, self.objective, self._metrics_built)
        states = [] if self.optimizer_step.is_sharded else self.optimizer.variables
        initial_broadcast([], states)
        self._step = Step(
            *(step, self._engine, self.optimizer, self.optimizer_step, metrics, self._compiler)
        )

    def _start_engine(self, first=None):
        """Make the engine, once, and build the network with it; return the `ForwardStep`."""
        compile_checks.check_unchanged(self._parallel_config)
        if first is not None and hasattr(self.network, "named_inputs"):  # one of ours
            self.network.named_inputs(keras.utils.unpack_x_y_sample_weight(first)[0])
        sees_outputs = self.compiled and self._compile_metrics is not None
        is_first = self._engine is None
        if is_first:
            self._states = LayerStates()
        step = ForwardStep(self.network, self.objective, sees_outputs, self._states)
        if is_first:
            self._first = element_specs(first)
            self._engine = make_engine(step, self._compiler.jit_forward)
        self._engine.build(first)
        self._weights = self._weights or compile_checks.weights_now(self.network)
        compile_checks.check_weights_unchanged(self.network, self._weights)
        if is_first and job.mesh() is not None:
            check_rules(self.network)
            warn_of_replicated_layers(self.network)
        return step

    def _start_optimizer(self):
        """Make the optimizer step, once, for a network that is built."""
        if self.optimizer_step is None:
            weights = self.network.trainable_variables
            self.optimizer_step = ShardedOptimizer(
                self.optimizer,
                weights,
                bucket_ids(self.network, weights),
                self._compiler,
                copied_weights(self.network),
            )

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the `with` block weights have the values of their moving averages; all ranks call.

        An optimizer with `use_ema` keeps these; with another one nothing changes. Nothing is trained
        or saved as a checkpoint meanwhile.

        Example:

        >>> network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "relu")])
        >>> trainer = Trainer(network)
        >>> trainer.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
        >>> x = np.ones((4, 2), "float32")
        >>> losses = [trainer.train_on_batch(x, x[:, :1]) for _ in range(3)]
        >>> with trainer.averaged_weights():
        ...     logs = trainer.evaluate(x, x[:, :1], verbose=0, return_dict=True)
        """
        step = self.optimizer_step  # None where nothing was trained
        exchange = lambda: step and step.take_averages(exchanges=True)
        exchange()
        try:
            yield
        finally:
            exchange()

    def training_state(self) -> TrainingState:
        """Return what checkpoints save and restore; network and optimizer are built for it."""
        if not self.network.built:
            self.network.build()
        self._start_optimizer()
        metrics = [self._loss_tracker, self._accuracy_tracker, self._compile_metrics]
        metrics += layer_metrics(self.network)
        if self._step is not None:
            metrics += self._step.metrics.of_outputs
        return TrainingState(
            network=self.network,
            optimizer=self.optimizer,
            optimizer_shards=[
                (unit.weight, unit.bounds, unit.flat_range) for unit in self.optimizer_step.units
            ],
            skipped_steps=self.optimizer_step.loss_scale.skipped_steps,
            metrics=[metric for metric in metrics if metric is not None],
        )

    def export(
        self,
        filepath: str | os.PathLike,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: list | None = None,
        **kwargs,
    ) -> None:
        """Export what the network computes, to be served; as `keras.Model.export`, from any layout.

        Rank 0 writes it, with the weights of all ranks, which all have to call.
        """
        options = {"format": format, "verbose": verbose, **kwargs}
        checkpointing.export(self, self._first, filepath, input_signature, **options)

    def get_compile_config(self) -> dict:
        """Return nothing: a trainer that is loaded has to be compiled again."""
        return {}

    def get_config(self) -> dict:
        return {"network": keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["network"]))
