"""Embedding: train vectors of texts, similar for texts that belong together."""

import itertools
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from dtransformer.datasets.record_batches import group_row
from dtransformer.datasets.records import get_negatives, get_text
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

    Similarities are cosines divided by the temperature. The texts are the positive texts and, if the
    records have any, the negative texts of all records. A text is not a negative of a query if it
    equals the query or its positive text, or if it is the positive text of an equal query.

    Call arguments:
        y_true: Float tensor [b, k]. Text ids of the query, its positive text, and its k - 2 negative
            texts. Equal texts have equal ids. Missing texts and rows of padding have ids of 0.
        y_pred: Float tensor [b, k, h]. Vectors of the texts.

    Output shape:
        [b]

    References:

    - [van den Oord et al., 2018](https://arxiv.org/abs/1807.03748), "Representation learning with
      contrastive predictive coding"
    - [Gao et al., 2021](https://arxiv.org/abs/2104.08821), "SimCSE"
    - [Kusupati et al., 2022](https://arxiv.org/abs/2205.13147), "Matryoshka representation learning"

    Args:
        temperature: Float. Similarities are divided by it.
        dimensions: List of integers. The losses of the first n features are summed for each n.
            Defaults to `()`, which uses all features.
    """

    weights_epoch_means = True
    compares_rows = True

    def __init__(self, temperature: float = 0.05, dimensions: Sequence[int] = ()):
        super().__init__("in_batch", "mean_with_sample_weight")
        self.temperature = temperature
        self.dimensions = tuple(dimensions)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        all_ids = _all_rows(y_true)
        # Slices keep the dimension, because DTensor crashes if a vector is expanded.
        query = y_true[:, :1]
        text = y_true[:, 1:2]
        sides = range(1, y_pred.shape[1])
        excluded = []
        for side in sides:
            ids = all_ids[:, side]
            excluded.append((ids == text) | (ids == query) | (ids == 0))
        excluded[0] |= all_ids[:, 0] == query
        texts = [_all_rows(y_pred[:, side]) for side in sides]
        losses = []
        for size in self.dimensions or (y_pred.shape[-1],):
            pairs = tf.math.l2_normalize(y_pred[:, :2, :size], axis=-1)
            candidates = [tf.math.l2_normalize(x[:, :size], axis=-1) for x in texts]
            losses.append(self._nll(pairs, candidates, excluded))
        return tf.add_n(losses)

    def _nll(self, pairs, candidates, excluded):
        """Return the loss of each query, [b].

        Args:
            pairs: Tensor [b, 2, h]. Unit vectors of the queries and their positive texts.
            candidates: List of tensors [n, h]. Unit vectors of texts.
            excluded: List of boolean tensors [b, n], `True` where a text is no negative.
        """
        queries = pairs[:, 0]
        positive = tf.reduce_sum(queries * pairs[:, 1], axis=-1) / self.temperature
        scores = []
        for texts, is_excluded in zip(candidates, excluded):
            similarities = tf.matmul(queries, texts, transpose_b=True) / self.temperature
            scores.append(similarities - 1e9 * tf.cast(is_excluded, similarities.dtype))
        negatives = tf.reduce_logsumexp(tf.concat(scores, axis=1), axis=-1)
        return tf.math.softplus(negatives - positive)


def _all_rows(x):
    """Return the rows [b, h] of all data ranks, replicated on a mesh."""
    if job.data_shard()[1] > 1:
        x = collectives.all_gather(x, group=job.data_parallel_group())
    return constrain(x, (None, None))


class Embedding(LabelTask):
    """Task that makes the vectors of a query and its positive text similar."""

    num_sequences = 2
    always_trained = None
    command = "embed --run {} < FILE > vectors.npy"

    def texts(self, record, place) -> list[str]:
        texts = [get_text(record, name, place) for name in ("query", "positive")]
        return texts + get_negatives(record, place)

    def read(self, part: str | None = None) -> None:
        has_stages = self.config.parallel.placement.num_chunks > 1
        if (has_stages and self.config.parallel.micro_batch_num > 1) or job.has_mesh_replicas():
            raise InputError(
                "Task embedding compares each query with all texts of a batch. Set pipeline_stage=1 "
                "or micro_batch_num=1, and do not combine data_parallel with model_parallel, "
                "context_parallel or local_devices."
            )
        super().read(part)

    def encode(self, records):
        groups = [self.texts(record, place) for place, record in records]
        sequences = iter(self.encode_whole(list(itertools.chain.from_iterable(groups))))
        return [list(itertools.islice(sequences, len(group))) for group in groups], None

    def _encode_part(self, name, sources):
        records, sizes = super()._encode_part(name, sources)
        num_texts = records.num_sequences
        texts = [
            records.sequence(i, side)[0].tobytes()
            for i in range(len(records))
            for side in range(num_texts)
        ]
        distinct, ids = np.unique(np.array(texts, object), return_inverse=True)
        has_text = (records.lengths > 0).ravel()
        records.targets = np.float32(np.where(has_text, ids + 1, 0).reshape(-1, num_texts))
        total = int(has_text.sum())
        num_distinct = len(distinct) - (not has_text.all())
        message = "texts repeat another text: in a batch, equal texts are not negatives"
        warn_skipped(f"Records ({name})", total - num_distinct, total, message)
        return records, sizes

    def encode_inputs(self, records):
        names = ("query" if "query" in x and "text" not in x else "text" for _, x in records)
        texts = [get_text(x, name, place) for name, (place, x) in zip(names, records)]
        return [[row] for row in self.encode_whole(texts)]

    def prediction(self, record, row, output):
        return {"vector": output[0]}

    def score_dev(self, trainer) -> dict[str, float]:
        vectors = self.predictions(trainer, "dev")
        ids = self.records["dev"].targets.astype(int)
        scores = retrieval(vectors, ids)
        for size in self.config.training.matryoshka:
            scores[f"mrr_{size}"] = retrieval(vectors[..., :size], ids)["mrr"]
        return scores

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
        options = self.config.training
        num_features = self.core.arguments["hidden_size"]
        if any(size > num_features for size in options.matryoshka):
            raise InputError(
                f"`training.matryoshka` must be at most {num_features}, the features of the network, "
                f"got {options.matryoshka}."
            )
        return InBatchLoss(options.temperature, options.matryoshka)


TASK = Embedding
