"""ZeRO partitions the optimizer, and shards are updated like full weights."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer import TransformerOpParallelConfig
from dtransformer.parallel.zero.partition import Parameter, Partition
from dtransformer.trainers.optimizer.checks import check_elementwise, check_shards
from dtransformer.trainers.optimizer.optimizer_step import LossScale
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy
from dtransformer.trainers.optimizer.sharded_optimizer import ShardedOptimizer
from dtransformer.trainers.step_runner import StepCompiler

WEIGHTS = [
    Parameter("encoder/kernel", (512, 100), 4),
    Parameter("encoder/bias", (100,), 4),
    Parameter("decoder/kernel", (333, 101), 4),
    Parameter("decoder/limited", (512, 512), 4, has_constraint=True),
    Parameter("head/kernel", (64, 1000), 4),
]
WHOLE = {"optimizer_shard_partition": "whole", "optimizer_shard": 2}


def plan(num_shards=4, weights=WEIGHTS, **fields):
    return Partition.from_weights(weights, TransformerOpParallelConfig(**fields), num_shards)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_flat_partition_states_why_weights_are_replicated(level):
    partition = plan(optimizer_shard=level, parallel_optimizer_exclude=("^head/",))
    assert [parameter.num_shards for parameter in partition.parameters] == [4, 1, 4, 1, 1]
    reasons = [parameter.why_replicated for parameter in partition.parameters]
    assert reasons == [
        "",
        "less than 64 KB",
        "",
        "its constraint needs the full weight",
        "excluded",
    ]
    elements = [12_800, 100, 8_409, 262_144, 64_000]  # 333 · 101 / 4 = 8408.25
    for index in range(4):
        assert [parameter.updated_elements(index) for parameter in partition.parameters] == elements
    assert partition.updated_elements == (sum(elements),) * 4
    assert partition.num_elements == 51_200 + 100 + 33_633 + 262_144 + 64_000
    assert (partition.level, partition.balance) == (level, 1)


# Number of ranks -> owners of the weights and elements by rank. Weights above 64 KB go to the
# rank with the fewest elements, largest first.
OWNERS = {
    2: ([1, None, 1, 0, 1], (262_244, 148_933)),
    3: ([2, None, 2, 0, 1], (262_244, 64_100, 84_933)),
    4: ([2, None, 3, 0, 1], (262_244, 64_100, 51_300, 33_733)),
}


@pytest.mark.parametrize("num_ranks", OWNERS)
def test_partition_of_whole_weights(num_ranks):
    owners, elements = OWNERS[num_ranks]
    partition = plan(num_ranks, **WHOLE)
    all_sizes = [
        parameter.division.sizes if parameter.division else None
        for parameter in partition.parameters
    ]
    assert [sizes and sizes.index(max(sizes)) for sizes in all_sizes] == owners
    assert all(sum(map(bool, sizes)) == 1 for sizes in all_sizes if sizes)
    assert partition.updated_elements == elements
    assert partition.balance == pytest.approx(max(elements) * num_ranks / sum(elements))


def test_shards_of_one_weight_have_one_owner_and_count_their_updates():
    weights = [
        Parameter("table", (10, 3), 4, updates=57),
        Parameter("table", (10, 3), 4, updates=0),
        Parameter("kernel", (100,), 4),
        Parameter("bias", (9,), 4),
    ]
    partition = plan(2, weights, **WHOLE, parallel_optimizer_threshold=0)
    assert [parameter.division.sizes for parameter in partition.parameters] == [
        (0, 30),
        (0, 30),
        (100, 0),
        (0, 9),
    ]
    assert partition.updated_elements == (100, 66)


def test_every_rank_updates_a_weight():
    weights = [Parameter(name, (size,), 4) for name, size in (("a", 9), ("b", 2), ("c", 5))]
    partition = plan(4, weights, **WHOLE, parallel_optimizer_threshold=0)
    assert [parameter.why_replicated for parameter in partition.parameters] == [
        "",
        "fewer weights than ranks",
        "",
    ]
    assert partition.updated_elements == (11, 7, 2, 2)


def test_nothing_is_sharded_on_one_rank_or_at_level_0():
    for partition in (plan(), plan(num_shards=1, optimizer_shard=3), plan(num_shards=1, **WHOLE)):
        assert partition.level == 0
        assert set(partition.updated_elements) == {partition.num_elements}


def test_string_of_the_flat_partition():
    text = str(plan(optimizer_shard=2, parallel_optimizer_threshold=0))
    assert "encoder/kernel 512×100 a part each of 4 12,800" in " ".join(text.split())
    assert "its constraint needs the full weight" in text
    assert "level 2, flat: states and gradients are sharded over 4 ranks" in text


def test_string_of_the_partition_of_whole_weights():
    text = " ".join(str(plan(num_shards=2, **WHOLE)).split())
    assert "decoder/kernel 333×101 rank 1 33,633" in text
    assert "encoder/bias 100 each of 2 100 less than 64 KB" in text
    assert "The ranks update 262,244, 148,933; the maximum is 1.28 × the mean" in text


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "adadelta": lambda: keras.optimizers.Adadelta(0.01),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_shards_equal_updates_of_full_weights(name, compiled):
    rng = np.random.default_rng(0)
    start = rng.standard_normal((5, 4)).astype("float32")
    steps = rng.standard_normal((3, 5, 4)).astype("float32")
    full = keras.Variable(start, name="kernel")
    optimizer = OPTIMIZERS[name]()
    for gradient in steps:
        optimizer.apply([tf.constant(gradient)], [full])

    owners = [keras.Variable(start, name="kernel"), keras.Variable(start, name="bias")]
    flat = [ParameterProxy(owner, (10,)) for owner in owners]
    sharded = OPTIMIZERS[name]()
    sharded.exclude_from_weight_decay(var_names=["bias"])
    sharded.build(flat)

    @tf.function(jit_compile=compiled, autograph=False)
    def update(gradients, values):
        for variable, value in zip(flat, values):
            variable.bind(value)
        sharded.apply(gradients, flat)
        return [variable.unbind() for variable in flat]

    halves = [start.reshape(2, 10)[0], start.reshape(2, 10)[0]]
    for gradient in steps:
        first = gradient.reshape(2, 10)[0]
        halves = update([tf.constant(first)] * 2, [tf.constant(half) for half in halves])
    expected = full.numpy().reshape(2, 10)[0]
    np.testing.assert_allclose(halves[0], expected, rtol=1e-5, atol=1e-7)
    if optimizer.weight_decay:
        assert np.abs(halves[1] - expected).max() > 1e-3, "the bias does not decay"


WHOLE_WEIGHTS = {
    "lamb": lambda: keras.optimizers.Lamb(0.01, weight_decay=0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01, weight_decay=0.1),
    "muon": lambda: keras.optimizers.Muon(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", WHOLE_WEIGHTS)
def test_updates_through_a_proxy_equal_updates_of_variables(name):
    rng = np.random.default_rng(0)
    start = rng.standard_normal((5, 4)).astype("float32")
    full = keras.Variable(start, name="kernel")
    proxy = ParameterProxy(keras.Variable(start, name="kernel"), start.shape)
    reference, optimizer, value = WHOLE_WEIGHTS[name](), WHOLE_WEIGHTS[name](), tf.constant(start)
    optimizer.build([proxy])
    for gradient in tf.constant(rng.standard_normal((3, 5, 4)), "float32"):
        reference.apply([gradient], [full])
        proxy.bind(value)
        optimizer.apply([gradient], [proxy])
        value = proxy.unbind()
    np.testing.assert_allclose(value, full.numpy(), rtol=1e-6)


def test_rejects_optimizers_that_read_weights_during_build():
    proxy = ParameterProxy(keras.Variable(np.zeros((5, 3), "float32"), name="kernel"), (4,))
    with pytest.raises(ValueError, match="reads kernel outside of an update.*partition='whole'"):
        keras.optimizers.ScheduleFreeAdamW().build([proxy])


@pytest.mark.parametrize("fields", [{"gradient_accumulation_steps": 2}], ids=str)
def test_rejects_gradient_accumulation_of_shards(fields):
    with pytest.raises(ValueError, match=f"Lamb has {next(iter(fields))}="):
        check_shards(keras.optimizers.Lamb(0.1, **fields))


def test_optimizer_states_have_the_size_of_shards():
    variable = ParameterProxy(keras.Variable(np.zeros((5, 3), "float32")), (4,))
    optimizer = keras.optimizers.AdamW()
    optimizer.build([variable])
    assert [v.shape for v in optimizer.variables if v.shape.rank] == [(4,), (4,)]


@pytest.mark.parametrize("kind", ["Lamb", "Adafactor", "Muon"])
def test_rejects_optimizers_that_need_full_weights(kind):
    with pytest.raises(ValueError, match=f"{kind} computes with full weights.*partition='whole'"):
        check_elementwise(getattr(keras.optimizers, kind)(0.1))


class Lars(keras.optimizers.SGD):
    """Optimizer that scales gradients by the ratio of norms (You et al., 2017)."""

    def update_step(self, gradient, variable, learning_rate):
        scale = tf.norm(variable) / tf.norm(gradient)
        super().update_step(gradient * scale, variable, learning_rate)


class CustomAdam(keras.optimizers.AdamW):
    pass


def test_custom_optimizers_are_tried_on_halves_of_a_weight():
    with pytest.raises(ValueError, match="Lars computes with full weights"):
        check_elementwise(Lars(0.1))
    check_elementwise(
        CustomAdam(keras.optimizers.schedules.CosineDecay(0.1, 9), global_clipnorm=0.1)
    )


class TestLossScale:
    def run(self, norms, growth_steps=3):
        weight = keras.Variable(np.ones(2, "float32"))
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=growth_steps
        )
        optimizer.build([weight])
        scale, scales, updates = LossScale(optimizer), [], []
        for norm in norms:
            scale.run(tf.constant(norm), lambda: updates.append(norm))
            scales.append(float(scale.value()))
        return scales, updates, int(scale.skipped_steps)

    def test_scale_doubles_after_finite_steps(self):
        assert self.run([1.0] * 7) == ([8, 8, 16, 16, 16, 32, 32], [1.0] * 7, 0)

    @pytest.mark.parametrize("bad", [float("inf"), float("nan")])
    def test_overflow_halves_the_scale_skips_the_step_and_resets_the_count(self, bad):
        scales, updates, skipped = self.run([1.0, 1.0, bad, 1.0, 1.0, 1.0])
        assert scales == [8, 8, 4, 4, 4, 8]
        assert (updates, skipped) == ([1.0] * 5, 1)

    def test_without_loss_scaling_nothing_is_skipped(self):
        weight = keras.Variable(np.ones(2, "float32"))
        step = ShardedOptimizer(keras.optimizers.SGD(0.1), [weight], [None], StepCompiler())
        run_step(step, [tf.constant([float("nan"), 1.0])])
        assert float(step.loss_scale.value()) == 1.0
        np.testing.assert_allclose(weight.numpy(), [np.nan, 0.9])


def run_step(step, gradients):
    """Update the weights and return the norm of all gradients."""
    gradients, reduced, norm, _ = step.reduce_and_clip(gradients)
    step.apply(gradients, reduced, norm)
    return norm


def test_update_removes_the_loss_scale():
    weight = keras.Variable(np.ones(3, "float32"))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
    step = ShardedOptimizer(optimizer, [weight], [None], StepCompiler())
    norm = run_step(step, [tf.constant([4.0, 8.0, 8.0])])
    assert float(norm) == pytest.approx(3.0)
    np.testing.assert_allclose(weight.numpy(), [0.5, 0.0, 0.0])


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("clip", [{}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}])
@pytest.mark.parametrize("kind", ["none", "copies"])
def test_norm_is_zero_without_counted_weights(kind, clip, traced):
    weights = [] if kind == "none" else [keras.Variable(np.ones(2, "float32"))]
    copies = weights if kind == "copies" else []
    optimizer = keras.optimizers.SGD(1.0, **clip)
    step = ShardedOptimizer(optimizer, weights, [None] * len(weights), StepCompiler(), copies)
    run = functools.partial(run_step, step)
    run = tf.function(run, autograph=False) if traced else run
    assert float(run([tf.constant([3.0, 4.0])] * len(weights))) == 0
    assert int(optimizer.iterations) == 1


def phase_names(steps):
    return [getattr(phase, "func", phase).__name__ for phase in steps]


def test_one_device_skips_phases_of_other_layouts():
    weight = keras.Variable(np.ones(3, "float32"))
    step = ShardedOptimizer(keras.optimizers.SGD(0.5), [weight], [None], StepCompiler())
    assert phase_names(step.phases) == [
        "prepare_gradients",
        "unscale",
        "measure_gradients",
        "measure_norm",
        "clip",
    ]
    assert step.store is None


def test_keras_clips_the_sum_of_accumulated_gradients():
    weight = keras.Variable(np.ones(3, "float32"))
    optimizer = keras.optimizers.SGD(0.5, clipnorm=1.0, gradient_accumulation_steps=2)
    step = ShardedOptimizer(optimizer, [weight], [None], StepCompiler())
    assert "clip" not in phase_names(step.phases)


def test_tensorflow_has_no_stateless_apply():
    """If this fails, Keras may be able to replace `ParameterProxy`."""
    weight = keras.Variable(np.ones(3, "float32"))
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([weight])
    states = [variable.value for variable in optimizer.variables]
    with pytest.raises(ValueError, match="stateless_apply is not supported with the TensorFlow"):
        optimizer.stateless_apply(states, [tf.ones(3)], [tf.ones(3)])
