"""Small documents as token shards, with a tokenizer of letters."""

import numpy as np

from dtransformer.datasets import write_token_shards

PAD, START, END = 0, 2, 3
FIRST = 4  # Id of "a".


class Letters:
    """Tokenizer with one token for each letter from a to z. Other characters have no token."""

    vocab_size, pad_id, unk_id, start_id, end_id = 30, PAD, 1, START, END

    def encode(self, texts):
        return [[ord(c) - ord("a") + FIRST for c in text if "a" <= c <= "z"] for text in texts]

    def decode(self, rows):
        return ["".join(chr(i - FIRST + ord("a")) for i in row if i >= FIRST) for row in rows]


def some_documents(count=40, longest=30, seed=0, parts=0):
    """Return random texts, or lists of up to `parts` texts."""
    rng = np.random.default_rng(seed)

    def text():
        return "".join(map(chr, rng.integers(ord("a"), ord("z") + 1, rng.integers(1, longest))))

    return [
        [text() for _ in range(rng.integers(1, parts + 1))] if parts else text()
        for _ in range(count)
    ]


def some_shards(folder, documents=None, shard_tokens=100, **options):
    documents = some_documents(**options) if documents is None else documents
    return write_token_shards(documents, Letters(), folder, shard_tokens=shard_tokens)
