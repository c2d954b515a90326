"""Reward: a number for each answer, higher for the chosen one of two."""

import keras

from dtransformer.errors import InputError, shown
from dtransformer.layers.heads import SequenceHead
from dtransformer.layers.preference import RewardLoss
from dtransformer.models import CausalLM
from dtransformer.models.one_stack import with_task_head
from dtransformer.runs.tasks.preference import PairTask


class Reward(PairTask):
    """A decoder with a number in place of its vocabulary (Ouyang et al., 2022, "InstructGPT", §3.5)."""

    with_labels, always_trained = False, "head/*"

    def target(self, record, place) -> list[float]:
        margin = 0.0 if record.get("margin") is None else record["margin"]
        if type(margin) not in (int, float):
            raise InputError(f"{place}: margin is {shown(margin)}, expected a number")
        return [float(margin), 0.0]

    def with_head(self, core: CausalLM) -> CausalLM:
        head = SequenceHead(1, "last", use_bias=False, dtype=core.dtype_policy)
        return with_task_head(core, head)

    def loss(self) -> RewardLoss:
        return RewardLoss()

    def metrics(self) -> dict:
        right = lambda _, r: keras.ops.cast(r[:, 0] > r[:, 1], "float32")
        return {"weighted_metrics": [keras.metrics.MeanMetricWrapper(right, name="accuracy")]}


TASK = Reward
