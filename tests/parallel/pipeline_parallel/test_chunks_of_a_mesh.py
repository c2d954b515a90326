"""Promise: model chunks of a single stage on a mesh give what one function gives, and send it."""

import numpy as np

from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer
from tests.on_mesh import on_mesh, start, stop

IDS = np.random.default_rng(0).integers(3, 30, (4, 9), "int32")


def trained(**fields):
    """Return what three steps, an evaluation and a prediction give, and the step's report."""
    start(model_parallel=2, **fields)
    network = CausalLM(30, hidden_size=16, num_heads=2, num_layers=6, dropout_rate=0.1)
    trainer = Trainer(network)
    trainer.compile("sgd", CrossEntropyLoss())
    batch = IDS[:, :-1], IDS[:, 1:]
    losses = [trainer.train_on_batch(*batch, return_dict=True)["step_loss"] for _ in range(3)]
    losses.append(trainer.evaluate(*batch, verbose=0, return_dict=True)["loss"])
    logits = trainer.predict(IDS[:, :-1], verbose=0)
    return np.array(losses, "float64"), logits, trainer.communication_report()


@on_mesh
def test_chunks_of_a_mesh_give_the_numbers_of_one_function():
    losses, logits, report = trained()
    stop()
    fields = {"pipeline_schedule": "interleaved", "pipeline_chunks": 6}
    in_chunks, own_logits, own_report = trained(**fields)
    np.testing.assert_allclose(in_chunks, losses, rtol=1e-6)  # with the same masks of dropout
    np.testing.assert_allclose(own_logits, logits, rtol=0, atol=1e-5)
    for number in range(6):
        block = f"blocks/block_{number}"
        assert own_report.summed_elements(block) == report.summed_elements(block) > 0
