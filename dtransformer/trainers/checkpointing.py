"""What a trainer keeps: checkpoints of the whole run, and files of weights."""

import keras

from dtransformer.errors import InputError
from dtransformer.parallel import job
from dtransformer.parallel.pipeline.stage_weights import full_network
from dtransformer.parallel.sharded_variable import unsharded_on_chief
from dtransformer.trainers.checkpoint.export import is_safetensors, load_safetensors
from dtransformer.trainers.checkpoint.reader import restore
from dtransformer.trainers.checkpoint.writer import CheckpointWriter


class Checkpointing(keras.Model):
    """Saves and restores as a trainer does.

    A subclass has the `network`, and `_start_optimizer()`, which makes its step.
    """

    _writer = None
    _data_position = None  # of the last fit
    _restored_position = None

    def save(self, path, overwrite=True, *, wait=True, replicas=False, assets=None, **kwargs):
        """Save a checkpoint of the whole run, which any layout can restore.

        It holds weights, the optimizer's states, the scale of the loss, the step, the
        position in the data, seeds, the Keras configs of network and optimizer and the
        parallel config. All ranks have to call; each writes a share, to a folder that all
        hosts see. The checkpoint is at its path once it is complete, not before. It is
        TensorFlow's own format: `tf.train.load_checkpoint(path).get_tensor(name)` reads any
        tensor whole.

        Args:
            path: folder of the checkpoint. With the ending `.keras` the model is saved as
                Keras does, with `**kwargs`.
            overwrite: whether a checkpoint there is replaced.
            wait: whether to return once it is saved. Otherwise training may go on while it
                is written; `wait_until_saved`, or the next save, tells of errors.
            replicas: whether parts that several ranks have are written twice, by different
                ranks, so that a part that is lost can be replaced.
            assets: dict of names of files or folders to add, and objects whose `save(path)`
                writes them, such as a tokenizer.

        Raises:
            ValueError: the network is not built, or the trainer not compiled.
            InputError: it cannot be written; the state of training is as before.

        Example:

        >>> trainer.save("runs/wmt14/last")  # doctest: +SKIP
        """
        if str(path).endswith(".keras"):
            super().save(path, overwrite=overwrite, **kwargs)
            return
        self._start_state("save")
        info = {"position": self._position(), "metrics": {}}
        self._save(path, info, overwrite=overwrite, replicas=replicas, assets=assets)
        if wait:
            self.wait_until_saved()

    def _save(self, path, info, **options):
        if self._writer is None:
            self._writer = CheckpointWriter(self)
        self._writer.start(path, info, **options)

    def wait_until_saved(self):
        """Wait until the checkpoint that is being written is complete.

        Raises:
            InputError: it could not be written.
        """
        if self._writer is not None:
            self._writer.finish()

    def restore(self, path, *, strict=True, weights_only=False):
        """Restore a checkpoint, whatever layout has saved it; all ranks have to call.

        Each rank reads the slices that it needs. All files are compared with their checksums
        first; nothing is changed where one is damaged or does not fit.

        Args:
            path: a checkpoint's folder; or a folder of checkpoints, of which the newest is
                taken that is not damaged.
            strict: whether it is an error if network or optimizer has a tensor that the
                checkpoint lacks, the reverse, or one of another shape. With False what fits
                is restored, and the rest stays as it is.
            weights_only: whether the network's weights are restored alone, to train on with
                another optimizer.

        Returns:
            A `dtransformer.trainers.checkpoint.reader.Restored`: `step`, `position`,
            `manifest`, and what did not fit. To go on in the midst of an epoch, use
            `fit(resume=path)`.

        Raises:
            ValueError: the network is not built, or the trainer not compiled.
            InputError: there is no checkpoint, it is damaged, or it does not fit.

        Example:

        >>> trainer.restore("runs/wmt14/last").step  # doctest: +SKIP
        1200
        """
        return self._restore(path, strict=strict, weights_only=weights_only)

    def _restore(self, path, **options):
        self.wait_until_saved()
        self._start_state("restore")
        restored = restore(self, path, **options)
        self._data_position = None
        if not options.get("weights_only"):
            self._restored_position = restored.position
        return restored

    def _position(self):
        """Return where training stands in its data, as checkpoints keep it; None if unknown."""
        if self._data_position is None:
            return self._restored_position
        return self._data_position.value()

    def _start_state(self, purpose):
        """Build network and optimizer, so that there is a state."""
        self._assert_compile_called(purpose)
        if not self.network.built:
            self.network.build()
        self._start_optimizer()

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Save the network's weights from rank 0; as `keras.Model.save_weights`.

        The network alone can load the file too, on any layout. Weights that are cut are
        gathered on rank 0, so that all ranks have to call.
        """
        is_first = job.stage()[0] == 0  # `full_network` gathers what the others have
        own = self.network.variables if is_first else []
        with unsharded_on_chief(own), full_network(self.network):
            if job.is_chief():
                self.network.save_weights(filepath, overwrite=overwrite, **kwargs)
        job.barrier()

    def load_weights(self, filepath, **kwargs):
        """Load weights on every rank; as `keras.Model.load_weights`.

        Args:
            filepath: a file of Keras', `.weights.h5`, or of `dtransformer checkpoint export`,
                `.safetensors`.
            **kwargs: as Keras'.

        Raises:
            InputError: a `.safetensors` file does not hold the network's weights.
        """
        if not self.network.built:
            self.network.build()
        if is_safetensors(filepath):
            if kwargs:
                raise InputError(f"{filepath}: a .safetensors file takes no {', '.join(kwargs)}")
            load_safetensors(self.network, filepath)
        else:
            self.network.load_weights(filepath, **kwargs)
