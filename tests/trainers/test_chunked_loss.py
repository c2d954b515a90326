"""The loss in chunks of tokens equals the loss from all logits, and never stores all logits."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer._compat import get_function_graph
from dtransformer.layers import CrossEntropyLoss
from dtransformer.layers.preference import PreferenceLoss, SequenceLogProbability
from dtransformer.models import CausalLM, MaskedLM
from dtransformer.models.pairs import GroupModel
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tensor_parallel import chunked_cross_entropy
from dtransformer.reports.audit import needed_operations
from dtransformer.trainers import Trainer
from tests import on_mesh
from tests.peak_memory import peak_of_a_second_step
from tests.shared_runs import on_ranks

VOCAB_SIZE, ROWS, LENGTH = 103, 4, 18
UNTIED = {"tied_head": False, "head_bias": True}
CAPPED = {"logits_soft_cap": 3.0, "logits_scale": 0.5}


@pytest.fixture
def chunk_counts(monkeypatch):
    """List that receives the maximum chunk size whenever a loss in chunks is traced."""
    return record_chunks(monkeypatch)


def record_chunks(monkeypatch):
    sizes = []
    original = chunked_cross_entropy._chunked_losses

    def recorded(product, labels, size, *args, **options):
        sizes.append(size)
        return original(product, labels, size, *args, **options)

    monkeypatch.setattr(chunked_cross_entropy, "_chunked_losses", recorded)
    return sizes


def batch():
    inputs = np.random.default_rng(0).integers(4, VOCAB_SIZE, (ROWS, LENGTH), "int32")
    labels = np.roll(inputs, -1, axis=1)
    labels[0, 5:] = -100
    return inputs, labels


def train(chunk_tokens, steps=3, model=CausalLM, dtype="float32", jit_compile=False, **options):
    """Return the losses and accuracies of training and evaluation, and the trained weights."""
    keras.utils.set_random_seed(0)
    dtransformer.set_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 2, "num_layers": 1, "dropout_rate": 0.0}
    network = model(VOCAB_SIZE, dtype=dtype, **{**sizes, **options})
    trainer = Trainer(network)
    loss = CrossEntropyLoss(0.1, ignore_id=-100, z_loss=0.01, chunk_tokens=chunk_tokens)
    trainer.compile(keras.optimizers.SGD(0.5), loss, jit_compile=jit_compile)
    logs = [trainer.train_on_batch(*batch(), return_dict=True) for _ in range(steps)]
    logs.append(trainer.evaluate(*batch(), batch_size=ROWS, return_dict=True, verbose=0))
    values = [[log["loss"], log["accuracy"]] for log in logs]
    weights = np.concatenate([np.ravel(weight) for weight in trainer.get_weights()])
    return np.array(values, float), weights


def assert_equal(results, expected, tolerance=1e-6):
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [{}, UNTIED, CAPPED, {"jit_compile": True}, {"model": MaskedLM}],
    ids=["tied", "untied", "capped", "xla", "masked_lm"],
)
def test_losses_and_weights_equal_the_loss_from_all_logits(options, chunk_counts):
    expected = train(None, **options)
    assert not chunk_counts
    assert_equal(train(10, **options), expected)
    assert set(chunk_counts) == {10}


def test_weights_stay_close_in_mixed_precision():
    expected = train(None, dtype="mixed_bfloat16")
    assert_equal(train(10, dtype="mixed_bfloat16"), expected, 5e-3)


def mesh_matches(monkeypatch, options=UNTIED, **layout):
    on_mesh.start(**layout)
    expected = train(None, steps=2, **options)
    sizes = record_chunks(monkeypatch)
    assert_equal(train(24, steps=2, **options), expected)
    return sizes


@on_mesh.on_mesh
def test_sharded_vocabulary_equals_all_logits():
    with pytest.MonkeyPatch.context() as patch:
        assert set(mesh_matches(patch, model_parallel=2)) == {24}


@on_mesh.on_mesh
def test_tied_head_on_data_and_model_axes_equals_all_logits():
    with pytest.MonkeyPatch.context() as patch:
        sizes = mesh_matches(patch, CAPPED, data_parallel=2, model_parallel=2)
        assert set(sizes) == {24}


@on_mesh.on_mesh
def test_context_shards_compute_chunks_of_their_tokens():
    with pytest.MonkeyPatch.context() as patch:
        assert set(mesh_matches(patch, {}, model_parallel=1, context_parallel=2)) == {24}


@on_mesh.on_mesh
def test_weights_sharded_on_a_mesh_equal_all_logits():
    layout = {"data_parallel": 2, "optimizer_shard": 3, "parallel_optimizer_threshold": 0}
    with pytest.MonkeyPatch.context() as patch:
        assert set(mesh_matches(patch, **layout)) == {24}


def check_peak_of_a_mesh(**layout):
    """Check that the temporary memory of a step is smaller than all logits, but only with chunks."""
    on_mesh.start(model_parallel=1, **layout)
    vocab_size = 20000
    shape = ROWS, 128
    inputs = np.random.default_rng(0).integers(4, vocab_size, shape, "int32")
    logits_bytes = 4 * inputs.size * vocab_size

    def peak(chunk_tokens):
        network = CausalLM(vocab_size, hidden_size=16, num_heads=2, num_layers=1, tied_head=False)
        trainer = Trainer(network)
        trainer.compile("sgd", CrossEntropyLoss(chunk_tokens=chunk_tokens))

        def step():
            # DTensor is asynchronous. Reading the loss waits for the step.
            float(trainer.train_on_batch(inputs, inputs, return_dict=True)["step_loss"])

        return peak_of_a_second_step(step)

    assert peak(32) < logits_bytes < peak(None)


@on_mesh.on_mesh
def test_context_shards_never_store_all_logits():
    check_peak_of_a_mesh(context_parallel=2)


@on_mesh.on_mesh
def test_sharded_weights_on_a_mesh_never_store_all_logits():
    check_peak_of_a_mesh(data_parallel=2, optimizer_shard=3, parallel_optimizer_threshold=0)


def check_on_ranks(*heads):
    """Check 20 steps with each kind of head against the loss from all logits."""
    for head in heads:
        options = {"num_layers": 2, **head}
        expected = train(None, steps=20, **options)
        with pytest.MonkeyPatch.context() as patch:
            sizes = record_chunks(patch)
            assert_equal(train(6, steps=20, **options), expected, 1e-5)
        assert set(sizes) <= {6}
        if job.stage()[0] == job.stage()[1] - 1:  # The last stage computes the loss.
            assert sizes


@pytest.mark.long
@on_ranks("dp2@2x1+shard2")
def test_losses_on_data_ranks_equal_the_loss_from_all_logits():
    check_on_ranks({}, UNTIED)


@pytest.mark.long
@on_ranks("pp2m2-1f1b@2x1")
def test_losses_in_a_pipeline_equal_the_loss_from_all_logits():
    check_on_ranks({}, UNTIED)


@pytest.mark.long
@on_ranks("dp2@2x1+shard3")
def test_losses_of_gathered_heads_equal_the_loss_from_all_logits():
    check_on_ranks(UNTIED)


@pytest.mark.long
@on_ranks("cp2@2x1")
def test_losses_of_sharded_sequences_equal_the_loss_from_all_logits():
    check_on_ranks(UNTIED)


@pytest.mark.long
@on_ranks("dp2pp2m2-1f1b@4x1+shard3")
def test_losses_of_gathered_heads_in_a_pipeline_equal_the_loss_from_all_logits():
    check_on_ranks({})


def memory_of_logits(chunk_tokens):
    trainer = Trainer(CausalLM(VOCAB_SIZE, hidden_size=8, num_heads=2, num_layers=1))
    trainer.compile("sgd", CrossEntropyLoss(ignore_id=-100, chunk_tokens=chunk_tokens))
    trainer.train_on_batch(*batch())
    return trainer.memory_report()["logits"].planned


def test_memory_report_counts_logits_of_one_chunk():
    """An element has the logit, its float32 copy and its gradient."""
    assert memory_of_logits(None) == ROWS * LENGTH * VOCAB_SIZE * (4 + 2 * 4)
    assert memory_of_logits(10) == 10 * VOCAB_SIZE * (4 + 2 * 4)
    assert memory_of_logits("auto") == memory_of_logits(None)


def gradient_graph(chunk_tokens):
    """Return the graph of the gradient of a loss."""
    network = CausalLM(VOCAB_SIZE, hidden_size=8, num_heads=2, num_layers=1, dropout_rate=0.0)
    network.build()
    loss = CrossEntropyLoss(chunk_tokens=chunk_tokens)
    kernel = network.embedding.table

    @tf.function(autograph=False)
    def compute(inputs, labels):
        with tf.GradientTape() as tape:
            value = loss(network(inputs, training=True), labels)
        return tape.gradient(value, kernel.value)

    batch_of_tensors = map(tf.constant, batch_without_ignored())
    return compute.get_concrete_function(*batch_of_tensors).graph


def stored_shapes(chunk_tokens):
    """Return the shapes of all tensors in the graph of a loss and its gradients."""
    needed = needed_operations(gradient_graph(chunk_tokens))
    return {tuple(x.shape) for operation in needed for x in operation.outputs if x.shape}


def batch_without_ignored():
    inputs, labels = batch()
    return inputs, np.maximum(labels, 0)


def test_step_does_not_compute_all_logits():
    all_logits = {(ROWS, LENGTH, VOCAB_SIZE), (ROWS * LENGTH, VOCAB_SIZE)}
    assert stored_shapes(None) & all_logits
    assert not stored_shapes(10) & all_logits


def test_gradients_do_not_compute_the_logits_again():
    """One loop has the products of the logits and of both gradients."""
    needed = needed_operations(gradient_graph(10))
    (loop,) = [operation for operation in needed if operation.type in ("While", "StatelessWhile")]
    body = get_function_graph(loop.graph, loop.get_attr("body").name)
    products = [operation for operation in body.get_operations() if "MatMul" in operation.type]
    assert len(products) == 3


class SquaredLoss(CrossEntropyLoss):
    """Loss of a subclass that overrides `per_token`."""

    def per_token(self, logits, labels, mask=None):
        values, weights = super().per_token(logits, labels, mask)
        return tf.square(values), weights


def test_subclasses_may_change_the_loss_of_a_token():
    network = CausalLM(VOCAB_SIZE, hidden_size=8, num_heads=2, num_layers=1, dropout_rate=0.0)
    trainer = Trainer(network)
    trainer.compile("sgd", SquaredLoss(ignore_id=-100, chunk_tokens=10))
    inputs, labels = batch()
    values, weights = CrossEntropyLoss(ignore_id=-100).per_token(network(inputs), labels)
    expected = np.sum(np.square(values) * weights) / np.sum(weights)
    logs = trainer.train_on_batch(inputs, labels, return_dict=True)
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)


def test_metrics_read_all_logits_and_warn(chunk_counts):
    network = CausalLM(VOCAB_SIZE, hidden_size=8, num_heads=2, num_layers=1)
    trainer = Trainer(network)
    loss = CrossEntropyLoss(ignore_id=-100, chunk_tokens=10)
    trainer.compile("sgd", loss, metrics=["sparse_categorical_accuracy"])
    with pytest.warns(UserWarning, match="Metrics read all logits of shape"):
        trainer.train_on_batch(*batch_without_ignored())
    assert not chunk_counts


def test_predictions_and_generation_are_unchanged(chunk_counts):
    network = CausalLM(VOCAB_SIZE, hidden_size=8, num_heads=2, num_layers=1)
    trainer = Trainer(network)
    trainer.compile("sgd", CrossEntropyLoss(chunk_tokens=10))
    inputs, _ = batch()
    np.testing.assert_allclose(trainer.predict(inputs), network(inputs), rtol=1e-5, atol=1e-5)
    assert not chunk_counts


def test_preference_scores_use_chunks_for_large_logits(monkeypatch, chunk_counts):
    network = CausalLM(VOCAB_SIZE, hidden_size=8, num_heads=2, num_layers=1, **UNTIED)
    network.build()
    model = GroupModel(network, SequenceLogProbability(VOCAB_SIZE))
    tokens, labels = (tf.reshape(x, [ROWS // 2, 2, LENGTH]) for x in batch())
    inputs = {"tokens": tokens, "segments": tf.ones_like(tokens), "labels": labels}
    weights = [network.head.kernel.value, network.head.bias.value]

    def compute():
        with tf.GradientTape() as tape:
            log_p = model(inputs)
            loss = PreferenceLoss(beta=1.0).call(tf.zeros_like(log_p), log_p)
        return [log_p, *tape.gradient(loss, weights)]

    expected = compute()
    monkeypatch.setattr(chunked_cross_entropy, "max_chunk_tokens", lambda vocab_size: 10)
    assert_equal(tf.function(compute, autograph=False)(), expected)
    assert chunk_counts == [10]


@pytest.mark.parametrize(
    ("shape", "vocab_size", "expected"),
    [
        ([1, 8192], 8 * 1024, None),
        ([1, 8193], 8 * 1024, 8192),
        ([1, 2048], 128 * 1024, None),
        ([1, 2049], 128 * 1024, 2048),
        ([None, 8], 128 * 1024, 2048),
        ([None, 8], 1000, None),
    ],
)
def test_auto_limits_float32_logits_to_256_mib_or_2048_tokens(shape, vocab_size, expected):
    with tf.Graph().as_default():
        inputs = tf.compat.v1.placeholder("bfloat16", [*shape, 2])
        logits = tf.compat.v1.placeholder("bfloat16", [*shape, vocab_size])
        kernel = tf.zeros([2, vocab_size], "bfloat16")
        chunked_cross_entropy.attach_product(logits, inputs, kernel, [], False, tf.identity)
        assert chunked_cross_entropy.chunk_size(logits) == expected
        assert chunked_cross_entropy.chunk_size(logits, None) is None


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_batches_of_unknown_size_are_divided_evenly(rows):
    network = CausalLM(VOCAB_SIZE, hidden_size=8, num_heads=2, num_layers=1)
    network.build()
    loss = CrossEntropyLoss(chunk_tokens=7)
    spec = tf.TensorSpec([None, LENGTH], "int32")

    @tf.function(input_signature=[spec, spec], autograph=False)
    def compute(inputs, labels):
        return loss(network(inputs), labels)

    inputs = tf.random.uniform((rows, LENGTH), 4, VOCAB_SIZE, "int32")
    expected = CrossEntropyLoss(chunk_tokens=None)(network(inputs), inputs) if rows else 0.0
    np.testing.assert_allclose(compute(inputs, inputs), expected, rtol=1e-6)


def test_rejects_an_invalid_chunk_size():
    with pytest.raises((TypeError, ValueError), match="chunk_tokens"):
        CrossEntropyLoss(chunk_tokens=0)
