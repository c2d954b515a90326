"""Files of a trainer's network, written by rank 0: weights, `.keras` archives and exports."""

import contextlib
import functools
import os

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import InputError
from dtransformer.files import free_path, warn_occupied
from dtransformer.inputs.weights_file import load_weights
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.config.config import TransformerOpParallelConfig, parallel_config
from dtransformer.parallel.pipeline_parallel import stage_weights
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import ShardedVariable, unsharded_on_chief
from dtransformer.trainers.checkpoint.export import is_safetensors, load_safetensors, write_keras
from dtransformer.trainers.data import input_symbols

MODEL_SUFFIX = ".keras"
WEIGHTS_SUFFIX = ".weights.h5"


class NetworkFiles:
    """Writes files of the full network on any layout.

    While it exists, the network's methods that save also write one file from rank 0. In a pipeline
    the network's methods that read, set and count weights cover all stages.

    Args:
        network: The `keras.Model`.
    """

    def __init__(self, network):
        self._network = network
        methods = {}
        if job.stage()[1] > 1:
            for name in ("get_weights", "set_weights", "count_params"):
                methods[name] = functools.partial(getattr(stage_weights, name), network)
        if job.size() > 1:
            for name in ("save", "save_weights"):
                methods[name] = functools.partial(self._save_network, name)
        for name, method in methods.items():
            # Bypass Keras' tracking: the methods are no part of the network.
            object.__setattr__(network, name, method)

    def save_weights(self, filepath, overwrite=True, before=None, **kwargs):
        """Write a weights file from rank 0; see `Trainer.save_weights`."""
        save_network = type(self._network).save_weights

        def save(path, **options):
            save_network(self._network, path, **options)
            if before is not None:
                before(path)

        if kwargs or not str(filepath).endswith(WEIGHTS_SUFFIX):
            # Keras splits the weights into several files, or raises an error.
            self._write_on_chief(functools.partial(save, filepath, **kwargs))
        else:
            self.write(filepath, WEIGHTS_SUFFIX, overwrite, save)

    def save_model(self, path, overwrite, save, optimizer, options):
        """Write a `.keras` archive from rank 0.

        Args:
            path, overwrite, optimizer: As in `write`.
            save: Keras' `save` method.
            options: Dict of its options. Empty ones are ignored. Keras raises an error for options
                that it does not support.
        """
        options = {name: value for name, value in options.items() if value}
        save = functools.partial(save, **options)
        self.write(path, MODEL_SUFFIX, overwrite, save, optimizer)

    def write(self, path, suffix, overwrite, save, optimizer=None):
        """Write a complete file of the full network from rank 0; all ranks call.

        Args:
            path: Path of the file.
            suffix: Suffix of a new path, if `path` is a folder or must not be overwritten.
            overwrite: Whether to replace an existing file.
            save: Function of a path that saves the file.
            optimizer: Optimizer that `save` would save. Its states are skipped, because ranks may
                have shards of them.
        """

        def write():
            is_taken = os.path.isdir(path) or (not overwrite and os.path.lexists(path))
            target = free_path(path, suffix) if is_taken else path
            write_keras(self._network, target, save)
            if is_taken:
                warn_occupied(path, target)

        self._write_on_chief(write, optimizer)

    def load_weights(self, filepath, **kwargs):
        """Load a file of the network's weights on every rank; see `Trainer.load_weights`."""
        if not is_safetensors(filepath):
            load_weights(self._network, filepath, **kwargs)
            return
        if kwargs:
            raise InputError(
                f"{filepath}: loading a .safetensors file has no options, received "
                f"{', '.join(kwargs)}. Remove them."
            )
        load_safetensors(self._network, filepath)

    def export(self, trainer, first, filepath, input_signature, **kwargs):
        """Export the full network from rank 0; see `Trainer.export`.

        Args:
            trainer: The `Trainer` of the network, whose `call` is exported.
            first: Specs of a batch, or `None` if no batch is known.
            filepath, input_signature, **kwargs: As in `keras.Model.export`.
        """
        network = self._network
        signature = input_signature or _signature(network, first)
        weights = None if _is_complete(network) else network.get_weights()

        def write():
            served = trainer
            with contextlib.ExitStack() as stack:
                if weights is not None:
                    stack.enter_context(job.alone())
                    stack.enter_context(parallel_config(TransformerOpParallelConfig()))
                    stack.enter_context(_custom_classes(network))
                    full_network = type(network).from_config(network.get_config())
                    full_network(*tf.nest.map_structure(_zeros, signature))
                    full_network.set_weights(weights)
                    served = type(trainer)(full_network)
                served.build()
                keras.Model.export(served, filepath, input_signature=signature, **kwargs)

        with job.record_activity("saving"):
            from_chief(write, "network/exported")

    def _save_network(self, method, filepath, overwrite=True, **kwargs):
        """Run the `save` or `save_weights` method of the network's class on the full network."""
        network = self._network
        save = functools.partial(getattr(type(network), method), network)
        is_sharded = any(isinstance(v, ShardedVariable) for v in network.variables)
        is_one_file = str(filepath).endswith((WEIGHTS_SUFFIX, MODEL_SUFFIX))

        def write():
            if kwargs or not overwrite or not is_one_file:
                # Keras asks whether to overwrite, or raises its error.
                save(filepath, overwrite, **kwargs)
            else:
                write_keras(network, filepath, save)

        if is_sharded or job.stage()[1] > 1:
            self._write_on_chief(write)
        else:
            # Every rank has all weights, so a single rank may call this.
            write()

    def _write_on_chief(self, write, optimizer=None):
        """Let rank 0 call a function while it has the full network; all ranks call."""
        is_first_stage = job.stage()[0] == 0  # `full_network` collects the other stages' weights.
        local_variables = self._network.variables if is_first_stage else []
        with job.record_activity("saving"), contextlib.ExitStack() as stack:
            stack.enter_context(unsharded_on_chief(local_variables))
            stack.enter_context(stage_weights.full_network(self._network))
            for part in (optimizer, getattr(optimizer, "inner_optimizer", None)):
                if part is not None:
                    patch = _compat.patched(part, save_own_variables=_save_nothing)
                    stack.enter_context(patch)
            from_chief(write, "network/saved")


