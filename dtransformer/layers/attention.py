"""Multi-head attention with a cache for decoding one token at a time."""

import keras
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers import elementwise
from dtransformer.layers.attention_core import IMPLEMENTATIONS, attention, implementation_for
from dtransformer.layers.attention_inputs import (
    check_inputs,
    check_layout,
    check_mask,
)
from dtransformer.layers.attention_mask import Segments, mask_or_keras_mask
from dtransformer.layers.base import StreamLayer, check_rate, register
from dtransformer.layers.cached_attention import insert_position, next_positions, prefix_cache
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.initializers import FlattenedInitializer
from dtransformer.layers.norm import make_norm
from dtransformer.layers.position_bias import PositionBias, alibi, relative_bias
from dtransformer.layers.rotary import attention_factor, query_factor, rotary_frequencies, rotate
from dtransformer.parallel.decoding import cache as kv_cache
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
        rotary_base: Float. Base of the rotary position embedding, see `rotary_frequencies`.
            Defaults to `None`, which disables it.
        rotary_fraction: Float. Fraction of the features to rotate. Defaults to `1.0`.
        rotary_scaling: Dictionary. Extension of the rotary embedding to longer sequences, see
            `rotary_frequencies`. Defaults to `None`.
        causal: Boolean, whether to hide later positions. With a cache they are always hidden.
            Defaults to `False`.
        window: Integer. Sliding-window size, see `is_near`. `None` disables it (default).
        alibi: Boolean, whether to add the ALiBi bias to scores. Defaults to `False`.
        relative_max_distance: Integer. Largest distance that T5's relative positions distinguish,
            see `relative_bias`. Defaults to `128`.
        query_scale: Float. Factor of the queries. The kernel initializer compensates for it, so
            initial scores do not depend on it. Defaults to 1 / √d.
        soft_cap: Float c. Replaces a score x by c·tanh(x / c). `None` disables it (default).
        qk_norm: Name of a norm, see `make_norm`. Normalizes each head of queries and keys before
            the rotary embedding ([Henry et al., 2020](https://arxiv.org/abs/2010.04245)).
            `"rms_norm_all_heads"` normalizes over all heads. `None` disables it (default).
        qk_norm_epsilon: Float. Epsilon of these norms. Defaults to the norm's default.
        qk_norm_after_rotary: Boolean, whether these norms follow the rotary embedding, as in
            HunYuan. Defaults to `False`.
        sinks: Boolean, whether heads learn an attention sink, see `attention`. Defaults to `False`.
        implementation: `"auto"`, `"reference"`, `"blockwise"` or `"cudnn"`, see `attention`.
            Defaults to `"auto"`.

    Call arguments:
        query: Tensor of shape `[b, s, h]`.
        key, value: Tensors of shape `[b, t, h]`.
        attention_mask: Boolean or 0/1 tensor of shape `[b, t]`, `[b, s, t]`, `[b, 1, t]` or
            `[b, n, s, t]`, 1 where a query may attend; or `Segments`. Defaults to the Keras mask of
            `key`.
        cache: Dictionary with the keys and values of earlier calls. With a cache from `init_cache`
            the layer is self-attention: it inserts one new position (s = 1) at `cache["index"]` and
            hides later positions. With a cache from `project_memory`, `key` and `value` may be
            `None`, and the query may have k rows per memory row. An empty dictionary starts a
            sequence: the call attends as without a cache and returns a cache with `"prefix_key"`
            and `"prefix_value"` of shape `[b, m, p, d]`. Merged with the cache of `init_cache`,
            these p positions come before the positions of all k hypotheses.
        prefix_mask: Boolean tensor of shape `[b, p]`, True for visible prefix positions.
        position_table: Tensor of shape `[r, n]`, the table of T5's relative positions.
        training: Boolean, whether to apply dropout.

    Output shape:
        `[b, s, h]`. With a cache, an `(output, cache)` tuple with the cache for the next call.

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
        rotary_base: float | None = None,
        rotary_fraction: float = 1.0,
        rotary_scaling: dict | None = None,
        causal: bool = False,
        window: int | None = None,
        alibi: bool = False,
        relative_max_distance: int = 128,
        query_scale: float | None = None,
        soft_cap: float | None = None,
        qk_norm: str | None = None,
        qk_norm_epsilon: float | None = None,
        qk_norm_after_rotary: bool = False,
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
        self.rotary_base = rotary_base
        self.rotary_fraction = rotary_fraction
        self.rotary_scaling = rotary_scaling
        self.set_rotary(self.head_dim)
        self.causal = causal
        self.alibi = alibi
        self.window = None if window is None else check_int("window", window)
        self.relative_max_distance = check_int("relative_max_distance", relative_max_distance)
        self.query_scale = query_scale
        self.soft_cap = elementwise.check_soft_cap(soft_cap)
        self.qk_norm = qk_norm
        self.qk_norm_epsilon = qk_norm_epsilon
        self.sinks = sinks
        self.qk_norm_after_rotary = qk_norm_after_rotary
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
        self.query_norm = self.key_norm = None
        if qk_norm is not None:
            self.query_norm, self.key_norm = (
                make_norm(qk_norm, qk_norm_epsilon, dtype=policy, name=f"{name}_norm")
                for name in ("query", "key")
            )

    def set_rotary(self, num_features: int) -> None:
        """Compute the rotary angles for `num_features` features per head, if enabled."""
        if self.rotary_base is not None:
            rotary = self.rotary_base, self.rotary_fraction, self.rotary_scaling
            self._frequencies = rotary_frequencies(num_features, *rotary)
            self._rotary_factor = attention_factor(self.rotary_scaling)

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
        for norm in filter(None, (self.query_norm, self.key_norm)):
            norm.build((None, n if norm is self.query_norm else m, None, self.head_dim))

    def call(
        self,
        query: tf.Tensor,
        key: tf.Tensor | None,
        value: tf.Tensor | None,
        attention_mask: tf.Tensor | Segments | None = None,
        cache: dict | None = None,
        prefix_mask: tf.Tensor | None = None,
        position_table: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor | tuple[tf.Tensor, dict]:
        if cache is None:
            attention_mask = mask_or_keras_mask(attention_mask, key)
        check_inputs(self.hidden_size, query, key, value)
        decodes = bool(cache)
        if not decodes:
            check_mask(attention_mask, query, key.shape[1], self.num_heads)
        if not decodes or "index" in cache:
            q, k, v = self._project({"query": query, "key": key, "value": value})
            masks = attention_mask, prefix_mask
            if not self.qk_norm_after_rotary:
                q, k = self._normalize_heads(q, k)
            q, k = self._apply_rotary(q, k, cache, masks)
            if self.qk_norm_after_rotary:
                q, k = self._normalize_heads(q, k)
            if decodes:
                bias = self._bias(position_table)
                cache, *attended = insert_position(cache, k, v, *masks, self.window, bias)
            elif cache is not None:
                cache = prefix_cache(k, v, self.window)
        else:
            (q,) = self._project({"query": query})
            attended = [cache["key"]], [cache["value"]], attention_mask, None
        scale = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        q = elementwise.scale(q, tf.cast(scale, q.dtype)) if scale != 1 else q
        if decodes:
            q = kv_cache.side_by_side(q, static_or_dynamic_shape(attended[0][0])[0])
            context = self._attend(q, *attended)
        else:
            context = self._attend_without_cache(q, k, v, attention_mask, position_table, training)
        # [batch, heads, length, head_dim] -> [batch, length, heads, head_dim] -> [batch, length,
        # embed]
        if decodes:
            context = kv_cache.one_by_one(context, static_or_dynamic_shape(query)[1])
        else:
            context = tf.transpose(context, [0, 2, 1, 3])
        output = row_parallel(context, self.output_kernel, ("heads", "head_dim"))
        if self.use_bias:
            output = add_bias(output, self.output_bias)
        output = self.hidden_dropout(output, training=training)
        return output if cache is None else (output, cache)

    def _project(self, inputs):
        """Return the queries, keys and values in `inputs`, each `[b, heads, length, head_dim]`.

        Projections of the same tensor are one product and share one gradient reduction.
        """
        names_by_input = {}
        for name, x in inputs.items():
            names_by_input.setdefault(id(x), []).append(name)
        heads = {}
        for names in names_by_input.values():
            kernels = [getattr(self, f"{name}_kernel") for name in names]
            biases = [getattr(self, f"{name}_bias") for name in names]
            heads.update(zip(names, project_to_heads(inputs[names[0]], kernels, biases)))
        return [heads[name] for name in inputs]

    def _apply_rotary(self, q, k, cache, masks):
        """Apply the rotary embedding to queries and keys at the next positions of a sequence."""
        if self.rotary_base is None:
            return q, k
        beta = (self.rotary_scaling or {}).get("llama_4_scaling_beta")
        # The result then depends on absolute positions.
        in_texts = bool(beta) or self.qk_norm_after_rotary
        positions = next_positions(q, cache, *masks, in_texts)
        q, k = [rotate(x, positions, self._frequencies, self._rotary_factor) for x in (q, k)]
        if beta:
            factor = query_factor(positions, self.rotary_scaling)
            q = elementwise.scale(q, tf.cast(factor, q.dtype)[:, None, :, None])
        return q, k

    def _normalize_heads(self, q, k):
        if self.query_norm is None:
            return q, k
        return self.query_norm(q), self.key_norm(k)

    def _attend_without_cache(self, q, k, v, mask, table, training):
        """Attend from all queries to all keys, without a cache."""
        options = {
            "causal": self.causal,
            "window": self.window,
            "dropout": self.attention_dropout.masks(training),
        }

        def attend(q, k, v, *tables):
            return self._attend(q, [k], [v], mask, self._bias(*tables), **options)

        tensors = [q, k, v] if table is None else [q, k, v, table]
        if self.recomputes and training:
            choice = {"soft_cap": self.soft_cap, "softmax_compute_type": self.softmax_compute_type}
            choice |= {"mask": mask, "bias": self.alibi or table is not None, **options}
            if implementation_for(self.implementation, q, k, **choice) == "reference":
                weights = [self.sink_scores] if self.sinks else []
                # Other implementations store no scores.
                return recomputed(attend, tensors, weights)
        return attend(*tensors)

    def _attend(self, q, keys, values, mask, bias, **options):
        return attention(
            q,
            keys,
            values,
            mask,
            bias,
            soft_cap=self.soft_cap,
            softmax_compute_type=self.softmax_compute_type,
            implementation=self.implementation if options else "reference",
            sinks=tf.convert_to_tensor(self.sink_scores) if self.sinks else None,
            **options,
        )

    def _bias(self, table=None) -> PositionBias | None:
        if table is not None:
            return relative_bias(table, self.relative_max_distance, self.causal)
        return alibi(self.num_heads) if self.alibi else None

    def init_cache(
        self, batch_size: int | tf.Tensor, max_length: int | tf.Tensor, num_hypotheses: int = 1
    ) -> dict[str, tf.Tensor]:
        """Return an empty cache for self-attention.

        With a window, the cache holds at most a window of positions per hypothesis.

        Args:
            batch_size: Integer. Number b of sources.
            max_length: Integer. Maximum number of positions.
            num_hypotheses: Integer. Number k of sequences per source, in consecutive rows of the
                queries `[b·k, s, h]`. Each sequence attends to the entries of its source that the
                mask `[b, k, max_length·k]` allows. Entry p·k + c is position p of sequence c.
                Defaults to `1`.

        Returns:
            A dictionary with `"key"` and `"value"` of shape `[b, m, max_length·k, d]`, and
            `"index"`, an int32 scalar: the number of positions inserted so far.
        """
        if self.window is not None:
            minimum = min if isinstance(max_length, int) else tf.minimum
            max_length = minimum(max_length, self.window)
        shape = [batch_size, self.num_kv_heads, max_length * num_hypotheses, self.head_dim]
        key, value = (kv_cache.empty(shape, self.compute_dtype) for _ in range(2))
        return {"key": key, "value": value, "index": tf.constant(0)}

    def project_memory(self, memory: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return a cache with the keys and values of a fixed memory, for cross-attention.

        Args:
            memory: Tensor of shape `[b, t, h]`.

        Returns:
            A dictionary with `"key"` and `"value"` of shape `[b, m, t, d]`.
        """
        memory = tf.cast(memory, self.compute_dtype)
        k, v = self._project({"key": memory, "value": memory})
        return {"key": k, "value": v}
