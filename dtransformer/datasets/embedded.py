"""A bundled corpus of English-French sentence pairs that needs no download.

`embedded.tsv.xz` contains one pair per line. A grammar generated it (`python -m harness.corpus`):
the French is correct, sentences are distinct, and each has one translation.
"""

import lzma
import os
import pathlib
import random

from dtransformer.errors import InputError, check_int
from dtransformer.files import add_to_folder
from dtransformer.inputs.files import check_path

FILE = pathlib.Path(__file__).with_name("embedded.tsv.xz")
MAX_PAIRS = 40_000


def sentence_pairs(num_pairs: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return distinct sentence pairs of the bundled corpus.

    Args:
        num_pairs: Integer from 0 to 40,000. Number of pairs.
        seed: Integer. Each seed has a different order. For the same seed, a longer list begins with
            the pairs of a shorter one. Defaults to 0, the order of the file.

    Returns:
        List of `(english, french)` tuples.

    Raises:
        InputError: If `num_pairs` is negative or greater than 40,000.
    """
    if not 0 <= num_pairs <= MAX_PAIRS:
        raise InputError(
            f"`{num_pairs=}` must be between 0 and {MAX_PAIRS}, the size of the embedded corpus. "
            "Request fewer pairs or read another corpus."
        )
    lines = lzma.decompress(FILE.read_bytes()).decode().splitlines()
    if seed:  # Only `random()` gives the same values in every version of Python.
        draw = random.Random(seed).random
        lines.sort(key=lambda line: draw())
    return [tuple(line.split("\t")) for line in lines[:num_pairs]]


def write_corpus(
    folder: str | os.PathLike,
    num_train: int = 30_000,
    num_dev: int = 500,
    num_test: int = 500,
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, pathlib.Path]:
    """Write disjoint training, development and test sets, with one sentence per line.

    Args:
        folder: Path of the output folder. It is created if it does not exist.
        num_train: Integer. Number of training pairs. It does not change the other sets. Defaults to
            30,000.
        num_dev: Integer. Number of development pairs. Defaults to 500.
        num_test: Integer. Number of test pairs. Defaults to 500.
        seed: Integer. Each seed gives a different order of the pairs. Defaults to 0.
        overwrite: Boolean. Whether to replace existing files with different content. Defaults to
            `False`.

    Returns:
        Dict of file names ("dev.en", "dev.fr", "test.en", ...) and their paths.

    Raises:
        InputError: If a number is negative, the numbers add up to more than 40,000, the folder
            cannot be written, or `overwrite` is false and files with these names have different
            content.
    """
    sizes = {"dev": num_dev, "test": num_test, "train": num_train}
    for name, size in sizes.items():
        check_int(f"num_{name}", size, 0)
    folder = check_path(folder)
    pairs = iter(sentence_pairs(sum(sizes.values()), seed))
    paths = {}
    with add_to_folder(folder, overwrite) as fresh:
        for name, size in sizes.items():
            split = [next(pairs) for _ in range(size)]
            for side, language in enumerate(("en", "fr")):
                file = f"{name}.{language}"
                text = "".join(pair[side] + "\n" for pair in split)
                (fresh / file).write_text(text, encoding="utf-8", newline="")
                paths[file] = folder / file
    return paths
