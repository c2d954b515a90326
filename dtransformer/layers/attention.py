"""Multi-head attention with a cache for decoding one token at a time."""

from collections.abc import Mapping

import keras
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers import elementwise
from dtransformer.layers.attention_core import (
    IMPLEMENTATIONS,
    attention,
    implementation_for,
    reference_attention,
)
from dtransformer.layers.attention_inputs import check_inputs, check_layout, check_mask
from dtransformer.layers.attention_mask import Segments, mask_or_keras_mask
from dtransformer.layers.attention_options import AttentionOptions
from dtransformer.layers.base import StreamLayer, check_rate, decoding_method, register
from dtransformer.layers.cached_attention import (
    next_positions,
    prompt_positions,
    sequence_positions,
    visible_entries,
)
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.initializers import FlattenedInitializer
from dtransformer.layers.norm import QKNorm
from dtransformer.layers.position_bias import PositionBias, alibi, relative_bias
from dtransformer.layers.rotary import Rotary
from dtransformer.parallel.decoding.cache import (
    KVCache,
    hypotheses_to_positions,
    positions_to_hypotheses,
)
from dtransformer.parallel.mesh.axis_rules import override_rules
from dtransformer.parallel.ops.feature_reductions import add_bias
from dtransformer.parallel.recompute.recompute import recomputed
from dtransformer.parallel.tensor_parallel.heads import project_to_heads
from dtransformer.parallel.tensor_parallel.linear import row_parallel
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


