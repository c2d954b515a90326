"""The network of a run: published weights, a preset, another run's, or of sizes; and its adapters."""

import importlib
import pathlib
from typing import Any

from dtransformer.architectures import Architecture, architecture_named
from dtransformer.errors import InputError, refusing, shown
from dtransformer.models import EncoderDecoderLM, MaskedLM, add_lora, freeze, merge_lora
from dtransformer.models.base import TokenModel
from dtransformer.models.lora import adapters_of
from dtransformer.models.presets import from_preset
from dtransformer.models.pretrained.load import architecture_of, from_pretrained
from dtransformer.models.weight_paths import unfreeze
from dtransformer.parallel.ops.training_noise import EmbeddingNoise
from dtransformer.runs import needs
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import is_run
from dtransformer.runs.options import USUAL_VOCABULARY

_IDS = {name: name for name in ("pad_id", "start_id", "end_id")}
# Arguments of networks -> the tokenizer's special ids, where they are not all, by the same names; an
# encoder-decoder starts with the padding, as T5, which is never trained as a label.
_IDS_OF_KINDS = {MaskedLM: {"pad_id": "pad_id"}, EncoderDecoderLM: {**_IDS, "start_id": "pad_id"}}
_NOT_SIZES = {"from_", "preset", "adapters", "freeze"}


def make_network(
    config: RunConfig,
    kind: type[TokenModel],
    vocab_size: int,
    precision: str | None = None,
    accepts: type | None = None,
    **own: Any,
) -> TokenModel:
    """Return the network that `model` of a run's config asks for, built; all ranks call.

    Args:
        config: the run's config.
        kind: the class that the task trains.
        vocab_size: number of ids of its tokenizer.
        precision: of its computations; by default `training.precision`.
        accepts: a base of the classes that weights may be of; by default `kind`.
        **own: arguments that the task gives, such as special ids, where it is of sizes.

    Raises:
        InputError: the options make none, or one that is too large for this machine; or the weights
            are of another kind, or of a smaller vocabulary.
    """
    precision = precision or config.training.precision
    given = sizes_of(config)
    try:
        network = _made(config, kind, vocab_size, precision, given, own)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"model: {error}") from None
    if not isinstance(network, accepts or kind):
        raise InputError(
            f"model: task {config.task} trains a {kind.__name__}, and what is given is a "
            f"{type(network).__name__}"
        )
    if vocab_size > network.vocab_size:
        raise InputError(
            f"model: the tokenizer has {vocab_size} ids, and the model {network.vocab_size}: is it "
            "the model's own?"
        )
    return network


def sizes_of(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of a network that a config gives."""
    return {
        name: value
        for name, value in vars(config.model).items()
        if value is not None and name not in _NOT_SIZES
    }


def check_positions(network: TokenModel, length: int) -> None:
    """Check that a network has learned positions for rows of a length, where it learns them.

    Raises:
        InputError: it has fewer.
    """
    arguments = network.arguments
    has_table = arguments.get("positions", "learned") == "learned"
    if has_table and arguments.get("max_length", length) < length:
        raise InputError(
            f"data.length makes rows of {length} tokens, and the model has {arguments['max_length']} "
            "positions: give less"
        )


def architecture(config: RunConfig, kind: str, vocab_size: int) -> Architecture:
    """Return the sizes of a run's network, of which no weight is read or made.

    Args:
        config: the run's config.
        kind: name of the class that the task trains.
        vocab_size: number of ids, where nothing else says it.

    Raises:
        InputError: there is no such preset or folder.
    """
    options, given = config.model, sizes_of(config)
    if options.from_ is not None:
        folder = pathlib.Path(options.from_)
        if is_run(folder):
            loading = importlib.import_module("dtransformer.runs.loading")
            other = loading.check_run(folder)
            return architecture(other, kind, other.tokenizer.vocab_size or USUAL_VOCABULARY)
        found = architecture_of(folder)
    elif options.preset is not None:
        _, found = architecture_named(options.preset)
    else:
        usual = {"hidden_size": 512, "num_heads": 8, "max_length": config.data.length}
        stacks = (
            ("encoder_layers", "decoder_layers") if kind == "EncoderDecoderLM" else ("num_layers",)
        )
        usual |= {"vocab_size": vocab_size, **dict.fromkeys(stacks, 6)}
        found = Architecture(kind, usual, "")
    return Architecture(found.network, {**found.arguments, **given}, found.source)


def _made(config, kind, vocab_size, precision, given, own):
    options = config.model
    if options.from_ is not None and options.preset is not None:
        raise InputError("model: from and preset are both given: give one of them")
    if options.from_ is not None:
        return _loaded(config, pathlib.Path(options.from_), precision, given)
    if options.preset is not None:
        _, preset = architecture_named(options.preset)
        usual = {"vocab_size": max(vocab_size, preset.arguments["vocab_size"])}
        network = from_preset(options.preset, **{**usual, **given}, dtype=precision)
    else:
        own = {"max_length": config.data.length, **own, **given}
        network = kind(vocab_size, **own, dtype=precision)
    needs.check_network(network)
    network.build()
    return network


def _loaded(config, folder, precision, given):
    """Return the network of a published folder, or of another run with its adapters merged."""
    if is_run(folder):
        loading = importlib.import_module("dtransformer.runs.loading")  # which makes networks, too
        if given:
            raise InputError(
                f"model.{next(iter(given))}: {folder} is a run, which has its own sizes"
            )
        network = loading.load_run(folder, precision).core
        if adapters_of(network):
            merge_lora(network)
            unfreeze(network)
        return network
    needs.check_published(folder)
    return from_pretrained(folder, dtype=precision, **given)


def adapt(network: TokenModel, config: RunConfig, always: str | None = None) -> None:
    """Give a network the adapters that a config asks for, and freeze what is not trained.

    Args:
        network: the network, built.
        config: the run's config.
        always: a pattern of weights that are trained in any case, such as a new head's.

    Raises:
        InputError: a pattern matches no weight.
    """
    options = config.model
    with refusing("model.adapters, model.freeze"):
        if options.adapters is not None:
            asked = options.adapters
            alpha = asked.alpha * (asked.rank**0.5 if asked.rslora else 1)
            add_lora(
                network, asked.rank, alpha, asked.targets, dropout=asked.dropout, kind=asked.kind
            )
            if always is not None:
                unfreeze(network, always)
        if options.freeze is not None:
            freeze(network, options.freeze)
    if alpha := getattr(config.training, "neftune_alpha", 0.0):
        network.embedding_noise = EmbeddingNoise(alpha, f"{network.name}/embedding_noise")


def tokenizer_folder(config: RunConfig) -> pathlib.Path | None:
    """Return where the tokenizer of a run is that is not trained for it; None where it is.

    Raises:
        InputError: the model has one that is not there.
    """
    if config.tokenizer.folder is not None:
        return pathlib.Path(config.tokenizer.folder)
    source = getattr(config.model, "from_", None)
    if source is None:
        return None
    folder = pathlib.Path(source)
    if not folder.is_dir():
        raise InputError(f"model.from: there is no folder {shown(str(folder))}")
    return folder / "tokenizer" if is_run(folder) else folder


def special_ids(tokenizer: object, kind: type[TokenModel]) -> dict[str, int | None]:
    """Return the ids of a tokenizer's special tokens, by the arguments of a class of networks."""
    names = _IDS_OF_KINDS.get(kind, _IDS)
    return {ours: getattr(tokenizer, theirs, None) for ours, theirs in names.items()}
