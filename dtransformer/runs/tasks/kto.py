"""KTO: train on single answers, each labeled as desirable or undesirable."""

import sys

import keras
import numpy as np
import tensorflow as tf

from dtransformer.datasets.record_batches import cut_sequences
from dtransformer.datasets.records import get_labeled_answer
from dtransformer.errors import InputError
from dtransformer.layers.preference import SequenceLogProbability
from dtransformer.models import CausalLM
from dtransformer.parallel import collectives
from dtransformer.parallel.runtime import job
from dtransformer.runs.tasks.preference import PairTask


class KTOLoss(keras.losses.Loss):
    """Loss of a single answer that is labeled as desirable or undesirable.

    A desirable answer has the loss w·(1 − σ(β·(g − z))), and an undesirable one w·(1 − σ(β·(z − g))).
    g is the gain of the answer's log-likelihood over the reference. z estimates the KL divergence
    from the reference: the mean gain of unrelated answers over the global batch, at least 0, without
    a gradient. With several micro-batches the mean is taken over each micro-batch.

    Reference: [Ethayarajh et al., 2024](https://arxiv.org/abs/2402.01306), equation 8

    Args:
        beta: Float above 0. The factor β. Defaults to `0.1`.
        desirable_weight: Float. Weight w of desirable answers. Defaults to `1.0`.
        undesirable_weight: Float. Weight w of undesirable answers. Defaults to `1.0`.

    Call arguments:
        y_true: Float tensor of shape `[b, 3]`: log-likelihoods of the answer and of an unrelated
            answer under the reference model, and the label: 1 for desirable, -1 for undesirable, 0
            for a row of padding.
        y_pred: Float tensor of shape `[b, 2]`. The two log-likelihoods under the trained model.

    Output shape:
        `[b]`
    """

    weights_epoch_means = True

    def __init__(
        self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
    ):
        super().__init__("kto", "mean_with_sample_weight")
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        gains = y_pred - y_true[:, :2]
        label = y_true[:, 2]
        is_row = tf.abs(label)
        total = tf.reduce_sum(gains[:, 1] * is_row)
        count = tf.reduce_sum(is_row)
        if job.data_shard()[1] > 1:
            group = job.data_parallel_group()
            total, count = (collectives.all_reduce_sum(x, group=group) for x in (total, count))
        divergence = tf.stop_gradient(tf.nn.relu(tf.math.divide_no_nan(total, count)))
        weights = tf.where(label > 0, self.desirable_weight, self.undesirable_weight)
        return weights * tf.sigmoid(self.beta * label * (divergence - gains[:, 0]))


class KTO(PairTask):
    """Task for Kahneman-Tversky optimization (Ethayarajh et al., 2024, arXiv 2402.01306).

    The second sequence of a record is its prompt with the answer of the record before. The loss
    estimates the KL divergence from the reference model with it. The reference model is the initial
    network, whose log probabilities are computed once before the first step.
    """

    def read(self, part: str | None = None) -> None:
        if job.has_mesh_replicas():
            raise InputError(
                "Task kto estimates a divergence from all rows of a batch. Do not combine "
                "data_parallel on several ranks with model_parallel, context_parallel or local_devices."
            )
        super().read(part)

    def encode(self, records):
        answers = [get_labeled_answer(record, place) for place, record in records]
        texts = []
        places = []
        for index, (prompt, answer, _) in enumerate(answers):
            place, record = records[index]
            unrelated = answers[index - 1][1]
            if isinstance(unrelated, str) != isinstance(answer, str):
                raise InputError(
                    f"{place}: prompts and completions of all records must be texts, or messages in "
                    "all records."
                )
            texts.append(self.render_answer(prompt, answer, place, record))
            texts.append(self.render_answer(prompt, unrelated, place, record))
            places += [place, place]
        rows = self.encode_rendered(texts, places)
        # A long unrelated answer must not exclude the record.
        unrelated_rows = cut_sequences(rows[1::2], self.config.data.length)
        targets = [[0.0, 0.0, 1.0 if label else -1.0] for _, _, label in answers]
        return list(zip(rows[::2], unrelated_rows)), targets

    def scores(self, core: CausalLM) -> SequenceLogProbability:
        return SequenceLogProbability(core.vocab_size, name="scores")

    def before_training(self, trainer: keras.Model) -> None:
        for name, records in self.records.items():
            job.print_once(f"Reference ({name}): {len(records):,} answers", sys.stderr)
            labels = records.targets[:, 2:]
            records.targets = np.concatenate([self.predictions(trainer, name), labels], axis=1)

    def loss(self) -> KTOLoss:
        options = self.config.training
        return KTOLoss(options.beta, options.desirable_weight, options.undesirable_weight)

    def metrics(self) -> dict:
        beta = self.config.training.beta

        def signed_gain(targets, log_p):
            return targets[:, 2] * (log_p - targets[:, :2])[:, 0]

        def accuracy(targets, log_p):
            return keras.ops.cast(signed_gain(targets, log_p) > 0, "float32")

        def margin(targets, log_p):
            return beta * signed_gain(targets, log_p)

        def divergence(targets, log_p):
            return (log_p - targets[:, :2])[:, 1]

        return self.mean_metrics(accuracy, margin, divergence)


TASK = KTO
