"""Ranking: train a cross-encoder, which scores how well a document answers a query."""

import itertools

import keras
import numpy as np
import tensorflow as tf

from dtransformer.datasets.record_batches import get_targets
from dtransformer.datasets.records import get_negatives, get_number, get_text
from dtransformer.errors import InputError
from dtransformer.runs.scores import ranking, relevant_ranks
from dtransformer.runs.tasks.classification import LabelTask


class RankingLoss(keras.losses.Loss):
    """Sigmoid cross-entropy of single documents, or softmax cross-entropy of lists of documents.

    With a single document per query, the loss is −y·log σ(s) − (1 − y)·log(1 − σ(s)) for the score s
    and the label y. A list begins with the relevant document. Its loss is the negative
    log-probability of this document in a softmax over the scores of all documents of the list.

    Call arguments:
        y_true: Float tensor [b, k]. Labels of the documents from 0 to 1, or -1 for missing documents.
        y_pred: Float tensor [b, k]. Scores of the documents.

    Output shape:
        [b]

    References:

    - [Nogueira & Cho, 2019](https://arxiv.org/abs/1901.04085), "Passage re-ranking with BERT"
    - [Cao et al., 2007](https://dl.acm.org/doi/10.1145/1273496.1273513), "Learning to rank: from
      pairwise approach to listwise approach"
    """

    weights_epoch_means = True

    def __init__(self):
        super().__init__("ranking", "mean_with_sample_weight")

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        first = y_pred[:, 0]
        if y_pred.shape[1] == 1:
            return tf.nn.softplus(first) - y_true[:, 0] * first
        is_missing = tf.cast(y_true < 0, y_pred.dtype)
        return tf.reduce_logsumexp(y_pred - 1e9 * is_missing, axis=-1) - first


class Ranking(LabelTask):
    """Task that scores pairs of a query and a document, for reranking.

    Records have a `query` and either a `document` with a `label`, or a `positive` document with
    negative ones.
    """

    num_labels = 1
    num_sequences = 2  # The number of documents varies. The network is always a `GroupModel`.

    def texts(self, record, place) -> list[str]:
        name = "positive" if "positive" in record else "document"
        texts = [get_text(record, "query", place), get_text(record, name, place)]
        return texts + get_negatives(record, place)

    def encode_inputs(self, records):
        groups = [self.texts(record, place) for place, record in records]
        pairs = [(query, document) for query, *documents in groups for document in documents]
        encodings = self.tokenizer.encode_with_offsets(*map(list, zip(*pairs)))
        sequences = iter([(x.ids, x.types) for x in encodings])
        return [list(itertools.islice(sequences, len(group) - 1)) for group in groups]

    def encode(self, records):
        labels = [self._labels(record, place) for place, record in records]
        return self.encode_inputs(records), labels

    def _labels(self, record, place):
        """Return the labels of a record's documents."""
        negatives = get_negatives(record, place)
        self._sides |= {"positive" in record}
        if len(self._sides) > 1:
            raise InputError(
                f"{place}: Some records have `positive` and others `document`. Use one kind only."
            )
        if "positive" in record:
            if not negatives:
                raise InputError(
                    f"{place} has no document to compare with. Add `negative` or `negatives`."
                )
            return [1.0] + [0.0] * len(negatives)
        label = get_number(record, "label", place)
        if negatives or not 0 <= label <= 1:
            raise InputError(
                f"{place}: a record with `document` must have a `label` between 0 and 1, got "
                f"{label:g}, and no negatives. Use `positive` for a document with negatives."
            )
        return [label]

    def build_row(self, records, indices, length) -> tuple:
        rows = [self.row(records, indices, length, i) for i in range(records.num_sequences)]
        inputs = tf.nest.map_structure(lambda *arrays: np.stack(arrays), *rows)
        return inputs, get_targets(records, indices), np.float32(len(indices) > 0)

    def prediction(self, record, row, output):
        scores = np.exp(-np.logaddexp(0.0, -np.float64(output[: len(row)]))).tolist()
        names = ["score"] if len(row) == 1 else [f"score_{i + 1}" for i in range(len(row))]
        return dict(zip(names, scores))

    def loss(self) -> RankingLoss:
        return RankingLoss()

    def score_dev(self, trainer) -> dict[str, float]:
        """Return the scores of `ranking` over queries with relevant and other documents.

        Labeled documents are ranked with all documents of an equal query. Lists are separate.
        """
        records = self.records["dev"]
        scores = self.predictions(trainer, "dev")
        queries = {}
        for i in range(len(records)):
            ids, types = records.sequence(i)
            is_list = records.num_sequences > 1
            # The token ids before the document identify the query.
            query = i if is_list else ids[: np.argmax(types >= 0)].tobytes()
            queries.setdefault(query, []).append(i)
        ranks = []
        for indices in queries.values():
            labels = records.targets[indices]
            is_document = labels >= 0
            is_relevant = labels[is_document] >= 0.5
            if 0 < is_relevant.sum() < len(is_relevant):
                ranks.append(relevant_ranks(scores[indices][is_document], is_relevant))
        return ranking(ranks) if ranks else {}


TASK = Ranking
