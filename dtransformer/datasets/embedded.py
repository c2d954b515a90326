"""A corpus of English-French sentence pairs that needs no download.

`embedded.tsv.xz` has a pair a line. A grammar wrote it (`python -m harness.corpus`): correct French,
distinct sentences, and one translation of each.
"""

import lzma
import os
import pathlib
import random

from dtransformer.errors import InputError, check_int
from dtransformer.files import adding_to
from dtransformer.inputs.files import check_path

FILE = pathlib.Path(__file__).with_name("embedded.tsv.xz")
MAX_PAIRS = 40_000


def sentence_pairs(num_pairs: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return a list of at most 40,000 distinct sentence pairs (English, French).

    Each seed has an order of its own; the first pairs of a longer list are those of a shorter one.

    Raises:
        InputError: a number below zero or above 40,000.
    """
    if not 0 <= num_pairs <= MAX_PAIRS:
        raise InputError(
            f"num_pairs={num_pairs}: the embedded corpus has {MAX_PAIRS} sentence pairs. Ask for "
            "fewer, or read a corpus of your own."
        )
    lines = lzma.decompress(FILE.read_bytes()).decode().splitlines()
    if seed:  # of `random`, only `random()` promises to be alike in every Python
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
    """Write a development, a test and a training set, which share no sentence, one a line.

    Args:
        folder: where the files go; made where it is missing.
        num_train: how many pairs to train on; the held-out ones are the same for every number.
        num_dev: how many pairs for development; `num_test` for the test.
        seed: an integer; another seed gives another order of the pairs.
        overwrite: whether files that are there with other content are replaced.

    Returns:
        A dict from "dev.en", "dev.fr", "test.en", ... to the path of `dev.en`, ....

    Raises:
        InputError: a number below zero, too many pairs, a place that cannot be written, or
            that has other files of these names.
    """
    sizes = {"dev": num_dev, "test": num_test, "train": num_train}
    for name, size in sizes.items():
        check_int(f"num_{name}", size, 0)
    folder = check_path(folder)
    pairs, paths = iter(sentence_pairs(sum(sizes.values()), seed)), {}
    with adding_to(folder, overwrite) as fresh:
        for name, size in sizes.items():
            split = [next(pairs) for _ in range(size)]
            for side, language in enumerate(("en", "fr")):
                file = f"{name}.{language}"
                text = "".join(pair[side] + "\n" for pair in split)
                (fresh / file).write_text(text, encoding="utf-8", newline="")
                paths[file] = folder / file
    return paths
