"""Methods of a trainer that save and restore: checkpoints of the full run, files of weights."""

import contextlib
import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import InputError
from dtransformer.files import free_path, warn_of_taken
from dtransformer.inputs.weights_file import class_of, load_weights
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.config.config import TransformerOpParallelConfig, parallel_config
from dtransformer.parallel.pipeline_parallel import stage_weights
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import ShardedVariable, unsharded_on_chief
from dtransformer.trainers.checkpoint.export import is_safetensors, load_safetensors, write_keras
from dtransformer.trainers.checkpoint.reader import Restored, restore
from dtransformer.trainers.checkpoint.writer import CheckpointWriter
from dtransformer.trainers.data import input_symbols

_MODEL, _WEIGHTS = ".keras", ".weights.h5"  # endings of Keras' files


class Checkpointing(keras.Model):
    """The methods of a trainer that save and restore.

    A subclass has the `network`, and `training_state`.
    """

    _writer = None
    _data_position = None  # of the last fit
    _restored_position = None
    _callback_states = None  # of the fit that runs

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
        """Save a checkpoint of the full run, which any layout can restore.

        It holds the weights, the optimizer's states, the loss scale, the step, the position in
        the data, the seed, the Keras configs of network and optimizer, and the parallel config.
        All ranks have to call; each writes its share, to a folder that all hosts see. The
        checkpoint appears at its path once it is complete. It is in TensorFlow's own format:
        `tf.train.load_checkpoint(path).get_tensor(name)` reads any full tensor.

        Args:
            path: the checkpoint's folder. A path that ends with `.keras` is a file to which Keras
                saves the model, with `**kwargs`: network and weights, not the optimizer's states.
            overwrite: whether it may replace a checkpoint. What is there otherwise is kept, and
                the new one is saved beside it; a warning says where.
            wait: whether to return once it is saved. Otherwise training may go on while it
                is written, and `wait_until_saved`, or the next save, raises its errors.
            replicas: whether shards that several ranks hold are written twice, by different
                ranks, so that a lost file can be replaced.
            assets: names of files or folders to add, and objects whose `save(path)` writes them,
                such as a tokenizer.
            metrics: names of logs and their values, which the checkpoint's manifest keeps; None
                for one that is not finite.

        Raises:
            ValueError: the network cannot be built yet, or the trainer is not compiled.
            InputError: it cannot be written; training can go on.

        Example:

        >>> trainer.save("runs/wmt14/last")
        """
        if str(path).endswith(_MODEL):
            save = super().save
            given = {"replicas": replicas, "assets": assets, "metrics": metrics}
            kwargs |= {name: value for name, value in given.items() if value}  # which Keras refuses
            self._write(path, _MODEL, overwrite, lambda fresh: save(fresh, **kwargs))
            return
        if kwargs:
            raise TypeError(f"save() of a checkpoint has no options {', '.join(kwargs)}")
        self._assert_compile_called("save")
        if self._writer is None:
            self._writer = CheckpointWriter()
        metrics = {
            name: float(value) if math.isfinite(value) else None
            for name, value in (metrics or {}).items()
        }
        info = {"position": self._position(), "metrics": metrics}
        states = {} if self._callback_states is None else self._callback_states.assets()
        options = {
            "overwrite": overwrite,
            "replicas": replicas,
            "assets": {**(assets or {}), **states},
        }
        with job.doing("saving"):
            self._writer.start(path, self.training_state(), info, **options)
        if wait:
            self.wait_until_saved()

    def wait_until_saved(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            InputError: it could not be written.
        """
        if self._writer is not None:
            with job.doing("saving"):
                self._writer.finish()

    def restore(
        self,
        path: str | os.PathLike,
        *,
        strict: bool = True,
        weights_only: bool = False,
        check: Callable[[Restored], None] | None = None,
    ) -> Restored:
        """Restore a checkpoint, whatever layout has saved it; all ranks have to call.

        Each rank reads only the shards that it holds. All files are compared with their checksums
        first, and nothing is changed where one is damaged or does not fit.

        Args:
            path: a checkpoint's folder; or a folder of checkpoints, of which the newest intact one
                is taken.
            strict: whether it is an error if network or optimizer has a tensor that the
                checkpoint lacks, the reverse, or one of another shape. With False what fits
                is restored, and the rest stays as it is.
            weights_only: whether only the network's weights are restored, to train on with
                another optimizer.
            check: a function of what is about to be restored. It is called before anything is
                changed, and stops it with an error of its own.

        Returns:
            A `dtransformer.trainers.checkpoint.reader.Restored`: `step`, `position`,
            `checkpoint`, and what did not fit. To go on in the middle of an epoch, use
            `fit(resume=path)`.

        Raises:
            ValueError: the network cannot be built yet, or the trainer is not compiled.
            InputError: there is no checkpoint, it is damaged, or it does not fit.

        Example:

        >>> trainer.save("runs/wmt14/last")
        >>> trainer.restore("runs/wmt14/last").missing
        []
        """
        self.wait_until_saved()
        self._assert_compile_called("restore")
        seed = job.seed()
        with job.doing("saving"):
            restored = restore(self.training_state(), path, strict, weights_only, check)
        if job.seed() != seed:
            self.train_function = self._for_other_rows = None  # traced with the other seed
        self._data_position = None
        if not weights_only:
            self._restored_position = restored.position
        return restored

    def _position(self):
        """Return where training stands in its data, as checkpoints keep it; None if unknown."""
        if self._data_position is None:
            return self._restored_position
        return self._data_position.value()

    def save_weights(
        self,
        filepath: str | os.PathLike,
        overwrite: bool = True,
        *,
        before: Callable[[pathlib.Path], None] | None = None,
        **kwargs,
    ) -> None:
        """Save the network's weights from rank 0; as `keras.Model.save_weights`.

        The network alone can load the file too, on any layout. Sharded weights are gathered on
        rank 0, so that all ranks have to call. The file is complete or as it was. Where there is
        one and `overwrite` is False, weights go to another beside it, and a warning says where.

        Args:
            filepath, overwrite, **kwargs: as of Keras.
            before: a function of a file with the weights, which is called before it takes its place.

        Raises:
            InputError: it cannot be written; on every rank.
        """

        def save(fresh, **options):
            type(self.network).save_weights(self.network, fresh, **options)
            if before is not None:
                before(fresh)

        if kwargs or not str(filepath).endswith(_WEIGHTS):  # several files, or an error
            self._from_chief(lambda: save(filepath, **kwargs))
        else:
            self._write(filepath, _WEIGHTS, overwrite, save)

    def get_weights(self) -> list:
        """Return the network's weights in full; as Keras, in a pipeline those of all stages.

        All ranks have to call.
        """
        return self.network.get_weights()

    def set_weights(self, weights: list) -> None:
        """Set the network's weights, as `get_weights` returns them, on every rank."""
        self.network.set_weights(weights)

    def count_params(self) -> int:
        """Return the number of elements of the network's weights, in a pipeline of all stages."""
        return self.network.count_params()

    def _share_saving(self):
        """Let the network's own methods that save write one file, whichever ranks call them.

        In a pipeline those that read, set and count weights are of all stages.
        """
        for method in ("get_weights", "set_weights", "count_params") if job.stage()[1] > 1 else ():
            of_all = functools.partial(getattr(stage_weights, method), self.network)
            object.__setattr__(self.network, method, of_all)
        for method in ("save", "save_weights") if job.size() > 1 else ():
            shared = functools.partial(self._save_network, method)
            object.__setattr__(self.network, method, shared)  # no part of the network

    def _save_network(self, method, filepath, overwrite=True, **kwargs):
        """Save as a method of the network does, which its class has."""
        network, path = self.network, str(filepath)
        save = functools.partial(getattr(type(network), method), network)
        divided = any(isinstance(v, ShardedVariable) for v in network.variables)
        if kwargs or not overwrite or not path.endswith((".weights.h5", ".keras")):
            write = lambda: save(filepath, overwrite, **kwargs)  # Keras asks, or says what is wrong
        else:
            write = lambda: write_keras(network, filepath, save)
        if not divided and job.stage()[1] == 1:  # every rank has all: also one alone may call
            write()
        else:
            self._from_chief(write)

    def _write(self, path, ending, overwrite, save):
        """Write a file of the full network from rank 0, complete or not at all; all ranks call."""

        def write():
            is_taken = os.path.isdir(path) or (not overwrite and os.path.lexists(path))
            target = free_path(path, ending) if is_taken else path
            write_keras(self.network, target, save)
            if is_taken:
                warn_of_taken(path, target)

        self._from_chief(write)

    def _from_chief(self, write):
        """Let rank 0 write, where it can save the full network as Keras does; all ranks call.

        Nothing is saved of the optimizer, whose states may be shards.
        """
        is_first = job.stage()[0] == 0  # `full_network` collects the other stages' weights
        own = self.network.variables if is_first else []
        optimizer = getattr(self, "optimizer", None)
        with job.doing("saving"), contextlib.ExitStack() as stack:
            stack.enter_context(unsharded_on_chief(own))
            stack.enter_context(stage_weights.full_network(self.network))
            for one in (optimizer, getattr(optimizer, "inner_optimizer", None)):
                if one is not None:
                    nothing = {"save_own_variables": lambda store: None}
                    stack.enter_context(_compat.meanwhile(one, **nothing))
            from_chief(write, "network/saved")

    def load_weights(self, filepath: str | os.PathLike, **kwargs) -> None:
        """Load weights on every rank; as `keras.Model.load_weights`.

        Args:
            filepath: a file of Keras, `.weights.h5` or `.keras`, or of `dtransformer checkpoint export`,
                `.safetensors`.
            **kwargs: as in Keras.

        Raises:
            InputError: the file is damaged, or does not hold the network's weights.
        """
        if not self.network.built:  # by its own name, which paths begin with
            self.network.build()
        if not is_safetensors(filepath):
            is_own = class_of(filepath) == type(self).__name__  # written by `save`
            if is_own:
                self.build()
            load_weights(super() if is_own else self.network, filepath, **kwargs)
            return
        if kwargs:
            raise InputError(
                f"{filepath}: a .safetensors file is loaded without options, received "
                f"{', '.join(kwargs)}"
            )
        load_safetensors(self.network, filepath)


# A trained network as a file that is served without this package: Keras' `export`, of any layout.


def export(trainer: keras.Model, first, filepath, input_signature, **kwargs) -> None:
    """Export a trainer's network from rank 0, all of its weights; all ranks have to call.

    Args:
        trainer: a `Trainer`.
        first: a batch, see `trainers.data.peek`; None where none is known.
        filepath, input_signature, **kwargs: as of `keras.Model.export`.

    Raises:
        ValueError: nobody knows what inputs look like; or the network is sharded, or in stages, and
            cannot be made again from its config.
    """
    network = trainer.network
    signature = _signature(network, first) if input_signature is None else input_signature
    is_whole = job.mesh() is None and job.stage()[1] == 1
    is_whole &= not any(isinstance(variable, ShardedVariable) for variable in network.variables)
    is_whole &= not any(getattr(layer, "sends", False) for layer in _compat.flat_layers(network))
    weights = None if is_whole else network.get_weights()

    def write():
        served = trainer
        with contextlib.ExitStack() as stack:
            if not is_whole:
                stack.enter_context(job.alone())
                stack.enter_context(parallel_config(TransformerOpParallelConfig()))
                classes = {
                    type(layer).__name__: type(layer) for layer in _compat.flat_layers(network)
                }
                stack.enter_context(keras.saving.custom_object_scope(classes))
                served = type(trainer)(type(network).from_config(network.get_config()))
                served.network(*tf.nest.map_structure(_zeros, signature))
                served.network.set_weights(weights)
            served.built = True
            keras.Model.export(served, filepath, input_signature=signature, **kwargs)

    with job.doing("saving"):
        from_chief(write, "network/exported")


def _signature(network, first):
    """Return the specs of a network's inputs: rows are open, and lengths of our own networks."""
    if getattr(network, "inputs", None):  # functional and sequential ones know them
        symbols = network.input
    elif first is None:
        raise ValueError(
            "nobody knows yet what the network's inputs look like: call the trainer, fit or predict "
            "on a batch before export, or give input_signature"
        )
    else:
        symbols = input_symbols(first)
    is_ours = hasattr(network, "input_keys")
    shape = lambda x: [None] * len(x.shape) if is_ours else [None, *x.shape[1:]]
    return [tf.nest.map_structure(lambda x: tf.TensorSpec(shape(x), x.dtype), symbols)]


def _zeros(spec):
    return tf.zeros([size or 4 for size in spec.shape], spec.dtype)
