"""The embedded corpus has correct French, one translation per sentence, and unseen held-out pairs."""

import pathlib
import re

import pytest

from dtransformer.datasets import read_lines
from dtransformer.datasets.embedded import MAX_PAIRS, sentence_pairs, write_corpus
from harness.corpus import corpus, lexicon, numerals, sentences
from harness.corpus.phrases import PRONOUNS, Phrase, clause, noun_phrase, sentence
from tests.datasets.input_errors import get_error_message

I, YOU, HE, SHE, WE, THEY = (row[0] for row in PRONOUNS)
ANNA = Phrase("Anna", "Anna", feminine=True)
SENTENCES = pathlib.Path(__file__).parents[2] / "examples" / "wmt14" / "sentences.txt"


@pytest.fixture(scope="module")
def pairs():
    return sentence_pairs(40_000)


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """Return the default corpus as a dict from "train", "dev" and "test" to pairs."""
    paths = write_corpus(tmp_path_factory.mktemp("corpus"))
    read = {key: read_lines(path) for key, path in paths.items()}
    return {
        name: list(zip(read[f"{name}.en"], read[f"{name}.fr"], strict=True))
        for name in ("train", "dev", "test")
    }


# Shorthand for the tables below.


def noun(word, determiner="the", plural=False, adjective=None, negative=False):
    (result,) = lexicon.nouns(word)
    items = [item for item in lexicon.ADJECTIVES if item.english == adjective]
    return noun_phrase(result, determiner, plural, *items, negative=negative)


def verb(base, group="event instant motion activity giving state liking be"):
    return next(verb for verb in lexicon.verbs(group) if verb.base == base)


NOUN_PHRASES = {
    # gender, number, elision
    "the house": (noun("house"), "la maison"),
    "the friends": (noun("friend", plural=True), "les amis"),
    "the hotel": (noun("hotel"), "l'hôtel"),
    "the newspapers": (noun("newspaper", plural=True), "les journaux"),
    "the birds": (noun("bird", plural=True), "les oiseaux"),
    "the mice": (noun("mouse", plural=True), "les souris"),
    "this bird": (noun("bird", "this"), "cet oiseau"),
    "this church": (noun("church", "this"), "cette église"),
    "these horses": (noun("horse", "this", True), "ces chevaux"),
    # possessives, and the masculine before a vowel
    "my school": (noun("school", "my"), "mon école"),
    "her son": (noun("son", "her"), "son fils"),
    "his daughter": (noun("daughter", "his"), "sa fille"),
    "their keys": (noun("key", "their", True), "leurs clés"),
    "Paul's red car": (noun("car", "Paul's", adjective="red"), "la voiture rouge de Paul"),
    "Anna's boats": (noun("boat", "Anna's", True), "les bateaux d'Anna"),
    # articles
    "an orange": (noun("orange", "a"), "une orange"),
    "some bread": (noun("bread", "some"), "du pain"),
    "some water": (noun("water", "some"), "de l'eau"),
    "some meat": (noun("meat", "some"), "de la viande"),
    "any water": (noun("water", "some", negative=True), "d'eau"),
    "some apples": (noun("apple", "some", True), "des pommes"),
    # adjectives before and after the noun
    "an old hotel": (noun("hotel", "a", adjective="old"), "un vieil hôtel"),
    "a beautiful bird": (noun("bird", "a", adjective="beautiful"), "un bel oiseau"),
    "the new umbrellas": (noun("umbrella", "the", True, "new"), "les nouveaux parapluies"),
    "some big houses": (noun("house", "some", True, "big"), "de grandes maisons"),
    "some black shoes": (noun("shoe", "some", True, "black"), "des chaussures noires"),
    "these happy women": (noun("woman", "this", True, "happy"), "ces femmes heureuses"),
    "some cold water": (noun("water", "some", adjective="cold"), "de l'eau froide"),
    "my old suitcase": (noun("suitcase", "my", adjective="old"), "ma vieille valise"),
    # numbers agree
    "twenty-one apples": (noun("apple", 21, True), "vingt et une pommes"),
    "eighty red hats": (noun("hat", 80, True, "red"), "quatre-vingts chapeaux rouges"),
}


@pytest.mark.parametrize("english", NOUN_PHRASES)
def test_noun_phrases_agree_in_french(english):
    phrase, words = NOUN_PHRASES[english]
    assert sentence(phrase) == sentence((english, words))


def told(*words, **more):
    return sentence(clause(*words, **more))


