"""The router of a mixture of experts: which experts a token is sent to, and how much each counts."""

import typing

import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.arguments import as_moe_config
from dtransformer.layers.base import Layer, register
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.parallel.expert_parallel.checks import check_moe_config
from dtransformer.parallel.ops.feature_reductions import add_bias
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tensor_parallel.linear import column_parallel
from dtransformer.parallel.tracing.dropout_seed import (
    DrawsMasks,
    current_dropout_seed,
    layer_number,
    random_floats,
)
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


class Routing(typing.NamedTuple):
    """What a router says of each token; k of E experts are chosen.

    Args:
        choices: int64 [b, s, k], the experts chosen, the best one first.
        gates: float32 [b, s, k], what their outputs are multiplied with.
        probabilities: float32 [b, s, E], of all experts, which sum to 1.
        logits: float32 [b, s, E].
    """

    choices: tf.Tensor
    gates: tf.Tensor
    probabilities: tf.Tensor
    logits: tf.Tensor


@register
class Router(DrawsMasks, Layer):
    """Choose k of E experts for each token; everything is computed in float32.

    With `router_type="softmax"` these are the k most probable, and where k > 1 their
    probabilities are divided by their sum, unless `normalizes_gates=False` (OLMoE: Muennighoff et
    al., 2024, arXiv 2409.02060) (Shazeer et al., 2017, arXiv 1701.06538, §2.1; Lepikhin et
    al., 2020, GShard, arXiv 2006.16668, §2.2). A single one keeps its probability, from which the
    router learns (Fedus et al., 2021, Switch Transformers, arXiv 2101.03961, §2.1).

    With `"sigmoid"` the choice is by the sigmoid of the logits plus a bias of each expert, which
    has no part in the gates: the sigmoids of those chosen, divided by their sum where k > 1
    (DeepSeek-V3, arXiv 2412.19437, §2.1.2). With `router_bias` the logits have one that is trained
    as any other. Of `routing_groups` of experts a token chooses the
    `routing_groups_chosen` whose two best experts have the highest sum, or with
    `group_score="max"` the best expert (DeepSeek-V2, arXiv 2405.04434, §2.2.2). In the end gates
    are multiplied with `gate_scale`.

    Args:
        moe_config: a `MoEConfig`, or a dict of its fields.
        kernel_initializer: a Keras initializer, or its name.

    Call arguments:
        inputs: tensor [b, s, h].
        training: whether inputs are jittered.

    Returns:
        A `Routing`.
    """

    def __init__(
        self, moe_config: MoEConfig | dict, kernel_initializer: str = "glorot_uniform", **kwargs
    ):
        super().__init__(**kwargs)
        self.config = self.moe_config = as_moe_config(moe_config)
        check_moe_config(self.config)
        check_int("expert_num", self.config.expert_num)
        self.kernel_initializer = kernel_initializer
        self.bias = self.logits_bias = None

    def build(self, input_shape: tuple) -> None:
        experts = self.config.expert_num
        self.takes(input_shape[-1])
        self.kernel = self.add_weight(
            (input_shape[-1], experts),
            self.kernel_initializer,
            axes=("embed", None),
            name="kernel",
            autocast=False,
        )
        vector = {"initializer": "zeros", "axes": (None,), "autocast": False}
        if self.config.router_type == "sigmoid":
            self.bias = self.add_weight((experts,), name="bias", **vector)
        if self.config.router_bias:
            self.logits_bias = self.add_weight((experts,), name="logits_bias", **vector)

    def call(self, inputs: tf.Tensor, training: bool = False) -> Routing:
        x = tf.cast(inputs, "float32")
        if training and self.config.router_jitter:
            x *= self._jitter(static_or_dynamic_shape(x))
        (logits,) = column_parallel(x, [self.kernel], (None,))
        if self.logits_bias is not None:
            logits = add_bias(logits, self.logits_bias)
        if self.config.router_type == "softmax":
            scores = probabilities = tf.nn.softmax(logits)
            ranked = scores
        else:
            scores = tf.sigmoid(logits)
            probabilities = scores / tf.reduce_sum(scores, axis=-1, keepdims=True)
            ranked = scores + tf.cast(self.bias, "float32")
        chosen = self.config.num_experts_chosen
        choices = tf.math.top_k(self._in_best_groups(tf.stop_gradient(ranked)), chosen).indices
        choices = tf.cast(choices, INDEX_TYPE)
        # As a product: the gradient of a look-up would be scattered.
        is_choice = tf.one_hot(choices, self.config.expert_num)  # [b, s, k, E]
        gates = tf.reduce_sum(is_choice * scores[:, :, None, :], axis=-1)
        if chosen > 1 and self.config.normalizes_gates:
            gates = tf.math.divide_no_nan(gates, tf.reduce_sum(gates, axis=-1, keepdims=True))
        if self.config.gate_scale != 1:
            gates *= self.config.gate_scale
        return Routing(choices, gates, probabilities, logits)

    def _in_best_groups(self, scores):
        """Return scores [b, s, E], -∞ where an expert is in a group that is not chosen."""
        groups, chosen = self.config.routing_groups, self.config.routing_groups_chosen
        if chosen == groups:
            return scores
        shape = static_or_dynamic_shape(scores)
        members = shape[-1] // groups
        grouped = tf.reshape(scores, [*shape[:-1], groups, members])
        counted = min({"top2": 2, "max": 1}[self.config.group_score], members)
        best = tf.math.top_k(grouped, counted).values
        best = tf.math.top_k(tf.reduce_sum(best, axis=-1), chosen).indices
        is_best = tf.reduce_sum(tf.one_hot(best, groups), axis=-2)[..., None]
        return tf.reshape(tf.where(is_best > 0, grouped, float("-inf")), shape)

    def _jitter(self, shape):
        """Return random numbers of 1 ± `router_jitter`."""
        numbers = random_floats(shape, current_dropout_seed(), layer_number(self))
        return 1 + self.config.router_jitter * (2 * numbers - 1)
