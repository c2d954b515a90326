"""Embedding: train vectors of texts, similar for texts that belong together."""

import keras
import numpy as np
import tensorflow as tf

from dtransformer.datasets.record_batches import group_row
from dtransformer.datasets.records import get_text
from dtransformer.datasets.skipped_records import warn_skipped
from dtransformer.errors import InputError
from dtransformer.layers.heads import PoolingHead
from dtransformer.models import CausalLM
from dtransformer.models.one_stack import OneStackModel, with_task_head
from dtransformer.parallel import collectives
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.runtime import job
from dtransformer.runs.scores import retrieval
from dtransformer.runs.tasks.classification import LabelTask


class InBatchLoss(keras.losses.Loss):
    """Cross-entropy of each query's positive text among all texts of the global batch.

    Similarities are cosines divided by the temperature. A text is not a negative of a query if it
    equals the query or its positive text, or belongs to an equal query.

    Call arguments:
        y_true: Float tensor [b, 2]. Text ids of the query and of its positive text. Equal texts have
            equal ids. Rows of padding have ids of 0.
        y_pred: Float tensor [b, 2, h]. Vectors of the query and of its positive text.

    Output shape:
        [b]

    Reference: van den Oord et al., 2018, "Representation learning with contrastive predictive coding",
    arXiv 1807.03748; Gao et al., 2021, "SimCSE", arXiv 2104.08821.

    Args:
        temperature: Float. Similarities are divided by it.
    """

    weights_epoch_means = True

    def __init__(self, temperature: float = 0.05):
        super().__init__("in_batch", "mean_with_sample_weight")
        self.temperature = temperature

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        vectors = tf.math.l2_normalize(y_pred, axis=-1)
        queries = vectors[:, 0]
        texts = vectors[:, 1]
        ids = y_true
        positive = tf.reduce_sum(queries * texts, axis=-1) / self.temperature
        if job.data_shard()[1] > 1:
            group = job.data_parallel_group()
            texts, ids = (collectives.all_gather(x, group=group) for x in (texts, ids))
        texts = constrain(texts, (None, None))
        ids = constrain(ids, (None, None))
        scores = tf.matmul(queries, texts, transpose_b=True) / self.temperature
        # Slices keep the dimension, because DTensor crashes if a vector is expanded.
        query = y_true[:, :1]
        text = y_true[:, 1:]
        is_equal = (ids[:, 1] == text) | (ids[:, 1] == query) | (ids[:, 0] == query)
        is_masked = tf.cast(is_equal | (ids[:, 1] == 0), scores.dtype)
        negatives = tf.reduce_logsumexp(scores - 1e9 * is_masked, axis=-1)
        return tf.math.softplus(negatives - positive)


class Embedding(LabelTask):
    """Task that makes the vectors of a query and its positive text similar."""

    num_sequences = 2
    always_trained = None
    command = "embed --run {} < FILE > vectors.npy"

    def texts(self, record, place) -> list[str]:
        for name in ("negative", "negatives"):
            if record.get(name) is not None:
                raise InputError(
                    f"{place}: {name} is not supported, because the other texts of the batch are the "
                    "negatives. Remove it."
                )
        return [get_text(record, name, place) for name in ("query", "positive")]

    def read(self, part: str | None = None) -> None:
        shards_mesh = job.mesh() is not None and job.data_shard()[1] > 1
        if self.config.parallel.micro_batch_num > 1 or shards_mesh:
            raise InputError(
                "Task embedding compares each query with all texts of a batch. Set "
                "micro_batch_num=1, and do not combine data_parallel with model_parallel, "
                "context_parallel or local_devices."
            )
        super().read(part)

    def encode(self, records):
        texts = [text for place, record in records for text in self.texts(record, place)]
        rows = self.encode_whole(texts)
        return list(zip(rows[::2], rows[1::2])), None

    def _encode_part(self, name, sources):
        records, sizes = super()._encode_part(name, sources)
        texts = [records.sequence(0, i)[0].tobytes() for i in range(records.lengths.size)]
        distinct, ids = np.unique(np.array(texts, object), return_inverse=True)
        records.targets = np.float32(ids.reshape(-1, 2) + 1)
        message = "texts repeat another text: in a batch, equal texts are not negatives"
        warn_skipped(f"Records ({name})", len(ids) - len(distinct), len(ids), message)
        return records, sizes

    def encode_inputs(self, records):
        names = ("query" if "query" in x and "text" not in x else "text" for _, x in records)
        texts = [get_text(x, name, place) for name, (place, x) in zip(names, records)]
        return [[row] for row in self.encode_whole(texts)]

    def prediction(self, record, row, output):
        return {"vector": output[0]}

    def score_dev(self, trainer) -> dict[str, float]:
        vectors = self.predictions(trainer, "dev")
        ids = np.unique(self.records["dev"].targets[:, 1], return_inverse=True)[1]
        return retrieval(vectors[:, 0], vectors[:, 1], ids)

    def build_row(self, *args) -> tuple:
        inputs, target, weight = group_row(*args, with_labels=False)
        return {"tokens": inputs["tokens"], "attention_mask": inputs["segments"]}, target, weight

    def with_head(self, core: OneStackModel) -> OneStackModel:
        pooling = self.config.data.pooling
        if not pooling and isinstance(core.head, PoolingHead):  # A published head stays.
            return core
        pooling = pooling or ("last" if isinstance(core, CausalLM) else "mean")
        return with_task_head(core, PoolingHead(pooling, dtype=core.dtype_policy))

    def loss(self) -> InBatchLoss:
        return InBatchLoss(self.config.training.temperature)


TASK = Embedding
