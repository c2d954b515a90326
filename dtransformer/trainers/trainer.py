"""The trainer: a Keras model whose steps run on every rank of the job."""

import contextlib
import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras

from dtransformer.inputs.weights_file import load_weights, read_class_name
from dtransformer.layers.base import register
from dtransformer.parallel.config import validators
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.schedules.timeline import Timeline
from dtransformer.reports.communication import CommunicationReport
from dtransformer.reports.expert_load import ExpertLoad
from dtransformer.reports.memory import MemoryReport
from dtransformer.reports.plan import WeightPlan
from dtransformer.trainers import compile_checks
from dtransformer.trainers.checkpoint import TrainingState
from dtransformer.trainers.checkpoint.reader import Restored
from dtransformer.trainers.checkpoints import Checkpoints
from dtransformer.trainers.compile_options import (
    CompileOptions,
    resolve_log_every,
    resolve_losses,
    resolve_metrics,
    resolve_optimizer,
    set_tensorflow_options,
)
from dtransformer.trainers.data import prepare_data
from dtransformer.trainers.distilled import check_teacher
from dtransformer.trainers.epoch_loop import chief_verbosity, evaluate
from dtransformer.trainers.fit import FitOptions, run_fit
from dtransformer.trainers.loss_checks import get_sample_weight
from dtransformer.trainers.network_files import MODEL_SUFFIX, NetworkFiles
from dtransformer.trainers.optimizer.guard import SpikeGuard
from dtransformer.trainers.program import Program
from dtransformer.trainers.reports import Reports
from dtransformer.trainers.row_sharding import RowSharding
from dtransformer.trainers.sample_preprocessing import (
    Samples,
    preprocess_batch,
    preprocess_data,
)
from dtransformer.trainers.step_errors import convert_step_errors
from dtransformer.trainers.step_runner import StepCompiler


