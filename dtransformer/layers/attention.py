"""Multi-head attention, with a cache for decoding one token at a time."""

import keras
import tensorflow as tf

from dtransformer.layers.arguments import check_floating
from dtransformer.layers.attention_core import attention, expand_mask
from dtransformer.layers.base import (
    FlattenedInitializer,
    Layer,
    check_divisible,
    check_rate,
    check_size,
    register,
)
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.flat_inputs import as_sequences, in_form_of
from dtransformer.layers.rotary import rotary_frequencies, rotate
from dtransformer.parallel import cache as kv_cache
from dtransformer.parallel.features import add_bias
from dtransformer.parallel.recompute import recomputed
from dtransformer.parallel.shapes import static_or_dynamic_shape
from dtransformer.parallel.tensor_parallel.heads import project_to_heads
from dtransformer.parallel.tensor_parallel.linear import row_parallel


@register
class MultiHeadAttention(Layer):
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
        rotary_base: turns queries and keys by rotary positions of this base, in attention of a
            sequence to itself; None for no positions. See `rotary_frequencies`.
        rotary_fraction: share of a head's features that turn.
        rotary_scaling: how the angles are scaled for longer texts; None for not.

    Call arguments:
        query: tensor [b, s, h]; or [b·s, h] with a mask, which tells b.
        key: tensor [b, t, h], or [b·t, h].
        value: tensor [b, t, h], or [b·t, h].
        attention_mask: tensor of 0 and 1, or bool: [b, t], [b, s, t], [b, 1, t] or
            [b, n, s, t]; 1 where a query may attend.
        cache: what earlier calls computed. From `init_cache`, for attention of a
            sequence to itself: the keys and values of the s new positions are put
            in at `cache["index"]`, and queries attend to positions up to their own.
            From `project_memory`, for attention to a memory: `key` and `value` are
            not read and may be None; the query may have k rows for each of the memory's.
            An empty dict, for the beginning of a sequence: it is attended to as without a
            cache, and its keys and values are in the cache for the next call, `"prefix_key"`
            and `"prefix_value"` [b, m, p, d]. Together with what `init_cache` gives, the
            positions of all k sequences of a source come after its p ones.
        prefix_mask: bool tensor [b, p], what may be seen of the prefix; None for all.
        training: whether dropout applies.

    Output shape:
        The query's; with a cache, a pair of this and the cache for the next call.

    Raises:
        ValueError: num_heads does not divide hidden_size where there is no head_dim,
            num_kv_heads does not divide num_heads, or model_parallel does not divide them.

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
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.hidden_size = check_size("hidden_size", hidden_size)
        self.num_heads = check_size("num_heads", num_heads)
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"num_heads={num_heads} must divide hidden_size={hidden_size}")
        self.head_dim = check_size("head_dim", head_dim or hidden_size // num_heads)
        self.num_kv_heads = check_size("num_kv_heads", num_kv_heads or num_heads)
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        check_divisible(
            num_heads=num_heads, num_kv_heads=self.num_kv_heads, hidden_size=hidden_size
        )
        self.use_bias = use_bias
        self.qkv_bias = use_bias if qkv_bias is None else qkv_bias
        self.rotary_base, self.rotary_fraction = rotary_base, rotary_fraction
        self.rotary_scaling = rotary_scaling
        if rotary_base is not None:
            self._frequencies = rotary_frequencies(
                self.head_dim, rotary_base, rotary_fraction, rotary_scaling
            )
        self.hidden_dropout_rate = check_rate("hidden_dropout_rate", hidden_dropout_rate)
        self.attention_dropout_rate = check_rate("attention_dropout_rate", attention_dropout_rate)
        self.softmax_compute_type = softmax_compute_type
        self.kernel_initializer = kernel_initializer
        policy = self.dtype_policy
        self.attention_dropout = Dropout(
            attention_dropout_rate, dtype=policy, name="attention_dropout"
        )
        self.hidden_dropout = Dropout(hidden_dropout_rate, dtype=policy, name="hidden_dropout")

    def build(
        self, query_shape: tuple, key_shape: tuple | None = None, value_shape: tuple | None = None
    ) -> None:
        h, d = self.hidden_size, self.head_dim
        n, m = self.num_heads, self.num_kv_heads
        for name, heads in {"query": n, "key": m, "value": m}.items():
            kernel = self.add_weight(
                (h, heads, d),
                FlattenedInitializer(self.kernel_initializer),
                axes=("embed", "heads", "head_dim"),
                name=f"{name}_kernel",
            )
            setattr(self, f"{name}_kernel", kernel)
            bias = None
            if self.qkv_bias:
                axes = ("heads", "head_dim")
                bias = self.add_weight((heads, d), "zeros", axes=axes, name=f"{name}_bias")
            setattr(self, f"{name}_bias", bias)
        self.output_kernel = self.add_weight(
            (n, d, h),
            FlattenedInitializer(self.kernel_initializer, num_inputs=2),
            axes=("heads", "head_dim", "embed"),
            name="output_kernel",
        )
        self.output_bias = None
        if self.use_bias:
            self.output_bias = self.add_weight((h,), "zeros", axes=("embed",), name="output_bias")
        self.attention_dropout.build((None, n, None, None))
        self.hidden_dropout.build(query_shape)
        self.built = True

    def call(
        self,
        query: tf.Tensor,
        key: tf.Tensor | None,
        value: tf.Tensor | None,
        attention_mask: tf.Tensor | None = None,
        cache: dict | None = None,
        prefix_mask: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor | tuple[tf.Tensor, dict]:
        given = query
        query = as_sequences("query", query, attention_mask)
        key, value = (
            query if x is given else as_sequences(name, x, attention_mask)
            for name, x in {"key": key, "value": value}.items()
        )
        self._check_inputs(query, key, value)
        decodes = bool(cache)
        if not decodes:
            self._check_mask(attention_mask, query, key.shape[1])
        if not decodes or "index" in cache:
            q, k, v = self._project({"query": query, "key": key, "value": value})
            q, k = self._turned(q, k, cache if decodes else {})
            if decodes:
                cache, attention_mask = self._extend(cache, k, v, attention_mask, prefix_mask)
            elif cache is not None:
                cache = {"prefix_key": k, "prefix_value": v}
        else:
            (q,) = self._project({"query": query})
        keys, values = ([k], [v]) if not decodes else _kept(cache)
        q = q * tf.cast(self.head_dim**-0.5, q.dtype)
        if decodes:
            q = kv_cache.side_by_side(q, static_or_dynamic_shape(keys[0])[0])
        attend = lambda q, k, v: self._attend(q, [k], [v], attention_mask, training)
        if decodes:
            context = self._attend(q, keys, values, attention_mask, training)
        elif self.recomputes and training:
            context = recomputed(attend, [q, k, v], [])
        else:
            context = attend(q, k, v)
        # [batch, heads, length, head_dim] -> [batch, length, heads, head_dim] -> [.., embed]
        if decodes:
            context = kv_cache.one_by_one(context, static_or_dynamic_shape(query)[1])
        else:
            context = tf.transpose(context, [0, 2, 1, 3])
        output = row_parallel(context, self.output_kernel, ("heads", "head_dim"))
        if self.use_bias:
            output = add_bias(output, self.output_bias)
        output = self.hidden_dropout(output, training=training)
        output = in_form_of(output, given)
        return output if cache is None else (output, cache)

    def _check_inputs(self, query, key, value):
        """Refuse what would be broadcast, or fail in a product."""
        h, batch, length = self.hidden_size, query.shape[:1], None
        for name, x in {"query": query, "key": key, "value": value}.items():
            if x is None:
                continue
            expected = [*batch, length, h]
            if x.shape.rank != 3 or not x.shape.is_compatible_with(expected):
                raise ValueError(
                    f"{name} has the shape {list(x.shape)}, expected {expected}: a batch, a length "
                    f"and hidden_size={h}"
                )
            check_floating(name, x)
            if name == "key":
                length = x.shape[1]

    def _check_mask(self, mask, query, length):
        """Refuse a mask that would be broadcast over other sequences, or fail later."""
        if mask is None:
            return
        batch, own = query.shape[:2]
        forms = {2: [[batch, length]], 3: [[batch, s, length] for s in (1, own)]}
        forms[4] = [[batch, n, *form[1:]] for n in (1, self.num_heads) for form in forms[3]]
        allowed = forms.get(mask.shape.rank, ())
        if not any(mask.shape.is_compatible_with(form) for form in allowed):
            raise ValueError(
                f"the attention mask has the shape {list(mask.shape)}, expected "
                f"[{batch}, {length}], [{batch}, {own}, {length}] or [{batch}, {self.num_heads}, "
                f"{own}, {length}] for queries of the shape {list(query.shape)}"
            )

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

    def _turned(self, q, k, cache):
        """Turn queries and keys of a sequence's next positions by the angles of these."""
        if self.rotary_base is None:
            return q, k
        start = cache.get("index", 0)
        if "prefix_key" in cache:
            start += static_or_dynamic_shape(cache["prefix_key"])[2]
        positions = start + tf.range(static_or_dynamic_shape(q)[2])
        return [rotate(x, positions, self._frequencies) for x in (q, k)]

    def _attend(self, q, keys, values, mask, training):
        dropout = lambda probabilities: self.attention_dropout(probabilities, training=training)
        return attention(q, keys, values, mask, dropout, self.softmax_compute_type)

    def _extend(self, given, k, v, mask, prefix_mask):
        """Put the new positions in; return the cache and a mask of what may be seen."""
        num_sources, _, size, _ = static_or_dynamic_shape(given["key"])
        rows, _, num_new, _ = static_or_dynamic_shape(k)
        num_hypotheses, index = rows // num_sources, given["index"]
        k, v = kv_cache.put([given["key"], given["value"]], [k, v], index)
        extended = {**given, "key": k, "value": v, "index": index + num_new}
        seen = kv_cache.seen(size, index, num_new, num_hypotheses)
        if mask is not None:
            seen &= expand_mask(mask)
        if "prefix_key" not in given:
            return extended, seen
        length = static_or_dynamic_shape(given["prefix_key"])[2]
        if prefix_mask is None:
            prefix_mask = tf.ones([num_sources, length], "bool")
        shape = [num_sources, 1, num_new * num_hypotheses]
        return extended, tf.concat(
            [
                tf.broadcast_to(expand_mask(prefix_mask), [*shape, length]),
                tf.broadcast_to(seen, [*shape, size]),
            ],
            axis=-1,
        )

    def init_cache(
        self, batch_size: int | tf.Tensor, max_length: int | tf.Tensor, num_hypotheses: int = 1
    ) -> dict[str, tf.Tensor]:
        """Return an empty cache for attention of a sequence to itself.

        Args:
            batch_size: number b of sources.
            max_length: number of positions the cache can hold.
            num_hypotheses: number k of sequences of each source, which follow each other in the
                queries [b·k, s, h]. Each attends to those entries of its source that the mask
                [b, s·k, max_length·k] allows: entry p·k + c is position p of the sequence c.

        Returns:
            A dict of `"key"` and `"value"` [b, m, max_length·k, d] and `"index"`, the
            number of positions filled (int32 scalar).
        """
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

    def compute_output_shape(self, query_shape: tuple, *args, **kwargs) -> tuple:
        return query_shape

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "hidden_dropout_rate": self.hidden_dropout_rate,
            "attention_dropout_rate": self.attention_dropout_rate,
            "softmax_compute_type": self.softmax_compute_type,
            "kernel_initializer": self.kernel_initializer,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "use_bias": self.use_bias,
            "qkv_bias": self.qkv_bias,
            "rotary_base": self.rotary_base,
            "rotary_fraction": self.rotary_fraction,
            "rotary_scaling": self.rotary_scaling,
        }


def _kept(cache):
    """Return the keys and the values of a cache, those of a prefix first."""
    pairs = [("prefix_key", "prefix_value")] if "prefix_key" in cache else []
    pairs.append(("key", "value"))
    return [cache[key] for key, _ in pairs], [cache[value] for _, value in pairs]
