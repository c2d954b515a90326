"""Base class of tasks: all parts of a run that depend on the task."""

import abc
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import keras

from dtransformer.datasets.byte_level import train_byte_level
from dtransformer.datasets.tokenizer import SubwordTokenizer
from dtransformer.datasets.tokenizer_folder import load_tokenizer
from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import TextGenerator
from dtransformer.models.base import TokenModel, value_or_default
from dtransformer.models.pairs import GroupModel
from dtransformer.parallel.runtime import job
from dtransformer.runs import networks
from dtransformer.runs.callbacks import Samples
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import TOKENIZER
from dtransformer.runs.options import DEFAULT_VOCAB_SIZE

PARTS = "train", "dev"


class Task(abc.ABC):
    """Base class of tasks: records, tokenizer, network, batches, loss and metrics of a run.

    Every rank calls `read`, then `make_network`, then the other methods.

    Args:
        config: Config of the run.
        old_run: Folder of the run to resume or load. `None` for a new run.
        folder: Folder for prepared data: the run folder, or the folder that is renamed to it later.
        load_run: Function `load_run(folder, precision)` that returns the task of another run, for
            `model.from`. `make_task` sets it.

    Attributes:
        kind: Class of a network that is created from the sizes in `model`.
        accepts: Base class of all networks that the task can train. `None` accepts only `kind`.
        num_sequences: Number of sequences per record. If it is above 1, `network` is a `GroupModel`.
        num_added: Number of tokens added to rows of `data.length`, such as a start token.
        always_trained: Path pattern of weights that stay trainable next to adapters, or `None`.
        command: Command that uses the trained network, with `{}` for the run folder.
        algorithm: Default of `tokenizer.algorithm`.
        tokenizer: Tokenizer, available after `read`.
        network: Trained network, available after `make_network`.
        digests: Dict with the SHA-256 of the `"train"` and `"dev"` records, or `None` for no records.
        monitor: Name of the log that selects the best epoch; lower is better. `None` without held-out
            records.
    """

    kind: ClassVar[type[TokenModel]]
    accepts: ClassVar[type | None] = None
    num_sequences: ClassVar[int] = 1
    num_added: ClassVar[int] = 0
    always_trained: ClassVar[str | None] = None
    command: ClassVar[str] = "generate --model {} --prompt TEXT"
    algorithm: ClassVar[str] = "wordpiece"

    def __init__(
        self,
        config: RunConfig,
        old_run: pathlib.Path | None = None,
        folder: pathlib.Path | None = None,
        load_run: Callable | None = None,
    ):
        self.config = config
        self._load_run = load_run
        self.old_run = old_run
        self.folder = folder
        self.tokenizer = self.network = None
        self.digests = dict.fromkeys(PARTS)

    @property
    def monitor(self) -> str | None:
        return "val_loss" if self.digests["dev"] is not None else None

    @abc.abstractmethod
    def read(self, part: str | None = None) -> None:
        """Read the tokenizer and the records, and check the records.

        Args:
            part: `"train"` or `"dev"`. `None` reads both parts.

        Raises:
            InputError: If a file is missing or wrong. The message names the file and the line.
        """

    def make_network(self, precision: str | None = None) -> keras.Model:
        """Create and build the network, store it as `network`, and return it.

        Args:
            precision: Name of the dtype policy. Defaults to `training.precision`.

        Raises:
            InputError: If the options of `model` are invalid, or the network is too large for this
                machine.
        """
        core = self.with_head(self.make_core(precision))
        head = core.head
        if core.pad_id is None and hasattr(head, "pad_id") and head.pooling == "last":
            # `transformers` needs a padding id to find the last token of a text.
            pad_id = value_or_default(head.pad_id, core.end_id)
            head.pad_id = value_or_default(getattr(self.tokenizer, "pad_id", None), pad_id)
        networks.adapt(core, self.config, always=self.always_trained)
        is_group = self.num_sequences > 1
        self.network = GroupModel(core, self.scores(core)) if is_group else core
        return self.network

    def with_head(self, core: TokenModel) -> TokenModel:
        """Return the network with the head that the task trains.

        The default returns `core` itself, with its vocabulary head.

        Raises:
            InputError: If the loaded network has another kind of head.
        """
        if getattr(core, "has_task_head", False):
            raise InputError(
                f"`model.from`: {self.config.model.from_} has a {type(core.head).__name__}, but task "
                f"{self.config.task} trains a vocabulary head. Choose a folder with one."
            )
        return core

    def scores(self, core: TokenModel) -> keras.layers.Layer | None:
        """Return the layer that a `GroupModel` applies to the outputs of each sequence, or `None`."""
        return None

    def make_core(self, precision: str | None = None) -> TokenModel:
        """Create and build the core network, without head, adapters or `GroupModel`."""
        arguments = self.arguments()
        network = networks.make_network(
            self.config,
            self.kind,
            self.vocab_size(),
            precision,
            self.accepts,
            self._load_run,
            **arguments,
        )
        networks.check_positions(network, self.config.data.length + self.num_added)
        return network

    def arguments(self) -> dict:
        """Return the arguments of a network that is created from sizes, as a dict."""
        return networks.special_ids(self.tokenizer, self.kind)

    def vocab_size(self) -> int:
        """Return the number of ids that the network must have."""
        return self.tokenizer.vocab_size

    @staticmethod
    def predicted_positions(config: RunConfig) -> int | None:
        """Return the number of positions per row with logits, or `None` for all, for the planner."""
        return None

    @abc.abstractmethod
    def batches(self, part: str) -> Any:
        """Return this rank's batches for `fit`.

        Args:
            part: `"train"` or `"dev"`.

        Returns:
            A `keras.utils.PyDataset`, or `None` if the part has no records.
        """

    def batch_options(self, part: str) -> dict[str, Any]:
        """Return the arguments that all batch classes have in common, for a part of this rank."""
        index, count = job.data_shard()
        return {
            "shuffle": self.config.data.shuffle and part == "train",
            "seed": self.config.training.seed,
            "shard_index": index,
            "num_shards": count,
            "pad_rows_to_multiple_of": job.row_multiple(),
            "training": part == "train",
        }

    def loss(self) -> keras.losses.Loss:
        """Return the loss for `Trainer.compile`."""
        return self.cross_entropy()

    def metrics(self) -> dict:
        """Return the arguments of `Trainer.compile` that set metrics, as a dict."""
        return {}

    def before_training(self, trainer: keras.Model) -> None:  # noqa: B027 (most need nothing)
        """Prepare training or evaluation with the initial network. All ranks call it."""

    def callbacks(self, trainer: keras.Model) -> list:
        """Return callbacks that evaluate or sample the network during training, on every rank."""
        options = self.config.evaluation
        if not options.samples:
            return []
        generate = TextGenerator(self.core, self.tokenizer, options.max_new_tokens)
        return [
            Samples(
                lambda texts: generate(self.prompts(texts)), options.samples, options.every_steps
            )
        ]

    def prompts(self, texts: list[str]) -> list[str]:
        """Convert the texts of `evaluation.samples` to prompts for the network."""
        return texts

    def set_folder(self, folder: pathlib.Path) -> None:
        """Set `folder` to its new path after the folder was renamed."""
        self.folder = folder

    def results(self, trainer: keras.Model, batches: Any) -> dict[str, float]:
        """Return the loss, metrics and scores of `dtransformer evaluate`. All ranks call it.

        Args:
            trainer: Trainer of the network.
            batches: Batches of the held-out records.
        """
        logs = trainer.evaluate(batches, verbose=0, return_dict=True)
        return {**logs, **self.score_dev(trainer)}

    def score_dev(self, trainer: keras.Model) -> dict[str, float]:
        """Return a dict of scores that are not means over rows, such as F1. All ranks call it."""
        return {}

    def summary_lines(self) -> list[str]:
        """Return lines that describe the records. They are printed before training."""
        return []

    def preview(self, count: int) -> list[list[tuple[str, bool]]]:
        """Return the first `count` records, each as a list of (text, has_labels) pairs."""
        return []

    @property
    def core(self) -> TokenModel:
        """The core network: `network` itself, or the network inside a `GroupModel`."""
        return self.network.core if self.num_sequences > 1 else self.network

    def cross_entropy(self, ignore_id: int | None = -100) -> CrossEntropyLoss:
        """Return the cross-entropy loss with the options of `training`."""
        options = self.config.training
        return CrossEntropyLoss(
            options.label_smoothing,
            ignore_id,
            z_loss=options.z_loss,
            chunk_tokens=options.chunk_tokens,
        )

    def find_tokenizer(self, texts: Callable[[], Iterable[str]]) -> None:
        """Set `tokenizer` to the old run's, the config's or the model's, or train one.

        A tokenizer that was set before is kept if neither the old run nor the config has one.

        Args:
            texts: Function without arguments that returns the texts to train a tokenizer on.

        Raises:
            InputError: If the tokenizer is unusable, or the texts do not suffice for
                `tokenizer.vocab_size` entries.
        """
        folder = networks.tokenizer_folder(self.config)
        options = self.config.tokenizer
        if self.old_run is not None:
            self.load_tokenizer(self.old_run)
        elif folder is not None:
            self.tokenizer = load_tokenizer(folder)
        elif self.tokenizer is None:
            is_byte_level = (options.algorithm or self.algorithm) == "byte_bpe"
            train = train_byte_level if is_byte_level else SubwordTokenizer.train
            self.tokenizer = train(
                texts(),
                options.vocab_size or DEFAULT_VOCAB_SIZE,
                lower_case=options.lower_case,
                allow_smaller=options.vocab_size is None,
            )

    def load_tokenizer(self, run: pathlib.Path) -> None:
        """Set `tokenizer` to the tokenizer in a run folder."""
        self.tokenizer = load_tokenizer(run / TOKENIZER)

    def require_option(self, key: str) -> Any:
        """Return a required option of the section `data`.

        Raises:
            InputError: If it is missing or empty.
        """
        value = getattr(self.config.data, key, None)
        if not value:
            raise InputError(
                f"`data.{key}` is missing, and task {self.config.task} requires it. Add it to the "
                f"config, or pass --set data.{key}=FILE."
            )
        return value
