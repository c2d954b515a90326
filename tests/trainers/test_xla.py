"""With `jit_compile=True`, networks train with the same losses and compile once."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import dtransformer
from dtransformer import MoEConfig, parallel_config
from dtransformer.models import CausalLM, EncoderDecoderLM, MaskedLM, TranslationTransformer
from harness.batches import batches
from harness.tolerances import PARITY_LOSS
from tests.trainers.small import dense_trainer, translation_trainer

VOCAB_SIZE, STEPS = 60, 5
SIZES = {"hidden_size": 8, "num_heads": 2, "ffn_hidden_size": 16}
DECODER_SIZES, ENCODER_DECODER_SIZES = (
    {"num_layers": 1, **SIZES},
    {"encoder_layers": 1, "decoder_layers": 1, **SIZES},
)
ROTARY = {"positions": "rotary", "norm": "rms_norm", "gated": True, "num_kv_heads": 1}
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "capacity_factor": 1.0, "expert_group_size": 8}
FAMILIES = {
    "learned": (CausalLM, DECODER_SIZES),
    "rotary": (CausalLM, DECODER_SIZES | ROTARY),
    "experts": (CausalLM, DECODER_SIZES | {"moe_config": MoEConfig(**EXPERTS)}),
    "dropless": (CausalLM, DECODER_SIZES | {"moe_config": MoEConfig(expert_num=4, dropless=True)}),
    "masked": (MaskedLM, DECODER_SIZES),
    "translation": (TranslationTransformer, ENCODER_DECODER_SIZES),
    "relative": (
        EncoderDecoderLM,
        ENCODER_DECODER_SIZES | {"positions": "relative", "start_id": 0},
    ),
}
# Fields of the config, and options of networks.
OPTIONS = {
    "recompute": ({"recompute": True}, {}),
    "micro-batches": ({"micro_batch_num": 2}, {}),
    "window": ({}, {"window": 3}),
    "blockwise": ({}, {"implementation": "blockwise"}),
    "cudnn": ({}, {"implementation": "cudnn"}),
    "dropout": ({}, {"dropout_rate": 0.1}),
}
# Options to test together with experts.
COMBINED_OPTIONS = ["recompute", "micro-batches", "window", "dropout"]
CASES = [
    pytest.param(family, [option], id=f"{family}-{option}", marks=pytest.mark.long)
    for family in FAMILIES
    for option in OPTIONS
    if option not in ("window", "blockwise", "cudnn") or FAMILIES[family][0] is CausalLM
    if (family, option) != ("dropless", "micro-batches")
]


def count_compilations(run, folder):
    """Return the number of XLA compilations while a function runs."""
    options = tf.profiler.experimental.ProfilerOptions(python_tracer_level=0)
    with tf.profiler.experimental.Profile(str(folder), options):
        run()
    (file,) = folder.rglob("*.xplane.pb")
    (_, devices), *_ = xplane_pb2.XSpace.FromString(file.read_bytes()).ListFields()
    events = (
        (device, event) for device in devices for line in device.lines for event in line.events
    )
    names = (device.event_metadata[event.metadata_id].name for device, event in events)
    return sum("::RunBackend" in name for name in names)


def make_runner(family, options, jit_compile):
    """Return a function that trains for `num_steps` steps and returns the losses."""
    dtransformer.set_seed(0)
    keras.utils.set_random_seed(0)
    model_class, sizes = FAMILIES[family]
    sizes = {"dropout_rate": 0.0, **sizes}
    for option in options:
        sizes |= OPTIONS[option][1]
    network = model_class(VOCAB_SIZE, **sizes, name="network")  # Dropout masks depend on paths.
    trainer = translation_trainer(None, network, jit_compile=jit_compile)
    data = iter(batches(STEPS, VOCAB_SIZE, seed=0, shapes=((8, 8, 8),)))

    def run(num_steps):
        losses = []
        for _, (inputs, labels) in zip(range(num_steps), data):
            inputs = inputs["target"] if model_class in (CausalLM, MaskedLM) else inputs
            losses.append(float(trainer.train_on_batch(inputs, labels, return_dict=True)["loss"]))
        return losses

    return run


@pytest.mark.parametrize("family, options", [("experts", COMBINED_OPTIONS), *CASES])
def test_five_steps_compile_once_with_equal_losses(family, options, tmp_path):
    fields = {}
    for option in options:
        fields |= OPTIONS[option][0]
    with parallel_config(**fields):
        expected, run = (
            make_runner(family, options, "auto")(STEPS),
            make_runner(family, options, True),
        )
        losses = []
        assert count_compilations(lambda: losses.extend(run(1)), tmp_path / "first") >= 1
        assert count_compilations(lambda: losses.extend(run(STEPS - 1)), tmp_path / "others") == 0
    np.testing.assert_allclose(losses, expected, rtol=PARITY_LOSS)
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize(
    "branch, jit_compile, expected",
    [
        ("1", "auto", "autoclustering"),
        ("1", False, ""),
        ("1", True, ""),
        ("0", "auto", ""),
    ],
)
def test_auto_enables_autoclustering_on_gpus(monkeypatch, branch, jit_compile, expected):
    monkeypatch.setenv("DTRANSFORMER_GPU_BRANCH", branch)
    trainer = dense_trainer()
    # An earlier trainer may have left this setting.
    tf.config.optimizer.set_jit("autoclustering" if branch == "1" else False)
    try:
        trainer.compile("sgd", jit_compile=jit_compile)
        assert tf.config.optimizer.get_jit() == expected
    finally:
        tf.config.optimizer.set_jit(False)
