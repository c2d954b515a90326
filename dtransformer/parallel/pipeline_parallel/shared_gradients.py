"""Gradients of weights that several stages have are added up."""

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.pipeline_parallel.local_stage import shared_layers
from dtransformer.parallel.runtime import job


class SharedGradients:
    """The weights of this rank's stage that other stages have too.

    Every rank of the job makes one at the same time.

    Args:
        network: a `keras.Model`, whose shared weights are built.
    """

    def __init__(self, network):
        numbers = {id(w): i for i, w in enumerate(network.trainable_variables)}
        pipelines = dict.fromkeys(job.topology().pipeline_group(r) for r in range(job.size()))
        self._shared = []  # number and path of the weight, and the group that has it
        for stages, layer in shared_layers(network):
            for ranks in pipelines:
                group = job.agreed_group(sorted(ranks[stage] for stage in stages))
                if group.index is not None:
                    weights = [w for w in layer.variables if id(w) in numbers]
                    self._shared += [(numbers[id(w)], w.path, group) for w in weights]

    def add_up(self, gradients: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Return the gradients, those of shared weights summed over the stages.

        Args:
            gradients: for each trained weight a list of tensors, its gradient's shards.
        """
        gradients = list(gradients)
        for i, path, group in self._shared:
            gradients[i] = [
                transport.all_reduce(shard, "Sum", group, f"copies_{path}_{n}")
                for n, shard in enumerate(gradients[i])
            ]
        return gradients
