"""Check the least memory that a run needs against the free memory of this machine."""

import contextvars
import pathlib

from dtransformer.errors import InputError
from dtransformer.inputs.files import free_memory
from dtransformer.parallel.runtime import job
from dtransformer.planner.shape import QUANTIZED_BYTES
from dtransformer.runs.config import RunConfig

_FLOAT_BYTES = 4  # bytes of a float32
_TRAINED_BYTES = 3 * _FLOAT_BYTES  # bytes of a weight, its gradient and one optimizer state
_GIBIBYTE = 2**30
# Number of ranks that a dry run plans for. A dry run is a single process.
planned_ranks: contextvars.ContextVar[float] = contextvars.ContextVar("planned_ranks", default=1)


def check_search(config: RunConfig, vocab_size: int, beam_size: int, sentences: int = 1) -> None:
    """Check that the free memory suffices for the caches and scores of a search.

    Args:
        config: Config of the run.
        vocab_size: Integer. Size of the vocabulary.
        beam_size: Integer. Beams per sentence.
        sentences: Integer. Sentences per batch.

    Raises:
        InputError: If the free memory is too small, or `search.max_length` exceeds the model's
            positions.
    """
    length = config.data.max_length
    hidden = config.model.hidden_size
    _check(f"The position tables of data.max_length={length}", 2 * _FLOAT_BYTES * length * hidden)
    steps = config.search.max_length or 1
    if steps > length + 1:
        raise InputError(
            f"`search.max_length={steps}` is longer than the model's targets. Set it to at most "
            f"{length + 1}, which is data.max_length={length} plus the end token."
        )
    per_beam = vocab_size + 2 * hidden * config.model.decoder_layers * steps
    _check(
        f"A search with beam_size={beam_size}, max_length={steps} and {sentences} sentences per batch",
        _FLOAT_BYTES * sentences * beam_size * per_beam,
    )


def check_network(network: object) -> None:
    """Check that the free memory suffices for a rank's share of a network in training.

    Args:
        network: Unbuilt network with a method `num_parameters()`.

    Raises:
        InputError: If the free memory is too small, even if all ranks share the weights.
    """
    num_parameters = network.num_parameters()
    _check(
        f"The model with {num_parameters:,} parameters",
        _TRAINED_BYTES * num_parameters // _num_ranks(),
    )


def check_published(folder: pathlib.Path, base_dtype: str | None = None) -> None:
    """Check that the free memory suffices for a rank's share of published weights.

    Args:
        folder: Folder of the weights.
        base_dtype: Format that kernels are quantized to, or `None`.

    Raises:
        InputError: If the free memory is too small, even if all ranks share the weights.
    """
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if base_dtype is not None:
        size = int(size * QUANTIZED_BYTES[base_dtype] / _FLOAT_BYTES)
    _check(f"Loading the weights of `{folder}`", size // _num_ranks())


def _num_ranks():
    return max(job.size(), planned_ranks.get())


def _check(what, need):
    free = free_memory()
    if need > free:
        raise InputError(
            f"{what} needs at least {need / _GIBIBYTE:,.1f} GiB of memory, but this machine has "
            f"{free / _GIBIBYTE:,.1f} GiB free. Reduce the sizes, or use more ranks."
        )
