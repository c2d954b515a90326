"""Embedding: vectors of texts, near to each other where texts belong together."""

import keras
import tensorflow as tf

from dtransformer.datasets.record_batches import group_row
from dtransformer.datasets.records import text_of
from dtransformer.errors import InputError
from dtransformer.layers.heads import PoolingHead
from dtransformer.models import CausalLM
from dtransformer.models.pairs import GroupModel
from dtransformer.models.task_heads import with_task_head
from dtransformer.parallel import collectives
from dtransformer.parallel.runtime import job
from dtransformer.runs.networks import adapt
from dtransformer.runs.tasks.classification import LabelTask


class InBatchLoss(keras.losses.Loss):
    """Cross entropy of each query's own text among those of the global batch, [b].

    Reference: van den Oord et al., 2018, "Representation learning with contrastive predictive coding",
    arXiv 1807.03748; Gao et al., 2021, "SimCSE", arXiv 2104.08821.

    Args:
        temperature: what similarities are divided by.
    """

    def __init__(self, temperature: float = 0.05):
        super().__init__("in_batch", "mean_with_sample_weight")
        self.temperature = temperature

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        index, count = job.data_shard()
        queries, texts, is_row = y_pred[:, 0], y_pred[:, 1], y_true[:, 0]
        first = index * tf.shape(queries)[0] if count > 1 else 0
        if count > 1:
            group = job.data_parallel_group()
            texts, is_row = (collectives.all_gather(x, group=group) for x in (texts, is_row))
        scores = tf.matmul(queries, texts, transpose_b=True) / self.temperature
        scores = tf.where(is_row[None] > 0, scores, -1e9)
        own = first + tf.range(tf.shape(queries)[0])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(own, scores)


class Embedding(LabelTask):
    """A network whose vectors of a query and of its text are alike, and of others not."""

    def texts(self, record, place) -> list[str]:
        return [text_of(record, name, place) for name in ("query", "positive")]

    @property
    def core(self):
        return self.network.core

    def read(self, part: str | None = None) -> None:
        if self.config.parallel.micro_batch_num > 1 or job.mesh() is not None:
            raise InputError(
                "parallel: task embedding compares each query with all texts of a batch: give "
                "micro_batch_num=1, model_parallel=1 and one device a rank"
            )
        super().read(part)

    def encode(self, records):
        before, after = self.added
        given = [text for place, record in records for text in self.texts(record, place)]
        found = self.tokenizer.encode_with_offsets(given)
        rows = [([*before, *one.ids, *after], [0] * len(one.ids + before + after)) for one in found]
        return list(zip(rows[::2], rows[1::2])), [[1.0]] * len(records)

    def form(self, *args) -> tuple:
        inputs, target, weight = group_row(*args, with_labels=False)
        return {"tokens": inputs["tokens"], "attention_mask": inputs["segments"]}, target, weight

    def make_network(self, precision: str | None = None) -> GroupModel:
        core = self.make_core(precision)
        pooling = self.config.data.pooling or ("last" if isinstance(core, CausalLM) else "mean")
        core = with_task_head(core, PoolingHead(pooling, dtype=core.dtype_policy))
        adapt(core, self.config)
        self.network = GroupModel(core)
        return self.network

    def loss(self) -> InBatchLoss:
        return InBatchLoss(self.config.training.temperature)


TASK = Embedding
