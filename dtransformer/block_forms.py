"""Forms of blocks: options that vary within a stack, latent attention sizes, and norm placement.

A block pattern is a list of dicts, one for each of several consecutive blocks. It repeats until
the stack ends. Gemma 2's `[{"window": 4096}, {}]` uses a sliding window in every second block. A
list with one dict per block sets each block separately.
"""

import dataclasses
from collections.abc import Mapping, Sequence

Pattern = Sequence[Mapping]

# Keys of a pattern's dicts: arguments of `TransformerEncoderLayer` that may differ between blocks,
# "experts" for the experts of `moe_config`, and "attention_norm" for a norm before attention.
FIELDS = (
    "window", "rotary_base", "rotary_fraction", "rotary_scaling", "experts", "attention_norm",
)  # fmt: skip


def check_pattern(pattern: Pattern | None) -> list[dict]:
    """Return a pattern as a list of dicts, `[{}]` for `None`.

    Raises:
        ValueError: If the pattern is empty or has a key that is not in `FIELDS`.
    """
    blocks = [dict(block) for block in ([{}] if pattern is None else pattern)]
    if not blocks:
        raise ValueError("`block_pattern` is empty. Use a list with one or more dicts, or None.")
    for block in blocks:
        if unknown := sorted(block.keys() - set(FIELDS)):
            raise ValueError(
                f"`block_pattern` has the key {unknown[0]!r}, expected keys among "
                f"{', '.join(FIELDS)}. Other arguments must be equal in all blocks."
            )
    return blocks


def get_block_arguments(arguments: Mapping, index: int) -> dict:
    """Return a network's arguments with the pattern's values for one of its blocks.

    Args:
        arguments: Dict of a network's arguments, with its `block_pattern`.
        index: Integer. Index of the block.

    Example:

    >>> get_block_arguments({"window": None, "block_pattern": [{"window": 4}, {}]}, 2)["window"]
    4
    """
    pattern = check_pattern(arguments.get("block_pattern"))
    return {**arguments, **pattern[index % len(pattern)]}


def has_experts(arguments: Mapping, index: int) -> bool:
    """Return whether a block has experts.

    The pattern's value of "experts" decides. Without it, every `moe_every`-th block has experts.

    Args:
        arguments: Dict of a network's arguments with several experts in `moe_config`.
        index: Integer. Index of the block.
    """
    default = (index + 1) % arguments.get("moe_every", 1) == 0
    return get_block_arguments(arguments, index).get("experts", default)


def shortest_pattern(blocks: Pattern) -> list[dict]:
    """Return the shortest pattern that repeats to the given list of blocks.

    Example:

    >>> shortest_pattern([{"window": 4}, {}, {"window": 4}, {}, {"window": 4}])
    [{'window': 4}, {}]
    """
    blocks = list(map(dict, blocks))
    for period in range(1, len(blocks) + 1):
        if all(block == blocks[i % period] for i, block in enumerate(blocks)):
            return blocks[:period]
    return []


@dataclasses.dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention, see `layers.LatentAttention`.

    Args:
        kv_rank: Integer. Features of the key and value latent.
        rotary_dim: Integer. Rotary features of queries and keys. All heads share the key's.
        value_dim: Integer. Features of a value per head.
        query_rank: Integer. Features of the query latent. `None` projects queries directly.
    """

    kv_rank: int
    rotary_dim: int
    value_dim: int
    query_rank: int | None = None
    DOWN = "latent", "query_down"

    @staticmethod
    def from_sizes(sizes: "Latent | Mapping | None") -> "Latent | None":
        """Return a `Latent` for a dict. Return a `Latent` or `None` unchanged."""
        return Latent(**sizes) if isinstance(sizes, Mapping) else sizes

    @property
    def features(self) -> int:
        """Number of features per position of all latents and the rotary key."""
        return self.kv_rank + self.rotary_dim + (self.query_rank or 0)

    def kernels(self, hidden_size: int, num_heads: int, head_dim: int) -> dict[str, tuple]:
        """Return a dict from the attention's kernel names to pairs of feature counts.

        The second feature belongs to heads and is sharded, except for the kernels in `DOWN`.
        """
        h = hidden_size
        n = num_heads
        r = self.query_rank
        query = {"query_down": (h, r), "query_up": (r, n * head_dim)}
        features_per_head = head_dim - self.rotary_dim + self.value_dim
        return {
            **(query if r else {"query": (h, n * head_dim)}),
            "latent": (h, self.kv_rank + self.rotary_dim),
            "key_value": (self.kv_rank, n * features_per_head),
            "output": (h, n * self.value_dim),
        }


@dataclasses.dataclass(frozen=True)
class Placement:
    """Positions of norms around a sublayer f with its residual connection.

    Args:
        of_input: Boolean, whether the input of f is normalized.
        of_output: Boolean, whether the output of f is normalized before the residual addition.
        of_sum: Boolean, whether the sum is normalized.
        is_parallel: Boolean, whether attention and the feed-forward layer read the same input:
            x + f(norm x) + g(norm x).
        shares_norm: Boolean, whether parallel sublayers share one norm.
    """

    of_input: bool = False
    of_output: bool = False
    of_sum: bool = False
    is_parallel: bool = False
    shares_norm: bool = False

    @property
    def norms_per_sublayer(self) -> int | float:
        """Number of norms per sublayer, 0.5 if two sublayers share one."""
        return 0.5 if self.shares_norm else self.of_input + self.of_output + self.of_sum


# Placements by name.
PLACEMENTS = {
    "pre": Placement(of_input=True),  # x + f(norm(x)): Xiong et al., 2020, arXiv 2002.04745
    "post": Placement(of_sum=True),  # norm(x + f(x)): Vaswani et al., 2017, section 3.1
    "output": Placement(of_output=True),  # x + norm(f(x)): OLMo 2, arXiv 2501.00656, section 3.1
    "sandwich": Placement(of_input=True, of_output=True),  # x + norm(f(norm(x))): Gemma 2
    # GPT-NeoX (Black et al., 2022, arXiv 2204.06745, section 2.1). GPT-J shares one norm.
    "parallel": Placement(of_input=True, is_parallel=True),
    "parallel_one_norm": Placement(of_input=True, is_parallel=True, shares_norm=True),
}


def get_placement(arguments: Mapping) -> Placement:
    """Return the norm placement of a block's or a network's arguments.

    Args:
        arguments: Dict with `norm_placement`, a key of `PLACEMENTS`. If it is `None`,
            `post_layernorm_residual` selects "post" instead of "pre".

    Raises:
        ValueError: If the name is unknown, or if the two arguments contradict each other.
    """
    requested = arguments.get("norm_placement")
    is_post = arguments.get("post_layernorm_residual")
    name = ("post" if is_post else "pre") if requested is None else requested
    if name not in PLACEMENTS:
        raise ValueError(
            f"`norm_placement` must be one of {', '.join(PLACEMENTS)}, got {requested!r}."
        )
    if is_post and name != "post":
        raise ValueError(
            f"`post_layernorm_residual=True` contradicts `norm_placement={requested!r}`. "
            "Set only one of them."
        )
    return PLACEMENTS[name]


def ends_with_norm(arguments: Mapping) -> bool:
    """Return whether a norm follows the stack, which is true unless blocks normalize the sum."""
    return not get_placement(arguments).of_sum
