"""Create the network of a run from published weights, another run, a preset or sizes."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

from dtransformer.architectures import Architecture, get_architecture
from dtransformer.errors import InputError, raise_as_input_error, short_repr
from dtransformer.models import EncoderDecoderLM, MaskedLM, add_lora, freeze, merge_lora, quantize
from dtransformer.models.base import TokenModel
from dtransformer.models.lora import get_adapters
from dtransformer.models.presets import from_preset
from dtransformer.models.pretrained.load import from_pretrained, read_architecture
from dtransformer.models.weight_paths import unfreeze
from dtransformer.parallel.ops.training_noise import EmbeddingNoise
from dtransformer.runs import needs
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import is_run
from dtransformer.runs.options import DEFAULT_VOCAB_SIZE
from dtransformer.runs.run_files import check_run

_ID_NAMES = {name: name for name in ("pad_id", "start_id", "end_id")}
# Maps arguments of networks to the tokenizer's special ids. By default all ids have the same names.
# Encoder-decoders start with padding, as T5 does, because padding is never a label.
_ID_NAMES_BY_CLASS = {
    MaskedLM: {"pad_id": "pad_id"},
    EncoderDecoderLM: {**_ID_NAMES, "start_id": "pad_id"},
}
_NOT_SIZES = {"from_", "preset", "adapters", "freeze"}


def make_network(
    config: RunConfig,
    kind: type[TokenModel],
    vocab_size: int,
    precision: str | None = None,
    accepts: type | None = None,
    load_run: Callable | None = None,
    **arguments: Any,
) -> TokenModel:
    """Create and build the network that `model` of a run's config describes. All ranks call it.

    Args:
        config: Config of the run.
        kind: Class of the network that the task trains.
        vocab_size: Integer. Number of ids of the tokenizer.
        precision: Name of the dtype policy. Defaults to `training.precision`.
        accepts: Base class of all networks that the task accepts. Defaults to `kind`.
        load_run: Function that loads the task of another run, for `model.from`; see `Task`.
        **arguments: Default arguments, such as special ids, for a network from sizes.

    Raises:
        InputError: If the options are invalid, the network is too large for this machine, its class
            does not suit the task, or its vocabulary is smaller than the tokenizer's.
    """
    precision = precision or config.training.precision
    sizes = get_sizes(config)
    try:
        with _quantized_base(config):
            network = _create(config, kind, vocab_size, precision, sizes, load_run, arguments)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"model: {error}") from None
    if not isinstance(network, accepts or kind):
        raise InputError(
            f"Task {config.task} trains a {kind.__name__}, but `model` specifies a "
            f"{type(network).__name__}."
        )
    if vocab_size > network.vocab_size:
        raise InputError(
            f"The tokenizer has {vocab_size} ids, but the model has only {network.vocab_size}. Use "
            "the tokenizer of this model."
        )
    return network


def _quantized_base(config):
    """Return a context manager that quantizes the kernels under the config's adapters."""
    adapters = config.model.adapters
    if adapters is None or adapters.base_dtype is None:
        return contextlib.nullcontext()
    if config.model.from_ is not None and is_run(config.model.from_):
        raise InputError(
            "`model.adapters.base_dtype` requires a published folder in `model.from`, but "
            f"{config.model.from_} is a run. Export the run first, with `export.folder`."
        )
    return quantize(adapters.base_dtype, adapters.base_targets)