@register
class Trainer(keras.Model):
    """Trains a Keras model on every rank of the job.

    Progress bar, history and callbacks are Keras'. Each rank computes its share of the global
    batch. Loss and gradients are means over all counted tokens of the global batch, for every
    number of ranks.

    Args:
        network: The `keras.Model` to train. The logs report FLOP/s for networks of
            `dtransformer.models` and for networks with a method `flops_per_step(inputs)`, which may
            only use shapes.

    Example:

    >>> from dtransformer.layers import CrossEntropyLoss
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
        compile_checks.warn_overridden_loops(network)
        self.network = network
        self.objective = None
        self._num_fits = 0
        self._files = NetworkFiles(network)
        self._use_options(CompileOptions())

    def _use_options(self, options):
        """Create the collaborators that depend on the arguments of `compile`.

        Args:
            options: `CompileOptions`.
        """
        self._program = Program(self, self.network, self._parallel_config, options)
        self._checkpoints = Checkpoints(self._program)
        self._reports = Reports(self.network, options.optimizer, self._program)

    # The Keras model.

    def __call__(self, inputs: Any, *args, **kwargs) -> Any:
        self._program.build_for_call(inputs)
        return super().__call__(inputs, *args, **kwargs)

    def call(self, inputs: Any, training: bool | None = False) -> Any:
        return self._program.call(inputs, training)

    def build(self, input_shape: tuple | None = None) -> None:
        self._program.build_network(input_shape)
        self.built = True

    def compile(
        self,
        optimizer: str | keras.optimizers.Optimizer | None = None,
        loss: str | Callable | dict | list | None = None,
        loss_weights: float | dict | list | None = None,
        metrics: list | None = None,
        weighted_metrics: list | None = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
        log_every: int | None = None,
        guard: SpikeGuard | None = None,
        log_gradient_norms: bool = False,
        teacher: keras.Model | None = None,
    ) -> None:
        """Configure the training.

        Args:
            optimizer: Keras optimizer or its name. `None` uses the optimizer of the network's last
                `compile`, with new states if it has been used, or else `"adamw"`.
            loss: `CrossEntropyLoss`, or a loss as in `keras.Model.compile`: a Keras loss, its name,
                a function of `(y_true, y_pred)`, or a list or dict of them, one per output. It is
                reduced over the global batch with its `reduction`. `None` uses the loss and
                `loss_weights` of the network's last `compile`. If there is none, it uses
                `CrossEntropyLoss()` for networks with the method `logits_vocab_size`, as in
                `dtransformer.models`, or else the sum of the layers' `add_loss`.
            loss_weights: Weights of several losses, as in Keras.
            metrics: List of Keras metrics. Their states are summed over the ranks. If this and
                `weighted_metrics` are `None`, the metrics of the network's last `compile` are used,
                as for KerasHub tasks. `[]` disables metrics.
            weighted_metrics: List of Keras metrics that receive sample weights.
            run_eagerly: Whether to run steps in Python, for debugging.
            steps_per_execution: Number of steps per call of the compiled training function.
            jit_compile: Whether XLA compiles the forward and backward pass and the update. `"auto"`
                compiles the update of networks of at least 2**20 weights, and on CPUs the loss and
                activations of at least 2**18 elements with a known shape. On GPUs it also lets
                XLA compile clusters between collectives (docs/gpus.md).
            auto_scale_loss: Whether to scale the loss under `mixed_float16`. The scale doubles
                after 2,000 finite steps and halves after a step with an overflow on any rank, which
                all ranks skip. The logs contain `loss_scale` and `skipped_steps`. For other values
                pass a `keras.optimizers.LossScaleOptimizer`.
            log_every: Interval in steps between reading logs from the device. The host blocks on
                each read. In between, callbacks receive the last values. The first and last step of
                an epoch are always read. Defaults to 1 on CPUs and 10 on GPUs.
            guard: `SpikeGuard` that skips steps with an unusual gradient norm. Defaults to `None`.
            log_gradient_norms: Whether the logs also contain the gradient norm of each block and each
                layer outside of blocks, before clipping, such as `gradient_norm/blocks/block_3`.
                Their squares sum to the square of `gradient_norm`.
            teacher: Network of the trained network's class and vocabulary, for a
                `DistillationLoss`. It is frozen, runs in the same layout, and is neither saved nor
                part of checkpoints. Defaults to `None`.

        Raises:
            ValueError: If the layout does not support these options.
        """
        set_tensorflow_options(jit_compile)
        metrics, weighted_metrics = resolve_metrics(self.network, metrics, weighted_metrics)
        self.objective = resolve_losses(self.network, loss, loss_weights)
        if teacher is not None:
            check_teacher(self.network, teacher, loss)
        super().compile(
            optimizer=resolve_optimizer(self.network, optimizer, auto_scale_loss),
            metrics=compile_checks.add_metric_checks(metrics),
            weighted_metrics=compile_checks.add_metric_checks(weighted_metrics),
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=False,  # XLA cannot compile Horovod's operations.
            auto_scale_loss=False,
        )
        compiler = StepCompiler(jit_compile, run_eagerly)
        compile_checks.check_compile_options(self.objective, self.optimizer, compiler)
        options = CompileOptions(
            objective=self.objective,
            optimizer=self.optimizer,
            compiled_metrics=self._compile_metrics,
            compiler=compiler,
            log_every=resolve_log_every(log_every),
            steps_per_execution=steps_per_execution,
            guard=guard,
            log_gradient_norms=log_gradient_norms,
            teacher=teacher,
        )
        self._use_options(options)

    def _check_compiled(self, method):
        if not self.compiled:
            raise ValueError(f"The trainer is not compiled. Call `compile()` before `{method}()`.")

    def _build_steps(self, method, first):
        """Return the `StepRunner`; build everything that it needs."""
        self._check_compiled(method)
        runner = self._program.build_steps(first)
        self.built = True
        return runner

    # Training, evaluation and prediction.

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: list | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        *,
        resume: bool | str | os.PathLike = False,
        shard: bool | None = None,
        **options,
    ) -> keras.callbacks.History:
        """Train the network; as `keras.Model.fit`.

        Args:
            x: Data as in Keras, identical on every rank. Each data shard computes its rows of each
                batch. Or an object with `as_dataset()` and `set_epoch(epoch)` that shuffles by
                itself, such as `TranslationBatches`.
            batch_size: Number of rows of the global batch.
            epochs: Index of the final epoch, counted from the beginning of the run.
            verbose: As in Keras. Ranks other than 0 print nothing. 1 shows a progress bar with
                losses, metrics and tokens per second. If standard output is not a terminal, 1 prints
                lines with at most six metrics instead. 2 prints one such line per epoch.
            resume: `True` resumes from the newest checkpoint of the `ModelCheckpoint` in
                `callbacks`, or starts from scratch if it has none. A string is the path of a
                checkpoint, or of a folder of checkpoints. In the middle of an epoch, training
                resumes with the next batch. The losses equal the losses of an uninterrupted run if the
                order of the data depends on the epoch only, as for `TranslationBatches`.
            shard: `False` if the data and validation data contain only the rows of this data shard,
                `dtransformer.data_shard()`. All ranks of a shard need the same data, and all ranks
                the same number of batches. Defaults to `True`, except for objects with
                `as_dataset()` whose `num_shards` is not 1.
            **options: `validation_steps`, `validation_batch_size` and `validation_freq`, as in
                Keras.

        Returns:
            A `keras.callbacks.History`.

        Raises:
            InputError: If the checkpoint to resume from is missing or damaged or does not fit, or
                if the data cannot start at its position.
            ValueError: If the ranks have different data.
            SystemExit: With code 75, after saving, if a rank has received SIGTERM or SIGUSR1 and
                `callbacks` contains a `ModelCheckpoint`.
        """
        self._check_compiled("fit")
        fit_options = FitOptions(
            samples=Samples(x, y, sample_weight, batch_size),
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            resume=resume,
            shard=shard,
            **options,
        )
        self.stop_training = False
        self._num_fits += 1
        return run_fit(self, self._program, self._checkpoints, fit_options, self._num_fits)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: list | None = None,
        return_dict: bool = False,
        *,
        shard: bool | None = None,
    ) -> float | list | dict:
        """Compute the loss and metrics; as `keras.Model.evaluate`. `shard` is as in `fit`."""
        with job.record_activity("validating"), convert_step_errors():
            samples = preprocess_data(self.network, Samples(x, y, sample_weight, batch_size))
            data = prepare_data(samples.x, shard, self.network)
            runner = self._build_steps("evaluate", data.first)
            logs = evaluate(self, runner, data, samples, steps, callbacks, verbose)
            return logs if return_dict else self._program.as_list(logs)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: list | None = None,
        shard: bool | None = None,
    ) -> Any:
        """Compute the network's outputs; as `keras.Model.predict`.

        Args:
            x, batch_size, verbose, steps, callbacks: As in Keras.
            shard: As in `fit`. For global batches every rank returns the outputs of all rows, in
                their order. Otherwise a rank returns the outputs of its local rows.

        Returns:
            NumPy arrays. Logits of a padded vocabulary have their true size.
        """
        with job.record_activity("validating"), convert_step_errors():
            samples = preprocess_data(self.network, Samples(x, batch_size=batch_size))
            data = prepare_data(samples.x, shard, self.network)
            self.predict_function = self._program.predictor(data.first, data.sharding)
            verbose = chief_verbosity(verbose)
            return super().predict(data.data, samples.batch_size, verbose, steps, callbacks)

    def make_train_function(self, force: bool = False) -> None:
        """Trace the training step again in its next call if `force` is true; as in Keras."""
        if force:
            self._program.recompile()

    def make_predict_function(self, force: bool = False) -> Callable:
        """Return the function that `predict` and `predict_on_batch` have set."""
        return self.predict_function

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict | None = None,
        return_dict: bool = False,
        shard: bool | None = None,
    ) -> float | list | dict:
        """Train on one batch; as `keras.Model.train_on_batch`. `shard` is as in `fit`."""
        with job.record_activity("compiling"), convert_step_errors():
            x, y, sample_weight = preprocess_batch(self.network, x, y, sample_weight)
            runner = self._build_steps("train_on_batch", (x,))
            sample_weight = get_sample_weight(self.objective, y, class_weight, sample_weight)
            self._checkpoints.track(None)
            self.reset_metrics()
            logs = runner.train_batch((x, y, sample_weight), RowSharding.from_data(x, shard))
            return logs if return_dict else self._program.as_list(logs)

    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
        shard: bool | None = None,
    ) -> float | list | dict:
        """Evaluate one batch; as `keras.Model.test_on_batch`. `shard` is as in `fit`."""
        with job.record_activity("validating"), convert_step_errors():
            x, y, sample_weight = preprocess_batch(self.network, x, y, sample_weight)
            runner = self._build_steps("test_on_batch", (x,))
            self.reset_metrics()
            logs = runner.test_batch((x, y, sample_weight), RowSharding.from_data(x, shard))
            return logs if return_dict else self._program.as_list(logs)

    def predict_on_batch(self, x: Any, shard: bool | None = None) -> Any:
        """Compute one batch's outputs; as `keras.Model.predict_on_batch`. `shard` is as in `fit`."""
        with job.record_activity("validating"), convert_step_errors():
            x, _, _ = preprocess_batch(self.network, x)
            sharding = RowSharding.from_data(x, shard)
            self.predict_function = self._program.predictor((x,), sharding)
            return super().predict_on_batch(x)

    @property
    def output_names(self) -> list | None:
        """Names of the network's outputs, or `None`. Keras derives metric names from them."""
        return getattr(self.network, "output_names", None)

    @property
    def metrics(self) -> list:
        """The metrics in Keras' order, with the accuracy if `compile` received no metrics."""
        return self._program.shown_metrics()

    def reset_metrics(self) -> None:
        self._program.reset_metrics()

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps, counted on the host."""
        return 0 if self._program.runner is None else self._program.runner.num_steps

    @property
    def logs_are_new(self) -> bool:
        """True if callbacks receive the logs of the last step, see `log_every`."""
        return self._program.runner.logs.are_new

    @property
    def optimizer_step(self):
        """The `ShardedOptimizer`, or `None` before it is built."""
        return self._program.optimizer_step

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Swap the weights with their moving averages in the `with` block; all ranks call.

        Without an optimizer with `use_ema` nothing changes. Do not train or save checkpoints in
        the block.

        Example:

        >>> network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "relu")])
        >>> trainer = Trainer(network)
        >>> trainer.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
        >>> x = np.ones((4, 2), "float32")
        >>> losses = [trainer.train_on_batch(x, x[:, :1]) for _ in range(3)]
        >>> with trainer.averaged_weights():
        ...     logs = trainer.evaluate(x, x[:, :1], verbose=0, return_dict=True)
        """
        return self._program.averaged_weights()

    # Checkpoints and files.

    def training_state(self) -> TrainingState:
        """Return the state that checkpoints save and restore; build network and optimizer."""
        return self._program.training_state()

    def save(
        self,
        path: str | os.PathLike,
        overwrite: bool = True,
        *,
        wait: bool = True,
        replicas: bool = False,
        assets: Mapping | None = None,
        metrics: Mapping[str, float] | None = None,
        **kwargs,
    ) -> None:
        """Save a checkpoint of the full run that every layout can restore; all ranks call.

        It contains the weights, optimizer states, loss scale, step, position in the data, seed and
        configs. Each rank writes its share to a folder that all hosts see. The checkpoint appears
        at its path once it is complete. `tf.train.load_checkpoint(path)` reads it.

        Args:
            path: Folder of the checkpoint. A path that ends with `.keras` is a file that Keras
                writes, with `**kwargs`: network and weights without the optimizer's states.
            overwrite: Whether to replace an existing checkpoint. Otherwise the new one is saved
                next to it, and a warning names its path.
            wait: Whether to return after the checkpoint is complete. Otherwise training may
                continue, and `wait_until_saved` or the next save raises errors.
            replicas: Whether to write shards that several ranks have twice, by different ranks, so
                that a lost file can be replaced.
            assets: Dict of file or folder names to objects whose `save(path)` writes them.
            metrics: Dict of log names to values, kept in the manifest.

        Raises:
            ValueError: If the network cannot be built yet, or if the trainer is not compiled.
            InputError: If the checkpoint cannot be written. Training can continue.

        Example:

        >>> trainer.save("runs/wmt14/last")
        """
        if str(path).endswith(MODEL_SUFFIX):
            options = {"replicas": replicas, "assets": assets, "metrics": metrics, **kwargs}
            optimizer = getattr(self, "optimizer", None)
            self.built = self.built or self.network.built
            self._files.save_model(path, overwrite, super().save, optimizer, options)
            return
        if kwargs:
            raise TypeError(f"save() of a checkpoint has no options {', '.join(kwargs)}.")
        self._check_compiled("save")
        self._checkpoints.save(path, overwrite, wait, replicas, assets, metrics)

    def wait_until_saved(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            InputError: If it could not be written.
        """
        self._checkpoints.wait()

    def restore(
        self,
        path: str | os.PathLike,
        *,
        strict: bool = True,
        weights_only: bool = False,
        check: Callable | None = None,
    ) -> Restored:
        """Restore a checkpoint that any layout has saved; all ranks call.

        Each rank reads only its shards. All files are verified first, so that a damaged or
        unsuitable checkpoint changes nothing. To resume training, use `fit(resume=path)`.

        Args:
            path: Folder of a checkpoint, or folder of checkpoints with the newest intact one.
            strict: Whether missing, unexpected or differently shaped tensors raise an error.
                Otherwise only the matching tensors are restored.
            weights_only: Whether to restore the network's weights only.
            check: Function of the `Restored` that is called before anything is changed and may
                raise an error.

        Returns:
            A `Restored` with `step`, `position`, `checkpoint` and the tensors that did not match.

        Raises:
            ValueError: If the network cannot be built yet, or if the trainer is not compiled.
            InputError: If the checkpoint is missing or damaged, or does not fit.

        Example:

        >>> trainer.save("runs/wmt14/last")
        >>> trainer.restore("runs/wmt14/last").missing
        []
        """
        self._check_compiled("restore")
        return self._checkpoints.restore(path, strict, weights_only, check)

    def save_weights(
        self,
        filepath: str | os.PathLike,
        overwrite: bool = True,
        *,
        before: Callable | None = None,
        **kwargs,
    ) -> None:
        """Save the network's full weights from rank 0; as `keras.Model.save_weights`.

        All ranks call. The network alone can also load the file, on every layout. The file is
        written atomically. If it exists and `overwrite` is `False`, the weights are saved next to
        it, and a warning names the path.

        Args:
            filepath, overwrite, **kwargs: As in Keras.
            before: Function of the path of the complete file, called before it gets its final name.

        Raises:
            InputError: If the file cannot be written. All ranks raise it.
        """
        self._files.save_weights(filepath, overwrite, before, **kwargs)

    def load_weights(self, filepath: str | os.PathLike, **kwargs) -> None:
        """Load weights on every rank; as `keras.Model.load_weights`.

        Args:
            filepath: A `.weights.h5` or `.keras` file of Keras, or a `.safetensors` file of
                `dtransformer checkpoint export`.
            **kwargs: As in Keras.

        Raises:
            InputError: If the file is damaged or does not contain the network's weights.
        """
        self._program.build_network()
        if read_class_name(filepath) == type(self).__name__:
            self.build()
            load_weights(super(), filepath, **kwargs)
        else:
            self._files.load_weights(filepath, **kwargs)

    def get_weights(self) -> list:
        """Return the network's full weights, of all pipeline stages; all ranks call."""
        return self.network.get_weights()

    def set_weights(self, weights: list) -> None:
        """Set the network's full weights, as returned by `get_weights`, on every rank."""
        self.network.set_weights(weights)

    def count_params(self) -> int:
        """Return the number of weight elements, of all pipeline stages."""
        return self.network.count_params()

    def export(
        self,
        filepath: str | os.PathLike,
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: list | None = None,
        **kwargs,
    ) -> None:
        """Export the network for serving, from any layout; as `keras.Model.export`.

        All ranks call, rank 0 writes the full network.
        """
        options = {"format": format, "verbose": verbose, **kwargs}
        self._files.export(self, self._program.first_batch, filepath, input_signature, **options)

    def get_compile_config(self) -> dict:
        """Return an empty dict: a loaded trainer must be compiled again."""
        return {}

    def get_config(self) -> dict:
        return {"network": keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config: dict) -> "Trainer":
        return cls(keras.saving.deserialize_keras_object(config["network"]))

    # Reports.

    def summary(self, **kwargs) -> None:
        """Print the network and the parameters per device; as `keras.Model.summary`."""
        self._reports.summary(**kwargs)

    def plan(self) -> WeightPlan:
        """Return a `dtransformer.reports.plan.WeightPlan`: the sharding of every weight.

        In a pipeline it covers the weights of this rank's stage and, after the first batch, lists
        the layers of each stage.

        Raises:
            ValueError: If the network is not built, or if a rule of `parallel_rules` or a pattern of
                `layout_map` matches no weight.

        Example:

        >>> print(trainer.plan())
        weight                      shape  type     rule                 sharded over  bytes per device
        ...
        causal_lm/embedding/table   50×8   float32  (vocab_rows, embed)  (–, –)                   1,600
        ...
        20 weights with 9,480 elements. Each device stores 9,480 of them: ...
        """
        return self._reports.plan()

    def communication_report(self) -> CommunicationReport:
        """Return a `dtransformer.reports.communication.CommunicationReport` of the training step.

        It lists the collectives of the mesh as DTensor lowered them, the collectives of data-parallel
        ranks from the step's graphs, and the messages between pipeline stages. For networks with the
        method `stream_shapes(inputs)` it also lists the theoretical volumes.

        Raises:
            ValueError: If no training step is compiled yet.
        """
        return self._reports.communication_report()

    def memory_report(self, inputs: Any = None) -> MemoryReport:
        """Return a `dtransformer.reports.memory.MemoryReport` of this rank, in bytes.

        Args:
            inputs: Batch of inputs whose saved activations are computed. Defaults to the last
                batch on a mesh.

        Raises:
            ValueError: If no training step has run yet.

        Example:

        >>> print(trainer.memory_report(inputs))
        bytes of this rank   planned     measured
        --------------------------------------...
        weights               37,920       37,920
        gradients             37,920       37,920
        optimizer states      75,840       75,840
        activations           24,720            –
        all                  176,400            –
        peak of the process        –  ...
        """
        return self._reports.memory_report(inputs)

    def expert_load(self) -> ExpertLoad:
        """Return a `dtransformer.reports.expert_load.ExpertLoad` of the last epoch's steps.

        It covers all ranks, micro-batches and stages. Its `write("load.png")` draws it.

        Raises:
            ValueError: If no step has run yet, or if the network has no experts.
        """
        return self._reports.expert_load()

    def timeline(self, path: str | os.PathLike | None = None) -> Timeline:
        """Return a `dtransformer.parallel.schedules.timeline.Timeline` of the last training step.

        All ranks call. Clocks of different hosts are not adjusted. On GPUs the first call enables
        the measurement of later steps, which then wait for the GPU.

        Args:
            path: JSON file in the Trace Event Format that rank 0 writes, for Perfetto.

        Returns:
            The timeline. Its `bubble` is the fraction of the step in which stages are idle.

        Raises:
            ValueError: If there is no pipeline, or if no step has been measured yet.
        """
        return self._reports.timeline(path)
