"""What passes between the stages of a pipeline, and the computation of one part.

What passes are results of placed layers. Which ones `StagePlan` finds out, by running the
network once with stand-ins for them: it is not declared.
"""

import dataclasses

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.pipeline import placement


@dataclasses.dataclass(frozen=True)
class Value:
    """A result of a placed layer that other parts need.

    Args:
        name: str, the same on every rank.
        shape: tuple of ints.
        dtype: name of its type.
        first: the part that computes it.
        last: the last part that needs it.
    """

    name: str
    shape: tuple
    dtype: str
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """What passes from part to part, for one shape of micro-batches.

    Args:
        num_parts: number of parts: of stages, where each has one chunk.
        values: tuple of `Value`s.
        outputs: nested specs of what the network returns.
    """

    num_parts: int
    values: tuple
    outputs: object = None

    def sent_after(self, part):
        """Return the `Value`s that a part hands to the next one."""
        return [value for value in self.values if value.first <= part < value.last]

    def received_by(self, part):
        """Return the `Value`s that a part has from the one before."""
        return self.sent_after(part - 1) if part else []

    def __str__(self):
        lines = []
        for part in range(self.num_parts - 1):
            for value in self.sent_after(part):
                shape = "×".join(map(str, value.shape))
                lines.append(f"stage {part} → {part + 1}: {value.name} {shape} {value.dtype}")
        return "\n".join(lines)

    @classmethod
    def of(cls, function, inputs, number):
        """Return the plan of a function of placed layers.

        Args:
            function: a function of `inputs` that returns nested tensors.
            inputs: nested tensors, or specs of known shapes: a micro-batch.
            number: number of parts.

        Raises:
            ValueError: a part needs what a later one computes.
        """
        return _record(function, inputs, number).plan()

    @classmethod
    def of_network(cls, network, inputs, number):
        """Return the plan of a network, and let stages have the tables that they share.

        Args:
            network: a `keras.Model`.
            inputs: nested tensors, or specs of known shapes: a micro-batch.
            number: number of parts.

        Raises:
            ValueError: a part has no layers, or needs what a later one computes; or a
                layer with weights has no place.
        """
        recorder = _record(lambda inputs: network(inputs, training=True), inputs, number)
        _check_places(network, recorder, number)
        return recorder.plan()


def _record(function, inputs, number):
    recorder = _Recorder(number)

    def run(inputs):
        with placement.view(recorder):
            recorder.outputs = function(inputs)

    tf.function(run, autograph=False).get_concrete_function(specs_of(inputs))
    return recorder


def specs_of(tensors):
    """Return the specs of nested tensors; None stays None."""
    return tf.nest.map_structure(
        lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), tensors
    )


class _Recorder:
    """Stands in for placed layers, and remembers what their inputs come from."""

    is_last = True  # outputs are wanted

    def __init__(self, num_parts):
        self._num_parts = num_parts
        self._names = _Names()
        self._results = {}  # a stand-in's name -> (layer, number of the result, name, stand-in)
        self._needed = []  # (layer, tensors)
        self.outputs = ()
        self.layers = []

    def call(self, layer, compute, args, kwargs, stand_in):
        self.layers.append(layer)
        self._needed.append((layer, tf.nest.flatten(layer.needed_inputs(*args, **kwargs))))
        results = stand_in(*args, **kwargs)
        flat = [tf.identity(x) for x in tf.nest.flatten(results)]
        name = self._names.next(layer)
        for number, x in enumerate(flat):
            self._results[x.name] = (layer, number, f"{name}:{number}", x)
        return tf.nest.pack_sequence_as(results, flat)

    def plan(self):
        """Return the `StagePlan`; say of tables which parts need a copy."""
        return Dataflow(self._num_parts, tuple(self._values()), specs_of(self.outputs))

    def _values(self):
        last_use = {}
        last_part, outputs = self._num_parts - 1, tf.nest.flatten(self.outputs)
        uses = [
            (placement.chunk_of(layer, self._num_parts), layer.path, xs)
            for layer, xs in self._needed
        ]
        for part, user, tensors in [*uses, (last_part, "the output", outputs)]:
            for key in self._origins(tensors):
                layer, number, name, _ = self._results[key]
                first = placement.chunk_of(layer, self._num_parts)
                if number in layer.results_that_are_weights:
                    if part != first:
                        layer.parts_with_copies = {*layer.parts_with_copies, part}
                    continue
                if part < first:
                    raise ValueError(
                        f"{user} is on stage {part} and needs what {layer.path} computes on stage "
                        f"{first}: stages may not go backwards along the network"
                    )
                last_use[key] = max(last_use.get(key, 0), part)
        for key, last in last_use.items():
            layer, number, name, x = self._results[key]
            first = placement.chunk_of(layer, self._num_parts)
            if last > first:
                yield Value(name, tuple(x.shape), x.dtype.name, first, last)

    def _origins(self, tensors):
        """Return the stand-ins that tensors are computed from, without another in between."""
        found, seen, todo = {}, set(), [x for x in tensors if tf.is_tensor(x)]
        while todo:
            x = todo.pop()
            if x.name in seen:
                continue
            seen.add(x.name)
            if x.name in self._results:
                found[x.name] = True
            else:
                todo += list(x.op.inputs)
        return list(found)


