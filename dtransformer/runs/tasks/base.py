"""Base of tasks: everything of a run that depends on what is trained."""

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
from dtransformer.models.base import TokenModel, first_given
from dtransformer.models.pairs import GroupModel
from dtransformer.parallel.runtime import job
from dtransformer.runs import networks
from dtransformer.runs.callbacks import Samples
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import TOKENIZER
from dtransformer.runs.options import USUAL_VOCABULARY

PARTS = "train", "dev"


class Task(abc.ABC):
    """A kind of training: its records, tokenizer, network, batches, loss and metrics.

    A run calls `read`, then `make_network`, then the others, on every rank.

    Args:
        config: the run's config.
        old_run: the folder of the run that goes on; None for a new one.
        folder: the run's folder, or the one that becomes it: what is prepared is written there.

    Attributes:
        kind: the class of the network that it trains, where `model` gives sizes.
        accepts: a base of the networks that it trains, too; None for no other.
        num_sequences: how many a record has, which a `GroupModel` sees where they are several.
        num_added: of tokens that come to rows of `data.length`, such as a start token.
        always_trained: a pattern of weights that are trained beside adapters, too.
        command: Command that uses the trained network, with `{}` for the run folder.
        algorithm: Default of `tokenizer.algorithm`.
        tokenizer: the tokenizer, once `read` was called.
        network: the network that is trained, once `make_network` was called.
        digests: the SHA-256 of the records `"train"` and `"dev"`; None where there are none.
        monitor: the log by which the least is best; None where there are no held-out records.
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
    ):
        self.config, self.old_run, self.folder = config, old_run, folder
        self.tokenizer = self.network = None
        self.digests = dict.fromkeys(PARTS)

    @property
    def monitor(self) -> str | None:
        return "val_loss" if self.digests["dev"] is not None else None

    @abc.abstractmethod
    def read(self, part: str | None = None) -> None:
        """Read the tokenizer and the records, and check these.

        Args:
            part: `"train"` or `"dev"`, the one of which batches are wanted; None for both.

        Raises:
            InputError: a file is missing or wrong; says which, and the line.
        """

    def make_network(self, precision: str | None = None) -> keras.Model:
        """Return the network, built; it is `network` from then on.

        Args:
            precision: of its computations; by default `training.precision`.

        Raises:
            InputError: the options make none, or one that is too large for this machine.
        """
        core = self.with_head(self.make_core(precision))
        head = core.head
        if core.pad_id is None and hasattr(head, "pad_id") and head.pooling == "last":
            # `transformers` needs an id that is skipped where it looks for the last token.
            pad_id = first_given(head.pad_id, core.end_id)
            head.pad_id = first_given(getattr(self.tokenizer, "pad_id", None), pad_id)
        networks.adapt(core, self.config, always=self.always_trained)
        is_group = self.num_sequences > 1
        self.network = GroupModel(core, self.scores(core)) if is_group else core
        return self.network

    def with_head(self, core: TokenModel) -> TokenModel:
        """Return the network with the head that the task trains.

        Raises:
            InputError: If the task trains the network's own head, and a folder has none.
        """
        if getattr(core, "has_task_head", False):
            raise InputError(
                f"model: {self.config.model.from_} has a {type(core.head).__name__}, and task "
                f"{self.config.task} trains a head of the vocabulary: give a folder with one"
            )
        return core

    def scores(self, core: TokenModel) -> keras.layers.Layer | None:
        """Return what a `GroupModel` makes of the outputs of each sequence; None for themselves."""
        return None

    def make_core(self, precision: str | None = None) -> TokenModel:
        """Return the network inside of what is trained, without adapters, built."""
        own = self.arguments()
        network = networks.make_network(
            self.config, self.kind, self.vocab_size(), precision, self.accepts, **own
        )
        networks.check_positions(network, self.config.data.length + self.num_added)
        return network

    def arguments(self) -> dict:
        """Return arguments of the network, where it is of sizes."""
        return networks.special_ids(self.tokenizer, self.kind)

    def vocab_size(self) -> int:
        """Return the number of ids that the network needs."""
        return self.tokenizer.vocab_size

    @abc.abstractmethod
    def batches(self, part: str) -> Any:
        """Return this rank's batches of a part, for `fit`; None where there are none."""

    def batch_options(self, part: str) -> dict[str, Any]:
        """Return what all makers of batches take, for this rank's batches of a part."""
        index, count = job.data_shard()
        return {
            "shuffle": self.config.data.shuffle and part == "train",
            "seed": self.config.training.seed,
            "shard_index": index,
            "num_shards": count,
            "pad_rows_to_multiple_of": job.rows_multiple_of(),
            "training": part == "train",
        }

    def loss(self) -> keras.losses.Loss:
        """Return the loss, as `Trainer.compile` takes it."""
        return self.cross_entropy()

    def metrics(self) -> dict:
        """Return arguments of `Trainer.compile` with metrics."""
        return {}

    def before_training(self, trainer: keras.Model) -> None:  # noqa: B027 (most need nothing)
        """Compute what is needed of the network as training begins, to evaluate, too; all ranks call."""

    def callbacks(self, trainer: keras.Model) -> list:
        """Return callbacks that look at the network while it trains, on every rank."""
        options = self.config.evaluation
        if not options.samples:
            return []
        generate = TextGenerator(self.core, self.tokenizer, options.max_new_tokens)
        shown = lambda prompts: generate(self.prompts(prompts))
        return [Samples(shown, options.samples, options.every_steps)]

    def prompts(self, texts: list[str]) -> list[str]:
        """Return what the network goes on with, of `evaluation.samples`."""
        return texts

    def moved(self, folder: pathlib.Path) -> None:
        """Go on with what was written into `folder` in another folder, which it has become."""
        self.folder = folder

    def results(self, trainer: keras.Model, batches: Any) -> dict[str, float]:
        """Return the loss, metrics and scores of `dtransformer evaluate`. All ranks call it.

        Args:
            trainer: Trainer of the network.
            batches: Batches of the held-out records.
        """
        logs = trainer.evaluate(batches, verbose=0, return_dict=True)
        return {**logs, **self.scores_of_dev(trainer)}

    def scores_of_dev(self, trainer: keras.Model) -> dict[str, float]:
        """Return scores of all held-out records that no mean over rows gives. All ranks call it."""
        return {}

    def told(self) -> list[str]:
        """Return lines on the records, which are printed before training."""
        return []

    def preview(self, number: int) -> list[list[tuple[str, bool]]]:
        """Return some records as pieces of text, each with whether it is learnt."""
        return []

    @property
    def core(self) -> TokenModel:
        """The network of `dtransformer.models` inside of what is trained."""
        return self.network.core if self.num_sequences > 1 else self.network

    def cross_entropy(self, ignore_id: int | None = -100) -> CrossEntropyLoss:
        """Return the loss of tokens, or of labels, as `training` asks for."""
        options = self.config.training
        return CrossEntropyLoss(options.label_smoothing, ignore_id, z_loss=options.z_loss)

    def find_tokenizer(self, texts: Callable[[], Iterable[str]]) -> None:
        """Take the run's tokenizer, the one that is given or the model's, or train one on texts.

        Raises:
            InputError: it is not usable, or texts have not as many pieces as the config asks for.
        """
        folder, options = networks.tokenizer_folder(self.config), self.config.tokenizer
        if self.old_run is not None:
            self.load_tokenizer(self.old_run)
        elif folder is not None:
            self.tokenizer = load_tokenizer(folder)
        elif self.tokenizer is None:
            is_byte_level = (options.algorithm or self.algorithm) == "byte_bpe"
            train = train_byte_level if is_byte_level else SubwordTokenizer.train
            self.tokenizer = train(
                texts(),
                options.vocab_size or USUAL_VOCABULARY,
                lower_case=options.lower_case,
                at_most=options.vocab_size is None,
            )

    def load_tokenizer(self, run: pathlib.Path) -> None:
        """Take the tokenizer of a run's folder."""
        self.tokenizer = load_tokenizer(run / TOKENIZER)

    def needed(self, section: str, key: str) -> Any:
        """Return a required option.

        Raises:
            InputError: If it is missing or empty.
        """
        value = getattr(getattr(self.config, section), key, None)
        if not value:
            raise InputError(
                f"`{section}.{key}` is missing, and task {self.config.task} requires it. Add it to the "
                f"config, or pass --set {section}.{key}=FILE."
            )
        return value
