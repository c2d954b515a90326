"""Layout of every weight of Keras' layers: from `layout_map`, a published map or the default rules."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import keras

from dtransformer import _compat
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.keras_layers import rules
from dtransformer.parallel.keras_layers.layout_map import (
    Specs,
    check_all_used,
    find_problem,
    match_layouts,
)
from dtransformer.parallel.pipeline_parallel.stage_weights import get_direct_weights

# Name of the model axis in the layout maps of KerasHub.
_MODEL = "model"
NO_RULE = "replicated: no rule"


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Layout of a weight of a Keras layer.

    Args:
        variable: The Keras variable.
        specs: Tuple with the mesh axis, or `None`, that shards each dimension.
        rule: String. Rule or pattern that determined the layout, or the reason why the weight is
            replicated.
    """

    variable: keras.Variable
    specs: Specs
    rule: str

    @property
    def is_sharded(self) -> bool:
        """True if the model axis shards the weight."""
        return _MODEL in self.specs

    @property
    def num_elements(self) -> int:
        """Number of elements of the full weight."""
        return math.prod(self.variable.shape)


def weight_layouts(
    network: keras.Model, config: TransformerOpParallelConfig, sizes: Mapping[str, int]
) -> list[WeightLayout]:
    """Return the layouts of a network's weights, without weights that have logical axes.

    The weights of other pipeline stages are included. A layer of another stage has a shape only.

    Args:
        network: Built `keras.Model`.
        config: `TransformerOpParallelConfig`.
        sizes: Mapping from mesh axes to shard counts.

    Returns:
        A list of `WeightLayout`s in the order of the layers.

    Raises:
        ValueError: If a pattern of `layout_map` matches no weight, two patterns match one weight, or
            a layout does not fit a shape.
    """
    layers = list({id(layer): layer for layer in _compat.flat_layers(network)}.values())
    if config.layout_map is not None:
        return _mapped_layouts(layers, config.layout_map, sizes)
    layouts = {}
    for layer, product in _products_in_order(layers):
        for variable, letters, letter, rule in _apply_rules(layer, product, config):
            specs = tuple(_MODEL if x == letter else None for x in letters)
            layouts[id(variable)] = _checked(variable, specs, rule, sizes)
    for layer in layers:
        if hasattr(type(layer), "get_layout_map"):
            layouts |= _published_layouts(layer, layouts, sizes)
    return [
        layouts.get(id(weight)) or _replicated(weight, NO_RULE)
        for weight in _distinct_weights(layers)
        if not hasattr(weight, "logical_axes")
    ]


def _distinct_weights(layers):
    """Return the weights of layers, each once."""
    weights = [weight for layer in layers for weight in get_direct_weights(layer)]
    return list({id(weight): weight for weight in weights}.values())


def _replicated(variable, reason):
    return WeightLayout(variable, (None,) * len(variable.shape), reason)


def _checked(variable, specs, rule, sizes):
    """Return a layout, or a replicated one if the axis does not divide the weight."""
    problem = find_problem(specs, tuple(variable.shape), sizes)
    if problem:
        return _replicated(variable, f"replicated: {problem}")
    return _layout(variable, specs, rule, sizes)


def _layout(variable, specs, rule, sizes):
    """Return a layout without axes that the mesh does not have."""
    specs = tuple(axis if axis in sizes else None for axis in specs)
    return WeightLayout(variable, specs, rule)


# Layouts from `layout_map`.


def _mapped_layouts(layers, layout_map, sizes):
    variables = _distinct_weights(layers)
    paths = [variable.path for variable in variables]
    patterns, unused = match_layouts(layout_map, paths)
    check_all_used(unused, paths)
    layouts = []
    for variable in variables:
        pattern = patterns.get(variable.path)
        if hasattr(variable, "logical_axes"):
            if pattern is not None:
                raise ValueError(
                    f"The pattern {pattern!r} of `layout_map` matches {variable.path}, whose layer "
                    f"declares the logical axes {variable.logical_axes}. Shard it with "
                    "`parallel_rules` or with the layer's method `shard`."
                )
            continue
        if pattern is None:
            layouts.append(_replicated(variable, "replicated: not in layout_map"))
            continue
        specs = layout_map[pattern]
        problem = find_problem(specs, tuple(variable.shape), sizes)
        if problem:
            raise ValueError(
                f"The pattern {pattern!r} of `layout_map` cannot shard the weight {variable.path} of "
                f"shape {tuple(variable.shape)}: {problem}. Change the layout or the size."
            )
        layouts.append(_layout(variable, specs, f"layout_map {pattern!r}", sizes))
    return layouts


