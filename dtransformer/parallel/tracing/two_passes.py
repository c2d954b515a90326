"""Forward and backward passes of a function, traced as two graphs that both take the weights.

A gradient tape stores all tensors that the backward pass reads, and a matrix product's gradient
reads its weight. Here, the backward pass does not store the weights and tensors that are computed
only from weights. It takes the weights as arguments and computes these tensors again. Other
activations are stored as usual, so no product with an activation is computed twice.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from dtransformer import _compat


class TwoPasses:
    """Passes of a function. Each call copies a pass into the current graph.

    Args:
        function: Function of `inputs`, `constants` and `weights`, three lists of tensors. Returns a
            list of differentiable tensors and a list of tensors without gradients. It may read
            other tensors, which are constants for gradients.
        inputs: List of float tensors. Gradients are computed for them.
        constants: List of tensors without gradients.
        weights: List of float tensors. Only their shapes and dtypes are used.
        trainable: List of Booleans. Whether to compute the gradient of each weight.

    Attributes:
        saved_names: List of the names of the tensors that the backward pass takes in addition to
            the weights.
    """

    def __init__(
        self,
        function: Callable,
        inputs: Sequence[tf.Tensor],
        constants: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        trainable: Sequence[bool],
    ):
        self._num_inputs = len(inputs)
        self._trainable = list(trainable)
        first_weight = len(inputs) + len(constants)

        def run(*arguments):
            input_arguments = list(arguments[: len(inputs)])
            constant_arguments = list(arguments[len(inputs) : first_weight])
            weight_arguments = list(arguments[first_weight:])
            sources = list(input_arguments)
            sources += [w for w, trains in zip(weight_arguments, trainable) if trains]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                results, others = function(input_arguments, constant_arguments, weight_arguments)
            stored = self._trace_backward(tape, results, sources)
            weight_only = _weight_only_operations(weight_arguments)
            saved = [x for x in stored if x.op not in weight_only]
            recomputed = [x for x in stored if x.op in weight_only]
            self._weight_graph = _Graph.ending_at(recomputed, weight_arguments)
            self._stored_names = [x.name for x in stored]
            self.saved_names = [x.name for x in saved]
            return [*results, *others, *saved]

        tensors = [*inputs, *constants, *weights]
        traced = _trace(run, tensors)
        self._forward_graph = _Graph.from_function(traced)
        self._captured = traced.captured_inputs
        self._num_returned = len(traced.outputs) - len(self.saved_names)

    def _trace_backward(self, tape, results, sources):
        """Trace the backward pass and return the tensors that a tape would store for it."""

        def run(*upstream):
            gradients = tape.gradient(results, sources, upstream)
            self._has_gradient = [gradient is not None for gradient in gradients]
            return [tf.convert_to_tensor(x) for x in gradients if x is not None]

        traced = _trace(run, results)
        self._backward_graph = _Graph.from_function(traced)
        return traced.captured_inputs

    def forward(
        self, inputs: list[tf.Tensor], constants: list[tf.Tensor], weights: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Compute the function.

        Returns:
            A `(results, saved)` tuple: the function's results in one list, and the tensors to pass
            to `backward`.
        """
        arguments = [*inputs, *constants, *weights, *self._captured]
        outputs = self._forward_graph.copy(arguments, "forward")
        return outputs[: self._num_returned], outputs[self._num_returned :]

    def backward(
        self, upstream: list[tf.Tensor], saved: list[tf.Tensor], weights: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor | None], list[tf.Tensor | None]]:
        """Compute the gradients.

        Args:
            upstream: List with the gradient of each differentiable result.
            saved: List of tensors that `forward` returned.
            weights: List of the weights' values.

        Returns:
            An `(input_gradients, weight_gradients)` tuple. The gradient of an unused input and of
            an unused or frozen weight is `None`.
        """
        stored = dict(zip(self.saved_names, saved))
        recomputed = self._weight_graph.copy(weights, "weights")
        stored |= dict(zip(self._weight_graph.results, recomputed))
        arguments = [*upstream, *(stored[name] for name in self._stored_names)]
        existing = iter(self._backward_graph.copy(arguments, "backward"))
        gradients = [next(existing) if exists else None for exists in self._has_gradient]
        trained = iter(gradients[self._num_inputs :])
        weight_gradients = [next(trained) if trains else None for trains in self._trainable]
        return gradients[: self._num_inputs], weight_gradients


@dataclasses.dataclass(frozen=True)
class _Graph:
    """Graph that can be copied into other graphs.

    Args:
        source: `tf.Graph` with the functions that operations call.
        definition: `GraphDef` without the nodes of the arguments.
        arguments: List of the names of the argument tensors.
        results: List of the names of the result tensors.
        shapes: List of the static shapes of the results.
    """

    source: tf.Graph
    definition: tf.compat.v1.GraphDef
    arguments: list[str]
    results: list[str]
    shapes: list[tf.TensorShape]

    @classmethod
    def from_function(cls, function):
        """Return the graph of a concrete function. Captured tensors are the last arguments."""
        operations = function.graph.get_operations()
        return cls.between(function.graph, function.inputs, function.outputs, operations)

    @classmethod
    def ending_at(cls, results, arguments):
        """Return the part of a graph that computes `results` from `arguments`."""
        operations = set()
        pending = [x.op for x in results]
        while pending:
            operation = pending.pop()
            if operation not in operations:
                operations.add(operation)
                pending += [x.op for x in operation.inputs]
        return cls.between(arguments[0].graph, arguments, results, operations)

    @classmethod
    def between(cls, graph, arguments, results, operations):
        """Return the part of a graph with the given operations."""
        names = {operation.name for operation in operations} - {x.op.name for x in arguments}
        full_definition = graph.as_graph_def()
        definition = tf.compat.v1.GraphDef(versions=full_definition.versions)
        definition.node.extend(node for node in full_definition.node if node.name in names)
        for node in definition.node:
            node.attr.pop("_class", None)  # Operations need not be on the device of an argument.
            control_inputs = [x for x in node.input if x.startswith("^") and x[1:] not in names]
            for control_input in control_inputs:
                node.input.remove(control_input)
        shapes = [x.shape for x in results]
        argument_names = [x.name for x in arguments]
        return cls(graph, definition, argument_names, [x.name for x in results], shapes)

    def copy(self, arguments, scope):
        """Copy the graph into the current graph.

        Args:
            arguments: List of tensors.
            scope: String. Name scope of the copy.

        Returns:
            The list of results.
        """
        tensors = dict(zip(self.arguments, map(_compat.captured, arguments), strict=True))
        read = {name for node in self.definition.node for name in map(_tensor_name, node.input)}
        computed = [name for name in self.results if name not in tensors]
        _compat.copy_functions(self.source)
        copies = tf.graph_util.import_graph_def(
            self.definition,
            input_map={name: x for name, x in tensors.items() if name in read},
            return_elements=computed,
            name=scope,
        )
        tensors |= dict(zip(computed, copies))
        results = [tensors[name] for name in self.results]
        for result, shape in zip(results, self.shapes):
            result.set_shape(shape)
        return results


def _trace(function, tensors):
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in tensors]
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _weight_only_operations(weights):
    """Return the operations that depend on weights and constants only."""
    operations = {weight.op for weight in weights}
    for operation in weights[0].graph.get_operations():
        is_source = operation.type == "Placeholder" or operation.op_def.is_stateful
        if not is_source and all(x.op in operations for x in operation.inputs):
            operations.add(operation)
    return operations


def _tensor_name(input_name):
    """Return the name of the tensor that a node's input refers to."""
    return input_name if ":" in input_name else f"{input_name}:0"
