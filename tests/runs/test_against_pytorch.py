"""Preferences, rewards and classes have the losses and gradients that PyTorch computes."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import CrossEntropyLoss, SequenceHead
from dtransformer.layers.preference import PreferenceLoss, RewardLoss, SequenceLogProbability
from dtransformer.models import from_pretrained, load_lora
from dtransformer.models.one_stack import with_task_head
from dtransformer.models.pairs import GroupModel
from dtransformer.preference_losses import MEAN_LOSSES
from dtransformer.runs.tasks.kto import KTOLoss
from tests.models.pretrained.published import with_transformers

pytestmark = with_transformers
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
BETA = 0.3
KINDS = [
    ("sigmoid", 0.0),
    ("sigmoid", 0.1),
    ("sigmoid_norm", 0.0),
    ("ipo", 0.0),
    ("hinge", 0.0),
    ("simpo", 0.1),
    ("orpo", 0.0),
    ("kto", 0.0),
]


def run(program, folder):
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", f"tests.runs.{program}", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run("reference_tasks", folder)
    return folder, dict(np.load(folder / "found.npz"))


def make_inputs(result, with_labels):
    """Return a batch in the form of the tasks' rows, with the next tokens as labels."""
    segments = np.arange(result["ids"].shape[-1]) < result["lengths"][..., None]
    labels = np.pad(result["labels"][..., 1:], [(0, 0), (0, 0), (0, 1)], constant_values=-100)
    arrays = {"tokens": result["ids"], "segments": segments, "labels": labels}
    arrays = arrays if with_labels else {name: arrays[name] for name in ("tokens", "segments")}
    return {name: tf.constant(x.astype("int32")) for name, x in arrays.items()}


@pytest.mark.parametrize("kind, smoothing", KINDS)
def test_preference_loss_with_adapters_matches_pytorch(reference, kind, smoothing):
    folder, result = reference
    core, key = from_pretrained(folder / "llama"), f"{kind}/{smoothing}"
    scores = SequenceLogProbability(core.vocab_size, kind in MEAN_LOSSES)
    model, inputs = GroupModel(core, scores), make_inputs(result, True)
    before = model(inputs)
    if kind != "simpo":
        np.testing.assert_allclose(before, result[f"{key}/reference"], **CLOSE)
    load_lora(core, folder / "adapters")
    preference_loss = (
        PreferenceLoss(kind, BETA, smoothing) if kind != "kto" else KTOLoss(BETA, 1.5, 0.5)
    )
    if kind == "simpo":
        before = tf.zeros_like(before)
    if kind == "kto":
        before = tf.concat([before, [[1.0], [-1.0], [1.0]]], axis=1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(preference_loss.call(before, model(inputs)))
    np.testing.assert_allclose(loss, result[f"{key}/loss"], **CLOSE)
    factors = {x.path.split("/", 1)[1]: x for x in core.trainable_variables}
    prefix = "blocks/block_0/attention/query_kernel_lora_"
    a, b = (factors[f"{prefix}{letter}"] for letter in "ab")
    of_a, of_b = tape.gradient(loss, [a.value, b.value])
    np.testing.assert_allclose(tf.transpose(of_a), result[f"{key}/A"], **CLOSE)
    np.testing.assert_allclose(tf.transpose(tf.reshape(of_b, (3, -1))), result[f"{key}/B"], **CLOSE)


@pytest.mark.long
def test_reference_losses_match_trl(reference):
    folder, result = reference
    run("reference_trl", folder)
    trl_values = np.load(folder / "trl.npz")
    assert len(trl_values.files) == 25
    for name in trl_values.files:
        np.testing.assert_allclose(trl_values[name], result[name], **CLOSE, err_msg=name)


@pytest.mark.parametrize("center_rewards", [None, 0.01])
def test_reward_loss_matches_pytorch(reference, center_rewards):
    folder, result = reference
    key = f"reward/{center_rewards}"
    core = from_pretrained(folder / "llama")
    head = SequenceHead(1, "last", use_bias=False)
    model, inputs = GroupModel(with_task_head(core, head)), make_inputs(result, False)
    head.classifier.kernel.assign(result["reward/score"].T)
    margins = np.stack([result["margin"], np.zeros(3)], 1).astype("float32")
    with tf.GradientTape() as tape:
        rewards = model(inputs)
        loss = tf.reduce_mean(RewardLoss(center_rewards).call(tf.constant(margins), rewards))
    np.testing.assert_allclose(rewards, result["reward/rewards"], **CLOSE)
    np.testing.assert_allclose(loss, result[f"{key}/loss"], **CLOSE)
    gradient = tape.gradient(loss, head.classifier.kernel.value)
    np.testing.assert_allclose(tf.transpose(gradient), result[f"{key}/gradient"], **CLOSE)


def test_classification_with_a_trained_pooler_matches_pytorch(reference):
    folder, result = reference
    network, head = from_pretrained(folder / "bert"), SequenceHead(4, "first", hidden_act="tanh")
    with_task_head(network, head)
    head.classifier.kernel.assign(result["bert/kernel"].T)
    head.classifier.bias.assign(result["bert/bias"])
    inputs = {
        "tokens": tf.constant(result["bert/ids"], "int32"),
        "attention_mask": tf.constant(result["bert/mask"], "int32"),
    }
    with tf.GradientTape() as tape:
        logits = network(inputs)
        loss = CrossEntropyLoss()(logits, tf.constant(result["bert/labels"], "int32"))
    np.testing.assert_allclose(logits, result["bert/logits"], **CLOSE)
    np.testing.assert_allclose(loss, result["bert/loss"], **CLOSE)
    gradient = tape.gradient(loss, head.pooler.kernel.value)
    np.testing.assert_allclose(tf.transpose(gradient), result["bert/gradient"], **CLOSE)
    assert network.num_parameters() == sum(np.prod(x.shape) for x in network.variables)


def test_unknown_kinds_of_preference_losses_are_refused():
    with pytest.raises(ValueError, match="`kind='kto'` is unknown. Choose one of sigmoid"):
        PreferenceLoss("kto")


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"smoothing": 0.5}, {"smoothing": -0.1}])
def test_preference_losses_check_the_range_of_their_numbers(options):
    with pytest.raises(ValueError, match="must be above 0, and `smoothing"):
        PreferenceLoss(**options)
