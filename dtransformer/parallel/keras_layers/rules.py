"""Default sharding rules of Keras' layers, as data.

Every dimension of a weight has a letter, as in an einsum. A rule selects one letter of a layer, and
the model axis shards this dimension in all weights of the layer.
"""

import dataclasses
from collections.abc import Callable

# A last layer with fewer outputs is a classifier. It stays replicated.
MIN_VOCABULARY = 256

DENSE = "ab,bc->ac"

# Dimensions of the weights of an `Embedding`: vocabulary, hidden size, and rank of an adapter.
TABLES = {
    "embeddings": "vh",
    "reverse_embeddings": "hv",
    "lora_embeddings_a": "vr",
    "lora_embeddings_b": "rh",
}
VOCABULARY = "v"
# Weights that keep all rows if `vocab_emb_dp=True`. They are looked up, not multiplied.
LOOKED_UP = ("embeddings", "lora_embeddings_a")


@dataclasses.dataclass(frozen=True)
class Product:
    """Product of a layer with a kernel, such as `Dense` and `EinsumDense`.

    Args:
        equation: String. Equation of the product, such as `"ab,bc->ac"`.
        bias_axes: String. Letters of the bias. Empty without a bias.
        sizes: Dict of the letters of the kernel to sizes.
        columns_before: Integer. Outputs of the previous product of the parent layer if it shards
            its outputs, else `0`.
        is_last: Boolean. Whether the network has no later product.
    """

    equation: str
    bias_axes: str
    sizes: dict[str, int]
    columns_before: int = 0
    is_last: bool = False

    @property
    def kernel(self) -> str:
        """Letters of the kernel."""
        return self.equation.replace("...", "").partition("->")[0].partition(",")[2]

    @property
    def _inputs(self):
        return self.equation.replace("...", "").partition(",")[0]

    @property
    def _outputs(self):
        return self.equation.replace("...", "").partition("->")[2]

    @property
    def contracted(self) -> str:
        """Letters of the kernel that the product sums over, in the order of the input."""
        return "".join(x for x in self._inputs if x in self.kernel and x not in self._outputs)

    @property
    def added(self) -> str:
        """Letters of the kernel that only the output has, in the order of the output."""
        return "".join(x for x in self._outputs if x in self.kernel and x not in self._inputs)

    @property
    def weights(self) -> dict[str, str]:
        """Dict of the names of the layer's weights to the letters of their dimensions."""
        unused = "-"  # The rank of an adapter.
        return {
            "kernel": self.kernel,
            "bias": "".join(x for x in self._outputs if x in self.bias_axes),
            "lora_kernel_a": self.kernel[:-1] + unused,
            "lora_kernel_b": unused + self.kernel[-1],
        }

    @property
    def num_inputs(self) -> int:
        """Size of the contracted dimension, if there is one."""
        return self.sizes[self.contracted] if len(self.contracted) == 1 else 0

    @property
    def num_outputs(self) -> int:
        """Size of the added dimension, if there is one."""
        return self.sizes[self.added] if len(self.added) == 1 else 0

    @property
    def is_dense(self) -> bool:
        """True if the product maps one dimension of features to another."""
        return bool(self.num_inputs and self.num_outputs)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Sharding rule of a product.

    Args:
        name: String. Name in reports.
        matches: Function of the `Product`. Returns whether the rule applies.
        letter: Function of the `Product`. Returns the letter of the dimension to shard.
    """

    name: str
    matches: Callable[[Product], bool]
    letter: Callable[[Product], str]


# The first rule that matches applies. Products that match no rule stay replicated.
RULES = (
    Rule(
        "attention heads",
        lambda product: len(product.added) > 1,
        lambda product: product.added[0],
    ),
    Rule(
        "attention heads",
        lambda product: len(product.contracted) > 1 and bool(product.added),
        lambda product: product.contracted[0],
    ),
    Rule(
        "rows",
        lambda product: (
            product.is_dense and product.columns_before == product.num_inputs > product.num_outputs
        ),
        lambda product: product.contracted,
    ),
    Rule(
        "columns",
        lambda product: product.is_dense and product.num_outputs > product.num_inputs,
        lambda product: product.added,
    ),
    Rule(
        "vocabulary",
        lambda product: product.is_last and product.num_outputs >= MIN_VOCABULARY,
        lambda product: product.added,
    ),
)


def find_rule(product: Product) -> Rule | None:
    """Return the first rule of `RULES` that matches a product, or `None`.

    Example:

    >>> find_rule(Product(DENSE, "c", {"b": 8, "c": 32})).name
    'columns'
    """
    return next((rule for rule in RULES if rule.matches(product)), None)
