"""Identical pipeline chunks are compiled once without a change of results."""

import numpy as np

from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from tests.on_mesh import on_mesh, start, stop

IDS = np.random.default_rng(0).integers(3, 30, (4, 9), "int32")
CHUNKS = {"pipeline_schedule": "interleaved", "pipeline_chunks": 6}


def trained(**fields):
    """Return losses of three steps and an evaluation, logits, the report and the trainer."""
    start(model_parallel=2, **fields)
    network = CausalLM(30, hidden_size=16, num_heads=2, num_layers=6, dropout_rate=0.1)
    trainer = Trainer(network)
    trainer.compile("sgd", CrossEntropyLoss())
    batch = IDS[:, :-1], IDS[:, 1:]
    losses = [trainer.train_on_batch(*batch, return_dict=True)["step_loss"] for _ in range(3)]
    losses.append(trainer.evaluate(*batch, verbose=0, return_dict=True)["loss"])
    values = np.array(losses, "float64"), trainer.predict(IDS[:, :-1], verbose=0)
    return *values, trainer.communication_report(), trainer


@on_mesh
def test_shared_chunks_are_compiled_once():
    losses, logits, report, _ = trained()
    stop()
    chunk_losses, chunk_logits, chunk_report, trainer = trained(**CHUNKS)
    np.testing.assert_allclose(chunk_losses, losses, rtol=1e-6)  # same dropout masks
    np.testing.assert_allclose(chunk_logits, logits, rtol=0, atol=1e-5)
    for i in range(6):
        block = f"blocks/block_{i}"
        assert chunk_report.summed_elements(block) == report.summed_elements(block) > 0
    functions = trainer._program.engine.function.__self__
    assert len(functions._compiled) == 6 and len(functions._shared) == 1


@on_mesh
def test_chunks_with_different_settings_are_compiled_separately():
    start(model_parallel=2, **CHUNKS)
    network = CausalLM(30, hidden_size=16, num_heads=2, num_layers=6, dropout_rate=0.0)
    network.blocks.blocks[2].recompute()
    trainer = Trainer(network)
    trainer.compile("sgd", CrossEntropyLoss())
    trainer.train_on_batch(IDS[:, :-1], IDS[:, 1:])
    assert len(trainer._program.engine.function.__self__._shared) == 2
