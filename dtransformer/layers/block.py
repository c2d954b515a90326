"""Base classes of Transformer blocks and of stacks of blocks, and placement on pipeline stages."""

from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.block_forms import (
    Pattern,
    check_pattern,
    ends_with_norm,
    get_block_arguments,
    has_experts,
)
from dtransformer.errors import check_int
from dtransformer.layers.arguments import check_floating, get_init_arguments, pop_arguments
from dtransformer.layers.attention import MultiHeadAttention
from dtransformer.layers.base import StreamLayer
from dtransformer.layers.feed_forward import FeedForward
from dtransformer.layers.norm import LayerNorm, RMSNorm, make_norm
from dtransformer.layers.position_bias import RelativePositionTable
from dtransformer.parallel import parallelize
from dtransformer.parallel.config.config import (
    TransformerOpParallelConfig,
    TransformerRecomputeConfig,
    get_parallel_config,
)
from dtransformer.parallel.recompute.recompute import as_recompute_config
from dtransformer.parallel.tracing.shared_blocks import SharedBlocks

# Layer types by the names in `TransformerRecomputeConfig.select`.
_SUBLAYERS = {
    "attention": MultiHeadAttention,
    "feed_forward": FeedForward,
    "norm": (LayerNorm, RMSNorm),
}


class TransformerBlock(StreamLayer):
    """Base class of the blocks in a `BlockStack`.

    Attributes:
        comm_fusion: Index of the bucket that reduces the block's gradients, or `None`.
        recompute_config: The `TransformerRecomputeConfig` set by `recompute`.
        shared: The `SharedBlocks` of the stack, or `None` outside of a stack.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.comm_fusion = None
        self.shared = None
        self.recompute_config = TransformerRecomputeConfig()

    def use_experts(self, has_experts: bool = True) -> None:
        """Choose between a mixture of experts and a feed-forward layer.

        Call it in a `lambda_func`, before the block is built. Otherwise `moe_every` decides.

        Args:
            has_experts: Boolean, whether to use a `MoE`. Defaults to `True`.

        Raises:
            ValueError: If the block has no `moe_config` with several experts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no feed-forward layer to replace.")

    def complete(self) -> None:
        """Create sublayers that depend on the placement of the block."""

    def set_comm_fusion(self, bucket: int) -> None:
        """Reduce the block's gradients in the bucket with this index."""
        self.comm_fusion = bucket

    def recompute(self, config: bool | TransformerRecomputeConfig = True) -> None:
        """Choose the activations that the backward pass computes again instead of storing them.

        Args:
            config: `True` for the entire block, `False` for none, or a
                `TransformerRecomputeConfig`. Defaults to `True`.
        """
        config = self.recompute_config = as_recompute_config(config)
        self.is_recomputed = config.recompute
        for layer in _compat.flat_layers(self, include_self=False):
            names = [name for name, kind in _SUBLAYERS.items() if isinstance(layer, kind)]
            is_selected = not config.recompute and any(name in config.select for name in names)
            if names and is_selected != layer.is_recomputed:
                layer.is_recomputed = is_selected
                if "attention" not in names:  # Attention computes only its scores again.
                    _compat.set_remat(layer, is_selected)

    def run_block(
        self, function: Callable, inputs: list[tf.Tensor], masks: list, training: bool
    ) -> tf.Tensor:
        """Call `function(*inputs, *masks)` with the block's recompute and sharing options.

        See `parallelize.run_block`.
        """
        check_floating("inputs", inputs[0])
        return parallelize.run_block(self, function, inputs, masks, training)

    def compute_output_spec(self, inputs: tf.Tensor, *args, **kwargs) -> keras.KerasTensor:
        """Return the spec of the output, for the arguments of every method."""
        return super().compute_output_spec(inputs)


