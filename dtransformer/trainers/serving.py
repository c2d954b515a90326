"""A trained network as a file that is served without this package: Keras' `export`, of any layout."""

import contextlib

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.config.config import TransformerOpParallelConfig, parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import ShardedVariable
from dtransformer.trainers.data import input_symbols


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
    trainer.wait_until_saved()  # by a thread that asks for this job, not for that of one process
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
