"""Forms of blocks, as data: what differs from block to block of a stack, and where norms are.

A pattern is a list of dicts of arguments, of blocks that follow each other; after the last it begins
anew. Gemma 2's `[{"window": 4096}, {}]` slides in every other block. A list as long as the stack says
it of each block.
"""

import dataclasses
from collections.abc import Mapping, Sequence

Pattern = Sequence[Mapping]

# What a pattern may say of a block: the arguments of `TransformerEncoderLayer` that may differ, and
# whether it has the experts of `moe_config`, and a norm before its attention.
FIELDS = (
    *("window", "rotary_base", "rotary_fraction", "rotary_scaling"),
    *("experts", "attention_norm"),
)


def check_pattern(pattern: Pattern | None) -> list[dict]:
    """Return a pattern as a list of dicts; `[{}]` where it is None.

    Raises:
        ValueError: it is empty, or names what cannot differ.
    """
    found = [dict(one) for one in ([{}] if pattern is None else pattern)]
    if not found:
        raise ValueError("block_pattern is empty: give a dict for each of some blocks, or None")
    for one in found:
        if others := sorted(one.keys() - set(FIELDS)):
            raise ValueError(
                f"block_pattern has {others[0]!r}, expected some of {', '.join(FIELDS)}: other "
                "arguments are those of all blocks"
            )
    return found


def arguments_of_block(arguments: Mapping, number: int) -> dict:
    """Return a network's arguments as they are of one of its blocks.

    Args:
        arguments: a network's, with its `block_pattern`.
        number: the block's, from 0.

    Example:

    >>> arguments_of_block({"window": None, "block_pattern": [{"window": 4}, {}]}, 2)["window"]
    4
    """
    pattern = check_pattern(arguments.get("block_pattern"))
    return {**arguments, **pattern[number % len(pattern)]}


def has_experts(arguments: Mapping, number: int) -> bool:
    """Return whether a block is to have experts, as `moe_every` and the pattern say.

    Args:
        arguments: with a `moe_config` of several experts.
        number: the block's, from 0.
    """
    usual = (number + 1) % arguments.get("moe_every", 1) == 0
    return arguments_of_block(arguments, number).get("experts", usual)


def shortest(blocks: Pattern) -> list[dict]:
    """Return the shortest pattern of a stack whose blocks have these arguments.

    Example:

    >>> shortest([{"window": 4}, {}, {"window": 4}, {}, {"window": 4}])
    [{'window': 4}, {}]
    """
    blocks = list(map(dict, blocks))
    periods = range(1, len(blocks) + 1)
    fits = lambda p: all(one == blocks[number % p] for number, one in enumerate(blocks))
    return blocks[: next(filter(fits, periods), 0)]


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of attention through latents; see `layers.LatentAttention`.

    Args:
        kv_rank: features of the latent of keys and values.
        rotary_dim: features of queries and keys that turn, which keys of all heads share.
        value_dim: features of a head's value.
        query_rank: features of the latent of queries; None where these have none.
    """

    kv_rank: int
    rotary_dim: int
    value_dim: int
    query_rank: int | None = None
    DOWN = "latent", "query_down"

    @staticmethod
    def of(given: "Latent | Mapping | None") -> "Latent | None":
        """Return sizes that may be given as a dict; None for none."""
        return Latent(**given) if isinstance(given, Mapping) else given

    @property
    def features(self) -> int:
        """The number of features of a position's latents, and of its rotary key."""
        return self.kv_rank + self.rotary_dim + (self.query_rank or 0)

    def kernels(self, hidden_size: int, num_heads: int, head_dim: int) -> dict[str, tuple]:
        """Return the kernels of the attention by their names, as pairs of features.

        The second ones are those of heads, of which devices have shards, but for kernels `DOWN`.
        """
        h, n, r = hidden_size, num_heads, self.query_rank
        query = {"query_down": (h, r), "query_up": (r, n * head_dim)}
        own = head_dim - self.rotary_dim + self.value_dim
        return {
            **(query if r else {"query": (h, n * head_dim)}),
            "latent": (h, self.kv_rank + self.rotary_dim),
            "key_value": (self.kv_rank, n * own),
            "output": (h, n * self.value_dim),
        }


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a sublayer f, with its residual connection, has norms.

    Args:
        of_input: whether what f sees is normalized.
        of_output: whether what f gives is, before it is added.
        of_sum: whether the sum is.
        is_parallel: whether attention and the feed-forward layer have the same input x, and both
            are added to it: x + f(norm x) + g(norm x).
        shares_norm: whether they have one norm, then, in place of one each.
    """

    of_input: bool = False
    of_output: bool = False
    of_sum: bool = False
    is_parallel: bool = False
    shares_norm: bool = False

    @property
    def number(self) -> int | float:
        """The number of norms of a sublayer: half a one where two share it."""
        return 0.5 if self.shares_norm else self.of_input + self.of_output + self.of_sum


# The name of a placement -> where norms are.
PLACEMENTS = {
    "pre": Placement(of_input=True),  # x + f(norm(x)): Xiong et al., 2020, arXiv 2002.04745
    "post": Placement(of_sum=True),  # norm(x + f(x)): Vaswani et al., 2017, section 3.1
    "output": Placement(of_output=True),  # x + norm(f(x)): OLMo 2, arXiv 2501.00656, section 3.1
    "sandwich": Placement(of_input=True, of_output=True),  # x + norm(f(norm(x))): Gemma 2
    # GPT-NeoX (Black et al., 2022, arXiv 2204.06745, section 2.1), and, of one norm, GPT-J.
    "parallel": Placement(of_input=True, is_parallel=True),
    "parallel_one_norm": Placement(of_input=True, is_parallel=True, shares_norm=True),
}


def placement_of(arguments: Mapping) -> Placement:
    """Return the `Placement` of a block's, or a network's, arguments.

    Args:
        arguments: `norm_placement`, a name; or, where it is None, `post_layernorm_residual`, whether
            it is `"post"` in place of `"pre"`.

    Raises:
        ValueError: there is no such name, or both differ.
    """
    given, is_post = arguments.get("norm_placement"), arguments.get("post_layernorm_residual")
    name = ("post" if is_post else "pre") if given is None else given
    if name not in PLACEMENTS:
        raise ValueError(f"norm_placement must be one of {', '.join(PLACEMENTS)}, got {given!r}")
    if is_post and name != "post":
        raise ValueError(
            f"post_layernorm_residual=True and norm_placement={given!r} differ: give one of them"
        )
    return PLACEMENTS[name]


def ends_with_norm(arguments: Mapping) -> bool:
    """Return whether a norm follows a stack of such blocks: where they do not normalize the sum."""
    return not placement_of(arguments).of_sum