def get_sizes(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of the network that `model` sets: all sizes that are not `None`."""
    return {
        name: value
        for name, value in vars(config.model).items()
        if value is not None and name not in _NOT_SIZES
    }


def check_positions(network: TokenModel, length: int) -> None:
    """Check that a network with learned positions has at least `length` positions.

    Raises:
        InputError: If it has fewer.
    """
    arguments = network.arguments
    has_table = arguments.get("positions", "learned") == "learned"
    if has_table and arguments.get("max_length", length) < length:
        raise InputError(
            f"`data.length` results in rows of {length} tokens, but the model has only "
            f"{arguments['max_length']} positions. Reduce data.length."
        )


def architecture(config: RunConfig, kind: str, vocab_size: int) -> Architecture:
    """Return the architecture of a run's network without reading or creating weights.

    Args:
        config: Config of the run.
        kind: Name of the network class that the task trains.
        vocab_size: Integer. Number of ids of a network from sizes. Presets and folders have theirs.

    Raises:
        InputError: If the preset or the folder does not exist.
    """
    options = config.model
    sizes = get_sizes(config)
    if options.from_ is not None:
        base = folder_architecture(pathlib.Path(options.from_), kind)
    elif options.preset is not None:
        _, base = get_architecture(options.preset)
    else:
        defaults = {"hidden_size": 512, "num_heads": 8, "max_length": config.data.length}
        stacks = (
            ("encoder_layers", "decoder_layers") if kind == "EncoderDecoderLM" else ("num_layers",)
        )
        defaults |= {"vocab_size": vocab_size, **dict.fromkeys(stacks, 6)}
        base = Architecture(kind, defaults, "")
    return Architecture(base.network, {**base.arguments, **sizes}, base.source)


def folder_architecture(folder: pathlib.Path, kind: str) -> Architecture:
    """Return the architecture of the network in a run folder or a published folder.

    Args:
        folder: Path of the folder.
        kind: Name of the network class, for a run folder.
    """
    if not is_run(folder):
        return read_architecture(folder)
    config = check_run(folder)
    return architecture(config, kind, config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE)


def _create(config, kind, vocab_size, precision, sizes, load_run, arguments):
    options = config.model
    if options.from_ is not None and options.preset is not None:
        raise InputError("`model.from` and `model.preset` are both set. Remove one of them.")
    if options.from_ is not None:
        base_dtype = None if options.adapters is None else options.adapters.base_dtype
        return load(pathlib.Path(options.from_), precision, sizes, load_run, base_dtype)
    if options.preset is not None:
        _, preset = get_architecture(options.preset)
        defaults = {"vocab_size": max(vocab_size, preset.arguments["vocab_size"])}
        network = from_preset(options.preset, **{**defaults, **sizes}, dtype=precision)
    else:
        arguments = {"max_length": config.data.length, **arguments, **sizes}
        network = kind(vocab_size, **arguments, dtype=precision)
    needs.check_network(network)
    network.build()
    return network


def load(
    folder: pathlib.Path,
    precision: str,
    sizes: dict[str, Any],
    load_run: Callable,
    base_dtype: str | None = None,
) -> TokenModel:
    """Return the network of a published folder, or of another run with its adapters merged.

    Args:
        folder: Folder of the network.
        precision: Name of the dtype policy.
        sizes: Network arguments that override the config of a published folder.
        load_run: Function that loads the task of another run; see `Task`.
        base_dtype: Type of quantized kernels. Defaults to `None`, no quantization.

    Raises:
        InputError: If the folder is unusable, or `sizes` are given for a run.
    """
    if is_run(folder):
        if sizes:
            raise InputError(
                f"`model.{next(iter(sizes))}` cannot change the sizes of the run {folder}. Remove it."
            )
        network = load_run(folder, precision).core
        if get_adapters(network):
            merge_lora(network)
            unfreeze(network)
        return network
    needs.check_published(folder, base_dtype)
    return from_pretrained(folder, dtype=precision, **sizes)


def adapt(network: TokenModel, config: RunConfig, always: str | None = None) -> None:
    """Add the adapters and the embedding noise that a config requests, and freeze weights.

    Args:
        network: Built network. It is changed in place.
        config: Config of the run.
        always: Path pattern of weights that stay trainable next to adapters, such as a new head's.

    Raises:
        InputError: If a pattern matches no weight.
    """
    options = config.model
    with raise_as_input_error("model.adapters, model.freeze"):
        if options.adapters is not None:
            adapters = options.adapters
            alpha = adapters.alpha * (adapters.rank**0.5 if adapters.rslora else 1)
            add_lora(
                network,
                adapters.rank,
                alpha,
                adapters.targets,
                dropout=adapters.dropout,
                kind=adapters.kind,
            )
            if always is not None:
                unfreeze(network, always)
        if options.freeze is not None:
            freeze(network, options.freeze)
    if alpha := getattr(config.training, "neftune_alpha", 0.0):
        network.embedding_noise = EmbeddingNoise(alpha, f"{network.name}/embedding_noise")


def tokenizer_folder(config: RunConfig) -> pathlib.Path | None:
    """Return the folder of a run's tokenizer, or `None` if the tokenizer must be trained.

    It is `tokenizer.folder`, or else the tokenizer of `model.from`.

    Raises:
        InputError: If the folder `model.from` does not exist.
    """
    if config.tokenizer.folder is not None:
        return pathlib.Path(config.tokenizer.folder)
    source = getattr(config.model, "from_", None)
    if source is None:
        return None
    folder = pathlib.Path(source)
    if not folder.is_dir():
        raise InputError(f"`model.from`: the folder {short_repr(str(folder))} does not exist.")
    return folder / "tokenizer" if is_run(folder) else folder


def special_ids(tokenizer: object, kind: type[TokenModel]) -> dict[str, int | None]:
    """Return a tokenizer's special ids as arguments for networks of the class `kind`.

    An id that the tokenizer does not have is `None`.
    """
    names = _ID_NAMES_BY_CLASS.get(kind, _ID_NAMES)
    return {argument: getattr(tokenizer, token, None) for argument, token in names.items()}
