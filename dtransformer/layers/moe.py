"""Mixture-of-experts layer."""

import tensorflow as tf

from dtransformer.layers.activations import gated_product
from dtransformer.layers.arguments import as_moe_config, check_floating
from dtransformer.layers.base import register
from dtransformer.layers.elementwise import add
from dtransformer.layers.feed_forward import FeedForward
from dtransformer.layers.initializers import StackedInitializer
from dtransformer.layers.router import Router, Routing
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.parallel.expert_parallel import balance
from dtransformer.parallel.expert_parallel.capacity_slots import capacity, places
from dtransformer.parallel.expert_parallel.checks import check_layout, sends_counts
from dtransformer.parallel.expert_parallel.dispatch import apply_experts
from dtransformer.parallel.expert_parallel.token_groups import TokenGroups
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tensor_parallel.quantized_kernel import (
    is_quantized,
    multiply_dequantized,
)
from dtransformer.parallel.tracing.auxiliary_metrics import report
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


@register
class MoE(FeedForward):
    """Mixture of experts: several feed-forward layers. A few of them compute each token.

    A router chooses k of E experts for each token. The output is the sum of their outputs, weighted
    by the router's gates. An expert accepts ⌈k · n · capacity_factor / E⌉ tokens from a group of n.
    Later tokens, in the order of the global batch, are dropped and only pass through the residual
    connection. Padding is not sent to experts.

    `add_loss` receives two terms. The load-balancing loss is aux_loss_factor · E · Σᵢ fᵢ · Pᵢ,
    where fᵢ is the fraction of choices of expert i and Pᵢ its mean probability. The z-loss is
    z_loss_factor times the mean of logsumexp(logits)². Both cover the global batch, or are averaged
    over its token groups with `expert_group_size`.

    References:

    - [Shazeer et al., 2017](https://arxiv.org/abs/1701.06538)
    - [Lepikhin et al., 2020](https://arxiv.org/abs/2006.16668) (GShard)
    - [Fedus et al., 2021](https://arxiv.org/abs/2101.03961) (Switch Transformers)
    - [DeepSeek-AI, 2024](https://arxiv.org/abs/2412.19437) (DeepSeek-V3)

    Args:
        hidden_size: Integer. Size h of the input and the output.
        ffn_hidden_size: Integer. Inner size f of each expert, unless `moe_config` sets it.
        moe_config: `MoEConfig`, or a dictionary of its fields.
        **kwargs: Other arguments of `FeedForward`: `dropout_rate` of the output, and `hidden_act`,
            `kernel_initializer`, `gated` and `use_bias` of each expert.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`, or `[tokens, h]` for a single sequence.
        mask: Tensor of shape `[b, s]` or `[tokens]`, 0 or False for padding. Defaults to `None`, no
            padding.
        training: Boolean, whether to apply dropout and router jitter. Defaults to `False`.
        drops: Boolean, whether experts drop tokens above their capacity. Defaults to `True`.

    Output shape:
        Same as the inputs.

    Raises:
        ValueError: If fields of the config conflict with each other or with the parallel config.

    Example:

    >>> layer = MoE(8, 32, dtransformer.MoEConfig(expert_num=4, num_experts_chosen=2))
    >>> layer(tf.zeros((2, 3, 8))).shape
    TensorShape([2, 3, 8])
    """

    has_experts = True

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, moe_config: MoEConfig | dict, **kwargs
    ):
        self.config = self.moe_config = as_moe_config(moe_config)
        super().__init__(hidden_size, self.config.ffn_hidden_size or ffn_hidden_size, **kwargs)
        policy = self.dtype_policy
        self.router = Router(self.config, self.kernel_initializer, dtype=policy, name="router")
        check_layout(self.config)
        self.shared_experts = None
        if self.config.shared_experts:
            self.shared_experts = FeedForward(
                hidden_size,
                self.config.shared_experts * self.ffn_hidden_size,
                dropout_rate=0.0,
                hidden_act=self.hidden_act,
                kernel_initializer=self.kernel_initializer,
                gated=self.gated,
                use_bias=self.use_bias,
                dtype=policy,
                name="shared_experts",
            )

    # `add_loss` receives means over the local rows. Trainers weight them by the number of rows.
    aux_loss_is_mean = True

    @property
    def exchanges_counts(self) -> bool:
        """True if ranks exchange token counts. Such blocks are not traced as shared blocks."""
        return sends_counts(self.config)

    def build(self, input_shape: tuple) -> None:
        self.add_dense(StackedInitializer(self.kernel_initializer), self.config.expert_num)
        for layer in (self.router, self.dropout, self.shared_experts):
            if layer is not None:
                layer.build(input_shape)

    def call(
        self,
        inputs: tf.Tensor,
        mask: tf.Tensor | None = None,
        training: bool = False,
        drops: bool = True,
    ) -> tf.Tensor:
        check_floating("inputs", inputs)
        is_flat = inputs.shape.rank == 2
        if is_flat:
            mask = None if mask is None else mask[None]
        # [batch, length, embed]
        x = inputs[None] if is_flat else inputs
        groups = TokenGroups(x, self.config)
        sharded_x = x
        x = groups.group_activations(x)
        if mask is None:
            is_token = tf.ones(static_or_dynamic_shape(x)[:2], INDEX_TYPE)
        else:
            is_token = tf.cast(tf.cast(mask, "bool"), INDEX_TYPE)
        is_token = groups.group_rows(is_token)
        y = self._route(groups, x, is_token, training, drops)
        y = constrain(y, ("batch", "length", None))
        if self.shared_experts is not None:
            # The shared experts keep the sharding of the inputs, like any feed-forward layer.
            y = add(y, self.shared_experts(sharded_x, training=training))
        y = self.dropout(y, training=training)
        return y[0] if is_flat else y

    def _route(self, groups, x, is_token, training, drops):
        """Return the combined outputs of the experts, and add the router's losses."""
        routing = Routing(*map(groups.group_rows, self.router(x, training=training)))
        choices = groups.split(routing.choices)
        gates = groups.split(routing.gates)
        is_token = groups.split(is_token)
        # [groups, tokens of a group, experts]
        chosen = tf.one_hot(choices, self.config.expert_num, dtype=INDEX_TYPE)
        chosen = tf.reduce_sum(chosen, axis=-2)
        chosen *= is_token[..., None]
        totals = groups.totals(chosen, is_token, self.path)
        if training:
            self.add_loss(self._router_losses(routing, groups, is_token, totals))
        max_tokens = capacity(totals.positions, self.config) if drops else None
        slots = places(chosen, max_tokens, totals.before)
        report(
            self.path, lambda: self._load(slots, chosen, is_token, groups, routing.probabilities)
        )
        y = apply_experts(
            self._feed_forward, groups.split(x), slots, choices, gates, groups, max_tokens
        )
        return groups.join(y)

    def _load(self, slots, chosen, is_token, groups, probabilities):
        """Return the statistics for `reports.expert_load`, a tensor of shape `[E + 3]`.

        The tokens computed by each expert, then the sums of choices, tokens and router entropies.
        """
        logs = tf.math.log(tf.maximum(groups.split(probabilities), 1e-30))
        entropy = -tf.reduce_sum(tf.exp(logs) * logs, axis=-1) * tf.cast(is_token, "float32")
        slots = tf.cast(slots.accepted, "float32")
        slots = tf.reduce_sum(slots, axis=[*range(len(slots.shape) - 1)])
        sums = [tf.reduce_sum(tf.cast(x, "float32")) for x in (chosen, is_token, entropy)]
        return tf.concat([slots, tf.stack(sums)], 0)

    def _router_losses(self, routing, groups, is_token, totals):
        config = self.config
        cost = tf.zeros([])
        if config.aux_loss_factor:
            tokens = tf.cast(is_token, "float32")[..., None]
            probabilities = groups.split(routing.probabilities) * tokens
            cost += config.aux_loss_factor * balance.load_balancing(probabilities, totals)
        if config.z_loss_factor:
            logits = groups.split(routing.logits)
            cost += config.z_loss_factor * balance.z_loss(logits, is_token, totals)
        if self.router.bias is not None:
            cost += balance.excess_load(tf.cast(self.router.bias, "float32"), totals)
        return cost

    def _feed_forward(self, products, tokens):
        """Apply each expert to its tokens.

        Args:
            products: Object with the matrix products of all experts.
            tokens: List of tensors of shape `[..., h]`.

        Returns:
            A list of tensors of the same shapes.
        """
        xs = _multiply(products.column_parallel, tokens, self.mapping_kernel)
        if self.use_bias:
            xs = products.add_bias(xs, self.mapping_bias)
        if self.gated:
            gates = _multiply(products.column_parallel, tokens, self.gate_kernel)
            if self.use_bias:
                gates = products.add_bias(gates, self.gate_bias)
            xs = [gated_product(self.activation, gate, x) for gate, x in zip(gates, xs)]
        else:
            xs = [self.activation(x) for x in xs]
        ys = _multiply(products.row_parallel, xs, self.projection_kernel)
        return products.add_bias(ys, self.projection_bias) if self.use_bias else ys


def _multiply(multiply, xs, kernel):
    """Return `multiply(xs, kernel)` for a variable or a `QuantizedKernel`."""
    if not is_quantized(kernel):
        return multiply(xs, kernel)
    return multiply_dequantized(lambda xs, values: multiply(xs, *values), xs, [kernel])
