"""Base of tasks that train on documents, in rows of equal length."""

import hashlib
from typing import ClassVar

import keras

from dtransformer.datasets.documents import read_documents
from dtransformer.datasets.indexed_batches import IndexedBatches
from dtransformer.datasets.sample import iterate_texts, sample_evenly
from dtransformer.datasets.shard_manifest import MANIFEST
from dtransformer.datasets.shard_mixture import MixedBatches, ShardMixture
from dtransformer.datasets.shard_writer import write_token_shards
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.datasets.tokenizer_folder import are_equal, load_tokenizer
from dtransformer.errors import InputError
from dtransformer.inputs.files import check_path
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.runs.identity import SHARDS
from dtransformer.runs.networks import tokenizer_folder
from dtransformer.runs.tasks.base import PARTS, Task


class DocumentTask(Task):
    """Base of tasks that train on documents.

    Files are tokenized once, into token shards in the run folder. Folders written by `dtransformer
    prepare --lm` are read directly.

    Attributes:
        batches_of: Class of the batches.
        shards: Dict by part, "train" and "dev". Each value is a `TokenShards`, or the
            `ShardMixture` of folders with weights.
        mixed_batches: `MixedBatches` of the training part, or `None`.
    """

    batches_of: ClassVar[type[IndexedBatches]]
    algorithm = "byte_bpe"
    mixed_batches: MixedBatches | None = None

    def read(self, part: str | None = None) -> None:
        self.shards = {}
        options = self.config.data
        if part in (None, "train"):
            self.require_option("train")
        self._check_prepared()
        if self.old_run is not None:
            self.load_tokenizer(self.old_run)
        for name in PARTS:
            sources = getattr(options, name)
            if not sources or part not in (None, name):
                continue
            self.shards[name] = self._shards(name, sources)
            self.digests[name] = hashlib.sha256(self.shards[name].fingerprint.encode()).hexdigest()

    def _check_prepared(self):
        """Check that `data.field` and `data.documents` are not set if all sources are token shards."""
        options = self.config.data
        defaults = type(self.config.data)()
        if not all(_is_prepared(x) for name in PARTS for x in getattr(options, name)):
            return
        for key in ("field", "documents"):
            if getattr(options, key) != getattr(defaults, key):
                raise InputError(
                    f"`data.{key}` has no effect on folders of token shards. Remove it, and pass "
                    f"--{key} to `dtransformer prepare --lm` instead."
                )

    def _shards(self, name, sources):
        """Return the token shards of a part. Rank 0 tokenizes files, unless an old run did."""
        if any(source.weight for source in sources) or all(map(_is_prepared, sources)):
            return self._open_folders(name, sources)
        paths = [source.path for source in sources]
        if self.tokenizer is None:
            self.find_tokenizer(lambda: sample_evenly(iterate_texts(self._documents(paths))))
        folder = self.folder / SHARDS / name
        is_written = self.old_run is not None and (folder / MANIFEST).is_file()

        def write():
            if not is_written:
                write_token_shards(self._documents(paths), self.tokenizer, folder, overwrite=True)

        from_chief(write, f"run/shards/{name}")
        return TokenShards(folder)

    def _open_folders(self, name, sources):
        """Return the `TokenShards` of a prepared folder, or the `ShardMixture` of several."""
        weights = [source.weight for source in sources]
        if len(sources) > 1 and None in weights:
            raise InputError(
                f"`data.{name}`: {weights.count(None)} of {len(weights)} folders of token shards "
                "have no weight. Set a weight for each folder of data.train, or prepare one folder."
            )
        folders = [TokenShards(source.path) for source in sources]
        for shards in folders:
            if self.config.data.sentences and not shards.has_parts:
                raise InputError(
                    f"`data.sentences`: {shards.folder} was prepared without sentences. Prepare it "
                    "again with --sentences."
                )
        result = ShardMixture(folders, weights) if any(weights) else folders[0]
        shard_tokenizer = load_tokenizer(folders[0].tokenizer_folder)
        run_tokenizer = self.tokenizer or self._tokenizer_of_model()
        if run_tokenizer is not None and not are_equal(run_tokenizer, shard_tokenizer):
            raise InputError(
                f"`data.{name}`: {folders[0].folder} was prepared with another tokenizer than the "
                "run or the model uses. Prepare it again with their tokenizer."
            )
        self.tokenizer = run_tokenizer or shard_tokenizer
        return result

    def _tokenizer_of_model(self):
        """Return the tokenizer of the config or of published weights, or `None` if none exists."""
        folder = tokenizer_folder(self.config)
        try:
            return None if folder is None else load_tokenizer(folder)
        except InputError:
            if self.config.tokenizer.folder is not None:
                raise
            return None  # A folder of weights without a tokenizer.

    def _documents(self, paths):
        options = self.config.data
        return read_documents(
            paths, field=options.field, boundary=options.documents, sentences=options.sentences
        )

    def set_folder(self, folder) -> None:
        for shards in self.shards.values():
            if isinstance(shards, TokenShards) and self.folder in shards.folder.parents:
                shards.folder = folder / shards.folder.relative_to(self.folder)
        super().set_folder(folder)

    def summary_lines(self) -> list[str]:
        return [
            f"Documents ({name}): {x.num_documents:,} with {x.num_tokens:,} tokens"
            for name, x in self.shards.items()
        ]

    def batches(self, part: str) -> IndexedBatches | None:
        if part not in self.shards:
            return None
        shards = self.shards[part]
        options = {
            "length": self.config.data.length,
            "batch_size": self.config.training.batch_size,
            **self.batch_options(part),
            **self.get_batch_options(),
        }
        if not isinstance(shards, ShardMixture):
            return self.batches_of(shards, **options)
        batches = self.mixed_batches = MixedBatches(self.batches_of, shards, **options)
        training = self.config.training
        steps = training.epochs * len(batches)
        epochs = batches.source_epochs(min(steps, training.max_steps or steps))
        for folder, count in epochs.items():
            job.print_once(f"Source {folder}: {count:.3g} epochs in this run")
        return batches

    def callbacks(self, trainer):
        callbacks = super().callbacks(trainer)
        batches = self.mixed_batches
        if batches is None:
            return callbacks
        latest = {}

        def log_epochs(batch, logs):
            # The index may exceed the last batch of the epoch if a call executes several steps.
            num_batches = batches.position()["epoch"] * len(batches) + min(batch + 1, len(batches))
            epochs = batches.source_epochs(num_batches)
            latest.update({f"epochs/{folder}": count for folder, count in epochs.items()})
            logs.update(latest)

        def log_latest(_, logs):
            logs.update(latest)

        logs_epochs = keras.callbacks.LambdaCallback(
            on_train_batch_end=log_epochs, on_epoch_end=log_latest
        )
        return [logs_epochs, *callbacks]

    def get_batch_options(self) -> dict:
        """Return additional arguments of `batches_of` as a dict."""
        return {}

    def preview(self, count: int) -> list[list[tuple[str, bool]]]:
        shards = self.shards.get("train") or self.shards["dev"]
        shards = getattr(shards, "sources", [shards])[0]
        rows = [shards[x][: self.config.data.length] for x in range(min(count, len(shards)))]
        return [[(text, True)] for text in self.tokenizer.decode(rows)]


def _is_prepared(source):
    return (check_path(source.path, "data.train") / MANIFEST).is_file()