class BlockStack(StreamLayer):
    """Stack of blocks of the class `layer_class`.

    The stack ends with a norm unless its blocks already normalize their sums (post-norm).

    Args:
        num_layers: Integer. Number of blocks.
        hidden_size, num_heads, ffn_hidden_size: See the block class.
        lambda_func: Function that places each block on a pipeline stage. Called as
            `lambda_func(network=, layer_id=, offset=, parallel_config=, layers=)`. Defaults to
            `spread_evenly`.
        offset: Integer. Number of blocks in the network before this stack. Defaults to `0`.
        network_layers: Integer. Number of blocks in the network. Defaults to `offset + num_layers`.
        relative_ranges: Integer. Number of ranges in T5's table of relative positions, which all
            blocks share, see `relative_bias`. Defaults to `None`, no table.
        moe_every: Integer n. With several experts in `moe_config`, every n-th block is a mixture of
            experts, unless `lambda_func` calls `use_experts`. Defaults to `1`.
        block_pattern: Options that differ between blocks, see `block_forms`. Defaults to `None`.
        **layer_arguments: Other arguments of the blocks.
    """

    layer_class = None

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        ffn_hidden_size: int,
        lambda_func: Callable | None = None,
        offset: int = 0,
        network_layers: int | None = None,
        relative_ranges: int | None = None,
        moe_every: int = 1,
        block_pattern: Pattern | None = None,
        **layer_arguments,
    ):
        init_arguments = get_init_arguments(locals())
        super().__init__(**pop_arguments(layer_arguments, ["name", "dtype", "trainable"]))
        check_int("moe_every", moe_every)
        del init_arguments["layer_arguments"]
        if lambda_func is None:
            del init_arguments["lambda_func"]
        self.arguments = {**init_arguments, **layer_arguments}
        self.blocks = [
            self.layer_class(
                hidden_size,
                num_heads,
                ffn_hidden_size,
                dtype=self.dtype_policy,
                name=f"block_{index}",
                **self._block_arguments(layer_arguments, index),
            )
            for index in range(num_layers)
        ]
        shared = SharedBlocks(num_layers)
        for index, block in enumerate(self.blocks):
            block.shared = shared
            block.recompute(get_parallel_config().recompute)
            uses_experts = has_experts(self.arguments, index)
            if "experts" in get_block_arguments(self.arguments, index) or not uses_experts:
                block.use_experts(uses_experts)
        place_blocks(self.blocks, lambda_func or spread_evenly, offset, network_layers)
        for block in self.blocks:
            block.complete()
        self.position_table = None
        if num_layers and relative_ranges is not None:
            policy = self.dtype_policy
            self.position_table = RelativePositionTable(
                num_heads, relative_ranges, dtype=policy, name="relative_positions"
            )
            self.position_table.pipeline_stage = self.blocks[0].pipeline_stage
        self.final_norm = None
        if num_layers and ends_with_norm(layer_arguments):
            self.final_norm = make_norm(
                layer_arguments.get("norm", "layer_norm"),
                layer_arguments.get("norm_epsilon"),
                compute_type=layer_arguments.get("layernorm_compute_type", "float32"),
                dtype=self.dtype_policy,
                name="final_norm",
            )
            self.final_norm.pipeline_stage = self.blocks[-1].pipeline_stage

    def _block_arguments(self, layer_arguments, index):
        """Return the arguments of a block, with the options of its pattern."""
        pattern = check_pattern(self.arguments["block_pattern"])
        options = dict(pattern[index % len(pattern)])
        options.pop("experts", None)
        return {**layer_arguments, **options}

    def build(self, input_shape: tuple, *args) -> None:
        for layer in [self.position_table, *self.blocks, self.final_norm]:
            if layer is not None and not layer.built:
                layer.build(input_shape)

    def run_blocks(self, inputs: tf.Tensor, *args, training: bool = False) -> tf.Tensor:
        """Apply all blocks and the final norm.

        Args:
            inputs: Input of the first block.
            *args: Other arguments of each block.
            training: Boolean, whether to apply dropout.
        """
        options = self._shared_options(inputs)
        for block in self.blocks:
            inputs = block(inputs, *args, training=training, **options)
        return self._normalize(inputs)

    def decode_step(
        self, inputs: tf.Tensor, caches: list, mask: tf.Tensor | None = None, **options
    ) -> tuple[tf.Tensor, list]:
        """Compute the next position of each sequence.

        Args:
            inputs: Tensor of shape `[b·k, 1, h]`.
            caches: List with the cache of each block.
            mask: Mask of the cache's entries, see `MultiHeadAttention.decode_step`.
            **options: Other arguments of the blocks' `decode_step`.

        Returns:
            An `(output, caches)` tuple: a tensor of the input's shape, and the next caches.
        """
        options |= self._shared_options(inputs)
        next_caches = []
        for block, cache in zip(self.blocks, caches, strict=True):
            inputs, cache = block.decode_step(inputs, cache, mask, **options)
            next_caches.append(cache)
        return self._normalize(inputs), next_caches

    def _shared_options(self, inputs):
        """Return the arguments of all blocks that come from the stack."""
        if self.position_table is None:
            return {}
        return {"position_table": self.position_table(inputs)}

    def _normalize(self, outputs):
        return outputs if self.final_norm is None else self.final_norm(outputs)


