"""Groups and collectives work in one process without Horovod."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer.parallel import collectives
from dtransformer.parallel.runtime import job


def test_single_process_is_the_only_group():
    group = job.new_group([0])
    assert (group.ranks, group.size, group.index, group.process_set) == ((0,), 1, 0, None)
    assert job.new_group(np.arange(1)) is group is job.world_group()
    dtransformer.init()
    assert job.world_group() == group


@pytest.mark.parametrize(
    "ranks, words",
    [
        ([], ["at least one"]),
        (None, ["at least one", "None"]),
        ([1], ["(1,)", "rank 0 alone"]),
        ([-1], ["-1", "rank 0 alone"]),
        ([0, 0], ["(0, 0)", "twice"]),
        (["0"], ["'0'", "rank 0 alone"]),
        ([0.0], ["0.0", "rank 0 alone"]),
    ],
)
def test_rejects_invalid_groups(ranks, words):
    with pytest.raises(ValueError) as caught:
        job.new_group(ranks)
    assert all(word in str(caught.value) for word in words)


ARGUMENTS = {
    "broadcast": (),
    "reduce_sum": (),
    "all_reduce_sum": (),
    "all_reduce_max": (),
    "all_reduce_min": (),
    "gather": (1,),
    "all_gather": (-1,),
    "scatter": (1,),
    "reduce_scatter_sum": (0,),
    "all_to_all": (0, 1),
}


def test_every_public_collective_is_covered():
    not_collectives = {"Group", "new_group", "send", "recv"}
    assert ARGUMENTS.keys() | not_collectives == set(collectives.__all__)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_collectives_are_the_identity_in_one_process(name, compiled):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = getattr(collectives, name)(x, *ARGUMENTS[name])
            loss = tf.reduce_sum(y**3)
        return y, tape.gradient(loss, x)

    x = tf.constant([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]])
    y, slope = (tf.function(gradient) if compiled else gradient)(x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(slope, 3 * x**2)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: collectives.all_gather(x, 2), ["all_gather", "(2, 3)", "group of 1", "axis=2"]),
        (lambda x: collectives.all_to_all(x, 0, -3), ["all_to_all", "concat_axis=-3", "-2 to 1"]),
        (lambda x: collectives.scatter(x[0, 0]), ["scatter", "()", "A scalar has no axis"]),
        (lambda x: collectives.broadcast(x, 1), ["broadcast", "(2, 3)", "Position 1"]),
        (lambda x: collectives.all_reduce_sum(x > 0), ["all_reduce_sum", "bool", "Cast"]),
        (lambda x: collectives.all_reduce_sum(tf.cast(x, "uint64")), ["uint64", "float32"]),
        (lambda x: collectives.send(x, 0), ["send(to=0)", "(2, 3)", "from itself"]),
        (lambda x: collectives.recv(x, 1), ["recv(source=1)", "Position 1"]),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_rejects_invalid_arguments(call, words, compiled):
    with pytest.raises(ValueError) as caught:
        (tf.function(call, autograph=False) if compiled else call)(tf.zeros([2, 3]))
    assert all(word in str(caught.value) for word in words)


def test_only_transport_module_calls_horovod():
    package = pathlib.Path(dtransformer.__file__).parent
    texts = {path.stem: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    users = [name for name, text in texts.items() if "job.horovod()" in text]
    assert users == ["transport"], "use a function of collectives/transport.py"
