"""Batches of prompts with answers, of which only the answers are learnt."""

import functools
import threading

import numpy as np

from dtransformer.datasets.indexed_batches import Example, IndexedBatches
from dtransformer.datasets.left_out import warn_left_out
from dtransformer.datasets.packed_documents import TOKENS_AT_END, check_length, first_id
from dtransformer.datasets.packing import PackedPlan
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError


class InstructionBatches(IndexedBatches):
    """Batches of prompts with answers for `Trainer.fit` of a `CausalLM`; the loss is that of answers.

    The parts of a document are a prompt and its answer, or several of these in turn. A document is
    [start] prompt answer [end] (prompt answer [end] …). Rows hold whole documents, packed so that
    next to nothing is padded (`packing`); what shares a row is drawn anew in each epoch. A batch is

        ({"tokens": int32 [b, s], "segments": int32 [b, s]}, labels int32 [b, s])

    where labels are the next tokens that belong to an answer, its end token among them, and
    `ignore_id` elsewhere; segments number the documents of a row, from 1, 0 being padding. With
    `prefix` inputs have `"prefix"`, too, int32 [b, s]: 1 in the first prompt of a document.

    Reference: Ouyang et al., 2022, "InstructGPT", arXiv 2203.02155, §3.5.

    Args:
        shards: documents whose parts are prompts and answers in turn.
        length: number of tokens s of a row.
        shuffle: whether each epoch is shuffled; by default where `training`.
        seed: what the shuffling depends on, besides the epoch.
        training: whether documents longer than a row are left out, and rows that fill no batch.
            Otherwise they are cut off, and empty rows fill the last batch.
        add_start, add_end: whether documents begin, and answers end, with the tokenizer's start and
            end tokens, where it has them; those that have them by themselves, as from a chat
            template, are left as they are.
        prefix: whether inputs tell the first prompts, for a `CausalLM` with `prefix=True`.
        **options: `batch_size` and others, as `LanguageModelBatches`'.

    Attributes:
        num_rows: number of rows of an epoch.
        num_left_out: number of documents that are longer than a row.

    Raises:
        InputError: a document has no answer to its last prompt, all are longer than a row, or as of
            `LanguageModelBatches`.

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
        shuffle: bool | None = None,
        seed: int = 0,
        training: bool = True,
        add_start: bool = True,
        add_end: bool = True,
        prefix: bool = False,
        **options,
    ):
        check_length(length, 2)
        self._has_prefix = prefix
        self._shards = shards
        self._start = first_id(shards, ("start", "cls")) if add_start else None
        self._end = first_id(shards, ("end", "sep")) if add_end else None
        sizes = self._sizes()
        self._documents = np.flatnonzero(sizes <= length) if training else np.arange(len(sizes))
        self.num_left_out = len(sizes) - len(self._documents)
        if not len(self._documents):
            raise InputError(
                f"all {len(sizes):,} documents have more than length={length} tokens: give more"
            )
        kept = np.minimum(sizes[self._documents], length)
        shuffle = training if shuffle is None else shuffle
        plan = PackedPlan(np.stack([kept, kept], 1), length, 1, shuffle=shuffle, seed=seed)
        # The rows of this epoch, and of the one before, which the pipeline may still read.
        self._plan, self._one_at_a_time = functools.lru_cache(2)(plan.batches), threading.Lock()
        what = f"{len(self._documents):,} documents"
        options = {"seed": seed, "training": training, **options}
        # The plan has shuffled.
        super().__init__(shards, plan.num_batches, what, length=length, shuffle=False, **options)
        long = "documents are longer than a row"
        message = f"{long}, and left out: give more than length={length}"
        warn_left_out(self, self.num_left_out, len(sizes), message)
        if not training:
            message = f"{long} of length={length}, and cut off"
            warn_left_out(self, int((sizes > length).sum()), len(sizes), message)

    def row(self, epoch: int, number: int) -> Example:
        """Return the inputs of a row, a dict of int32 [s], and its labels, int32 [s]."""
        inputs, labels = self.empty_row()
        with self._one_at_a_time:  # the pipeline's threads all ask for a new epoch's
            (documents,), start = self._plan(epoch)[number], 0
        for segment, document in enumerate(self._documents[documents].tolist(), start=1):
            ids, is_answer = self._document(document)
            room = slice(start, min(start + len(ids), self.length))
            size = room.stop - start
            inputs["tokens"][room], inputs["segments"][room] = ids[:size], segment
            if self._has_prefix:  # what comes before the first answer
                inputs["prefix"][room] = (np.cumsum(is_answer) == 0)[:size]
            following = np.where(is_answer[1:], ids[1:], self.ignore_id)[:size]
            labels[start : start + len(following)] = following
            start = room.stop
        return inputs, labels

    def empty_row(self) -> Example:
        """Return a row in which nothing counts."""
        zeros = np.zeros(self.length, np.int32)
        inputs = {"tokens": zeros + np.int32(self.pad_id), "segments": zeros.copy()}
        inputs.update({"prefix": zeros.copy()} if self._has_prefix else {})
        return inputs, zeros + np.int32(self.ignore_id)

    def _document(self, number):
        """Return a document's ids with its special tokens, and which of them belong to answers."""
        parts = self._shards.parts(number)
        has_start = self._start is None or self._start == next(x[0] for x in parts if len(x))
        pieces = [] if has_start else [([self._start], False)]
        for place, part in enumerate(parts):
            pieces.append((part, place % 2 == 1))
            if place % 2 and self._end is not None and self._end not in part[-TOKENS_AT_END:]:
                pieces.append(([self._end], True))
        ids = np.concatenate([part for part, _ in pieces]).astype(np.int32)
        return ids, np.repeat([kind for _, kind in pieces], [len(part) for part, _ in pieces])

    def _sizes(self):
        """Return the number of tokens of each document, its special ones included, int64 [n]."""
        sizes = []
        for number in range(len(self._shards.shard_sizes)):
            shard = self._shards.shard(number)
            bounds = shard.documents if shard.parts is None else shard.parts
            counts = np.diff(np.searchsorted(bounds, shard.documents))
            alone = np.flatnonzero(counts % 2)
            if len(alone):
                first = self._shards.first_document(number) + int(alone[0])
                raise InputError(
                    f"{self._shards.folder}: document {first} has {counts[alone[0]]} parts, "
                    "expected prompts and answers in turn: write the shards with --field PROMPT "
                    "ANSWER; PART+PART joins fields"
                )
            starts, ends = self._added(shard, np.asarray(bounds))
            sizes.append(np.diff(shard.documents) + starts + ends)
        return np.concatenate(sizes)

    def _added(self, shard, bounds):
        """Return how many start and end tokens come to each document: two int arrays [n]."""
        tokens, documents = shard.tokens, np.asarray(shard.documents)
        starts = np.zeros(len(documents) - 1, np.int64)
        if self._start is not None:
            starts += tokens[documents[:-1]] != self._start
        if self._end is None:
            return starts, 0
        begins, finish = bounds[1::2], bounds[2::2]  # of answers: each second part is one
        lacks = np.ones(len(finish), bool)
        for back in range(1, TOKENS_AT_END + 1):
            place = finish - back
            lacks &= (place < begins) | (tokens[np.maximum(place, 0)] != self._end)
        before = np.concatenate([[0], np.cumsum(lacks)])
        answers = np.searchsorted(bounds, documents) // 2
        return starts, np.diff(before[answers])
