"""Loads of experts in an epoch's steps, added up for the logs and the report."""

import numpy as np
import tensorflow as tf

from dtransformer.reports.expert_load import NUMBERS, ExpertLoad, LayerLoad

EXPERTS = "experts/"  # before a layer's path, in the sums of a step


class ExpertLoads:
    """Sums of what each `MoE` tells, since they were last forgotten."""

    def __init__(self):
        self._sums = {}  # path of a layer -> tf.Variable [E + 3]

    def update(self, totals: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Add up what was told of a step; return its logs.

        Args:
            totals: sums over the global batch: those whose names begin with `EXPERTS` count.

        Returns:
            A dict of scalars, means over the layers: `"dropped_share"` of choices,
            `"router_entropy"` in nats, and `"busiest_expert"`, its load over the mean.
        """
        metrics = {k.removeprefix(EXPERTS): x for k, x in totals.items() if k.startswith(EXPERTS)}
        for layer, value in metrics.items():
            if layer not in self._sums:
                with tf.init_scope():
                    self._sums[layer] = tf.Variable(tf.zeros(value.shape), trainable=False)
            self._sums[layer].assign_add(value)
        dropped, busiest, entropy = zip(*map(_numbers, metrics.values()))
        means = {"dropped_share": dropped, "busiest_expert": busiest, "router_entropy": entropy}
        return {name: tf.add_n(list(values)) / len(values) for name, values in means.items()}

    def forget(self) -> None:
        """Begin anew, as at the start of an epoch."""
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))

    def report(self) -> ExpertLoad:
        """Return the `ExpertLoad` of what was added up."""
        found = [LayerLoad.of(layer, np.asarray(x)) for layer, x in sorted(self._sums.items())]
        return ExpertLoad(tuple(found))


def _numbers(metrics):
    """Return the share of choices that is dropped, the busiest expert's load, and the entropy."""
    taken, others = metrics[: -len(NUMBERS)], metrics[-len(NUMBERS) :]
    choices, tokens, entropy = tf.unstack(others)
    total = tf.reduce_sum(taken)
    mean = total / tf.cast(tf.size(taken), "float32")
    return (
        tf.math.divide_no_nan(choices - total, choices),
        tf.math.divide_no_nan(tf.reduce_max(taken), mean),
        tf.math.divide_no_nan(entropy, tokens),
    )
