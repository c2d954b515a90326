"""Pipeline stages: which layers a rank has, and what passes from stage to stage.

A layer with a `pipeline_stage` is placed: its stage alone has its weights and computes it.
Others have no weights, and every stage that needs their results computes them. So what
passes from stage to stage are results of placed layers. Which ones `StagePlan` finds out,
by running the network once with stand-ins for the placed layers.
"""

import contextlib
import dataclasses

import tensorflow as tf

from dtransformer.parallel import runtime

_view = None


@contextlib.contextmanager
def view(of):
    """Let placed layers inside the `with` block be called through `of`."""
    global _view
    outer, _view = _view, of
    try:
        yield of
    finally:
        _view = outer


def current_view():
    """Return what placed layers are called through; None where all are on this rank."""
    return _view


def stage_of(layer, num_stages):
    """Return the number of a placed layer's stage; -1 means the last one."""
    return layer.pipeline_stage % num_stages if layer.pipeline_stage < 0 else layer.pipeline_stage


def is_elsewhere(layer):
    """Return whether other stages than this rank's have the layer's weights."""
    own, number = runtime.stage()
    if number == 1 or layer.pipeline_stage is None:
        return False
    return own != stage_of(layer, number) and own not in layer.stages_with_copies


def check_here(layer):
    """Check that a placed layer that is called has its weights on this rank.

    Raises:
        RuntimeError: another stage has them.
    """
    if is_elsewhere(layer):
        own, number = runtime.stage()
        raise RuntimeError(
            f"{layer.path} is on stage {stage_of(layer, number)} of the pipeline, this rank on "
            f"stage {own}: call fit, evaluate or predict of a Trainer, which go through all stages"
        )


def copies(network):
    """Return the weights of this rank that are copies of an earlier stage's."""
    own, number = runtime.stage()
    return [
        weight
        for layer in network._flatten_layers()
        if number > 1 and own in getattr(layer, "stages_with_copies", ())
        for weight in layer.trainable_variables
    ]


@dataclasses.dataclass(frozen=True)
class Value:
    """A result of a placed layer that other stages need.

    Args:
        name: str, the same on every rank.
        shape: tuple of ints.
        dtype: name of its type.
        first: the stage that computes it.
        last: the last stage that needs it.
    """

    name: str
    shape: tuple
    dtype: str
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What passes from stage to stage, for one shape of micro-batches.

    Args:
        num_stages: number p of stages.
        values: tuple of `Value`s.
    """

    num_stages: int
    values: tuple

    def sent_after(self, stage):
        """Return the `Value`s that a stage hands to the next one."""
        return [value for value in self.values if value.first <= stage < value.last]

    def received_by(self, stage):
        """Return the `Value`s that a stage has from the one before."""
        return self.sent_after(stage - 1) if stage else []

    def __str__(self):
        lines = []
        for stage in range(self.num_stages - 1):
            for value in self.sent_after(stage):
                shape = "×".join(map(str, value.shape))
                lines.append(f"stage {stage} → {stage + 1}: {value.name} {shape} {value.dtype}")
        return "\n".join(lines)

    @classmethod
    def of(cls, network, inputs, num_stages):
        """Return the plan of a network, and let stages have the tables that they share.

        Args:
            network: a `keras.Model`.
            inputs: nested tensors, or specs of known shapes: a micro-batch.
            num_stages: number p of stages.

        Raises:
            ValueError: a stage has no layers, or needs what a later one computes; or a
                layer with weights has no place.
        """
        recorder = _Recorder(num_stages)

        def run(inputs):
            with view(recorder):
                recorder.outputs = tf.nest.flatten(network(inputs, training=True))

        specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), inputs)
        tf.function(run, autograph=False).get_concrete_function(specs)
        _check_places(network, recorder, num_stages)
        return cls(num_stages, tuple(recorder.values()))


class _Recorder:
    """Stands in for placed layers, and remembers what their inputs come from."""

    def __init__(self, num_stages):
        self._num_stages = num_stages
        self._names = _Names()
        self._results = {}  # a stand-in's name -> (layer, number of the result, name, stand-in)
        self._needed = []  # (layer, tensors)
        self.outputs = ()
        self.layers = []

    def call(self, layer, compute, args, kwargs):
        self.layers.append(layer)
        self._needed.append((layer, tf.nest.flatten(layer.needed_inputs(*args, **kwargs))))
        results = layer.stand_in(*args, **kwargs)
        flat = [tf.identity(x) for x in tf.nest.flatten(results)]
        name = self._names.next(layer)
        for number, x in enumerate(flat):
            self._results[x.name] = (layer, number, f"{name}:{number}", x)
        return tf.nest.pack_sequence_as(results, flat)

    def values(self):
        """Return the `Value`s; say of tables which stages need a copy."""
        last_use = {}
        last_stage = self._num_stages - 1
        uses = [(stage_of(layer, self._num_stages), layer.path, xs) for layer, xs in self._needed]
        for stage, user, tensors in [*uses, (last_stage, "the output", self.outputs)]:
            for key in self._origins(tensors):
                layer, number, name, _ = self._results[key]
                first = stage_of(layer, self._num_stages)
                if number in layer.results_that_are_weights:
                    if stage != first:
                        layer.stages_with_copies = {*layer.stages_with_copies, stage}
                    continue
                if stage < first:
                    raise ValueError(
                        f"{user} is on stage {stage} and needs what {layer.path} computes on stage "
                        f"{first}: stages may not go backwards along the network"
                    )
                last_use[key] = max(last_use.get(key, 0), stage)
        for key, last in last_use.items():
            layer, number, name, x = self._results[key]
            first = stage_of(layer, self._num_stages)
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


class StageView:
    """Computes one stage's placed layers; others give what was received, or stand-ins.

    Args:
        stage: number of the stage.
        plan: the `StagePlan`.
        received: dict of the names of `plan.received_by(stage)` and their tensors.

    Attributes:
        sent: dict of the names of `plan.sent_after(stage)` and their tensors.
    """

    def __init__(self, stage, plan, received):
        self._stage, self._plan = stage, plan
        self._received = received
        self._names = _Names()
        self._wanted = {value.name for value in plan.sent_after(stage)}
        self.sent = {name: x for name, x in received.items() if name in self._wanted}

    def call(self, layer, compute, args, kwargs):
        name = self._names.next(layer)
        if stage_of(layer, self._plan.num_stages) == self._stage:
            with view(None):  # what is inside of a placed layer is with it
                results = compute(*args, **kwargs)
            for number, x in enumerate(tf.nest.flatten(results)):
                if f"{name}:{number}" in self._wanted:
                    self.sent[f"{name}:{number}"] = x
            return results
        results = layer.stand_in(*args, **kwargs)
        flat = tf.nest.flatten(results)
        copies = layer.copies() if self._stage in layer.stages_with_copies else {}
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


def _check_places(network, recorder, num_stages):
    placed = {stage_of(layer, num_stages) for layer in recorder.layers}
    without = [stage for stage in range(num_stages) if stage not in placed]
    if without:
        raise ValueError(
            f"stage {without[0]} of {num_stages} has no layer with weights: change lambda_func or "
            "pipeline_stage"
        )
    inside = {id(part) for layer in recorder.layers for part in layer._flatten_layers()}
    for layer in network._flatten_layers():
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        if own and id(layer) not in inside:
            raise ValueError(
                f"{layer.path} has weights, but no place in the pipeline: set its pipeline_stage"
            )
