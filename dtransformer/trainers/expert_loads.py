"""Expert loads of mixture-of-experts layers, summed over an epoch for the logs and the report."""

import numpy as np
import tensorflow as tf

from dtransformer.reports.expert_load import NUMBERS, ExpertLoad, LayerLoad

EXPERTS = "experts/"  # Prefix of a layer's path in the sums of a step.


class ExpertLoads:
    """Sums of the routing metrics of each `MoE` layer since the last reset."""

    def __init__(self):
        self._sums = {}  # Layer path -> tf.Variable [E + 3].

    def update(self, totals: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Add the routing metrics of a step and return its logs.

        Args:
            totals: Dict of float32 tensors, sums over the global batch. Only names that start
                with `EXPERTS` are used, the metrics of MoE layers.

        Returns:
            A dict of scalars, averaged over the layers: `"dropped_share"`, the fraction of dropped
            choices, `"busiest_expert"`, the largest load divided by the mean load, and
            `"router_entropy"` in nats.
        """
        metrics = {k.removeprefix(EXPERTS): x for k, x in totals.items() if k.startswith(EXPERTS)}
        for layer, value in metrics.items():
            if layer not in self._sums:
                with tf.init_scope():
                    self._sums[layer] = tf.Variable(tf.zeros(value.shape), trainable=False)
            self._sums[layer].assign_add(value)
        dropped, busiest, entropy = zip(*map(_summarize, metrics.values()))
        means = {"dropped_share": dropped, "busiest_expert": busiest, "router_entropy": entropy}
        return {name: tf.add_n(list(values)) / len(values) for name, values in means.items()}

    def reset(self) -> None:
        """Set all sums to zero, as at the start of an epoch."""
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))

    def report(self) -> ExpertLoad:
        """Return an `ExpertLoad` with the sums of all layers, sorted by layer path."""
        loads = [
            LayerLoad.from_loads(layer, np.asarray(x)) for layer, x in sorted(self._sums.items())
        ]
        return ExpertLoad(tuple(loads))


def _summarize(metrics):
    """Return the dropped fraction of choices, the busiest expert's load and the router entropy."""
    loads = metrics[: -len(NUMBERS)]
    choices, tokens, entropy = tf.unstack(metrics[-len(NUMBERS) :])
    total = tf.reduce_sum(loads)
    mean = total / tf.cast(tf.size(loads), "float32")
    return (
        tf.math.divide_no_nan(choices - total, choices),
        tf.math.divide_no_nan(tf.reduce_max(loads), mean),
        tf.math.divide_no_nan(entropy, tokens),
    )
