"""Default rules and layout maps select the mesh axis of each dimension of a weight."""

import types

import pytest

import dtransformer
from dtransformer.parallel.keras_layers.layout_map import (
    check_all_used,
    find_problem,
    match_layouts,
)
from dtransformer.parallel.keras_layers.rules import DENSE, Product, find_rule

QUERY = "abc,cde->abde"
OUTPUT = "abcd,cde->abe"


def sharded(product):
    """Return the rule's name and the letters of the sharded dimensions of each weight."""
    rule = find_rule(product)
    if rule is None:
        return None
    letter = rule.letter(product)
    dimensions = {
        name: [x == letter for x in letters].index(True) if letter in letters else None
        for name, letters in product.weights.items()
    }
    return rule.name, dimensions


def test_attention_projections_are_sharded_over_heads():
    sizes = {"c": 32, "d": 4, "e": 8}
    name, dimensions = sharded(Product(QUERY, "de", sizes))
    assert name == "attention heads"
    assert dimensions == {"kernel": 1, "bias": 0, "lora_kernel_a": 1, "lora_kernel_b": None}
    # Gemma's kernels have the heads first.
    assert sharded(Product("btd,ndh->btnh", "", {}))[1]["kernel"] == 0


def test_output_projection_of_attention_sums_over_sharded_heads():
    name, dimensions = sharded(Product(OUTPUT, "e", {"c": 4, "d": 8, "e": 32}))
    assert name == "attention heads"
    assert dimensions == {"kernel": 0, "bias": None, "lora_kernel_a": 0, "lora_kernel_b": None}


def test_expanding_layers_shard_columns_and_the_next_layer_shards_rows():
    name, dimensions = sharded(Product(DENSE, "c", {"b": 8, "c": 32}))
    assert name == "columns"
    assert dimensions == {"kernel": 1, "bias": 0, "lora_kernel_a": None, "lora_kernel_b": 1}
    contracting = Product(DENSE, "c", {"b": 32, "c": 8}, columns_before=32)
    name, dimensions = sharded(contracting)
    assert name == "rows"
    assert dimensions == {"kernel": 0, "bias": None, "lora_kernel_a": 0, "lora_kernel_b": None}
    assert sharded(Product(DENSE, "c", {"b": 32, "c": 8}, columns_before=16)) is None


def test_only_a_large_last_layer_is_sharded_over_its_outputs():
    sizes = {"b": 1024, "c": 512}
    assert sharded(Product(DENSE, "c", sizes, is_last=True))[0] == "vocabulary"
    assert sharded(Product(DENSE, "c", sizes)) is None
    assert sharded(Product(DENSE, "c", {"b": 1024, "c": 10}, is_last=True)) is None
    assert sharded(Product(DENSE, "c", {"b": 64, "c": 64})) is None


PATHS = ["block_0/query/kernel", "block_0/up/kernel", "block_0/up/bias"]


def test_patterns_are_searched_in_paths():
    layout_map = {"up/kernel": (None, "model"), "block_0/up/bias": ("model",), "head": ("model",)}
    patterns, unused = match_layouts(layout_map, PATHS)
    assert patterns == {PATHS[1]: "up/kernel", PATHS[2]: "block_0/up/bias"}
    assert unused == ["head"]


def test_two_patterns_for_one_weight_are_an_error():
    with pytest.raises(ValueError, match="block_0/up/kernel matches several patterns.*'up', 'ker"):
        match_layouts({"up": (None,), "kernel$": (None,)}, PATHS)
    # A path as a key takes precedence.
    assert match_layouts({"up/k": (None,), PATHS[1]: ("model",)}, PATHS)[0][PATHS[1]] == PATHS[1]


def test_a_pattern_without_weights_is_an_error_with_the_nearest_paths():
    paths = ["dense/kernel", "dense_1/kernel", "dense_2/kernel", *PATHS]
    for pattern in ("blok.*qery/kernel", "qery/kernel", r"block_\d+/qeury"):
        with pytest.raises(ValueError, match=r"nearest paths are block_0/query/kernel, ") as caught:
            check_all_used([pattern], paths)
        assert repr(pattern) in str(caught.value)
    check_all_used([], paths)


@pytest.mark.parametrize(
    "specs, problem",
    [
        (("model", None), "dimension 0 has 6 elements, but the mesh axis 'model' has 4 shards"),
        ((None, "model"), ""),
        (("model",), r"('model',) has 1 axes for 2 dimensions"),
        (("model", "model"), "the mesh axis 'model' twice"),
        (("data", None), ""),  # The mesh has no such axis.
    ],
)
def test_layouts_must_fit_the_shape(specs, problem):
    message = find_problem(specs, (6, 8), {"model": 4})
    assert problem in message and bool(problem) == bool(message)


def test_a_layout_map_of_keras_is_read():
    class LayoutMap(dict):
        pass

    layout = types.SimpleNamespace(axes=("batch", "model"))
    config = dtransformer.TransformerOpParallelConfig(layout_map=LayoutMap(kernel=layout))
    assert config.layout_map == {"kernel": ("data", "model")}
    assert config.mesh_spans_data
    assert dtransformer.TransformerOpParallelConfig(
        layout_map={"x": [None, "model"]}
    ).layout_map == {"x": (None, "model")}
