"""The corpus: distinct sentence pairs, and the files of a training with held-out sets."""

import os
import pathlib
import random

from dtransformer.datasets.embedded.sentences import PATTERNS
from dtransformer.datasets.sgm import write_sgm
from dtransformer.errors import InputError
from dtransformer.files import adding_to
from dtransformer.inputs.paths import check_path

MAX_PAIRS = 200_000


class Draw:
    """Draws from a seed, alike in every Python: of `random`, only `random()` promises that."""

    def __init__(self, seed):
        self._random = random.Random(seed).random

    def below(self, number):
        """Returns an integer from 0 to `number - 1`."""
        return int(self._random() * number)

    def chance(self, percent):
        """Returns True in `percent` of a hundred cases."""
        return self.below(100) < percent

    def choice(self, options):
        """Returns one item of a sequence."""
        return options[self.below(len(options))]


def sentence_pairs(num_pairs: int, seed: int = 0) -> list[tuple[str, str]]:
    """Returns a list of at most 200,000 distinct sentence pairs (English, French).

    French is a function of English: whatever the seed, a sentence has one translation. The first
    pairs of a longer list are those of a shorter one, on every machine.

    Raises:
        InputError: a number below zero or above 200,000.
    """
    if not 0 <= num_pairs <= MAX_PAIRS:
        raise InputError(
            f"num_pairs={num_pairs}: the embedded corpus gives 0 to {MAX_PAIRS} distinct sentence "
            f"pairs. Ask for fewer, or read a corpus of your own."
        )
    draw, pairs, seen = Draw(seed), [], set()
    while len(pairs) < num_pairs:
        pair = draw.choice(PATTERNS)(draw)
        # Two English sentences may share a French one ("him" and "her" are "lui"): the first
        # drawn stays, so that held-out sentences are new in both languages.
        if seen.isdisjoint(pair):
            seen.update(pair)
            pairs.append(pair)
    return pairs


def write_corpus(
    folder: str | os.PathLike,
    num_train: int = 30_000,
    num_dev: int = 500,
    num_test: int = 500,
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, pathlib.Path]:
    """Writes a development, a test and a training set, which share no sentence, as SGM files.

    Args:
        folder: where the files go; made where it is missing.
        num_train: how many pairs to train on; the held-out ones are the same for every number.
        num_dev: how many pairs for development; `num_test` for the test.
        seed: an integer; another seed gives another sample of the same language.
        overwrite: whether files that are there with other content are replaced.

    Returns:
        A dict from "dev.en", "dev.fr", "test.en", ... to the path of `dev.en.sgm`, ....

    Raises:
        InputError: a number below zero, too many pairs, a place that cannot be written, or
            that has other files of these names.
    """
    sizes = {"dev": num_dev, "test": num_test, "train": num_train}
    for name, size in sizes.items():
        if size < 0:
            raise InputError(f"num_{name}={size} must be at least 0.")
    folder = check_path(folder)
    pairs, paths = iter(sentence_pairs(sum(sizes.values()), seed)), {}
    with adding_to(folder, overwrite) as fresh:
        for name, size in sizes.items():
            split = [next(pairs) for _ in range(size)]
            for side, language in enumerate(("en", "fr")):
                file = f"{name}.{language}.sgm"
                write_sgm(
                    fresh / file, [pair[side] for pair in split], language, f"embedded-{name}"
                )
                paths[f"{name}.{language}"] = folder / file
    return paths