def place_blocks(blocks, lambda_func, offset=0, network_layers=None):
    """Place every block with `lambda_func` and check the result.

    Args:
        blocks: List of `TransformerBlock`.
        lambda_func: See `BlockStack`.
        offset: Integer. Number of blocks in the network before these. Defaults to `0`.
        network_layers: Integer. Number of blocks in the network. Defaults to the number up to the
            last of `blocks`.

    Raises:
        ValueError: If there are more model chunks than blocks, a stage is out of range, or stages
            decrease along the network.
    """
    config = get_parallel_config()
    layers = network_layers or offset + len(blocks)
    num_chunks = config.placement.num_chunks
    if num_chunks > layers:
        chunks = ""
        if config.pipeline_chunks > 1:
            chunks = f" with `pipeline_chunks={config.pipeline_chunks}`"
        raise ValueError(
            f"`pipeline_stage={config.pipeline_stage}`{chunks} needs at least {num_chunks} blocks, "
            f"but the network has {layers}. Use fewer stages or chunks."
        )
    for index, block in enumerate(blocks):
        block.pipeline_stage = 0  # Default for a `lambda_func` that sets no stage.
        lambda_func(
            network=block, layer_id=index, offset=offset, parallel_config=config, layers=layers
        )
    check_stages(blocks, num_chunks)


def spread_evenly(
    network: keras.Model,
    layer_id: int,
    offset: int,
    parallel_config: TransformerOpParallelConfig,
    layers: int,
) -> None:
    """Spread blocks evenly over pipeline stages or model chunks: the default `lambda_func`.

    Also spreads the blocks over the gradient buckets. On a single stage with more than two chunks,
    chunk sizes minimize the compile time instead, see `shared_chunks`.

    Args:
        network: The block.
        layer_id: Integer. Index of the block in its stack.
        offset: Integer. Number of blocks in the network before the stack.
        parallel_config: The `TransformerOpParallelConfig`.
        layers: Integer. Number of blocks in the network.
    """
    position = layer_id + offset
    chunks = parallel_config.placement.num_chunks
    groups = parallel_config.gradient_aggregation_group
    if parallel_config.pipeline_stage == 1 and layers >= chunks > 2:
        first, inner = _chunk_sizes(layers, chunks)
        network.pipeline_stage = min(max(position - first + inner, 0) // inner, chunks - 1)
    else:
        network.pipeline_stage = min(position // max(layers // chunks, 1), chunks - 1)
    network.set_comm_fusion(position // max(layers // groups, 1) + 1)


def _chunk_sizes(layers, chunks):
    """Return the numbers of blocks of the first chunk and of an inner chunk.

    Inner chunks are compiled once, the first and the last separately. Compile time grows with the
    square of a chunk's blocks, so the sizes minimize first² + last² + inner².
    """
    num_inner = chunks - 2
    inner = min(round(layers * num_inner / (2 + num_inner**2)), (layers - 2) // num_inner)
    inner = max(inner, 1)
    return (layers - inner * num_inner) // 2, inner


def check_stages(blocks, num_stages):
    """Check that stages are in range and never decrease along the network.

    Raises:
        ValueError: If they do. The message names the block and its stage.
    """
    previous = 0
    for index, block in enumerate(blocks):
        stage = block.pipeline_stage
        if not 0 <= stage < num_stages:
            raise ValueError(
                f"Block {index} ({block.name}) is on stage {stage}, but the stages are 0 to "
                f"{num_stages - 1}."
            )
        if stage < previous:
            raise ValueError(
                f"Block {index} ({block.name}) is on stage {stage}, after a block on stage "
                f"{previous}. Stages must not decrease along the network."
            )
        previous = stage