CLAUSES = {
    # tenses
    "He is eating an apple.": (
        told(HE, verb("eat"), "progressive", "", noun("apple", "a")),
        "Il mange une pomme.",
    ),
    "We were eating.": (told(WE, verb("eat"), "past progressive"), "Nous mangions."),
    "I was working.": (told(I, verb("work"), "past progressive"), "Je travaillais."),
    "I saw Anna.": (told(I, verb("see"), "past", "", ANNA), "J'ai vu Anna."),
    "They will buy it.": (
        told(THEY, verb("buy"), "will", clitic=("it", "le")),
        "Ils l'achèteront.",
    ),
    "You are going to read.": (told(YOU, verb("read"), "going to"), "Vous allez lire."),
    "She wants to write.": (told(SHE, verb("write"), "want to"), "Elle veut écrire."),
    "We can help Anna.": (told(WE, verb("help"), "can", "", ANNA), "Nous pouvons aider Anna."),
    "I was sick.": (told(I, verb("be"), "past", "", "sick|malade"), "J'étais malade."),
    "I liked cats.": (
        told(I, verb("like"), "past", "", noun("cat", "", True)),
        "J'aimais les chats.",
    ),
    # participles agree with the subject after "être", with a pronoun after "avoir"
    "Anna went to the market.": (
        told(ANNA, verb("go"), "past", "", noun("market")),
        "Anna est allée au marché.",
    ),
    "The women came from the hotels.": (
        told(noun("woman", "the", True), verb("come"), "past", "", noun("hotel", "the", True)),
        "Les femmes sont venues des hôtels.",
    ),
    "We stayed at the school.": (
        told(WE, verb("stay"), "past", "", noun("school")),
        "Nous sommes restés à l'école.",
    ),
    "He saw her.": (
        told(HE, verb("see"), "past", clitic=("her", "la"), agreement=SHE),
        "Il l'a vue.",
    ),
    "She never saw them.": (
        told(SHE, verb("see"), "past", "never", clitic=("them", "les"), agreement=THEY),
        "Elle ne les a jamais vus.",
    ),
    # Negation changes the object.
    "I don't have a car.": (
        told(I, verb("have"), "present", "not", noun("car", "a", negative=True)),
        "Je n'ai pas de voiture.",
    ),
    "He isn't buying any eggs.": (
        told(HE, verb("buy"), "progressive", "not", noun("egg", "some", True, negative=True)),
        "Il n'achète pas d'œufs.",
    ),
    "She no longer likes the bread.": (
        told(SHE, verb("like"), "present", "no longer", noun("bread")),
        "Elle n'aime plus le pain.",
    ),
    "You didn't wait for the bus.": (
        told(YOU, verb("wait"), "past", "not", noun("bus")),
        "Vous n'avez pas attendu le bus.",
    ),
    # "de" before an object
    "We need the keys.": (
        told(WE, verb("need"), "present", "", noun("key", plural=True)),
        "Nous avons besoin des clés.",
    ),
    "He needs a bed.": (
        told(HE, verb("need"), "present", "", noun("bed", "a")),
        "Il a besoin d'un lit.",
    ),
    "She needs some big tables.": (
        told(SHE, verb("need"), "present", "", noun("table", "some", True, "big")),
        "Elle a besoin de grandes tables.",
    ),
    # pronouns stand before the verb that they belong to
    "Anna is going to help him.": (
        told(ANNA, verb("help"), "going to", clitic=("him", "le")),
        "Anna va l'aider.",
    ),
    "They gave us a book.": (
        told(THEY, verb("give"), "past", "", noun("book", "a"), clitic=("us", "nous")),
        "Ils nous ont donné un livre.",
    ),
    "You can't show them the photo.": (
        told(YOU, verb("show"), "can", "not", noun("photo"), clitic=("them", "leur")),
        "Vous ne pouvez pas leur montrer la photo.",
    ),
}


@pytest.mark.parametrize("english", CLAUSES)
def test_clauses_in_both_languages(english):
    pair, words = CLAUSES[english]
    assert pair == (english, words)