@register
class MultiHeadAttention(StreamLayer):
    """Multi-head attention from queries to keys and values.

    The projections of queries, keys and values are column-parallel, so each head is computed on one
    device. The output projection is row-parallel, and its bias is added after the reduction.
    Queries are scaled before the product with keys, so 16-bit scores do not overflow. Masked
    positions have probability exactly 0. A query with no visible key returns zeros, before the
    output bias.

    `call` attends from all queries to all keys. To generate, `prefill` starts a cache with a prompt
    or `init_cache` without one, and `decode_step` adds one position per call. `project_memory` and
    `attend_to_memory` do the same for cross-attention.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.2;
    [Shoeybi et al., 2019](https://arxiv.org/abs/1909.08053), section 3

    Args:
        hidden_size: Integer. Size h of queries, keys, values and the output.
        num_heads: Integer. Number n of query heads.
        hidden_dropout_rate: Float in [0, 1). Dropout of the output. Defaults to `0.1`.
        attention_dropout_rate: Float in [0, 1). Dropout of probabilities. Defaults to `0.1`.
        softmax_compute_type: Type of the softmax. Defaults to `"float32"`.
        kernel_initializer: Keras initializer or its name. Defaults to `"glorot_uniform"`.
        num_kv_heads: Integer. Number m of key and value heads, a divisor of n. n / m query heads
            share one ([Ainslie et al., 2023](https://arxiv.org/abs/2305.13245)). Defaults to n.
        head_dim: Integer. Features d per head. Defaults to h / n.
        use_bias: Boolean, whether projections have a bias. Defaults to `True`.
        qkv_bias: Boolean, whether the projections of queries, keys and values have a bias. Defaults
            to `use_bias`.
        rotary: `Rotary`, or a dictionary of its fields. Defaults to `None`, which disables rotary
            positions.
        causal: Boolean, whether `call` and `prefill` hide later positions. Defaults to `False`.
        window: Integer. Sliding-window size, see `is_near`. `None` disables it (default).
        alibi: Boolean, whether to add the ALiBi bias to scores. Defaults to `False`.
        relative_max_distance: Integer. Largest distance that T5's relative positions distinguish,
            see `relative_bias`. Defaults to `128`.
        query_scale: Float. Factor of the queries. The kernel initializer compensates for it, so
            initial scores do not depend on it. Defaults to 1 / √d.
        soft_cap: Float c. Replaces a score x by c·tanh(x / c). `None` disables it (default).
        qk_norm: `QKNorm`, or a dictionary of its fields. Defaults to `None`, which disables it.
        sinks: Boolean, whether heads learn an attention sink, see `attention`. Defaults to `False`.
        implementation: `"auto"`, `"reference"`, `"blockwise"` or `"cudnn"`, see `attention`.
            Defaults to `"auto"`.

    Call arguments:
        query: Tensor of shape `[b, s, h]`.
        key, value: Tensors of shape `[b, t, h]`.
        attention_mask: Boolean or 0/1 tensor of shape `[b, t]`, `[b, s, t]`, `[b, 1, t]` or
            `[b, n, s, t]`, 1 where a query may attend; or `Segments`. Defaults to the Keras mask of
            `key`.
        position_table: Tensor of shape `[r, n]`, the table of T5's relative positions.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, s, h]`

    Raises:
        ValueError: If the head sizes do not divide each other or the parallel config cannot shard
            them.

    Example:

    >>> x = tf.zeros((2, 5, 16))
    >>> MultiHeadAttention(16, 4)(x, x, x).shape
    TensorShape([2, 5, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        hidden_dropout_rate: float = 0.1,
        attention_dropout_rate: float = 0.1,
        softmax_compute_type: str = "float32",
        kernel_initializer: str | keras.initializers.Initializer = "glorot_uniform",
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        use_bias: bool = True,
        qkv_bias: bool | None = None,
        rotary: Rotary | dict | None = None,
        causal: bool = False,
        window: int | None = None,
        alibi: bool = False,
        relative_max_distance: int = 128,
        query_scale: float | None = None,
        soft_cap: float | None = None,
        qk_norm: QKNorm | dict | None = None,
        sinks: bool = False,
        implementation: str = "auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.hidden_size = check_int("hidden_size", hidden_size)
        self.num_heads = check_int("num_heads", num_heads)
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"`num_heads={num_heads}` must divide `hidden_size={hidden_size}`.")
        self.head_dim = check_int("head_dim", head_dim or hidden_size // num_heads)
        self.value_dim = self.head_dim
        self.num_kv_heads = check_int("num_kv_heads", num_kv_heads or num_heads)
        if num_heads % self.num_kv_heads:
            raise ValueError(f"`num_kv_heads={num_kv_heads}` must divide `num_heads={num_heads}`.")
        self.use_bias = use_bias
        self.qkv_bias = use_bias if qkv_bias is None else qkv_bias
        self.rotary = Rotary(**rotary) if isinstance(rotary, Mapping) else rotary
        self.qk_norm = QKNorm(**qk_norm) if isinstance(qk_norm, Mapping) else qk_norm
        self.causal = causal
        self.alibi = alibi
        self.window = None if window is None else check_int("window", window)
        self.relative_max_distance = check_int("relative_max_distance", relative_max_distance)
        self.query_scale = query_scale
        self.soft_cap = elementwise.check_soft_cap(soft_cap)
        self.sinks = sinks
        if implementation not in IMPLEMENTATIONS:
            names = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"`implementation` must be one of {names}, got {implementation!r}.")
        self.implementation = implementation
        check_layout(hidden_size, num_heads, self.num_kv_heads, implementation)
        self.hidden_dropout_rate = check_rate("hidden_dropout_rate", hidden_dropout_rate)
        self.attention_dropout_rate = check_rate("attention_dropout_rate", attention_dropout_rate)
        self.softmax_compute_type = softmax_compute_type
        self.kernel_initializer = kernel_initializer
        policy = self.dtype_policy
        self.attention_dropout = Dropout(
            attention_dropout_rate, dtype=policy, name="attention_dropout"
        )
        self.hidden_dropout = Dropout(hidden_dropout_rate, dtype=policy, name="hidden_dropout")
        self.query_norm = None
        self.key_norm = None
        if self.qk_norm is not None:
            self.query_norm = self.qk_norm.make_layer("query_norm", policy)
            self.key_norm = self.qk_norm.make_layer("key_norm", policy)
        if self.rotary is not None:
            self.rotary.frequencies(self.num_rotary_features)  # Raises for invalid options.

    @classmethod
    def from_config(cls, config: dict) -> "MultiHeadAttention":
        """Return a layer from its config, which may have the flat options of earlier versions."""
        return super().from_config(with_attention_objects(config))

    @property
    def num_rotary_features(self) -> int:
        """Number of leading features per head that have rotary positions."""
        return self.head_dim

    @property
    def depends_on_start(self) -> bool:
        """True if scores depend on absolute positions, not only on distances."""
        has_absolute_rotary = self.rotary is not None and bool(self.rotary.query_beta)
        return has_absolute_rotary or (self.qk_norm is not None and self.qk_norm.after_rotary)

    def add_projections(self) -> None:
        """Add the weights of the projections of queries, keys and values."""
        h = self.hidden_size
        d = self.head_dim
        n = self.num_heads
        m = self.num_kv_heads
        scales = {"query": d**-0.5 / self.query_scale} if self.query_scale else {}
        for name, heads in {"query": n, "key": m, "value": m}.items():
            kernel = self.add_weight(
                (h, heads, d),
                FlattenedInitializer(self.kernel_initializer, scale=scales.get(name, 1.0)),
                axes=("embed", "heads", "head_dim"),
                name=f"{name}_kernel",
                num_inputs=1,
            )
            setattr(self, f"{name}_kernel", kernel)
            bias = None
            axes = ("heads", "head_dim")
            if self.qkv_bias:
                bias = self.add_weight((heads, d), "zeros", axes=axes, name=f"{name}_bias")
            setattr(self, f"{name}_bias", bias)

    def build(
        self, query_shape: tuple, key_shape: tuple | None = None, value_shape: tuple | None = None
    ) -> None:
        h = self.hidden_size
        n = self.num_heads
        m = self.num_kv_heads
        self.add_projections()
        self.output_kernel = self.add_weight(
            (n, self.value_dim, h),
            FlattenedInitializer(self.kernel_initializer, num_inputs=2),
            axes=("heads", "head_dim", "embed"),
            name="output_kernel",
            num_inputs=2,
        )
        self.output_bias = None
        if self.use_bias:
            self.output_bias = self.add_weight((h,), "zeros", axes=("embed",), name="output_bias")
        self.sink_scores = None
        if self.sinks:
            self.sink_scores = self.add_weight(
                (n,), "zeros", axes=("heads",), name="sinks", autocast=False
            )
        self.attention_dropout.build((None, n, None, None))
        self.hidden_dropout.build(query_shape)
        if self.qk_norm is not None:
            self.query_norm.build((None, n, None, self.head_dim))
            self.key_norm.build((None, m, None, self.head_dim))

    def call(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        attention_mask: tf.Tensor | Segments | None = None,
        position_table: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        attention_mask = mask_or_keras_mask(attention_mask, key)
        check_inputs(self.hidden_size, query, key, value)
        check_mask(attention_mask, query, key.shape[1], self.num_heads)
        q, k, v = self._project({"query": query, "key": key, "value": value})
        q, k = self._add_positions(q, k, sequence_positions, query, attention_mask)
        context = self._attend(q, k, v, attention_mask, position_table, training)
        return self._project_output(tf.transpose(context, [0, 2, 1, 3]), training)

    @decoding_method
    def prefill(
        self,
        inputs: tf.Tensor,
        capacity: int | tf.Tensor,
        attention_mask: tf.Tensor | Segments | None = None,
        num_hypotheses: int = 1,
        position_table: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, KVCache]:
        """Compute self-attention of prompts and start a cache that contains them.

        Args:
            inputs: Tensor of shape `[b, p, h]`, aligned at the end.
            capacity, num_hypotheses: Room after the prompts, see `init_cache`.
            attention_mask, position_table: See the call arguments.

        Returns:
            An `(output, cache)` tuple: a tensor of shape `[b, p, h]` and a `KVCache`.
        """
        check_inputs(self.hidden_size, inputs, inputs, inputs)
        check_mask(attention_mask, inputs, inputs.shape[1], self.num_heads)
        q, k, v = self._project({"query": inputs, "key": inputs, "value": inputs})
        q, k = self._add_positions(q, k, prompt_positions, inputs, attention_mask)
        cache = self.init_cache(static_or_dynamic_shape(inputs)[0], capacity, num_hypotheses)
        cache = cache.with_prompt(k, v, self.window)
        context = self._attend(q, k, v, attention_mask, position_table)
        return self._project_output(tf.transpose(context, [0, 2, 1, 3])), cache

    @decoding_method
    def decode_step(
        self,
        inputs: tf.Tensor,
        cache: KVCache,
        mask: tf.Tensor | None = None,
        prompt_mask: tf.Tensor | None = None,
        position_table: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, KVCache]:
        """Compute self-attention of the next position. Earlier positions are in the cache.

        Args:
            inputs: Tensor of shape `[b·k, 1, h]`: the next position of k hypotheses per source.
            cache: `KVCache` from `prefill`, `init_cache` or the previous step.
            mask: Bool tensor of shape `[b, k, capacity·k]`, see `init_cache`. `None` shows all
                entries (default).
            prompt_mask: Bool tensor of shape `[b, p]`, True for visible positions of the prompt.
                `None` shows all (default).
            position_table: See the call arguments.

        Returns:
            An `(output, cache)` tuple: a tensor of shape `[b·k, 1, h]` and the next `KVCache`.

        Raises:
            ValueError: If there is more than one position.
        """
        check_inputs(self.hidden_size, inputs, None, None)
        if inputs.shape[1] not in (None, 1):
            raise ValueError(
                f"`decode_step` takes one position, got {inputs.shape[1]}. Use `prefill` for more."
            )
        q, k, v = self._project({"query": inputs, "key": inputs, "value": inputs})
        q, k = self._add_positions(q, k, next_positions, inputs, cache, prompt_mask)
        b = static_or_dynamic_shape(cache.key)[0]
        num_hypotheses = static_or_dynamic_shape(inputs)[0] // b
        visible, entry_positions = visible_entries(
            cache, num_hypotheses, mask, prompt_mask, self.window
        )
        bias = self._bias(position_table)
        if bias is not None:
            bias = bias.at_positions(tf.reshape(cache.index, [1]), entry_positions)
        cache = cache.insert(k, v)
        return self._attend_to_cache(q, cache, visible, bias, 1), cache

    def attend_to_memory(
        self, query: tf.Tensor, memory: KVCache, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Compute cross-attention to a memory whose keys and values are known.

        Args:
            query: Tensor of shape `[b·k, s, h]`, with k rows per row of the memory.
            memory: `KVCache` from `project_memory`.
            mask: Mask of the memory, see the call arguments.

        Returns:
            A tensor of shape `[b·k, s, h]`.
        """
        check_inputs(self.hidden_size, query, None, None)
        query = tf.cast(query, self.compute_dtype)
        num_queries = static_or_dynamic_shape(query)[1]
        with override_rules(self._sharding_rules):
            (q,) = self._project({"query": query})
            return self._attend_to_cache(q, memory, mask, None, num_queries)

    def init_cache(
        self, batch_size: int | tf.Tensor, capacity: int | tf.Tensor, num_hypotheses: int = 1
    ) -> KVCache:
        """Return an empty cache for self-attention.

        With a window, the cache holds at most a window of positions per hypothesis.

        Args:
            batch_size: Integer. Number b of sources.
            capacity: Integer. Maximum number of positions.
            num_hypotheses: Integer. Number k of sequences per source, in consecutive rows of the
                inputs `[b·k, 1, h]`. Each sequence attends to the entries of its source that the
                mask `[b, k, capacity·k]` allows. Entry p·k + c is position p of sequence c.
                Defaults to `1`.
        """
        if self.window is not None:
            minimum = min if isinstance(capacity, int) else tf.minimum
            capacity = minimum(capacity, self.window)
        shape = [batch_size, self.num_kv_heads, capacity * num_hypotheses, self.head_dim]
        return KVCache.empty(shape, self.compute_dtype)

    def project_memory(self, memory: tf.Tensor) -> KVCache:
        """Return the keys and values of a memory, for cross-attention.

        Args:
            memory: Tensor of shape `[b, t, h]`.
        """
        memory = tf.cast(memory, self.compute_dtype)
        with override_rules(self._sharding_rules):
            k, v = self._project({"key": memory, "value": memory})
        return KVCache(k, v)

    def _project(self, inputs):
        """Return the queries, keys and values in `inputs`, each `[b, heads, length, head_dim]`.

        Projections of the same tensor are one product and share one gradient reduction.
        """
        names_by_input = {}
        for name, x in inputs.items():
            names_by_input.setdefault(id(x), []).append(name)
        heads = {}
        for names in names_by_input.values():
            x = inputs[names[0]]
            kernels = [getattr(self, f"{name}_kernel") for name in names]
            biases = [getattr(self, f"{name}_bias") for name in names]
            heads.update(zip(names, project_to_heads(x, kernels, biases), strict=True))
        return [heads[name] for name in inputs]

    def _add_positions(self, q, k, get_positions, *arguments):
        """Normalize each head and apply the rotary embedding, in the configured order.

        `get_positions` is a function of `cached_attention`, with all `arguments` except `restarts`.
        """
        norm_is_last = self.qk_norm is not None and self.qk_norm.after_rotary
        if self.qk_norm is not None and not norm_is_last:
            q = self.query_norm(q)
            k = self.key_norm(k)
        if self.rotary is not None:
            positions = get_positions(*arguments, self.depends_on_start)
            q, k = self.rotary.apply(q, k, positions, self.num_rotary_features)
        if norm_is_last:
            q = self.query_norm(q)
            k = self.key_norm(k)
        return q, k

    def _scale_queries(self, q):
        scale = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        return q if scale == 1 else elementwise.scale(q, tf.cast(scale, q.dtype))

    def _attend(self, q, k, v, mask, table, training=False):
        """Attend from all queries to all keys."""
        q = self._scale_queries(q)
        options = {
            "mask": mask,
            "causal": self.causal,
            "window": self.window,
            "dropout": self.attention_dropout.masks(training),
            "soft_cap": self.soft_cap,
            "softmax_compute_type": self.softmax_compute_type,
        }

        def attend(q, k, v, *tables):
            bias = self._bias(*tables)
            return attention(
                q, k, v, self.implementation, bias=bias, sinks=self._sinks(), **options
            )

        tensors = [q, k, v] if table is None else [q, k, v, table]
        if self.is_recomputed and training:
            has_bias = self.alibi or table is not None
            chosen = implementation_for(self.implementation, q, k, bias=has_bias, **options)
            # Other implementations store no scores.
            if chosen == "reference":
                weights = [self.sink_scores] if self.sinks else []
                return recomputed(attend, tensors, weights)
        return attend(*tensors)

    def _attend_to_cache(self, q, cache, mask, bias, num_queries):
        """Attend from the queries of all hypotheses to the entries of a cache."""
        q = self._scale_queries(q)
        q = hypotheses_to_positions(q, static_or_dynamic_shape(cache.key)[0])
        options = AttentionOptions(
            mask,
            bias,
            soft_cap=self.soft_cap,
            softmax_compute_type=self.softmax_compute_type,
            sinks=self._sinks(),
        )
        context = reference_attention(q, cache.keys, cache.values, options)
        return self._project_output(positions_to_hypotheses(context, num_queries))

    def _project_output(self, context, training=False):
        """Project the contexts of all heads `[b, s, n, d]` to the output `[b, s, h]`."""
        if self.value_dim != self.head_dim:
            context = context[..., : self.value_dim]
        output = row_parallel(context, self.output_kernel, ("heads", "head_dim"))
        if self.use_bias:
            output = add_bias(output, self.output_bias)
        return self.hidden_dropout(output, training=training)

    def _sinks(self):
        return tf.convert_to_tensor(self.sink_scores) if self.sinks else None

    def _bias(self, table=None) -> PositionBias | None:
        if table is not None:
            return relative_bias(table, self.relative_max_distance, self.causal)
        return alibi(self.num_heads) if self.alibi else None


def with_attention_objects(arguments: Mapping) -> dict:
    """Return arguments with `Rotary` and `QKNorm` objects instead of a network's flat options.

    Args:
        arguments: Mapping with arguments of `MultiHeadAttention`, and possibly `rotary_base`,
            `rotary_fraction`, `rotary_scaling`, `qk_norm` (a name), `qk_norm_epsilon` and
            `qk_norm_after_rotary`.
    """
    result = dict(arguments)
    fraction = result.pop("rotary_fraction", 1.0)
    scaling = result.pop("rotary_scaling", None)
    if "rotary_base" in result:
        base = result.pop("rotary_base")
        result["rotary"] = None if base is None else Rotary(base, fraction, scaling)
    epsilon = result.pop("qk_norm_epsilon", None)
    after_rotary = result.pop("qk_norm_after_rotary", False)
    if isinstance(result.get("qk_norm"), str):
        result["qk_norm"] = QKNorm(result["qk_norm"], epsilon, after_rotary)
    return result
