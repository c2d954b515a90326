"""Weighted mixtures of several folders of token shards."""

import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np

from dtransformer.datasets.indexed_batches import Example, IndexedBatches
from dtransformer.datasets.mixture import MixtureOrder
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError


class ShardMixture:
    """Several folders of token shards with weights, written with one tokenizer.

    Args:
        sources: `TokenShards` of the folders.
        weights: List with the positive weight of each source. The fraction of a source is its
            weight divided by the sum of all weights.

    Attributes:
        sources: List of the `TokenShards`.
        order: `MixtureOrder` of the rows.
        num_documents, num_tokens: Number of documents and tokens of all sources.
        special_ids: Dict of the ids of the tokenizer's special tokens.
        fingerprint: 64 hexadecimal digits that identify the tokens, the tokenizer and the weights.

    Raises:
        InputError: If the sources have different tokenizers, a folder is listed twice, or a weight
            is not positive or has too many digits.

    Example:

    >>> from dtransformer.datasets import SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> news = write_token_shards(["one two", "two"], tokenizer, "news")
    >>> books = write_token_shards(["three"], tokenizer, "books")
    >>> ShardMixture([news, books], weights=[0.75, 0.25]).num_documents
    3
    """

    def __init__(self, sources: Iterable[TokenShards], weights: Sequence[float]):
        self.sources = list(sources)
        if len(weights) != len(self.sources) or min(weights, default=0) <= 0:
            raise InputError(
                f"The weights {list(weights)} do not fit {len(self.sources)} folders of token "
                "shards. Pass one positive weight for each folder."
            )
        first = self.sources[0]
        for position, shards in enumerate(self.sources):
            if shards.encoding != first.encoding:
                raise InputError(
                    f"{shards.folder} was written with another tokenizer, vocabulary or id type than "
                    f"{first.folder}. Write it again with --tokenizer {first.tokenizer_folder}."
                )
            if shards.folder in [earlier.folder for earlier in self.sources[:position]]:
                raise InputError(f"{shards.folder} is listed twice. Add its weights to one entry.")
        self.order = MixtureOrder(weights)
        self.num_documents = sum(map(len, self.sources))
        self.num_tokens = sum(shards.num_tokens for shards in self.sources)
        self.special_ids = first.special_ids
        identity = [*(shards.fingerprint for shards in self.sources), *map(float, weights)]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()


class MixedBatches(IndexedBatches):
    """Training batches of a mixture: each row is a row of one source.

    Among the first n rows of a run, the number of rows of a source differs from its fraction of n
    by less than one. An epoch of a source uses all its rows once, in another random order. Then its
    next epoch starts. The rows depend only on the seed and their position in the run, not on the
    number of ranks.

    An epoch of `fit` has the number of rows of all sources together, rounded up to full batches.
    The next epoch of `fit` continues with the next row of each source.

    Args:
        kind: Class of the rows, such as `LanguageModelBatches`.
        mixture: The `ShardMixture`.
        batch_size: Integer. Number of rows of a global batch.
        seed: Integer. The order of each source depends on the seed and its epoch. Defaults to 0.
        shard_index, num_shards, pad_rows_to_multiple_of: See `LanguageModelBatches`.
        **options: Other arguments of `kind`, such as `length`.

    Attributes:
        sources: List of the sources' batches, instances of `kind`.

    Raises:
        InputError: If a source has no full row, or an argument is out of range.

    Example:

    >>> from dtransformer.datasets import LanguageModelBatches, SubwordTokenizer, write_token_shards
    >>> tokenizer = SubwordTokenizer.train(["one two three"], vocab_size=26)
    >>> web = write_token_shards(["one two three"] * 6, tokenizer, "web")
    >>> code = write_token_shards(["three two"] * 3, tokenizer, "code")
    >>> mixture = ShardMixture([web, code], weights=[0.75, 0.25])
    >>> batches = MixedBatches(LanguageModelBatches, mixture, length=8, batch_size=2)
    >>> inputs, labels = next(iter(batches.as_dataset()))
    >>> inputs["tokens"].shape, len(batches.source_epochs(num_batches=5))
    (TensorShape([2, 8]), 2)
    """

    def __init__(
        self,
        kind: type[IndexedBatches],
        mixture: ShardMixture,
        *,
        batch_size: int,
        seed: int = 0,
        shard_index: int = 0,
        num_shards: int = 1,
        pad_rows_to_multiple_of: int = 1,
        **options,
    ):
        self._mixture = mixture
        seeds = np.random.SeedSequence(seed).generate_state(len(mixture.sources)).tolist()
        self.sources = [
            kind(shards, batch_size=1, seed=source_seed, **options)
            for shards, source_seed in zip(mixture.sources, seeds)
        ]
        super().__init__(
            mixture,
            sum(batches.num_rows for batches in self.sources),
            f"{mixture.num_tokens:,} tokens",
            length=self.sources[0].length,
            batch_size=batch_size,
            shuffle=False,  # The sources shuffle.
            seed=seed,
            shard_index=shard_index,
            num_shards=num_shards,
            pad_rows_to_multiple_of=pad_rows_to_multiple_of,
            training=False,  # Rounds the number of batches up.
        )
        self.num_rows = len(self) * batch_size

    def row(self, epoch: int, index: int) -> Example:
        row = epoch * self.num_rows + index
        source, turn = self._mixture.order.place(row)
        batches = self.sources[source]
        source_epoch, place = divmod(turn, batches.num_rows)
        (source_row,) = batches.rows(source_epoch, place)
        return batches.row(source_epoch, int(source_row))

    def empty_row(self) -> Example:
        return self.sources[0].empty_row()

    def source_epochs(self, num_batches: int) -> dict[str, float]:
        """Return the epochs of each source in the first batches of a run.

        Args:
            num_batches: Integer. Number of batches since the start of the run.

        Returns:
            Dict from the folder of each source to its epochs, a float.
        """
        counts = self._mixture.order.counts(num_batches * self.batch_size)
        return {
            str(shards.folder): float(count / batches.num_rows)
            for shards, batches, count in zip(self._mixture.sources, self.sources, counts)
        }
