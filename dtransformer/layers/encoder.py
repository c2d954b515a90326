"""Transformer encoder: a block and a stack of blocks."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from dtransformer import _compat
from dtransformer.block_forms import get_placement
from dtransformer.layers.arguments import (
    as_moe_config,
    get_init_arguments,
    pop_arguments,
    validate_arguments,
)
from dtransformer.layers.attention import MultiHeadAttention, with_attention_objects
from dtransformer.layers.attention_mask import Segments, mask_or_keras_mask, token_mask
from dtransformer.layers.base import decoding_method, register
from dtransformer.layers.block import BlockStack, TransformerBlock
from dtransformer.layers.elementwise import add, scale
from dtransformer.layers.feed_forward import FeedForward
from dtransformer.layers.latent_attention import LatentAttention
from dtransformer.layers.moe import MoE
from dtransformer.layers.norm import LayerNorm, RMSNorm, make_norm
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.parallel.decoding.cache import KVCache
from dtransformer.parallel.zero.units import start_unit

# Arguments that blocks pass to all attention layers, and to self-attention only.
_ATTENTION_OPTIONS = (
    "num_kv_heads",
    "head_dim",
    "qkv_bias",
    "query_scale",
    "soft_cap",
    "qk_norm",
    "qk_norm_epsilon",
    "qk_norm_after_rotary",
    "implementation",
)
_SELF_ATTENTION_OPTIONS = (
    "rotary",
    "rotary_base",
    "rotary_fraction",
    "rotary_scaling",
    "causal",
    "window",
    "alibi",
    "relative_max_distance",
    "sinks",
    "latent",
)


@dataclasses.dataclass(frozen=True)
class BlockForm:
    """Form of a block.

    Args:
        gated: Boolean, whether the feed-forward layer is gated, see `FeedForward`. Defaults to
            `False`.
        use_bias: Boolean, whether dense layers have a bias. Defaults to `True`.
        norm_placement: Name in `block_forms.PLACEMENTS`. Defaults to `None`:
            `post_layernorm_residual` decides.
        residual_scale: Float. Factor of each sublayer's output. Defaults to `1.0`.
        attention_norm: Boolean, whether attention has an input norm. Defaults to `True`.

    Raises:
        TypeError: If a value has the wrong type.
    """

    gated: bool = False
    use_bias: bool = True
    norm_placement: str | None = None
    residual_scale: float = 1.0
    attention_norm: bool = True


BlockForm.__init__ = validate_arguments(BlockForm.__init__)


@register
class TransformerEncoderLayer(TransformerBlock):
    """Transformer encoder block: self-attention, then a feed-forward layer.

    Each sublayer has a residual connection. By default its input is normalized (pre-norm,
    [Xiong et al., 2020](https://arxiv.org/abs/2002.04745)). With `post_layernorm_residual=True` the
    sum is normalized, as in [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.1.

    Args:
        hidden_size: Integer. Size h of the input and the output.
        num_heads: Integer. Number of attention heads.
        ffn_hidden_size: Integer. Inner size of the feed-forward layer.
        attention_dropout_rate: Float in [0, 1). Dropout of attention probabilities. Defaults to
            `0.1`.
        hidden_dropout_rate: Float in [0, 1). Dropout of each sublayer's output. Defaults to `0.1`.
        hidden_act: Name of an activation, a callable, or a Keras layer class. Defaults to `"gelu"`.
        post_layernorm_residual: Boolean, whether to normalize the sum. Defaults to `False`.
        layernorm_compute_type: Type that norms compute in. Defaults to `"float32"`.
        softmax_compute_type: Type of the softmax. Defaults to `"float32"`.
        norm: Name of a norm, see `make_norm`. Defaults to `"layer_norm"`.
        norm_epsilon: Float. Epsilon of the norms. Defaults to the norm's default.
        moe_config: `MoEConfig`, or a dictionary of its fields. With several experts, a `MoE`
            replaces the feed-forward layer. Defaults to `None`.
        **kwargs: Fields of `BlockForm`. Options of `MultiHeadAttention`: `num_kv_heads`,
            `head_dim`, `qkv_bias`, `query_scale`, `soft_cap`, `qk_norm` and `implementation`; for
            self-attention also `rotary`, `causal`, `window`, `alibi`, `relative_max_distance` and
            `sinks`. A network's options in `with_attention_objects` replace `rotary` and `qk_norm`.
            `latent`: sizes of a `LatentAttention` for self-attention.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        attention_mask: Boolean or 0/1 tensor of shape `[b, s]`, `[b, 1, s]` or `[b, s, s]`, 1 for
            visible positions; or `Segments`. Defaults to the Keras mask of `inputs`.
        position_table: Tensor of shape `[r, n]`, the table of T5's relative positions.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, s, h]`
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        ffn_hidden_size: int,
        attention_dropout_rate: float = 0.1,
        hidden_dropout_rate: float = 0.1,
        hidden_act: str | Callable = "gelu",
        post_layernorm_residual: bool = False,
        layernorm_compute_type: str = "float32",
        softmax_compute_type: str = "float32",
        norm: str = "layer_norm",
        norm_epsilon: float | None = None,
        moe_config: MoEConfig | dict | None = None,
        **kwargs,
    ):
        arguments = get_init_arguments(locals())
        form_names = [field.name for field in dataclasses.fields(BlockForm)]
        form = BlockForm(**pop_arguments(kwargs, form_names))
        names = [*_ATTENTION_OPTIONS, *_SELF_ATTENTION_OPTIONS]
        attention_options = pop_arguments(kwargs, names)
        super().__init__(**kwargs)
        self.arguments = {**arguments, **vars(form), **attention_options}
        self.placement = get_placement(self.arguments)
        self.moe_config = None if moe_config is None else as_moe_config(moe_config)
        self.has_experts = self.may_have_experts
        self.add_sublayers()

    def add_sublayers(self) -> None:
        """Create attention, the feed-forward layer and their norms."""
        self.add_norms("attention", self.arguments["attention_norm"])
        self.attention = self.make_attention("attention")
        if not self.placement.shares_norm:
            self.add_norms("feed_forward")
        self.add_feed_forward()

    def add_norms(self, sublayer: str, of_input: bool = True) -> None:
        """Create the norms of a sublayer as attributes `"…_norm"` and, if needed, `"…_output_norm"`.

        Args:
            sublayer: String. Name of the sublayer.
            of_input: Boolean, whether to create the input norm of the placement. Defaults to
                `True`.
        """
        names = []
        if of_input or not self.placement.of_input:
            names.append(f"{sublayer}_norm")
        if self.placement.norms_per_sublayer > 1:
            names.append(f"{sublayer}_output_norm")
        for name in names:
            setattr(self, name, self.make_norm(name))

    @property
    def may_have_experts(self) -> bool:
        """True if `moe_config` has several experts, so the block can be a mixture of experts."""
        return self.moe_config is not None and self.moe_config.expert_num > 1

    def use_experts(self, has_experts: bool = True) -> None:
        if has_experts and not self.may_have_experts:
            raise ValueError(
                f"{self.name} has no experts. Set for example `moe_config=MoEConfig(expert_num=8)`."
            )
        self.has_experts = has_experts

    def add_feed_forward(self) -> None:
        """Create the feed-forward layer, unless `complete` chooses between it and a `MoE`."""
        if not self.may_have_experts:
            self.feed_forward = self.make_feed_forward("feed_forward")

    def complete(self) -> None:
        if not hasattr(self, "feed_forward"):
            make = self.make_moe if self.has_experts else self.make_feed_forward
            self.feed_forward = make("feed_forward").shard(**self._sharding_rules)
            self.recompute(self.recompute_config)

    def make_norm(self, name: str) -> LayerNorm | RMSNorm:
        return make_norm(
            self.arguments["norm"],
            self.arguments["norm_epsilon"],
            compute_type=self.arguments["layernorm_compute_type"],
            dtype=self.dtype_policy,
            name=name,
        )

    def make_attention(self, name: str, to_itself: bool = True) -> MultiHeadAttention:
        names = [*_ATTENTION_OPTIONS, *(_SELF_ATTENTION_OPTIONS if to_itself else ())]
        options = {name: self.arguments[name] for name in names if name in self.arguments}
        options = with_attention_objects(options)
        attention_class = MultiHeadAttention
        if options.get("latent") is not None:
            attention_class = LatentAttention
        else:
            options.pop("latent", None)
        return attention_class(
            self.arguments["hidden_size"],
            self.arguments["num_heads"],
            hidden_dropout_rate=self.arguments["hidden_dropout_rate"],
            attention_dropout_rate=self.arguments["attention_dropout_rate"],
            softmax_compute_type=self.arguments["softmax_compute_type"],
            dtype=self.dtype_policy,
            name=name,
            use_bias=self.arguments["use_bias"],
            **options,
        )

    def make_feed_forward(self, name: str) -> FeedForward:
        return FeedForward(**self._feed_forward_arguments(), name=name)

    def make_moe(self, name: str) -> MoE:
        return MoE(**self._feed_forward_arguments(), moe_config=self.moe_config, name=name)

    def _feed_forward_arguments(self):
        names = "hidden_size", "ffn_hidden_size", "hidden_act", "gated", "use_bias"
        return {
            **{name: self.arguments[name] for name in names},
            "dropout_rate": self.arguments["hidden_dropout_rate"],
            "dtype": self.dtype_policy,
        }

    def sublayer_input(self, name: str, inputs: tf.Tensor) -> tf.Tensor:
        """Return the input of a sublayer, normalized if the placement requires it.

        Args:
            name: String. Name of the sublayer, which selects the norm.
            inputs: Tensor of shape `[b, s, h]`.
        """
        norm = getattr(self, f"{name}_norm", None)
        return norm(inputs) if self.placement.of_input and norm is not None else inputs

    def add_residual(self, name: str, inputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Add a sublayer's output to its residual connection.

        Args:
            name: String. Name of the sublayer, which selects the norms.
            inputs: Tensor of shape `[b, s, h]`, before the sublayer and its norm.
            outputs: Tensor of the same shape.
        """
        norm = getattr(self, f"{name}_norm", None)
        if self.placement.of_output:
            outputs = getattr(self, f"{name}_output_norm", norm)(outputs)
        x = add(inputs, self._scale_residual(outputs))
        return norm(x) if self.placement.of_sum else x

    def _add_sublayers(self, inputs, attention_input, attention_output, **options):
        """Apply the feed-forward layer and return the block's output.

        Args:
            inputs: Input of the block, `[b, s, h]`.
            attention_input, attention_output: Tensors of the same shape.
            **options: Arguments of `feed`.
        """
        if self.placement.is_parallel:
            x = attention_input
            if not self.placement.shares_norm:
                x = self.sublayer_input("feed_forward", inputs)
            outputs = add(attention_output, self.feed(x, **options))
            return add(inputs, self._scale_residual(outputs))
        x = self.add_residual("attention", inputs, attention_output)
        y = self.feed(self.sublayer_input("feed_forward", x), **options)
        return self.add_residual("feed_forward", x, y)

    def _scale_residual(self, x):
        factor = self.arguments["residual_scale"]
        return x if factor == 1 else scale(x, tf.cast(factor, x.dtype))

    def build(self, input_shape: tuple, *args) -> None:
        self.complete()
        for layer in _compat.flat_layers(self, include_self=False, recursive=False):
            if not layer.built:
                layer.build(input_shape)

    def call(
        self,
        inputs: tf.Tensor,
        attention_mask: tf.Tensor | Segments | None = None,
        position_table: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        attention_mask = mask_or_keras_mask(attention_mask, inputs)

        def compute(inputs, *rest):
            *tables, mask = rest
            x = self.sublayer_input("attention", inputs)
            y = self.attention(x, x, x, mask, *tables, training=training)
            return self._add_sublayers(inputs, x, y, mask=mask, training=training)

        tensors = [inputs] if position_table is None else [inputs, position_table]
        return self.run_block(compute, tensors, [attention_mask], training)

    @decoding_method
    def prefill(
        self,
        inputs: tf.Tensor,
        capacity: int | tf.Tensor,
        attention_mask: tf.Tensor | Segments | None = None,
        **options,
    ) -> tuple[tf.Tensor, KVCache]:
        """Compute prompts and start a cache that contains them.

        See `MultiHeadAttention.prefill` for the arguments and the returned tuple.
        """
        return self._attend_with_cache(
            self.attention.prefill, inputs, capacity, attention_mask, **options
        )

    @decoding_method
    def decode_step(
        self, inputs: tf.Tensor, cache: KVCache, mask: tf.Tensor | None = None, **options
    ) -> tuple[tf.Tensor, KVCache]:
        """Compute the next position of each sequence.

        See `MultiHeadAttention.decode_step` for the arguments and the returned tuple.
        """
        return self._attend_with_cache(self.attention.decode_step, inputs, cache, mask, **options)

    def _attend_with_cache(self, attend, inputs, *args, **options):
        """Return the block's output and cache, from `prefill` or `decode_step` of the attention."""
        start_unit(inputs, self.variables)
        x = self.sublayer_input("attention", inputs)
        y, cache = attend(x, *args, **options)
        return self._add_sublayers(inputs, x, y, drops=False), cache

    def feed(
        self,
        inputs: tf.Tensor,
        mask: tf.Tensor | Segments | None = None,
        training: bool = False,
        drops: bool = True,
    ) -> tf.Tensor:
        """Apply the feed-forward layer or the mixture of experts.

        Args:
            inputs: Tensor of shape `[b, s, h]`.
            mask: Self-attention mask. Experts skip its padding. Defaults to `None`.
            training: Boolean, whether to apply dropout. Defaults to `False`.
            drops: Boolean, whether experts drop tokens above their capacity. Defaults to `True`.
        """
        if not self.has_experts:
            return self.feed_forward(inputs, training=training)
        return self.feed_forward(inputs, training=training, mask=token_mask(mask), drops=drops)


@register
class TransformerEncoder(BlockStack):
    """Stack of `TransformerEncoderLayer` blocks.

    Args:
        num_layers: Integer. Number of blocks. May be 0.
        hidden_size, num_heads, ffn_hidden_size: See `TransformerEncoderLayer`.
        lambda_func: Function that places each block on a pipeline stage. Called as
            `lambda_func(network=, layer_id=, offset=, parallel_config=, layers=)`. Defaults to
            `spread_evenly`.
        offset: Integer. Number of blocks in the network before this stack. Defaults to `0`.
        network_layers: Integer. Number of blocks in the network. Defaults to `offset + num_layers`.
        **layer_arguments: Other arguments of `BlockStack` and `TransformerEncoderLayer`.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        attention_mask: See `TransformerEncoderLayer`.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, s, h]`

    Example:

    >>> TransformerEncoder(2, 16, 4, 32)(tf.zeros((2, 5, 16))).shape
    TensorShape([2, 5, 16])
    """

    layer_class = TransformerEncoderLayer

    def call(
        self,
        inputs: tf.Tensor,
        attention_mask: tf.Tensor | Segments | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        return self.run_blocks(inputs, attention_mask, training=training)

    def prefill(
        self,
        inputs: tf.Tensor,
        capacity: int | tf.Tensor,
        attention_mask: tf.Tensor | Segments | None = None,
        **options,
    ) -> tuple[tf.Tensor, list[KVCache]]:
        """Compute prompts and start the caches of all blocks.

        See `MultiHeadAttention.prefill` for the arguments.

        Returns:
            An `(output, caches)` tuple: a tensor of the input's shape, and a list with the cache of
            each block.
        """
        options |= self._shared_options(inputs)
        caches = []
        for block in self.blocks:
            inputs, cache = block.prefill(inputs, capacity, attention_mask, **options)
            caches.append(cache)
        return self._normalize(inputs), caches
