"""Transformer encoder: a block and a stack of blocks."""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.block_forms import placement_of
from dtransformer.layers.arguments import as_moe_config, given_arguments
from dtransformer.layers.attention import MultiHeadAttention
from dtransformer.layers.attention_mask import Segments, mask_or_keras_mask, token_mask
from dtransformer.layers.base import register
from dtransformer.layers.block import BlockStack, TransformerBlock
from dtransformer.layers.elementwise import add, scale
from dtransformer.layers.feed_forward import FeedForward
from dtransformer.layers.latent_attention import LatentAttention
from dtransformer.layers.moe import MoE
from dtransformer.layers.norm import LayerNorm, RMSNorm, make_norm
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.parallel.pipeline_parallel.stage_dispatch import dispatch
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
        gated: Boolean, whether the feed-forward layer is gated, see `FeedForward`. Defaults to
            `False`.
        use_bias: Boolean, whether dense layers have a bias. Defaults to `True`.
        moe_config: `MoEConfig`, or a dictionary of its fields. With several experts, a `MoE`
            replaces the feed-forward layer. Defaults to `None`.
        norm_placement: Name in `block_forms.PLACEMENTS`. Defaults to `None`:
            `post_layernorm_residual` decides.
        residual_scale: Float. Factor of each sublayer's output. Defaults to `1.0`.
        attention_norm: Boolean, whether attention has an input norm. Defaults to `True`.
        **kwargs: Options of `MultiHeadAttention`: `num_kv_heads`, `head_dim`, `qkv_bias`,
            `query_scale`, `soft_cap`, `qk_norm`, `qk_norm_epsilon`, `qk_norm_after_rotary`,
            `implementation`; for self-attention also `rotary_base`, `rotary_fraction`,
            `rotary_scaling`, `causal`, `window`, `alibi`, `relative_max_distance` and `sinks`; and
            `latent`, the sizes of a `LatentAttention` that replaces it.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        attention_mask: Boolean or 0/1 tensor of shape `[b, s]`, `[b, 1, s]` or `[b, s, s]`, 1 for
            visible positions; or `Segments`. Defaults to the Keras mask of `inputs`.
        cache: Dictionary from `init_cache`, or an empty one to start a cache. See
            `MultiHeadAttention`.
        prefix_mask: Bool tensor of shape `[b, p]`, True for visible prefix positions of the cache.
        position_table: Tensor of shape `[r, n]`, the table of T5's relative positions.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, s, h]`. With a cache, an `(output, cache)` tuple with the cache for the next call.
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
        gated: bool = False,
        use_bias: bool = True,
        moe_config: MoEConfig | dict | None = None,
        norm_placement: str | None = None,
        residual_scale: float = 1.0,
        attention_norm: bool = True,
        **kwargs,
    ):
        init_arguments = given_arguments(locals())
        names = {*_ATTENTION_OPTIONS, *_SELF_ATTENTION_OPTIONS}
        attention_options = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        super().__init__(**kwargs)
        self.arguments = {**init_arguments, **attention_options}
        self.placement = placement_of(self.arguments)
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
        if self.placement.number > 1:
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
        names = (*_ATTENTION_OPTIONS, *(_SELF_ATTENTION_OPTIONS if to_itself else ()))
        options = {x: self.arguments[x] for x in names if x in self.arguments}
        attention_class = LatentAttention
        if options.get("latent") is None:
            attention_class = MultiHeadAttention
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

    def residual(self, name: str, sublayer: Callable, inputs: tf.Tensor) -> tf.Tensor:
        """Apply a sublayer with its norms and its residual connection.

        Args:
            name: String. Name of the sublayer, which selects the norms.
            sublayer: Function of a tensor.
            inputs: Tensor of shape `[b, s, h]`.

        Returns:
            A tensor of the same shape.
        """
        norms = [getattr(self, f"{name}{kind}", None) for kind in ("_norm", "_output_norm")]
        norm, output_norm = norms
        if self.placement.of_sum:
            return norm(add(inputs, self._scale_residual(sublayer(inputs))))
        x = norm(inputs) if self.placement.of_input and norm is not None else inputs
        x = sublayer(x)
        if self.placement.of_output:
            x = (output_norm or norm)(x)
        return add(inputs, self._scale_residual(x))

    def _parallel_sublayers(self, attend, feed, inputs):
        """Add attention and the feed-forward layer, both applied to the inputs, to the inputs."""
        names = ["attention_norm", "feed_forward_norm"][: 1 if self.placement.shares_norm else 2]
        norms = [getattr(self, name, None) for name in names]
        normed = [inputs if norm is None else norm(inputs) for norm in norms]
        return add(inputs, self._scale_residual(add(attend(normed[0]), feed(normed[-1]))))

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
        cache: dict | None = None,
        prefix_mask: tf.Tensor | None = None,
        position_table: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor | tuple[tf.Tensor, dict]:
        if cache is not None:
            rest = position_table, cache, prefix_mask
            start_unit(inputs, self.variables)
            return self._compute(inputs, attention_mask, False, *rest)
        attention_mask = mask_or_keras_mask(attention_mask, inputs)

        def compute(x, *rest):
            *tables, mask = rest
            return self._compute(x, mask, training, *tables)

        tensors = [inputs] if position_table is None else [inputs, position_table]
        return self.run_block(compute, tensors, [attention_mask], training)

    def _compute(self, inputs, mask, training, position_table=None, cache=None, prefix_mask=None):
        """Apply attention and the feed-forward layer, in sequence or in parallel."""
        new_cache = {}
        options = {"position_table": position_table, "training": training}

        def attend(x):
            if cache is None:
                return self.attention(x, x, x, mask, **options)
            caches = {"cache": cache, "prefix_mask": prefix_mask}
            output, updated = self.attention(x, x, x, mask, **options, **caches)
            new_cache.update(updated)
            return output

        feed = self._feed(training, mask if cache is None else None, drops=cache is None)
        if self.placement.is_parallel:
            x = self._parallel_sublayers(attend, feed, inputs)
        else:
            x = self.residual("attention", attend, inputs)
            x = self.residual("feed_forward", feed, x)
        return x if cache is None else (x, new_cache)

    def _feed(self, training, mask, drops):
        """Return the feed-forward layer as a function of its inputs.

        Experts skip padding according to `mask`, and drop tokens above their capacity only if
        `drops` is set.
        """
        options = {"mask": token_mask(mask), "drops": drops} if self.has_experts else {}
        return functools.partial(self.feed_forward, training=training, **options)

    def init_cache(
        self, source: int | tf.Tensor, max_length: int | tf.Tensor, num_hypotheses: int = 1
    ) -> dict:
        """Return an empty cache, or an empty dictionary if another pipeline stage has the block.

        See `MultiHeadAttention.init_cache`.

        Args:
            source: Integer. Number b of sources. For a decoder block, the memory: a tensor of shape
                `[b, s, h]`.
            max_length: Integer. Maximum number of positions.
            num_hypotheses: Integer. Number k of sequences per source. Defaults to `1`.
        """
        arguments = (source, max_length, num_hypotheses)
        return dispatch(self, self._init_cache, arguments, {}, placeholder=lambda *_: {})

    def _init_cache(self, *arguments):
        return self.attention.init_cache(*arguments)

    def compute_output_spec(
        self, inputs: tf.Tensor, *args, cache: dict | None = None, **kwargs
    ) -> keras.KerasTensor:
        outputs = super().compute_output_spec(inputs)
        if cache is None:
            return outputs
        return outputs, tf.nest.map_structure(lambda x: keras.KerasTensor(x.shape, x.dtype), cache)


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
        cache: List with the cache of each block, from `init_cache`.
        prefix_mask: See `TransformerEncoderLayer`.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, s, h]`. With a cache, an `(output, caches)` tuple with the caches for the next call.

    Example:

    >>> TransformerEncoder(2, 16, 4, 32)(tf.zeros((2, 5, 16))).shape
    TensorShape([2, 5, 16])
    """

    layer_class = TransformerEncoderLayer

    def call(
        self,
        inputs: tf.Tensor,
        attention_mask: tf.Tensor | Segments | None = None,
        cache: list[dict] | None = None,
        prefix_mask: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor | tuple[tf.Tensor, list[dict]]:
        options = {"training": training} if cache is None else {"prefix_mask": prefix_mask}
        return self.run_blocks(inputs, [attention_mask], cache, **options)
