"""Multi-head attention, with a cache for decoding one token at a time."""

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
from dtransformer.layers.attention_mask import Segments, own_or_keras_mask
from dtransformer.layers.base import StreamLayer, check_rate, register
from dtransformer.layers.cached_attention import next_positions, of_prefix, with_new_position
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
    """Attend from queries to keys and values, in several heads.

    The projections of queries, keys and values are column parallel (all of a head on
    one device), the output's is row parallel, and its bias is added after the
    reduction. Scores are scaled before the product, so that 16-bit types do not
    overflow. A position that is masked has a probability of exactly 0, and a query
    that may attend nowhere gets a context of 0.

    Reference: Vaswani et al., 2017, "Attention is all you need", §3.2; Shoeybi et
    al., 2019, "Megatron-LM", §3.

    Args:
        hidden_size: size h of queries, keys, values and the output.
        num_heads: number n of heads; divides h.
        hidden_dropout_rate: dropout of the output, in [0, 1).
        attention_dropout_rate: dropout of the probabilities, in [0, 1).
        softmax_compute_type: type that the softmax is computed in.
        kernel_initializer: a Keras initializer, or its name.
        num_kv_heads: number m of heads of keys and values; divides n, which it is by default.
            n / m heads of queries share one (Ainslie et al., 2023, arXiv 2305.13245).
        head_dim: number d of features of a head; h / n by default.
        use_bias: whether projections have a bias.
        qkv_bias: whether those of queries, keys and values do; `use_bias` by default.
        rotary_base: turns queries and keys by rotary positions of this base; None for no
            positions. See `rotary_frequencies`.
        rotary_fraction: share of a head's features that turn.
        rotary_scaling: how the angles are scaled for longer texts; None for not.
        causal: whether a query may attend to no later position; with a cache none does.
        window: how far a query may attend; None for everywhere. See `is_near`.
        alibi: whether scores have the bias of ALiBi; see `position_bias.alibi`.
        relative_max_distance: of the table of positions of a call; see `relative_bias`.
        query_scale: what queries are multiplied with; 1 / √d by default. First values of their
            kernel make up for it, so that the first scores do not depend on it.
        soft_cap: scores x become c·tanh(x / c); None for not. See `attention`.
        qk_norm: the norm of each head's queries and keys before they turn, a name of `make_norm`;
            None for none (Henry et al., 2020, arXiv 2010.04245, §2). `"rms_norm_all_heads"` is one
            of all heads together.
        qk_norm_epsilon: what these add to the variance; their own default where it is None.
        qk_norm_after_rotary: whether they come after the turning, as HunYuan's.
        sinks: whether each head has a score that is learnt, besides those of its keys; see
            `attention`.
        implementation: `"auto"`, `"reference"`, `"blockwise"` or `"cudnn"`; see `attention`.

    Call arguments:
        query: tensor [b, s, h].
        key: tensor [b, t, h].
        value: tensor [b, t, h].
        attention_mask: tensor of 0 and 1, or bool: [b, t], [b, s, t], [b, 1, t] or
            [b, n, s, t]; 1 where a query may attend. Or `Segments`.
        cache: what earlier calls computed. From `init_cache`, for attention of a
            sequence to itself: the keys and values of the new position, s being 1, are put
            in at `cache["index"]`, and queries attend to positions up to their own.
            From `project_memory`, for attention to a memory: `key` and `value` are
            not read and may be None; the query may have k rows for each of the memory's.
            An empty dict, for the beginning of a sequence: it is attended to as without a
            cache, and its keys and values are in the cache for the next call, `"prefix_key"`
            and `"prefix_value"` [b, m, p, d]. Together with what `init_cache` gives, the
            positions of all k sequences of a source come after its p ones.
        prefix_mask: bool tensor [b, p], what may be seen of the prefix; None for all.
        position_table: tensor [r, n], the table of T5's relative positions; None for none.
        training: whether dropout applies.

    Output shape:
        The query's; with a cache, a pair of this and the cache for the next call.

    Raises:
        ValueError: num_heads does not divide hidden_size where there is no head_dim,
            num_kv_heads does not divide num_heads, or the config cannot divide them.

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
            raise ValueError(f"num_heads={num_heads} must divide hidden_size={hidden_size}")
        self.head_dim = check_int("head_dim", head_dim or hidden_size // num_heads)
        self.value_dim = self.head_dim
        self.num_kv_heads = check_int("num_kv_heads", num_kv_heads or num_heads)
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        self.use_bias = use_bias
        self.qkv_bias = use_bias if qkv_bias is None else qkv_bias
        self.rotary_base, self.rotary_fraction = rotary_base, rotary_fraction
        self.rotary_scaling = rotary_scaling
        self.set_rotary(self.head_dim)
        self.causal, self.alibi = causal, alibi
        self.window = None if window is None else check_int("window", window)
        self.relative_max_distance = check_int("relative_max_distance", relative_max_distance)
        self.query_scale = query_scale
        self.soft_cap = elementwise.check_soft_cap(soft_cap)
        self.qk_norm, self.qk_norm_epsilon, self.sinks = qk_norm, qk_norm_epsilon, sinks
        self.qk_norm_after_rotary = qk_norm_after_rotary
        if implementation not in IMPLEMENTATIONS:
            names = ", ".join(IMPLEMENTATIONS)
            raise ValueError(f"implementation must be one of {names}, got {implementation!r}")
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
        """Compute the angles of rotary positions, if there are any, of so many features of a head."""
        if self.rotary_base is not None:
            rotary = self.rotary_base, self.rotary_fraction, self.rotary_scaling
            self._frequencies = rotary_frequencies(num_features, *rotary)
            self._rotary_factor = attention_factor(self.rotary_scaling)

    def add_projections(self) -> None:
        """Add the weights of the projections of queries, keys and values."""
        h, d = self.hidden_size, self.head_dim
        n, m = self.num_heads, self.num_kv_heads
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
            bias, axes = None, ("heads", "head_dim")
            if self.qkv_bias:
                bias = self.add_weight((heads, d), "zeros", axes=axes, name=f"{name}_bias")
            setattr(self, f"{name}_bias", bias)

    def build(
        self, query_shape: tuple, key_shape: tuple | None = None, value_shape: tuple | None = None
    ) -> None:
        h, n, m = self.hidden_size, self.num_heads, self.num_kv_heads
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
            attention_mask = own_or_keras_mask(attention_mask, key)
        check_inputs(self.hidden_size, query, key, value)
        decodes = bool(cache)
        if not decodes:
            check_mask(attention_mask, query, key.shape[1], self.num_heads)
        if not decodes or "index" in cache:
            q, k, v = self._project({"query": query, "key": key, "value": value})
            masks = attention_mask, prefix_mask
            turned = lambda q, k: self._turned(q, k, cache, masks)
            order = (self._normalized, turned)[:: -1 if self.qk_norm_after_rotary else 1]
            for step in order:
                q, k = step(q, k)
            if decodes:
                bias = self._bias(position_table)
                cache, *seen = with_new_position(cache, k, v, *masks, self.window, bias)
            elif cache is not None:
                cache = of_prefix(k, v, self.window)
        else:
            (q,) = self._project({"query": query})
            seen = [cache["key"]], [cache["value"]], attention_mask, None
        scale = self.head_dim**-0.5 if self.query_scale is None else self.query_scale
        q = elementwise.scale(q, tf.cast(scale, q.dtype)) if scale != 1 else q
        if decodes:
            q = kv_cache.side_by_side(q, static_or_dynamic_shape(seen[0][0])[0])
            context = self._attend(q, *seen)
        else:
            context = self._attend_at_once(q, k, v, attention_mask, position_table, training)
        # [batch, heads, length, head_dim] -> [batch, length, heads, head_dim] -> [.., embed]
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
        """[batch, length, embed] -> [batch, heads, length, head_dim], of each projection.

        Those of the same input are one product, and share one reduction of its gradient.
        """
        names_of = {}
        for name, x in inputs.items():
            names_of.setdefault(id(x), []).append(name)
        heads = {}
        for names in names_of.values():
            kernels = [getattr(self, f"{name}_kernel") for name in names]
            biases = [getattr(self, f"{name}_bias") for name in names]
            heads.update(zip(names, project_to_heads(inputs[names[0]], kernels, biases)))
        return [heads[name] for name in inputs]

    def _turned(self, q, k, cache, masks):
        """Turn queries and keys of a sequence's next positions by the angles of these."""
        if self.rotary_base is None:
            return q, k
        grows = (self.rotary_scaling or {}).get("llama_4_scaling_beta")
        in_texts = bool(grows) or self.qk_norm_after_rotary  # more counts than their distance
        positions = next_positions(q, cache, *masks, in_texts)
        q, k = [rotate(x, positions, self._frequencies, self._rotary_factor) for x in (q, k)]
        if grows:
            factor = query_factor(positions, self.rotary_scaling)
            q = elementwise.scale(q, tf.cast(factor, q.dtype)[:, None, :, None])
        return q, k

    def _normalized(self, q, k):
        if self.query_norm is None:
            return q, k
        return self.query_norm(q), self.key_norm(k)

    def _attend_at_once(self, q, k, v, mask, table, training):
        """Attend without a cache: from all queries to all keys."""
        options = {
            "causal": self.causal,
            "window": self.window,
            "dropout": self.attention_dropout.masks(training),
        }

        def attend(q, k, v, *tables):
            return self._attend(q, [k], [v], mask, self._bias(*tables), **options)

        tensors = [q, k, v] if table is None else [q, k, v, table]
        if self.recomputes and training:
            others = {"soft_cap": self.soft_cap, "softmax_compute_type": self.softmax_compute_type}
            others |= {"mask": mask, "bias": self.alibi or table is not None, **options}
            if implementation_for(self.implementation, q, k, **others) == "reference":
                weights = [self.sink_scores] if self.sinks else []
                return recomputed(attend, tensors, weights)  # the others keep no scores
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
        """Return what positions add to scores."""
        if table is not None:
            return relative_bias(table, self.relative_max_distance, self.causal)
        return alibi(self.num_heads) if self.alibi else None

    def init_cache(
        self, batch_size: int | tf.Tensor, max_length: int | tf.Tensor, num_hypotheses: int = 1
    ) -> dict[str, tf.Tensor]:
        """Return an empty cache for attention of a sequence to itself.

        Args:
            batch_size: number b of sources.
            max_length: number of positions the cache can hold.
            num_hypotheses: number k of sequences of each source, which follow each other in the
                queries [b·k, s, h]. Each attends to those entries of its source that the mask
                [b, k, max_length·k] allows: entry p·k + c is position p of the sequence c.

        Returns:
            A dict of `"key"` and `"value"` [b, m, max_length·k, d], of a window's length at most,
            and `"index"`, the number of positions that there were (int32 scalar).
        """
        if self.window is not None:
            least = min if isinstance(max_length, int) else tf.minimum
            max_length = least(max_length, self.window)
        shape = [batch_size, self.num_kv_heads, max_length * num_hypotheses, self.head_dim]
        key, value = (kv_cache.empty(shape, self.compute_dtype) for _ in range(2))
        return {"key": key, "value": value, "index": tf.constant(0)}

    def project_memory(self, memory: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the cache for attention to a memory that stays the same.

        Args:
            memory: tensor [b, t, h].

        Returns:
            A dict of `"key"` and `"value"` [b, m, t, d].
        """
        memory = tf.cast(memory, self.compute_dtype)
        k, v = self._project({"key": memory, "value": memory})
        return {"key": k, "value": v}
