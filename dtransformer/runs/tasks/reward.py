"""Reward: a number for each answer, higher for the chosen one of two."""

import keras

from dtransformer.layers.heads import SequenceHead
from dtransformer.layers.preference import RewardLoss
from dtransformer.models.one_stack import with_task_head
from dtransformer.models.pairs import GroupModel
from dtransformer.runs.networks import adapt
from dtransformer.runs.tasks.preference import PairTask


class Reward(PairTask):
    """A decoder with a number in place of its vocabulary (Ouyang et al., 2022, "InstructGPT", §3.5)."""

    with_labels = False

    def target(self, record, place) -> list[float]:
        return [float(record.get("margin") or 0.0), 0.0]

    def make_network(self, precision: str | None = None) -> GroupModel:
        core = self.make_core(precision)
        head = SequenceHead(1, "last", use_bias=False, dtype=core.dtype_policy)
        adapt(with_task_head(core, head), self.config, always="head/*")
        self.network = GroupModel(core)
        return self.network

    def loss(self) -> RewardLoss:
        return RewardLoss()

    def metrics(self) -> dict:
        right = lambda _, r: keras.ops.cast(r[:, 0] > r[:, 1], "float32")
        return {"weighted_metrics": [keras.metrics.MeanMetricWrapper(right, name="accuracy")]}


TASK = Reward
