"""A student learns from the logits of a frozen teacher, with PyTorch's losses and gradients."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss, DistillationLoss
from dtransformer.models import CausalLM, MaskedLM
from dtransformer.parallel.tensor_parallel.divergence import token_divergence
from dtransformer.reports.audit import needed_operations
from dtransformer.reports.throughput import tokens_and_flops
from dtransformer.trainers import Trainer
from tests import on_mesh
from tests.models.pretrained.published import with_transformers
from tests.trainers.reference_distillation import HARD_LOSS_WEIGHT, KINDS, TEMPERATURES
from tests.trainers.test_chunked_loss import assert_equal, record_chunks

VOCAB_SIZE, ROWS, LENGTH = 103, 8, 18
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SIZES = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "dropout_rate": 0.0}
TEACHER_SIZES = {**SIZES, "hidden_size": 32}


def batch():
    inputs = np.random.default_rng(0).integers(4, VOCAB_SIZE, (ROWS, LENGTH), "int32")
    labels = np.roll(inputs, -1, axis=1)
    labels[0, 5:] = -100
    return inputs, labels


def make_trainer(model=CausalLM, teacher=None, **options):
    """Return a compiled trainer of a new student. The teacher is new by default."""
    keras.utils.set_random_seed(0)
    dtransformer.set_seed(0)
    trainer = Trainer(model(VOCAB_SIZE, **SIZES))
    if teacher is None:
        teacher = model(VOCAB_SIZE, **TEACHER_SIZES)
    loss = DistillationLoss(ignore_id=-100, **options)
    trainer.compile(keras.optimizers.SGD(0.5), loss, teacher=teacher)
    return trainer


def train(steps=2, **options):
    """Return the losses of training and evaluation, and the trained weights."""
    trainer = make_trainer(**options)
    logs = [trainer.train_on_batch(*batch(), return_dict=True) for _ in range(steps)]
    logs.append(trainer.evaluate(*batch(), batch_size=ROWS, return_dict=True, verbose=0))
    values = [[log[name] for name in ("loss", "hard_loss", "kl_loss")] for log in logs]
    weights = np.concatenate([np.ravel(weight) for weight in trainer.get_weights()])
    return np.array(values, float), weights


def reference(folder, library):
    """Return random logits and labels, and the losses of a library in another process."""
    random = np.random.default_rng(1)
    logits = random.normal(size=(2, 3, 5, 12)).astype("float32") * 3
    labels = random.integers(0, 12, (3, 5))
    labels[0, 2:] = -100
    arrays = {"student": logits[0], "teacher": logits[1], "labels": labels}
    np.savez(folder / "logits.npz", **arrays)
    program = [sys.executable, "-m", "tests.trainers.reference_distillation", str(folder), library]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return arrays, np.load(folder / f"{library}.npz")


def check_reference(folder, library):
    arrays, expected = reference(folder, library)
    labels = tf.constant(arrays["labels"], "int32")
    for kind in KINDS:
        for temperature in TEMPERATURES:
            loss = DistillationLoss(temperature, HARD_LOSS_WEIGHT, kind, ignore_id=-100)
            with tf.GradientTape() as tape:
                student = tf.Variable(arrays["student"])
                logits = tf.identity(student)
                logits.teacher_logits = tf.constant(arrays["teacher"])
                value = loss(logits, labels)
            results = {"loss": value, "gradient": tape.gradient(value, student)}
            is_label = arrays["labels"] >= 0
            parts = logits.loss_parts.items()
            results |= {name: np.mean(part.numpy()[is_label]) for name, part in parts}
            for name, result in results.items():
                key = f"{kind}/{temperature}/{name}"
                np.testing.assert_allclose(result, expected[key], **CLOSE, err_msg=key)


@with_transformers
def test_losses_and_gradients_match_pytorch(tmp_path):
    check_reference(tmp_path, "torch")


@with_transformers
@pytest.mark.long
def test_losses_and_gradients_match_trl(tmp_path):
    check_reference(tmp_path, "trl")


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_ignores_padding_of_the_vocabulary(kind):
    logits = tf.random.stateless_normal((2, 3, 10), (1, 2))
    teacher_logits = tf.random.stateless_normal((2, 3, 10), (3, 4))
    lowest = tf.fill([2, 3, 2], logits.dtype.min)
    padded = [tf.concat([x, lowest], -1) for x in (logits, teacher_logits)]
    expected = token_divergence(logits, teacher_logits, kind, 0.5)
    with tf.GradientTape() as tape:
        tape.watch(padded)
        result = token_divergence(*padded, kind, 0.5, vocab_size=10)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    gradient, teacher_gradient = tape.gradient(result, padded)
    assert not np.any(gradient[..., 10:]) and np.isfinite(gradient).all()
    assert teacher_gradient is None


def test_logged_losses_come_from_the_logits_of_both_networks():
    teacher = CausalLM(VOCAB_SIZE, **TEACHER_SIZES)
    trainer = make_trainer(teacher=teacher, hard_loss_weight=0.2)
    inputs, labels = batch()
    log_q, log_p = (
        tf.nn.log_softmax(network(inputs) / 2.0) for network in (trainer.network, teacher)
    )
    is_label = labels >= 0
    kl = np.mean(tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), -1)[is_label])
    hard = float(CrossEntropyLoss(ignore_id=-100)(trainer.network(inputs), labels))
    before = [np.array(x) for x in teacher.get_weights()]
    logs = trainer.train_on_batch(inputs, labels, return_dict=True)
    np.testing.assert_allclose([logs["hard_loss"], logs["kl_loss"]], [hard, kl], rtol=1e-5)
    np.testing.assert_allclose(logs["loss"], 0.2 * hard + 0.8 * 4 * kl, rtol=1e-5)
    for old, new in zip(before, teacher.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_checkpoints_and_weights_contain_only_the_student():
    trainer = make_trainer()
    trainer.train_on_batch(*batch())
    names = {weight.path.split("/")[0] for weight in trainer.weights}
    assert "teacher" not in names
    state = trainer._program.training_state()
    assert len(state.network.weights) == len(trainer.network.weights)
    assert len(trainer.get_weights()) == len(CausalLM(VOCAB_SIZE, **SIZES).weight_shapes())


def test_reports_count_the_teacher():
    teacher = CausalLM(VOCAB_SIZE, **TEACHER_SIZES)
    trainer = make_trainer(teacher=teacher)
    trainer.train_on_batch(*batch())
    row = trainer.memory_report()["weights"]
    num_parameters = trainer.network.count_params() + teacher.count_params()
    assert row.planned == row.measured == 4 * num_parameters
    inputs, labels = map(tf.constant, batch())
    _, alone = tokens_and_flops(trainer.network, inputs, labels)
    _, taught = tokens_and_flops(teacher, inputs, labels)
    tokens, together = tokens_and_flops(trainer.network, inputs, labels, teacher)
    assert tokens == ROWS * LENGTH
    assert together == pytest.approx(alone + taught / 3)


def test_student_equal_to_its_teacher_has_no_divergence():
    teacher = CausalLM(VOCAB_SIZE, **{**SIZES, "dropout_rate": 0.5})
    trainer = make_trainer(teacher=teacher)
    teacher.set_weights(trainer.network.get_weights())
    # The teacher runs without dropout also in a training step.
    logs = trainer.train_on_batch(*batch(), return_dict=True)
    assert abs(logs["kl_loss"]) < 1e-6
    np.testing.assert_allclose(logs["loss"], 0.5 * logs["hard_loss"], rtol=1e-5)


@pytest.mark.parametrize("model", [CausalLM, MaskedLM])
def test_chunks_equal_all_logits(model, monkeypatch):
    expected = train(model=model, chunk_tokens=None)
    sizes = record_chunks(monkeypatch)
    assert_equal(train(model=model, chunk_tokens=10), expected)
    assert set(sizes) == {10}


def check_layout(**layout):
    """Check that a mesh has the losses of one device, with chunks of logits."""
    expected, _ = train(chunk_tokens=None)
    on_mesh.start(**layout)
    with pytest.MonkeyPatch.context() as patch:
        sizes = record_chunks(patch)
        losses, _ = train(chunk_tokens=24)  # Weights contain padding of the vocabulary.
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert set(sizes) == {24}


@on_mesh.on_mesh
def test_sharded_vocabulary_equals_one_device():
    check_layout(model_parallel=2)


@pytest.mark.long
@on_mesh.on_mesh
def test_data_and_model_axes_equal_one_device():
    check_layout(data_parallel=2, model_parallel=2)


def test_teachers_of_another_vocabulary_or_class_raise_an_error():
    loss = DistillationLoss()
    trainer = Trainer(CausalLM(VOCAB_SIZE, **SIZES))
    with pytest.raises(
        ValueError, match="vocabulary of 104 entries, but the trained network has 103"
    ):
        trainer.compile("sgd", loss, teacher=CausalLM(VOCAB_SIZE + 1, **SIZES))
    with pytest.raises(ValueError, match="is a MaskedLM, but the trained network is a CausalLM"):
        trainer.compile("sgd", loss, teacher=MaskedLM(VOCAB_SIZE, **SIZES))


def test_teacher_and_loss_require_each_other():
    teacher = CausalLM(VOCAB_SIZE, **SIZES)
    trainer = Trainer(CausalLM(VOCAB_SIZE, **SIZES))
    with pytest.raises(ValueError, match="`teacher` has no effect without a DistillationLoss"):
        trainer.compile("sgd", CrossEntropyLoss(), teacher=teacher)
    trainer.compile("sgd", DistillationLoss())
    with pytest.raises(ValueError, match="logits without teacher logits"):
        trainer.train_on_batch(*batch())


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"divergence": "js"}])
def test_invalid_options_raise_an_error(options):
    with pytest.raises(ValueError, match="must be above 0, and `divergence="):
        DistillationLoss(**options)


def test_step_does_not_compute_all_logits_of_the_teacher():
    student, teacher = (CausalLM(VOCAB_SIZE, **sizes) for sizes in (SIZES, TEACHER_SIZES))
    loss = DistillationLoss(chunk_tokens=10)
    student.build()
    teacher.build()

    @tf.function(autograph=False)
    def compute(inputs, labels):
        with tf.GradientTape() as tape:
            logits = student(inputs, training=True)
            logits.teacher_logits = teacher(inputs)
            value = loss(logits, labels)
        return tape.gradient(value, student.embedding.table.value)

    inputs, labels = batch()
    graph = compute.get_concrete_function(inputs, np.maximum(labels, 0)).graph
    outputs = [x for operation in needed_operations(graph) for x in operation.outputs]
    shapes = {tuple(x.shape) for x in outputs if x.shape}
    assert not shapes & {(ROWS, LENGTH, VOCAB_SIZE), (ROWS * LENGTH, VOCAB_SIZE)}
