"""Multi-head latent attention: keys and values are projected from a short latent vector."""

import tensorflow as tf

from dtransformer.block_forms import Latent
from dtransformer.errors import check_int
from dtransformer.layers.attention import MultiHeadAttention
from dtransformer.layers.base import register
from dtransformer.layers.initializers import FlattenedInitializer
from dtransformer.layers.norm import RMSNorm
from dtransformer.layers.rotary import Rotary
from dtransformer.parallel.tensor_parallel.heads import project_to_heads
from dtransformer.parallel.tensor_parallel.linear import column_parallel

_DEFAULT_ROTARY = Rotary()


@register
class LatentAttention(MultiHeadAttention):
    """Multi-head latent self-attention.

    The input is projected to a latent c of `kv_rank` features and to one rotary key of `rotary_dim`
    features, which all heads share. After a norm, c is projected to each head's other key features
    and to its value. Queries may also be projected from a latent. The rotary features of queries
    and keys come first.

    Projections to latents are replicated. Projections from latents are sharded by heads. Values are
    padded with zeros to the size of keys, and are sent, cached and passed to cuDNN in this form.
    The cache stores keys and values, not latents.

    Reference: [DeepSeek-AI, 2024](https://arxiv.org/abs/2405.04434) (DeepSeek-V2), section 2.1

    Args:
        hidden_size, num_heads: See `MultiHeadAttention`.
        latent: `Latent`, or a dictionary of its fields.
        head_dim: Integer. Features d of queries and keys, including the rotary ones. Defaults to h
            / n.
        use_bias: Boolean, whether the output projection has a bias. The other projections have
            none. Defaults to `True`.
        rotary: `Rotary` of all rotary features, or a dictionary of its fields. Defaults to
            `Rotary()`.
        **kwargs: Other arguments of `MultiHeadAttention`.

    Call arguments:
        query, key, value: The same tensor of shape `[b, s, h]`. For other arguments, and for
            `prefill` and `decode_step`, see `MultiHeadAttention`.

    Output shape:
        `[b, s, h]`

    Raises:
        ValueError: If sizes do not match, or an option of `MultiHeadAttention` is not supported:
            fewer key heads, `qk_norm`, a fraction of `rotary` or `qkv_bias`.

    Example:

    >>> x = tf.zeros((2, 5, 16))
    >>> sizes = {"kv_rank": 6, "rotary_dim": 4, "value_dim": 8}
    >>> LatentAttention(16, 4, sizes, head_dim=12)(x, x, x).shape
    TensorShape([2, 5, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        latent: Latent | dict,
        head_dim: int | None = None,
        use_bias: bool = True,
        rotary: Rotary | dict | None = _DEFAULT_ROTARY,
        **kwargs,
    ):
        sizes = Latent.from_sizes(latent)
        self.sizes = sizes
        options = {"head_dim": head_dim, "use_bias": use_bias, "qkv_bias": False, **kwargs}
        super().__init__(hidden_size, num_heads, rotary=rotary, **options)
        self.latent = dict(vars(sizes))
        for name, size in self.latent.items():
            if name != "query_rank" or size is not None:
                check_int(name, size)
        if max(sizes.rotary_dim, sizes.value_dim) > self.head_dim:
            raise ValueError(
                f"The features per head in {sizes} must be at most `head_dim={self.head_dim}`."
            )
        self._check_options()
        self.value_dim = sizes.value_dim
        policy = self.dtype_policy
        self.latent_norm = RMSNorm(dtype=policy, name="latent_norm")
        self.query_latent_norm = None
        if self.sizes.query_rank:
            self.query_latent_norm = RMSNorm(dtype=policy, name="query_latent_norm")

    def _check_options(self):
        unsupported = []
        if self.num_kv_heads != self.num_heads:
            unsupported.append(f"num_kv_heads={self.num_kv_heads}")
        if self.qk_norm is not None:
            unsupported.append(f"qk_norm={self.qk_norm}")
        if self.qkv_bias:
            unsupported.append("qkv_bias=True")
        if self.rotary is not None and self.rotary.fraction != 1:
            unsupported.append(f"rotary_fraction={self.rotary.fraction}")
        if unsupported:
            raise ValueError(
                f"Latent attention does not support {', '.join(unsupported)}. Remove these arguments, "
                "or `latent`."
            )

    @property
    def num_rotary_features(self) -> int:
        """Number of leading features per head that have rotary positions."""
        return self.sizes.rotary_dim

    def __call__(self, query, key, value, *args, **kwargs):
        if key is not query or value is not query:
            raise ValueError(
                "Latent attention is self-attention. Pass the same tensor as query, key and value."
            )
        return super().__call__(query, key, value, *args, **kwargs)

    def add_projections(self) -> None:
        h = self.hidden_size
        n = self.num_heads
        sizes = self.sizes
        self._add_kernel("latent", (h, sizes.kv_rank + sizes.rotary_dim), ("embed", None))
        self.latent_norm.build((None, None, sizes.kv_rank))
        if sizes.query_rank:
            self._add_kernel("query_down", (h, sizes.query_rank), ("embed", None))
            self.query_latent_norm.build((None, None, sizes.query_rank))
        scale = self.head_dim**-0.5 / self.query_scale if self.query_scale else 1.0
        if sizes.query_rank:
            query_shape = (sizes.query_rank, n, self.head_dim)
            self._add_kernel("query_up", query_shape, (None, "heads", "head_dim"), scale)
        else:
            query_shape = (h, n, self.head_dim)
            self._add_kernel("query", query_shape, ("embed", "heads", "head_dim"), scale)
        num_features = self.head_dim - sizes.rotary_dim + sizes.value_dim
        self._add_kernel("key_value", (sizes.kv_rank, n, num_features), (None, "heads", "head_dim"))

    def _add_kernel(self, name, shape, axes, scale=1.0):
        initializer = FlattenedInitializer(self.kernel_initializer, scale=scale)
        name = f"{name}_kernel"
        setattr(self, name, self.add_weight(shape, initializer, axes=axes, name=name, num_inputs=1))

    def _project(self, inputs):
        """Return queries, keys and values, each `[batch, heads, length, head_dim]`."""
        x = inputs["query"]
        sizes = self.sizes
        kernels = [self.latent_kernel]
        if sizes.query_rank:
            kernels.append(self.query_down_kernel)
        latents = column_parallel(x, kernels, (None,))
        if sizes.query_rank:
            query_latent = self.query_latent_norm(latents[1])
            (q,) = project_to_heads(query_latent, [self.query_up_kernel], [None])
        else:
            (q,) = project_to_heads(x, [self.query_kernel], [None])
        latent = self.latent_norm(latents[0][..., : sizes.kv_rank])
        rotary_key = latents[0][..., sizes.kv_rank :]
        (key_value,) = project_to_heads(latent, [self.key_value_kernel], [None])
        num_key_features = self.head_dim - sizes.rotary_dim
        k = key_value[..., :num_key_features]
        v = key_value[..., num_key_features:]
        # Repeat the rotary key for each head.
        rotary_keys = tf.expand_dims(rotary_key, 1) + tf.zeros_like(key_value[..., :1])
        v = tf.pad(v, [[0, 0]] * 3 + [[0, self.head_dim - sizes.value_dim]])
        return q, tf.concat([rotary_keys, k], axis=-1), v