# Default rules.


def _products_in_order(layers) -> Iterator[tuple[keras.layers.Layer, rules.Product | None]]:
    """Yield `(layer, product)` for products and tables. The product of a table is `None`."""
    dense = [layer for layer in layers if _kernel(layer) is not None]
    products = {id(layer): _product(layer, layer is dense[-1]) for layer in dense}
    for parent in layers:
        columns = 0
        for layer in _compat.flat_layers(parent, include_self=False, recursive=False):
            if id(layer) in products:
                product = dataclasses.replace(products[id(layer)], columns_before=columns)
                products[id(layer)] = product
                rule = rules.find_rule(product)
                is_columns = rule is not None and rule.name == "columns"
                columns = product.num_outputs if is_columns else 0
    for layer in layers:
        if id(layer) in products or isinstance(layer, keras.layers.Embedding):
            yield layer, products.get(id(layer))


def _kernel(layer):
    """Return the kernel of a built `Dense` or `EinsumDense` layer, or `None` for other layers."""
    if not isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)):
        return None
    return next((weight for weight in get_direct_weights(layer) if weight.name == "kernel"), None)


def _product(layer, is_last):
    """Return the `rules.Product` of a built `Dense` or `EinsumDense` layer."""
    is_einsum = isinstance(layer, keras.layers.EinsumDense)
    equation = layer.equation if is_einsum else rules.DENSE
    bias_axes = (layer.bias_axes or "") if is_einsum else equation[-1]
    product = rules.Product(equation, bias_axes, {}, is_last=is_last)
    sizes = dict(zip(product.kernel, _kernel(layer).shape))
    return dataclasses.replace(product, sizes=sizes)


def _apply_rules(layer, product, config):
    """Yield `(variable, letters, letter, rule)` for the weights of a layer that a rule covers."""
    if product is not None:
        rule = rules.find_rule(product)
        if rule is None:
            return
        dimensions = product.weights
        letter = rule.letter(product)
        name = rule.name
    else:
        dimensions = dict(rules.TABLES)
        letter = rules.VOCABULARY
        name = "vocabulary"
        if config.vocab_emb_dp:
            for looked_up in rules.LOOKED_UP:
                del dimensions[looked_up]
    for variable in get_direct_weights(layer):
        letters = dimensions.get(variable.name, "")
        if letter in letters and len(letters) == len(variable.shape):
            yield variable, letters, letter, name


# Layout maps that KerasHub publishes.


def _published_layouts(backbone, layouts, sizes):
    """Return the layouts of a backbone's weights from its `get_layout_map`, by id.

    The data axis is ignored, because `optimizer_shard=3` shards over data ranks. A layout that does
    not fit the shape, or shards another dimension than the default rules, is wrong and ignored.
    """
    devices = [f"cpu:{index}" for index in range(sizes.get(_MODEL, 1))]
    device_mesh = keras.distribution.DeviceMesh((1, len(devices)), ("batch", _MODEL), devices)
    published = type(backbone).get_layout_map(device_mesh)
    layout_map = {}
    for pattern, layout in published.items():
        layout_map[pattern] = tuple(axis if axis == _MODEL else None for axis in layout.axes)
    weights = [
        weight
        for weight in _distinct_weights(_compat.flat_layers(backbone))
        if not hasattr(weight, "logical_axes")
    ]
    patterns, _ = match_layouts(layout_map, [weight.path for weight in weights])
    name = f"{type(backbone).__name__}.get_layout_map"
    result = {}
    for variable in weights:
        pattern = patterns.get(variable.path)
        if pattern is None or id(variable) in layouts:
            continue
        specs = layout_map[pattern]
        if not find_problem(specs, tuple(variable.shape), sizes):
            result[id(variable)] = _layout(variable, specs, f"{name} {pattern!r}", sizes)
    return result
