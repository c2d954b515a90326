"""Regression: predict a number for a text or a pair of texts."""

import keras
import numpy as np

from dtransformer.datasets.record_batches import get_targets
from dtransformer.datasets.records import get_number
from dtransformer.runs.scores import spearman
from dtransformer.runs.tasks.classification import LabelTask


class Regression(LabelTask):
    """Task that predicts a number for a text or a pair (Devlin et al., 2019, §4.1, STS-B)."""

    num_labels = 1

    def describe(self, records):
        low, mean, high = (f(records.targets) for f in (np.min, np.mean, np.max))
        return f", labels from {low:.4g} to {high:.4g}, {mean:.4g} on average"

    def encode(self, records):
        labels = [[get_number(record, "label", place)] for place, record in records]
        return self.encode_inputs(records), labels

    def build_row(self, records, indices, length) -> tuple:
        weight = np.float32(len(indices) > 0)
        return self.row(records, indices, length), get_targets(records, indices), weight

    def loss(self):
        loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
        loss.weights_epoch_means = True
        return loss

    def score_dev(self, trainer) -> dict[str, float]:
        values = self.records["dev"].targets[:, 0]
        return {"spearman": spearman(values, self.predictions(trainer, "dev")[:, 0])}


TASK = Regression
