"""States of layers that a step sets, such as running means, which each data shard would set alone."""

import keras

from dtransformer.parallel import job
from dtransformer.parallel.object_collectives import all_gather_json
from dtransformer.parallel.same_batch import checksums
from dtransformer.parallel.sharded_variable import is_unsharded_for_use, own_shards


class SameStates(keras.callbacks.Callback):
    """Compares what is not trained between the data shards, once, after the first step.

    Raises:
        ValueError: it differs; names the first state that does.
    """

    _compared = False

    def on_train_batch_end(self, batch, logs=None):
        if self._compared or job.data_shard()[1] == 1:
            return
        self._compared = True
        own = {
            v.path: checksums([shard.numpy().astype("float32") for shard in own_shards([v])])
            for v in self.model.network.non_trainable_variables
            if v.dtype != _TYPE_OF_SEEDS and not is_unsharded_for_use(v)
        }
        group = job.data_parallel_group().ranks
        of_ranks = all_gather_json(own, "states")
        for path, sums in own.items():
            rank = next((r for r in group if of_ranks[r].get(path, sums) != sums), None)
            if rank is not None:
                raise ValueError(
                    f"{path} is set while the network trains, and this rank has another value than "
                    f"rank {rank}, which sees other rows: a layer with such a state needs one "
                    "data shard"
                )


_TYPE_OF_SEEDS = "uint32"  # each rank has its own, of Keras' Dropout