def _save_nothing(store):
    pass


def _is_complete(network):
    """Return whether this rank can export the network as it is."""
    is_sharded = any(isinstance(variable, ShardedVariable) for variable in network.variables)
    sends = any(getattr(layer, "exchanges_counts", False) for layer in _compat.flat_layers(network))
    is_divided = job.mesh() is not None or job.stage()[1] > 1
    return not (is_sharded or sends or is_divided)


def _custom_classes(network):
    classes = {type(layer).__name__: type(layer) for layer in _compat.flat_layers(network)}
    return keras.saving.custom_object_scope(classes)


def _signature(network, first):
    """Return the specs of a network's inputs: rows are open, also lengths of our networks."""
    if getattr(network, "inputs", None):
        symbols = network.input  # Functional and sequential models know their inputs.
    elif first is None:
        raise ValueError(
            "The shapes of the network's inputs are unknown. Call the trainer, `fit` or `predict` "
            "on a batch before `export`, or pass `input_signature`."
        )
    else:
        symbols = input_symbols(first)
    has_open_lengths = hasattr(network, "input_keys")
    if has_open_lengths and isinstance(symbols, dict):
        keys = network.input_keys
        symbols = {name: x for name, x in symbols.items() if name not in keys.training_only}

    def spec(x):
        shape = [None] * len(x.shape) if has_open_lengths else [None, *x.shape[1:]]
        return tf.TensorSpec(shape, x.dtype)

    return [tf.nest.map_structure(spec, symbols)]


def _zeros(spec):
    return tf.zeros([size or 4 for size in spec.shape], spec.dtype)