# Sentences of the patterns with `Draw(4)`, equal on every machine. If a change of the grammar changes
# a sentence, check the French again.
PATTERNS = {
    "action": (
        ("He didn't visit this big castle.", "Il n'a pas visité ce grand château."),
        (
            "You want to write this story next week.",
            "Vous voulez écrire cette histoire la semaine prochaine.",
        ),
    ),
    "state": (
        ("He doesn't have this small boat.", "Il n'a pas ce petit bateau."),
        ("I want this new shirt.", "Je veux cette nouvelle chemise."),
    ),
    "question": (
        ("Am I waiting for this bus?", "Est-ce que j'attends ce bus ?"),
        ("When will I take this plane?", "Quand est-ce que je prendrai cet avion ?"),
    ),
    "giving": (
        (
            "This child won't give his new key to your son.",
            "Cet enfant ne donnera pas sa nouvelle clé à votre fils.",
        ),
        (
            "She was showing a story to Alice's daughter.",
            "Elle montrait une histoire à la fille d'Alice.",
        ),
    ),
    "pronoun": (
        ("I am giving her this dress.", "Je lui donne cette robe."),
        ("You must show him the dress.", "Vous devez lui montrer la robe."),
    ),
    "description": (
        ("The women won't be old.", "Les femmes ne seront pas vieilles."),
        ("The girl won't be sick.", "La fille ne sera pas malade."),
    ),
    "because": (
        (
            "I sold a broken phone because I wasn't happy.",
            "J'ai vendu un téléphone cassé parce que je n'étais pas heureux.",
        ),
        ("They will sing because they are sick.", "Ils chanteront parce qu'ils sont malades."),
    ),
    "comparison": (
        (
            "Our brothers aren't taller than his neighbor.",
            "Nos frères ne sont pas plus grands que son voisin.",
        ),
        (
            "Lucas's child is more tired than Lucas's doctors.",
            "L'enfant de Lucas est plus fatigué que les médecins de Lucas.",
        ),
    ),
    "location": (
        (
            "The suitcase is in front of the big beaches.",
            "La valise est devant les grandes plages.",
        ),
        (
            "Thomas's big sofa will be near the expensive hotel.",
            "Le grand canapé de Thomas sera près de l'hôtel cher.",
        ),
    ),
    "existence": (
        ("There is a suitcase in front of her house.", "Il y a une valise devant sa maison."),
        (
            "There is an interesting letter near this black bike.",
            "Il y a une lettre intéressante près de ce vélo noir.",
        ),
    ),
    "price": (
        (
            "The bags will cost two hundred thirty-seven euros.",
            "Les sacs coûteront deux cent trente-sept euros.",
        ),
        (
            "The new coats cost eight hundred euros.",
            "Les nouveaux manteaux coûtent huit cents euros.",
        ),
    ),
    "age": (
        ("I am twenty-five years old.", "J'ai vingt-cinq ans."),
        ("His sons are forty-one years old.", "Ses fils ont quarante et un ans."),
    ),
    "schedule": (
        (
            "The trains leave on Sunday at ten past nine.",
            "Les trains partent dimanche à neuf heures dix.",
        ),
        (
            "The train will leave on the twenty-fourth of October at twenty-five to four.",
            "Le train partira le vingt-quatre octobre à quatre heures moins vingt-cinq.",
        ),
    ),
}


def test_every_pattern_has_examples():
    assert set(PATTERNS) == {pattern.__name__ for pattern in sentences.PATTERNS}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_give_correct_french(name):
    draw = corpus.Draw(4)
    for pair in PATTERNS[name]:
        assert getattr(sentences, name)(draw) == pair


NUMBERS = {
    0: ("zero", "zéro"),
    1: ("one", "un"),
    17: ("seventeen", "dix-sept"),
    21: ("twenty-one", "vingt et un"),
    22: ("twenty-two", "vingt-deux"),
    70: ("seventy", "soixante-dix"),
    71: ("seventy-one", "soixante et onze"),
    72: ("seventy-two", "soixante-douze"),
    80: ("eighty", "quatre-vingts"),
    81: ("eighty-one", "quatre-vingt-un"),
    91: ("ninety-one", "quatre-vingt-onze"),
    99: ("ninety-nine", "quatre-vingt-dix-neuf"),
    100: ("one hundred", "cent"),
    101: ("one hundred one", "cent un"),
    180: ("one hundred eighty", "cent quatre-vingts"),
    200: ("two hundred", "deux cents"),
    201: ("two hundred one", "deux cent un"),
    371: ("three hundred seventy-one", "trois cent soixante et onze"),
    999: ("nine hundred ninety-nine", "neuf cent quatre-vingt-dix-neuf"),
}


@pytest.mark.parametrize("value", NUMBERS)
def test_spells_irregular_numbers(value):
    assert tuple(numerals.number(value)) == NUMBERS[value]


def test_numbers_are_distinct_in_both_languages():
    for language in (0, 1):
        assert len({numerals.number(value)[language] for value in range(1000)}) == 1000