class BuildView:
    """Builds the placed layers of this rank as they are called; of others it has stand-ins."""

    def call(self, layer, compute, args, kwargs, stand_in):
        if not placement.is_elsewhere(layer):
            with placement.view(None):
                return compute(*args, **kwargs)
        if not layer.built:
            layer.build(None)  # for its path alone
        return stand_in(*args, **kwargs)


class StageView:
    """Computes one part's placed layers; others give what was received, or stand-ins.

    Args:
        part: number of the part.
        plan: the `StagePlan`.
        received: dict of the names of `plan.received_by(part)` and their tensors.

    Attributes:
        sent: dict of the names of `plan.sent_after(part)` and their tensors.
        is_last: whether the part has the outputs.
    """

    def __init__(self, part, plan, received):
        self._part, self._plan = part, plan
        self._received = received
        self.is_last = part == plan.num_parts - 1
        self._names = _Names()
        self._wanted = {value.name for value in plan.sent_after(part)}
        self.sent = {name: x for name, x in received.items() if name in self._wanted}

    def call(self, layer, compute, args, kwargs, stand_in):
        name = self._names.next(layer)
        if placement.chunk_of(layer, self._plan.num_parts) == self._part:
            with placement.view(None):  # what is inside of a placed layer is with it
                results = compute(*args, **kwargs)
            for number, x in enumerate(tf.nest.flatten(results)):
                if f"{name}:{number}" in self._wanted:
                    self.sent[f"{name}:{number}"] = x
            return results
        results = stand_in(*args, **kwargs)
        flat = tf.nest.flatten(results)
        copies = layer.copies() if self._part in layer.parts_with_copies else {}
        for number in range(len(flat)):
            if number in copies:
                flat[number] = copies[number]
            else:
                flat[number] = self._received.get(f"{name}:{number}", flat[number])
        return tf.nest.pack_sequence_as(results, flat)


class _Names:
    """Names of calls, the same on every rank: a layer may be called more than once."""

    def __init__(self):
        self._numbers = {}

    def next(self, layer):
        number = self._numbers[id(layer)] = self._numbers.get(id(layer), -1) + 1
        return f"{layer.path}#{number}" if number else layer.path


def _check_places(network, recorder, number):
    placed = {placement.chunk_of(layer, number) for layer in recorder.layers}
    without = [part for part in range(number) if part not in placed]
    if without:
        raise ValueError(
            f"stage {without[0]} of {number} has no layer with weights: change lambda_func or "
            "pipeline_stage"
        )
    inside = {id(part) for layer in recorder.layers for part in layer._flatten_layers()}
    for layer in network._flatten_layers():
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        if own and id(layer) not in inside:
            raise ValueError(
                f"{layer.path} has weights, but no place in the pipeline: set its pipeline_stage"
            )


def share_tables(network, inputs):
    """Find out which parts share tables, and build the copies that this rank has.

    There are none where the network is not in a pipeline.

    Args:
        network: a `keras.Model`, built.
        inputs: nested tensors, or specs of known shapes: a batch.

    Raises:
        ValueError: see `StagePlan.of_network`.
    """
    own, num_stages = job.stage()
    if num_stages == 1:
        return
    Dataflow.of_network(network, inputs, placement.num_chunks())
    for shared, layer in placement.shared_weights(network):
        if own in shared and not layer.weights:
            layer.built = False
            layer.build((None, None))
