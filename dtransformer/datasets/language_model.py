"""Batches of packed documents for a `CausalLM`."""

import numpy as np

from dtransformer.datasets.indexed_batches import Example
from dtransformer.datasets.packed_documents import PackedDocuments


class LanguageModelBatches(PackedDocuments):
    """Batches of documents that are packed to full rows, for `Trainer.fit` of a `CausalLM`.

    The documents stand one after the other, each between a start and an end token, and are divided
    into rows of `length` tokens: nothing is padded. A batch is

        ({"tokens": int32 [b, s], "segments": int32 [b, s]}, labels int32 [b, s])

    where segments are the numbers of the documents in their row, from 1, beyond which no token
    attends, and the label of a token is the next one of its document, `ignore_id` at its last. In
    an epoch each token but a document's first is a label once. Where rows begin is drawn anew for
    each epoch that is shuffled; of the circle of all documents at most a batch is left out.

    Reference: Brown et al., 2020, "Language models are few-shot learners", arXiv 2005.14165, §B.

    Args:
        shards: the documents.
        length: number of tokens s of a row.
        batch_size: number of rows of a global batch.
        shuffle: whether each epoch is shuffled: rows, of all shards together.
        seed: what the shuffling depends on, besides the epoch.
        shard_index, num_shards: this rank's share of each global batch; see
            `dtransformer.data_shard`.
        pad_rows_to_multiple_of: empty rows are added to this rank's rows of a batch until their
            number is a multiple of this; see `dtransformer.rows_multiple_of`.
        training: whether rows that fill no batch are left out. Otherwise each token counts, and
            empty rows fill the last batch.
        add_start, add_end: whether documents begin and end with the tokenizer's start and end
            tokens, where it has them.

    Attributes:
        num_rows: number of rows of an epoch.
        ignore_id: the label of tokens that do not count, -100, for `CrossEntropyLoss`.

    Raises:
        InputError: the text fills no batch, or an argument is out of range.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> shards = write_token_shards(["one two", "three"], tokenizer, "shards")
    >>> batches = LanguageModelBatches(shards, length=8, batch_size=1, training=False)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> inputs["tokens"].shape, inputs["segments"].numpy()[0, 0]
    (TensorShape([1, 8]), np.int32(1))
    """

    def row(self, epoch: int, number: int) -> Example:
        """Return {"tokens": int32 [s], "segments": int32 [s]} and labels int32 [s] of a row."""
        ids, segments = self._read(epoch, number, self.length + 1)
        inputs = {"tokens": ids[:-1], "segments": segments[:-1]}
        has_next = (segments[1:] == segments[:-1]) & (segments[:-1] > 0)
        return inputs, np.where(has_next, ids[1:], self.ignore_id).astype(np.int32)

    def empty_row(self) -> Example:
        """Return a row in which nothing counts."""
        return self._empty_inputs(), np.full(self.length, self.ignore_id, np.int32)
