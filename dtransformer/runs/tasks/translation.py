"""Translation: train an encoder–decoder and its tokenizer on sentence pairs."""

from dtransformer.datasets.batch_plan import LengthBuckets
from dtransformer.datasets.batching import SpecialTokenIds, TranslationBatches
from dtransformer.datasets.text import clean_pairs, read_pairs
from dtransformer.errors import raise_as_input_error
from dtransformer.models import TranslationTransformer
from dtransformer.models.generation.text_generator import TextGenerator
from dtransformer.parallel.runtime import job
from dtransformer.runs import needs
from dtransformer.runs.identity import hash_records
from dtransformer.runs.networks import special_ids
from dtransformer.runs.tasks.base import Task
from dtransformer.trainers.callbacks import SacreBleu

_KEYS = {"train": ("source", "target"), "dev": ("dev_source", "dev_target")}


class Translation(Task):
    """Task that trains a `TranslationTransformer` (Vaswani et al., 2017)."""

    kind = TranslationTransformer
    command = "translate --run {} < FILE"

    def read(self, part: str | None = None) -> None:
        parts = {name: self._read(*keys) for name, keys in _KEYS.items()}
        self.digests |= {name: hash_records(zip(*pairs)) for name, pairs in parts.items() if pairs}
        pairs = self._clean_pairs(parts["train"])
        self._pairs = {"train": pairs, "dev": parts["dev"]}
        self.find_tokenizer(lambda: [*pairs[0], *pairs[1]])

    def _read(self, *keys):
        """Return the lines of both languages, or `None` without held-out files."""
        paths = [getattr(self.config.data, key) for key in keys]
        if keys == _KEYS["dev"] and not any(paths):
            return None
        return read_pairs(*(self.require_option(key) for key in keys))

    def _clean_pairs(self, pairs):
        """Return the training pairs without empty, unbalanced and, if requested, repeated pairs."""
        options = self.config.data
        *pairs, counts = clean_pairs(*pairs, max_ratio=options.max_ratio, distinct=options.distinct)
        skipped = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count]
        self._summary = f"Training pairs: {', '.join(skipped)}"
        return pairs

    def summary_lines(self) -> list[str]:
        return [self._summary]

    def make_network(self, precision: str | None = None) -> TranslationTransformer:
        ids = special_ids(self.tokenizer, self.kind)
        self.network = self.unbuilt(self.tokenizer.vocab_size, precision, **ids)
        self.network.build()
        return self.network

    def unbuilt(
        self, vocab_size: int, precision: str | None = None, **ids: int | None
    ) -> TranslationTransformer:
        """Create the network without building it.

        Args:
            vocab_size: Integer. Number of ids of the tokenizer.
            precision: Name of the dtype policy. Defaults to `training.precision`.
            **ids: Special ids of the tokenizer.

        Raises:
            InputError: If the free memory is too small for the weights or the search.
        """
        config = self.config
        needs.check_search(config, vocab_size, config.search.beam_size)
        with raise_as_input_error("model"):
            network = TranslationTransformer(
                vocab_size,
                **vars(config.model),
                max_source_length=config.data.max_length,
                max_target_length=config.data.max_length + 1,  # plus the start token
                **ids,
                dtype=precision or config.training.precision,
            )
        needs.check_network(network)
        return network

    def batches(self, part: str) -> TranslationBatches | None:
        pairs = self._pairs[part]
        if not pairs:
            return None
        options = self.config.data
        tokenizer = self.tokenizer
        return TranslationBatches(
            tokenizer.encode(pairs[0]),
            tokenizer.encode(pairs[1]),
            batch_size=options.batch_size,
            batch_tokens=None if options.batch_size else options.batch_tokens,
            max_length=options.max_length,
            buckets=LengthBuckets(
                options.num_buckets,
                pad_to_bounds=job.compiles_shapes(),
                pad_to_multiple_of=self.config.parallel.model_parallel,
            ),
            packed_length=options.packed_length,
            special_ids=SpecialTokenIds(**special_ids(tokenizer, self.kind)),
            **self.batch_options(part),
        )

    def loss(self):
        return self.cross_entropy(self.tokenizer.pad_id)

    def callbacks(self, trainer) -> list:
        pairs = self._pairs["dev"]
        num_sentences = self.config.training.bleu_sentences
        if not pairs or not num_sentences:
            return []
        translate = TextGenerator(
            self.network,
            self.tokenizer,
            max_new_tokens=None,
            batch_size=64,
            beam_size=1,  # Greedy search is fast enough for every epoch.
            max_source_length=self.config.data.max_length,
        )
        return [SacreBleu(pairs[0][:num_sentences], pairs[1][:num_sentences], translate)]

    def preview(self, count: int) -> list[list[tuple[str, bool]]]:
        pairs = zip(*self._pairs["train"])
        return [[(source, False), (target, True)] for source, target in list(pairs)[:count]]


TASK = Translation
