"""The corpus: distinct sentence pairs, and the files of a training with held-out sets."""

import collections
from pathlib import Path

from dtransformer.datasets.embedded import (
    compounds,
    descriptions,
    figures,
    questions,
    requests,
    statements,
    surroundings,
)
from dtransformer.datasets.embedded.draw import Draw, Weighted
from dtransformer.datasets.sgm import write_sgm
from dtransformer.errors import InputError

MAX_PAIRS = 500_000
MIN_WORDS, MAX_WORDS = 3, 20  # of an English sentence

# How often each kind of sentence is drawn.
_KINDS = Weighted(
    {
        statements.action: 190,
        statements.modal: 54,
        statements.chain: 44,
        statements.motion: 55,
        statements.giving: 54,
        statements.pronoun_object: 46,
        statements.animal: 22,
        statements.possession: 30,
        statements.liking: 26,
        statements.language: 14,
        descriptions.description: 42,
        descriptions.comparison: 34,
        descriptions.superlative: 24,
        descriptions.identity: 18,
        descriptions.occupation: 14,
        descriptions.origin: 10,
        descriptions.feeling: 8,
        descriptions.pain: 4,
        surroundings.location: 24,
        surroundings.put: 16,
        surroundings.existence: 32,
        surroundings.residence: 18,
        surroundings.distance: 10,
        surroundings.weather: 20,
        surroundings.climate: 12,
        figures.age: 14,
        figures.price: 16,
        figures.clock: 2,
        figures.schedule: 16,
        figures.birthday: 4,
        figures.lasting: 32,
        compounds.because: 56,
        compounds.both: 40,
        compounds.but: 30,
        compounds.when: 36,
        compounds.if_clause: 30,
        compounds.opinion: 52,
        compounds.relative_subject: 42,
        compounds.relative_object: 28,
        questions.yes_or_no: 48,
        questions.where: 22,
        questions.when: 20,
        questions.why: 18,
        questions.what: 18,
        questions.who: 20,
        questions.how_many: 20,
        questions.which: 16,
        questions.where_is: 14,
        questions.how_old: 6,
        questions.how_much: 8,
        questions.how: 8,
        questions.what_time: 6,
        requests.request: 14,
        requests.order: 18,
        requests.proposal: 10,
    }
)


def sentence_pairs(num_pairs, seed=0):
    """Returns English sentences with their French translations.

    The sentences come from a grammar of everyday life: some 850 English words, 3 to 20 words
    a sentence, 7.5 in the mean. French is a function of English: whatever the seed, a sentence has
    one translation. No English and no French sentence occurs twice in a list. The first pairs
    of a longer list are those of a shorter one with the same seed, on every machine.

    Args:
        num_pairs: How many pairs, at most 500,000.
        seed: An integer; another seed gives another sample of the same language.

    Returns:
        A list of `num_pairs` tuples (English, French).

    Raises:
        InputError: A number of pairs below zero or above 500,000.

    Example:
        >>> english, french = sentence_pairs(1000)[0]
    """
    if not 0 <= num_pairs <= MAX_PAIRS:
        raise InputError(
            f"num_pairs={num_pairs}: the embedded corpus gives 0 to {MAX_PAIRS} distinct sentence "
            f"pairs. Ask for fewer, or read a corpus of your own."
        )
    draw = Draw(seed)
    pairs, seen_english, seen_french = [], set(), set()
    while len(pairs) < num_pairs:
        english_text, french_text = draw.weighted(_KINDS)(draw)
        # Two English sentences may share a French one ("he works", "he is working"): the
        # first drawn stays, so that held-out sentences are new in both languages.
        if english_text in seen_english or french_text in seen_french:
            continue
        if not MIN_WORDS <= english_text.count(" ") + 1 <= MAX_WORDS:
            continue
        seen_english.add(english_text)
        seen_french.add(french_text)
        pairs.append((english_text, french_text))
    return pairs


def write_corpus(folder, num_train=40_000, num_dev=500, num_test=500, seed=0):
    """Writes a training set, a development set and a test set as SGM files.

    The held-out sets are a random sample of the same language as the training set. Their
    sentences occur in no other set, in neither language; their words all occur in training, as
    long as training is large enough for that (some thousand pairs). The same arguments give
    the same bytes everywhere.

    Args:
        folder: Where the files go; made where it is missing.
        num_train: How many pairs to train on.
        num_dev: How many pairs for development.
        num_test: How many pairs for the test.
        seed: An integer.

    Returns:
        A dict from "train.en", "train.fr", "dev.en", … to the path of the file
        `train.en.sgm`, `train.fr.sgm`, `dev.en.sgm`, ….

    Raises:
        InputError: A number below zero, more pairs in all than there are, or a place that
            cannot be written.

    Example:
        >>> paths = write_corpus("corpus", num_train=2000)
        >>> paths["test.fr"]
        PosixPath('corpus/test.fr.sgm')
    """
    sizes = {"num_train": num_train, "num_dev": num_dev, "num_test": num_test}
    for name, size in sizes.items():
        if size < 0:
            raise InputError(f"{name}={size} must be at least 0.")
    pairs = sentence_pairs(sum(sizes.values()), seed)
    train, held_out = _split(pairs, num_dev + num_test, Draw(seed + 1))
    paths = {}
    splits = {"train": train, "dev": held_out[:num_dev], "test": held_out[num_dev:]}
    for name, split in splits.items():
        for side, language in enumerate(("en", "fr")):
            path = Path(folder) / f"{name}.{language}.sgm"
            write_sgm(path, [pair[side] for pair in split], language, f"embedded-{name}")
            paths[f"{name}.{language}"] = path
    return paths


def _split(pairs, num_held_out, draw):
    """Returns the training pairs, and random held-out pairs whose words occur among them."""
    order = list(range(len(pairs)))
    draw.shuffle(order)
    words = [set(words_of(pair[0])).union(words_of(pair[1])) for pair in pairs]
    left = collections.Counter(word for found in words for word in found)
    held_out, train = [], []
    for index in order:
        if len(held_out) < num_held_out and all(left[word] > 1 for word in words[index]):
            held_out.append(index)
            left.subtract(words[index])
        else:
            train.append(index)
    # In a tiny corpus there are too few such pairs, and some held-out words are new.
    missing = num_held_out - len(held_out)
    held_out, train = held_out + train[:missing], train[missing:]
    return [pairs[index] for index in train], [pairs[index] for index in held_out]


def words_of(text):
    """Returns the words of a sentence in lower case, without its marks."""
    return text.lower().replace(",", " ").replace("'", "' ").rstrip(".?! ").split()
