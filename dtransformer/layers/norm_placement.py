"""Placement of the norms around a block's sublayers, as a table."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a sublayer f, with its residual connection, has norms.

    Args:
        of_input: whether what f sees is normalized.
        of_output: whether what f gives is, before it is added.
        of_sum: whether the sum is.
    """

    of_input: bool = False
    of_output: bool = False
    of_sum: bool = False

    @property
    def number(self) -> int:
        """The number of norms of a sublayer."""
        return self.of_input + self.of_output + self.of_sum


# The name of a placement -> where norms are.
PLACEMENTS = {
    "pre": Placement(of_input=True),  # x + f(norm(x)): Xiong et al., 2020, arXiv 2002.04745
    "post": Placement(of_sum=True),  # norm(x + f(x)): Vaswani et al., 2017, section 3.1
    "output": Placement(of_output=True),  # x + norm(f(x)): OLMo 2, arXiv 2501.00656, section 3.1
    "sandwich": Placement(of_input=True, of_output=True),  # x + norm(f(norm(x))): Gemma 2
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
