"""Multi-head latent attention: keys and values are projected from a short latent vector."""

import tensorflow as tf

from dtransformer.block_forms import Latent
from dtransformer.errors import check_int
from dtransformer.layers.attention import MultiHeadAttention
from dtransformer.layers.base import register
from dtransformer.layers.initializers import FlattenedInitializer
from dtransformer.layers.norm import RMSNorm
from dtransformer.parallel.tensor_parallel.heads import project_to_heads
from dtransformer.parallel.tensor_parallel.linear import column_parallel


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
        rotary_base, rotary_scaling: Options of the rotary features, see `rotary_frequencies`.
            Default to `10000.0` and `None`.
        **kwargs: Other arguments of `MultiHeadAttention`.

    Call arguments:
        query, key, value: The same tensor of shape `[b, s, h]`. For other arguments see
            `MultiHeadAttention`.

    Output shape:
        `[b, s, h]`. With a cache, an `(output, cache)` tuple with the cache for the next call.

    Raises:
        ValueError: If sizes do not match, or an option of `MultiHeadAttention` is not supported:
            fewer key heads, `qk_norm`, `rotary_fraction` or `qkv_bias`.

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
        rotary_base: float | None = 10000.0,
        rotary_scaling: dict | None = None,
        **kwargs,
    ):
        options = {"head_dim": head_dim, "use_bias": use_bias, "qkv_bias": False, **kwargs}
        super().__init__(hidden_size, num_heads, **options)
        sizes = self.sizes = Latent.of(latent)
        self.latent = dict(vars(sizes))
        for name in [x for x in self.latent if x != "query_rank" or sizes.query_rank is not None]:
            check_int(name, self.latent[name])
        if max(sizes.rotary_dim, sizes.value_dim) > self.head_dim:
            raise ValueError(
                f"The features per head in {sizes} must be at most `head_dim={self.head_dim}`."
            )
        supported = {
            "num_kv_heads": num_heads,
            "qk_norm": None,
            "rotary_fraction": 1,
            "qkv_bias": False,
        }
        if unsupported := [
            f"{x}={getattr(self, x)}" for x in supported if getattr(self, x) != supported[x]
        ]:
            raise ValueError(
                f"Latent attention does not support {', '.join(unsupported)}. Remove these arguments, "
                "or `latent`."
            )
        self.value_dim = sizes.value_dim
        self.rotary_base = rotary_base
        self.rotary_scaling = rotary_scaling
        self.set_rotary(sizes.rotary_dim)
        policy = self.dtype_policy
        self.latent_norm = RMSNorm(dtype=policy, name="latent_norm")
        self.query_latent_norm = None
        if self.sizes.query_rank:
            self.query_latent_norm = RMSNorm(dtype=policy, name="query_latent_norm")

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
        name = "query_up"
        inputs = sizes.query_rank
        axis = None
        if not inputs:
            name = "query"
            inputs = h
            axis = "embed"
        self._add_kernel(name, (inputs, n, self.head_dim), (axis, "heads", "head_dim"), scale)
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
        latent, *query_latent = column_parallel(x, kernels, (None,))
        c = latent[..., : sizes.kv_rank]
        rotary = latent[..., sizes.kv_rank :]
        x = self.query_latent_norm(query_latent[0]) if query_latent else x
        kernel = self.query_up_kernel if query_latent else self.query_kernel
        (q,) = project_to_heads(x, [kernel], [None])
        (key_value,) = project_to_heads(self.latent_norm(c), [self.key_value_kernel], [None])
        size = self.head_dim - sizes.rotary_dim
        keys = key_value[..., :size]
        v = key_value[..., size:]
        rotary = tf.expand_dims(rotary, 1) + tf.zeros_like(
            key_value[..., :1]
        )  # Repeated for each head.
        v = tf.pad(v, [[0, 0]] * 3 + [[0, self.head_dim - sizes.value_dim]])
        return q, tf.concat([rotary, keys], axis=-1), v

    def _attend(self, q, keys, values, mask, bias, **options):
        context = super()._attend(q, keys, values, mask, bias, **options)
        return context[..., : self.value_dim]
