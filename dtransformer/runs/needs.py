"""The memory that a run needs at least, compared with what this machine has, before it is taken."""

import pathlib

from dtransformer.errors import InputError
from dtransformer.inputs.files import free_memory
from dtransformer.runs.config import RunConfig

_NUMBER = 4  # bytes of a float32
_TRAINED = 3 * _NUMBER  # of a weight that is trained: itself, its gradient, an optimizer's state
_GIBIBYTE = 2**30


def check_search(config: RunConfig, vocab_size: int, beam_size: int, sentences: int = 1) -> None:
    """Refuse a search that this machine cannot hold: its caches, and the scores of a step.

    Args:
        config: the run's config.
        vocab_size: number of pieces of the vocabulary.
        beam_size: number of beams of a sentence.
        sentences: number of sentences that are translated at once.

    Raises:
        InputError: names the need; or the search is longer than the model can count.
    """
    length, hidden = config.data.max_length, config.model.hidden_size
    _check(f"data.max_length={length} (its positions)", 2 * _NUMBER * length * hidden)
    steps = config.search.max_length or 1
    if steps > length + 1:
        raise InputError(
            f"search.max_length={steps} is more than the model can count, which is "
            f"data.max_length={length} and the end: give at most {length + 1}"
        )
    cached = vocab_size + 2 * hidden * config.model.decoder_layers * steps
    _check(
        f"search (beam_size={beam_size}, max_length={steps}, {sentences} sentences at once)",
        _NUMBER * sentences * beam_size * cached,
    )


def check_network(network: object, num_ranks: int = 1) -> None:
    """Refuse a network that this machine cannot hold while it is trained.

    Args:
        network: the network, not built, with `num_parameters()`.
        num_ranks: number of ranks that share the weights, at best.

    Raises:
        InputError: names the need.
    """
    number = network.num_parameters()
    _check(f"model ({number:,} parameters)", _TRAINED * number // num_ranks)


def check_published(folder: pathlib.Path, num_ranks: int = 1) -> None:
    """Refuse published weights that this machine cannot hold.

    Args:
        folder: the folder with their files.
        num_ranks: number of ranks that share the weights, at best.

    Raises:
        InputError: names the need.
    """
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    _check(f"{folder} (its weights)", size // num_ranks)


def _check(what, need):
    free = free_memory()
    if need > free:
        raise InputError(
            f"{what}: needs at least {need / _GIBIBYTE:,.1f} GiB of memory, and this machine has "
            f"{free / _GIBIBYTE:,.1f} GiB free: give smaller numbers, or more ranks"
        )
