"""Batches of prompts with answers for supervised fine-tuning: only answers have labels."""

from collections.abc import Sequence

import numpy as np

from dtransformer.datasets.indexed_batches import IGNORED
from dtransformer.datasets.language_model import TOKENS_AT_END, first_id
from dtransformer.datasets.record_batches import (
    EncodedRecords,
    RecordBatches,
    next_tokens,
    prepared_lengths,
)
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError, check_int


class InstructionBatches(RecordBatches):
    """Batches of prompts with answers for `Trainer.fit` of a `CausalLM`. Only answers are trained.

    The parts of a document are a prompt and its answer, or several of them in turn. A document is
    [start] prompt answer [end] (prompt answer [end] …). Rows contain complete documents, packed
    with little padding (see `packing`), differently in each shuffled epoch. All documents are kept
    in memory. A batch is

        ({"tokens": int32 [b, s], "segments": int32 [b, s]}, labels int32 [b, s])

    where labels are the next tokens that belong to an answer, including its end token, and
    `ignore_id` elsewhere. Segments are the indices of the documents in a row, from 1, and 0 for
    padding. With `prefix`, inputs also contain `"prefix"`, int32 [b, s]: 1 in the first prompt of a
    document.

    Reference: Ouyang et al., 2022, "InstructGPT", arXiv 2203.02155, §3.5.

    Args:
        shards: `TokenShards` of documents whose parts are prompts and answers in turn.
        length: Integer. Number of tokens s of a row.
        training: Boolean. Whether to leave out documents longer than a row, and rows that do not
            fill a batch. Otherwise documents are cut off and empty rows fill the last batch. A
            document is also left out if the cut removes all of its answers. Defaults to `True`.
        add_start, add_end: Boolean. Whether documents begin, and answers end, with the tokenizer's
            start and end tokens, if it has them. They are not repeated if a text already has them,
            for example from a chat template. Defaults to `True`.
        prefix: Boolean. Whether inputs mark the first prompts, for a `CausalLM` with `prefix=True`.
            Defaults to `False`.
        **options: `batch_size` and other arguments of `LanguageModelBatches`.

    Attributes:
        num_rows: Number of rows of an epoch.
        num_skipped: Number of documents left out because they are longer than a row.

    Raises:
        InputError: If a document has no answer to its last prompt, all documents are longer than a
            row, the text fills no batch, or an argument is out of range.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> shards = write_token_shards([["one", "two"], ["two", "three"]], tokenizer, "shards")
    >>> batches = InstructionBatches(shards, length=32, batch_size=1, shuffle=False)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> tokenizer.decode([labels.numpy()[labels != batches.ignore_id]])
    ['three']
    """

    def __init__(
        self,
        shards: TokenShards,
        *,
        length: int,
        training: bool = True,
        add_start: bool = True,
        add_end: bool = True,
        prefix: bool = False,
        **options,
    ):
        check_int("length", length, 2)
        start = first_id(shards, ("start", "cls")) if add_start else None
        end = first_id(shards, ("end", "sep")) if add_end else None
        rows = [[_encode_document(shards, x, start, end)] for x in range(len(shards))]
        longer = "leave_out" if training else "cut"
        indices, rows = prepared_lengths(rows, length, longer, type(self).__name__, "documents")
        self.num_skipped = len(shards) - len(indices)
        if not indices:
            raise InputError(
                f"All {len(shards):,} documents have more than `{length=}` tokens. Increase `length`."
            )
        options |= {"training": training, "packed": True}
        records = EncodedRecords(rows, pad_id=shards.special_ids.get("pad", 0))
        super().__init__(
            records, _next_tokens_with_prefix if prefix else next_tokens, length=length, **options
        )


def _encode_document(shards, document, start, end):
    """Return a document's ids with special tokens, and its labels: ids of answers, or `IGNORED`."""
    parts = shards.parts(document)
    if len(parts) % 2:
        raise InputError(
            f"{shards.folder}: Document {document} has {len(parts)} parts, expected prompts and answers "
            "in turn. Write the shards with --field PROMPT ANSWER, where PART+PART joins fields."
        )
    has_start = start is None or start == next(x[0] for x in parts if len(x))
    pieces = [] if has_start else [([start], False)]
    for index, part in enumerate(parts):
        pieces.append((part, index % 2 == 1))
        if index % 2 and end is not None and end not in part[-TOKENS_AT_END:]:
            pieces.append(([end], True))
    ids = np.concatenate([part for part, _ in pieces]).astype(np.int32)
    is_answer = np.repeat(
        [is_trained for _, is_trained in pieces], [len(part) for part, _ in pieces]
    )
    return ids, np.where(is_answer, ids, np.int32(IGNORED))


def _next_tokens_with_prefix(records: EncodedRecords, numbers: Sequence[int], length: int) -> tuple:
    """Return a row like `next_tokens`, with the input "prefix": 1 before the first answers."""
    inputs, labels = next_tokens(records, numbers, length)
    prefix = np.zeros(length, np.int32)
    start = 0
    for index in numbers:
        _, record_labels = records.sequence(int(index))
        prefix[start : start + len(record_labels)] = np.cumsum(record_labels != IGNORED) == 0
        start += len(record_labels)
    return {**inputs, "prefix": prefix}, labels
