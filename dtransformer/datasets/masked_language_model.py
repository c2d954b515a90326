"""Batches of packed documents for a `MaskedLM`."""

from dtransformer.datasets.indexed_batches import IGNORED, Example
from dtransformer.datasets.masking import Masking, row_generator
from dtransformer.datasets.packed_documents import PackedDocuments
from dtransformer.datasets.token_shards import TokenShards


class MaskedLanguageModelBatches(PackedDocuments):
    """Batches of packed documents of which some tokens are masked, for `Trainer.fit` of a `MaskedLM`.

    Rows are those of `LanguageModelBatches`; documents stand between the tokenizer's `cls` and
    `sep` tokens, or its start and end tokens where it has none of these. A batch is

        ({"tokens": int32 [b, s], "segments": int32 [b, s]}, labels int32 [b, s])

    where labels are the tokens that are asked for, and `ignore_id` elsewhere. Which ones these are
    is drawn anew in each epoch, from seed, epoch and row.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §3.1; Liu et al., 2019, "RoBERTa",
    arXiv 1907.11692, §4.1, on dynamic masking, and §4.2, "DOC-SENTENCES", here with several a row.

    Args:
        shards: the documents.
        rate: share of the tokens that are asked for.
        mask_id: id of the mask token; by default the tokenizer's, or one more id where it has none.
        ignore_id: the label of tokens that do not count.
        **options: `length`, `batch_size` and others, as `LanguageModelBatches`'.

    Attributes:
        vocab_size: number of ids, the mask token's included: that of the network.

    Raises:
        InputError: the text fills no batch, or an argument is out of range.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> shards = write_token_shards(["one two", "three"], tokenizer, "shards")
    >>> batches = MaskedLanguageModelBatches(shards, length=6, batch_size=1)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> labels.shape, batches.vocab_size
    (TensorShape([1, 6]), 27)
    """

    _BEGIN, _END = ("cls", "start"), ("sep", "end")

    def __init__(
        self,
        shards: TokenShards,
        *,
        rate: float = 0.15,
        mask_id: int | None = None,
        ignore_id: int = IGNORED,
        **options,
    ):
        self._masking = Masking.of(shards, rate, mask_id, ignore_id)
        self.vocab_size = max(shards.vocab_size, self._masking.mask_id + 1)
        super().__init__(shards, ignore_id=ignore_id, **options)

    def row(self, epoch: int, number: int) -> Example:
        """Return {"tokens": int32 [s], "segments": int32 [s]} and labels int32 [s] of a row."""
        ids, segments = self._read(epoch, number, self.length)
        ids, labels = self._masking(ids, row_generator(self._seed, epoch, number))
        labels[segments == 0] = self.ignore_id
        return {"tokens": ids, "segments": segments}, labels

    def empty_row(self) -> Example:
        """Return a row in which nothing counts."""
        inputs = self._empty_inputs()
        return inputs, inputs["segments"] + self.ignore_id
