"""Promise: texts are compared with all others of a batch, on a mesh as without one."""

import keras
import numpy as np

from harness.tolerances import PARITY_LOSS
from tests.on_mesh import on_mesh, start


def losses():
    """Return the losses of two steps, of a batch of which a row is padding."""
    from dtransformer.layers.heads import PoolingHead
    from dtransformer.models import MaskedLM
    from dtransformer.models.one_stack import with_task_head
    from dtransformer.models.pairs import GroupModel
    from dtransformer.runs.tasks.embedding import InBatchLoss
    from dtransformer.trainers import Trainer

    core = MaskedLM(30, hidden_size=16, num_heads=2, num_layers=1, dropout_rate=0.0)
    core.build()
    trainer = Trainer(GroupModel(with_task_head(core, PoolingHead("mean"))))
    trainer.compile(keras.optimizers.SGD(0.1), InBatchLoss())
    tokens = np.random.default_rng(0).integers(4, 30, (4, 2, 6), "int32")
    inputs = {"tokens": tokens, "attention_mask": np.ones_like(tokens)}
    weight = np.array([1, 1, 1, 0], "float32")
    batch = inputs, weight[:, None], weight
    return [float(trainer.train_on_batch(*batch, return_dict=True)["step_loss"]) for _ in range(2)]


@on_mesh
def test_losses_on_a_mesh_are_those_without():
    expected = losses()
    start(model_parallel=2)
    np.testing.assert_allclose(losses(), expected, rtol=PARITY_LOSS)
