"""Router of a mixture of experts: the experts of each token and their gates."""

import typing

import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.arguments import as_moe_config
from dtransformer.layers.base import Layer, register
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.parallel.expert_parallel.checks import check_moe_config
from dtransformer.parallel.mesh.random_numbers import random_floats
from dtransformer.parallel.ops.feature_reductions import add_bias
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tensor_parallel.linear import column_parallel
from dtransformer.parallel.tracing.dropout_seed import (
    RandomLayer,
    current_dropout_seed,
    current_random_id,
)
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


class Routing(typing.NamedTuple):
    """Choices of a router. Each token is sent to k of E experts.

    Args:
        choices: int64 tensor of shape `[b, s, k]`, the chosen experts, best first.
        gates: float32 tensor of shape `[b, s, k]`, the weights of their outputs.
        probabilities: float32 tensor of shape `[b, s, E]`, which sums to 1 over all experts.
        logits: float32 tensor of shape `[b, s, E]`.
    """

    choices: tf.Tensor
    gates: tf.Tensor
    probabilities: tf.Tensor
    logits: tf.Tensor


@register
class Router(RandomLayer, Layer):
    """Choose k of E experts for each token, in float32.

    `router_type="softmax"` chooses the k most probable experts. With k > 1 their probabilities are
    divided by their sum ([Shazeer et al., 2017](https://arxiv.org/abs/1701.06538), section 2.1;
    [Lepikhin et al., 2020](https://arxiv.org/abs/2006.16668), section 2.2), unless
    `normalizes_gates=False` ([Muennighoff et al., 2024](https://arxiv.org/abs/2409.02060)). A
    single expert keeps its probability as its gate, which trains the router
    ([Fedus et al., 2021](https://arxiv.org/abs/2101.03961), section 2.1).

    `router_type="sigmoid"` chooses the experts with the highest sigmoid of the logits plus a bias
    per expert. The gates are the sigmoids without the bias, normalized like probabilities
    ([DeepSeek-AI, 2024](https://arxiv.org/abs/2412.19437), section 2.1.2).

    `router_bias` adds a trained bias to the logits. With `routing_groups`, a token first chooses
    the `routing_groups_chosen` groups of experts with the highest score: the sum of a group's two
    best experts, or its best expert with `group_score="max"`
    ([DeepSeek-AI, 2024](https://arxiv.org/abs/2405.04434), section 2.2.2). Finally, gates are
    multiplied by `gate_scale`.

    Args:
        moe_config: `MoEConfig`, or a dictionary of its fields.
        kernel_initializer: Keras initializer or its name. Defaults to `"glorot_uniform"`.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        training: Boolean, whether to apply jitter to the inputs.

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
        self.require_features(input_shape[-1])
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
        choices = tf.math.top_k(self._keep_best_groups(tf.stop_gradient(ranked)), chosen).indices
        choices = tf.cast(choices, INDEX_TYPE)
        # Use a product; the gradient of a gather would be a scatter.
        is_choice = tf.one_hot(choices, self.config.expert_num)  # [b, s, k, E]
        gates = tf.reduce_sum(is_choice * scores[:, :, None, :], axis=-1)
        if chosen > 1 and self.config.normalizes_gates:
            gates = tf.math.divide_no_nan(gates, tf.reduce_sum(gates, axis=-1, keepdims=True))
        if self.config.gate_scale != 1:
            gates *= self.config.gate_scale
        return Routing(choices, gates, probabilities, logits)

    def _keep_best_groups(self, scores):
        """Return scores `[b, s, E]` with -inf for experts outside of the chosen groups."""
        groups = self.config.routing_groups
        chosen = self.config.routing_groups_chosen
        if chosen == groups:
            return scores
        shape = static_or_dynamic_shape(scores)
        members = shape[-1] // groups
        grouped = tf.reshape(scores, [*shape[:-1], groups, members])
        num_best = min({"top2": 2, "max": 1}[self.config.group_score], members)
        best = tf.math.top_k(grouped, num_best).values
        best = tf.math.top_k(tf.reduce_sum(best, axis=-1), chosen).indices
        is_best = tf.reduce_sum(tf.one_hot(best, groups), axis=-2)[..., None]
        return tf.reshape(tf.where(is_best > 0, grouped, float("-inf")), shape)

    def _jitter(self, shape):
        """Return random factors in 1 ± `router_jitter`."""
        numbers = random_floats(shape, current_dropout_seed(), current_random_id(self))
        return 1 + self.config.router_jitter * (2 * numbers - 1)
