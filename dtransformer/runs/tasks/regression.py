"""Regression: a number of a text, or of a pair of texts."""

import keras
import numpy as np

from dtransformer.datasets.record_batches import targets_of
from dtransformer.datasets.records import number_of
from dtransformer.runs.scores import spearman
from dtransformer.runs.tasks.classification import LabelTask


class Regression(LabelTask):
    """Texts have a number, such as how alike two are (Devlin et al., 2019, §4.1, STS-B)."""

    num_labels = 1

    def encode(self, records):
        labels = [[number_of(record, "label", place)] for place, record in records]
        return [[row] for row in self.encode_texts(records)], labels

    def form(self, records, numbers, length) -> tuple:
        weight = np.float32(len(numbers) > 0)
        return self.row(records, numbers, length), targets_of(records, numbers), weight

    def loss(self):
        loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
        loss.weights_epoch_means = True
        return loss

    def results(self, trainer, batches) -> dict[str, float]:
        values = self.records["dev"].targets[:, 0]
        found = spearman(values, self.predictions(trainer, "dev")[:, 0])
        return {**super().results(trainer, batches), "spearman": found}


TASK = Regression
