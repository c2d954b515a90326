"""Multi-head latent attention: queries, and keys with values, are projected from short latents."""

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
    """Attention of a sequence to itself whose keys and values are made of a latent of each position.

    A latent c of `kv_rank` features and one rotary key of `rotary_dim` features, which all heads
    share, are projected from the input; after a norm c becomes each head's other features of a key,
    and its value. Queries may be projected from a latent, too. The first features of queries and
    keys are the rotary ones.

    What is projected to latents is replicated, what is projected from them is sharded by heads.
    Values have zeros behind their features up to the size of keys, which is what is sent, cached and
    given to cuDNN. The cache has keys and values, and no latents.

    Reference: DeepSeek-AI, 2024, "DeepSeek-V2", arXiv 2405.04434, §2.1.

    Args:
        hidden_size, num_heads: as `MultiHeadAttention`'s.
        latent: a `Latent`, or a dict of its fields.
        head_dim: number d of features of queries and keys, the rotary ones among them.
        use_bias: whether the output's projection has a bias; the others have none.
        rotary_base, rotary_scaling: of the rotary features; see `rotary_frequencies`.
        **kwargs: others of `MultiHeadAttention`.

    Call arguments:
        query, key, value: the same tensor [b, s, h]; others as `MultiHeadAttention`'s.

    Output shape:
        The query's; with a cache, a pair of this and the cache for the next call.

    Raises:
        ValueError: sizes do not fit together, or what heads would share or normalize is asked for.

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
                f"{sizes} has features of heads that are more than head_dim={head_dim}"
            )
        plain = {
            "num_kv_heads": num_heads,
            "qk_norm": None,
            "rotary_fraction": 1,
            "qkv_bias": False,
        }
        if wrong := [f"{x}={getattr(self, x)}" for x in plain if getattr(self, x) != plain[x]]:
            raise ValueError(
                f"{', '.join(wrong)}: heads have keys of their own, no norms and no biases where "
                "attention is through latents: leave it out, or latent"
            )
        self.value_dim = sizes.value_dim
        self.rotary_base, self.rotary_scaling = rotary_base, rotary_scaling
        self.set_rotary(sizes.rotary_dim)
        policy = self.dtype_policy
        self.latent_norm = RMSNorm(dtype=policy, name="latent_norm")
        self.query_latent_norm = None
        if self.sizes.query_rank:
            self.query_latent_norm = RMSNorm(dtype=policy, name="query_latent_norm")

    def __call__(self, query, key, value, *args, **kwargs):
        if key is not query or value is not query:
            raise ValueError(
                "attention through latents is of a sequence to itself: give the same tensor three times"
            )
        return super().__call__(query, key, value, *args, **kwargs)

    def add_projections(self) -> None:
        h, n, sizes = self.hidden_size, self.num_heads, self.sizes
        self._add_kernel("latent", (h, sizes.kv_rank + sizes.rotary_dim), ("embed", None))
        self.latent_norm.build((None, None, sizes.kv_rank))
        if sizes.query_rank:
            self._add_kernel("query_down", (h, sizes.query_rank), ("embed", None))
            self.query_latent_norm.build((None, None, sizes.query_rank))
        scale = self.head_dim**-0.5 / self.query_scale if self.query_scale else 1.0
        name, inputs, axis = "query_up", sizes.query_rank, None
        if not inputs:
            name, inputs, axis = "query", h, "embed"
        self._add_kernel(name, (inputs, n, self.head_dim), (axis, "heads", "head_dim"), scale)
        both = self.head_dim - sizes.rotary_dim + sizes.value_dim
        self._add_kernel("key_value", (sizes.kv_rank, n, both), (None, "heads", "head_dim"))

    def _add_kernel(self, name, shape, axes, scale=1.0):
        initializer = FlattenedInitializer(self.kernel_initializer, scale=scale)
        name = f"{name}_kernel"
        setattr(self, name, self.add_weight(shape, initializer, axes=axes, name=name, num_inputs=1))

    def _project(self, inputs):
        """[batch, length, embed] -> queries, keys, values [batch, heads, length, head_dim]."""
        x = inputs["query"]
        sizes, kernels = self.sizes, [self.latent_kernel]
        if sizes.query_rank:
            kernels.append(self.query_down_kernel)
        latent, *of_query = column_parallel(x, kernels, (None,))
        c, rotary = latent[..., : sizes.kv_rank], latent[..., sizes.kv_rank :]
        x = self.query_latent_norm(of_query[0]) if of_query else x
        kernel = self.query_up_kernel if of_query else self.query_kernel
        (q,) = project_to_heads(x, [kernel], [None])
        (both,) = project_to_heads(self.latent_norm(c), [self.key_value_kernel], [None])
        size = self.head_dim - sizes.rotary_dim
        own, v = both[..., :size], both[..., size:]
        rotary = tf.expand_dims(rotary, 1) + tf.zeros_like(both[..., :1])  # of each head
        v = tf.pad(v, [[0, 0]] * 3 + [[0, self.head_dim - sizes.value_dim]])
        return q, tf.concat([rotary, own], axis=-1), v

    def _attend(self, q, keys, values, mask, bias, **options):
        context = super()._attend(q, keys, values, mask, bias, **options)
        return context[..., : self.value_dim]
