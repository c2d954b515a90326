"""Reward: train a score for answers, higher for the chosen answer of a pair."""

import keras

from dtransformer.datasets.records import get_number
from dtransformer.layers.heads import SequenceHead
from dtransformer.layers.preference import RewardLoss
from dtransformer.models import CausalLM
from dtransformer.models.one_stack import with_task_head
from dtransformer.runs.tasks.preference import PairTask


class Reward(PairTask):
    """Task that trains a decoder with a scalar head (Ouyang et al., 2022, "InstructGPT", §3.5)."""

    with_labels = False
    always_trained = "head/*"
    command = "predict --run {} < FILE"

    def encode_inputs(self, records):
        is_pair = "chosen" in records[0][1]
        return self.encode(records)[0] if is_pair else self.encode_single(records)

    def prediction(self, record, row, output):
        names = ("score",) if len(row) == 1 else ("chosen", "rejected")
        return dict(zip(names, output.tolist()))

    def target(self, record, place) -> list[float]:
        has_margin = record.get("margin") is not None
        return [get_number(record, "margin", place) if has_margin else 0.0, 0.0]

    def with_head(self, core: CausalLM) -> CausalLM:
        head = SequenceHead(1, "last", use_bias=False, dtype=core.dtype_policy)
        return with_task_head(core, head)

    def loss(self) -> RewardLoss:
        return RewardLoss(self.config.training.center_rewards)

    def metrics(self) -> dict:
        def margin(_, rewards):
            return rewards[:, 0] - rewards[:, 1]

        def accuracy(_, rewards):
            return keras.ops.cast(margin(_, rewards) > 0, "float32")

        return self.mean_metrics(accuracy, margin)


TASK = Reward