def test_french_feminine_numbers_times_and_dates():
    assert numerals.number(1, feminine=True)[1] == "une"
    assert numerals.number(81, feminine=True)[1] == "quatre-vingt-une"
    assert numerals.number(71, feminine=True)[1] == "soixante et onze"
    assert numerals.clock_time(1, 0) == ("one o'clock", "une heure")
    assert numerals.clock_time(0, 30) == ("half past midnight", "minuit et demi")
    assert numerals.clock_time(3, 30) == ("half past three", "trois heures et demie")
    assert numerals.clock_time(4, 45) == ("a quarter to five", "cinq heures moins le quart")
    assert numerals.clock_time(11, 40) == ("twenty to noon", "midi moins vingt")
    assert numerals.date(1, 4) == ("the first of May", "le premier mai")
    assert numerals.date(8, 7) == ("the eighth of August", "le huit août")
    assert numerals.date(21, 0) == ("the twenty-first of January", "le vingt et un janvier")


def test_one_english_sentence_has_one_translation(pairs):
    translations = dict(pairs)
    for seed in range(1, 5):
        for english, words in corpus.drawn_pairs(10_000, seed):
            assert translations.setdefault(english, words) == words


def test_pairs_are_distinct_in_both_languages(pairs):
    assert len({pair[0] for pair in pairs}) == len({pair[1] for pair in pairs}) == 40_000


def test_sentences_are_well_formed(pairs):
    for english, words in pairs:
        assert 2 <= len(english.split(" ")) <= 20
        assert re.fullmatch(r"[A-Z][A-Za-z,' -]*[a-z][.?]", english), english
        assert re.fullmatch(r"[A-ZÀÉÊ][\w,' -]*\w(\.| \?)", words), words
        assert english[-1] == words[-1]
        assert "  " not in english + words
        # French must contract these words.
        vowel = "[aeiouhéêœà]"
        assert not re.search(rf"\b(je|ne|me|de|le|la|que) (?!huit|onze){vowel}", words), words
        assert not re.search(r"\b(à|de) (le|les|de|des)\b", words), words
        negated = re.search(r"n't|\b(not|never|no)\b", english) is not None
        assert (re.search(r"\b(ne |n')", words) is not None) == negated, (english, words)


def test_file_equals_the_sentences_of_the_grammar(pairs):
    assert pairs == corpus.drawn_pairs(MAX_PAIRS)


def test_same_seed_gives_the_same_pairs(pairs):
    assert sentence_pairs(100) == pairs[:100]
    assert sentence_pairs(100, seed=1) == sentence_pairs(100, seed=1) != pairs[:100]
    assert sorted(sentence_pairs(MAX_PAIRS, seed=1)) == sorted(pairs)


def test_held_out_sentences_are_never_seen(splits):
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 30_000,
        "dev": 500,
        "test": 500,
    }
    for side in (0, 1):
        texts = [pair[side] for split in splits.values() for pair in split]
        assert len(set(texts)) == 31_000


def test_sentences_of_make_train_are_unseen_but_their_words_are_seen(splits):
    seen = {english for split in splits.values() for english, _ in split}
    words = {word for english in seen for word in english.rstrip(".?").lower().split()}
    for line in SENTENCES.read_text().splitlines():
        assert line not in seen
        assert words.issuperset(line.rstrip(".?").lower().split())


def test_held_out_sentences_do_not_depend_on_the_training_set(splits, tmp_path):
    paths = write_corpus(tmp_path, num_train=20)
    assert read_lines(paths["train.en"]) == [english for english, _ in splits["train"][:20]]
    assert read_lines(paths["test.fr"]) == [words for _, words in splits["test"]]


def test_same_seed_writes_the_same_bytes(tmp_path):
    sizes = {"num_train": 300, "num_dev": 20, "num_test": 10, "seed": 3}
    paths, again = (write_corpus(tmp_path / name, **sizes) for name in ("first", "second"))
    assert sorted(path.name for path in paths["dev.en"].parent.iterdir()) == sorted(
        f"{name}.{language}" for name in ("train", "dev", "test") for language in ("en", "fr")
    )
    for key, path in paths.items():
        assert again[key].read_bytes() == path.read_bytes()


def test_invalid_numbers_of_pairs_are_refused(tmp_path):
    for num_pairs in (-1, MAX_PAIRS + 1):
        assert f"num_pairs={num_pairs}" in get_error_message(sentence_pairs, num_pairs)
    assert "num_dev must be an integer of at least 0" in get_error_message(
        write_corpus, tmp_path, num_dev=-1
    )
    assert sentence_pairs(0) == []
    assert not list(tmp_path.iterdir())
