"""The embedded corpus: correct French, one translation a sentence, the same on every machine."""

import collections
import hashlib
import re

import pytest

from dtransformer.datasets import read_sgm
from dtransformer.datasets.embedded import (
    adjectives,
    corpus,
    grammar,
    lexicon,
    sentence_pairs,
    verbs,
    write_corpus,
)
from dtransformer.datasets.embedded.draw import Draw
from dtransformer.datasets.embedded.grammar import Clause, object_clitic, sentence
from dtransformer.datasets.embedded.noun_phrases import (
    PRONOUNS,
    Phrase,
    comparison,
    joined,
    noun_phrase,
    prepositional,
)
from dtransformer.datasets.embedded.noun_phrases import (
    superlative as superlative_phrase,
)
from dtransformer.datasets.embedded.numerals import (
    clock_time,
    english_number,
    french_number,
)
from dtransformer.errors import InputError

I, YOU, HE, SHE, WE, THEY = (PRONOUNS[key] for key in ("I", "you", "he", "she", "we", "they"))


@pytest.fixture(scope="module")
def pairs():
    return sentence_pairs(10_000)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_corpus(
        tmp_path_factory.mktemp("corpus"), num_train=8000, num_dev=150, num_test=150
    )


# Shorthand for the tables below.


def noun(word, determiner="the", plural=False, words=(), **more):
    found = tuple(
        next(item for item in adjectives.ATTRIBUTES[word] if item.english == name) for name in words
    )
    return noun_phrase(lexicon.NOUNS[word], determiner, plural, found, **more)


def item_of(word, adjective):
    return next(item for item in adjectives.PREDICATES[word] if item.english == adjective)


def verb(english_words, french_words, state=False):
    return verbs.make_verb(english_words, french_words, state=state)


def is_(subject, word, adjective, tense="present"):
    item = item_of(word, adjective)
    form = item.feminine if subject.feminine else item.masculine
    form += "s" if subject.plural else ""
    return Clause(subject, verbs.BE, tense, (Phrase(adjective, form),))


EAT, SEE, READ = verb("eat", "manger"), verb("see", "voir"), verb("read", "lire")
BUY, GIVE, TALK = verb("buy", "acheter"), verb("give", "donner"), verb("talk to", "parler")
GO, ARRIVE = verb("go", "aller"), verb("arrive", "arriver")
GET_UP, REST = verb("get up", "se lever"), verb("rest", "se reposer")
NEED, WANT = verb("need", "avoir besoin de", True), verb("want", "vouloir", True)
WORK, RAIN = verb("work", "travailler"), verb("rain", "pleuvoir")
PAUL = Phrase("Paul", "Paul", pronoun="il", owner="his")
ANNA = Phrase("Anna", "Anna", feminine=True, pronoun="elle", owner="her")
MARIE = Phrase("Marie", "Marie", feminine=True, pronoun="elle", owner="her")

NOUN_PHRASES = {
    # gender, number, elision
    "the friend": (noun("friend"), "l'ami"),
    "the hotel": (noun("hotel"), "l'hôtel"),
    "these horses": (noun("horse", "this", True), "ces chevaux"),
    "this hotel": (noun("hotel", "this"), "cet hôtel"),
    "this church": (noun("church", "this"), "cette église"),
    "some cameras": (noun("camera", "some", True), "des appareils photo"),
    # possessives and the masculine before a vowel
    "my school": (noun("school", "my"), "mon école"),
    "her son": (noun("son", "her"), "son fils"),
    "their keys": (noun("key", "their", True), "leurs clés"),
    # the partitive
    "some bread": (noun("bread", "some"), "du pain"),
    "some water": (noun("water", "some"), "de l'eau"),
    "some meat": (noun("meat", "some"), "de la viande"),
    # adjectives before and after the noun
    "an old tree": (noun("tree", "a", words=["old"]), "un vieil arbre"),
    "a new hotel": (noun("hotel", "a", words=["new"]), "un nouvel hôtel"),
    "a beautiful bird": (noun("bird", "a", words=["beautiful"]), "un bel oiseau"),
    "a beautiful flower": (noun("flower", "a", words=["beautiful"]), "une belle fleur"),
    "some big houses": (noun("house", "some", True, ["big"]), "de grandes maisons"),
    "some white shirts": (noun("shirt", "some", True, ["white"]), "des chemises blanches"),
    "the small brown bags": (
        noun("bag", "the", True, ["small", "brown"]),
        "les petits sacs marron",
    ),
    "a useful book": (noun("book", "a", words=["useful"]), "un livre utile"),
    # numbers agree
    "twenty-one apples": (noun("apple", "no-article", True, count=21), "vingt et une pommes"),
    "eighty books": (noun("book", "no-article", True, count=80), "quatre-vingts livres"),
    "many friends": (noun("friend", "many", True), "beaucoup d'amis"),
    # contraction
    "Paul's car": (noun("car", possessor=PAUL), "la voiture de Paul"),
    "the child's ball": (noun("ball", possessor=noun("child")), "le ballon de l'enfant"),
    "the boys' ball": (noun("ball", possessor=noun("boy", plural=True)), "le ballon des garçons"),
    "to the market": (
        prepositional("to", "à", Phrase("the market", "le marché")),
        "au marché",
    ),
    "the biggest house in the village": (
        superlative_phrase(lexicon.NOUNS["house"], item_of("house", "big"), noun("village")),
        "la plus grande maison du village",
    ),
    "the most expensive hotel in the city": (
        superlative_phrase(lexicon.NOUNS["hotel"], item_of("hotel", "expensive"), noun("city")),
        "l'hôtel le plus cher de la ville",
    ),
    "the best restaurant in the city": (
        superlative_phrase(
            lexicon.NOUNS["restaurant"], item_of("restaurant", "good"), noun("city")
        ),
        "le meilleur restaurant de la ville",
    ),
}


@pytest.mark.parametrize("english", NOUN_PHRASES)
def test_noun_phrases_agree_in_french(english):
    phrase, french = NOUN_PHRASES[english]
    assert sentence(phrase.english, phrase.french) == sentence(english, french)


STATEMENTS = {
    # tenses
    "He eats an apple.": (Clause(HE, EAT, "present", (noun("apple", "a"),)), "Il mange une pomme."),
    "We are eating.": (Clause(WE, EAT, "progressive"), "Nous mangeons."),
    "We were eating.": (Clause(WE, EAT, "past progressive"), "Nous mangions."),
    "It was raining.": (Clause(Phrase("it", "il"), RAIN, "past progressive"), "Il pleuvait."),
    "I saw Anna.": (Clause(I, SEE, "past", (ANNA,)), "J'ai vu Anna."),
    "She has arrived.": (Clause(SHE, ARRIVE, "perfect"), "Elle est arrivée."),
    "Anna and Marie went.": (
        Clause(joined(ANNA, MARIE), GO, "past"),
        "Anna et Marie sont allées.",
    ),
    "Anna and Paul went.": (Clause(joined(ANNA, PAUL), GO, "past"), "Anna et Paul sont allés."),
    "They will go.": (Clause(THEY, GO, "future"), "Ils iront."),
    "You are going to read.": (Clause(YOU, READ, "going to"), "Vous allez lire."),
    "He has just read.": (Clause(HE, READ, "just"), "Il vient de lire."),
    "I wanted a car.": (Clause(I, WANT, "past", (noun("car", "a"),)), "Je voulais une voiture."),
    "She would like to eat.": (Clause(SHE, EAT, "would like to"), "Elle voudrait manger."),
    "We should work.": (Clause(WE, WORK, "should"), "Nous devrions travailler."),
    # negation, and what it does to the object
    "I don't have a car.": (
        Clause(I, verbs.HAVE, "present", (noun("car", "a"),), "not"),
        "Je n'ai pas de voiture.",
    ),
    "He isn't eating any eggs.": (
        Clause(HE, EAT, "progressive", (noun("egg", "some", True),), "not"),
        "Il ne mange pas d'œufs.",
    ),
    "He never eats the bread.": (
        Clause(HE, EAT, "present", (noun("bread"),), "never"),
        "Il ne mange jamais le pain.",
    ),
    "She no longer works.": (
        Clause(SHE, WORK, "present", (), "no longer"),
        "Elle ne travaille plus.",
    ),
    "You haven't yet eaten.": (
        Clause(YOU, EAT, "perfect", (), "not yet"),
        "Vous n'avez pas encore mangé.",
    ),
    "I can't eat any bread.": (
        Clause(I, EAT, "can", (noun("bread", "some"),), "not"),
        "Je ne peux pas manger de pain.",
    ),
    # reflexive verbs
    "I get up.": (Clause(I, GET_UP, "present"), "Je me lève."),
    "She didn't get up.": (Clause(SHE, GET_UP, "past", (), "not"), "Elle ne s'est pas levée."),
    "We want to rest.": (
        Clause(WE, REST, "present", chain=verbs.CHAINS["want"]),
        "Nous voulons nous reposer.",
    ),
    "He tried to eat.": (
        Clause(HE, EAT, "past", chain=verbs.CHAINS["try"]),
        "Il a essayé de manger.",
    ),
    # object pronouns
    "I saw her.": (Clause(I, SEE, "past", clitic=object_clitic("she", True)), "Je l'ai vue."),
    "He doesn't see them.": (
        Clause(HE, SEE, "present", (), "not", clitic=object_clitic("they", True)),
        "Il ne les voit pas.",
    ),
    "She is going to talk to him.": (
        Clause(SHE, TALK, "going to", clitic=object_clitic("he", False)),
        "Elle va lui parler.",
    ),
    "They gave us a book.": (
        Clause(THEY, GIVE, "past", (noun("book", "a"),), clitic=object_clitic("we", False)),
        "Ils nous ont donné un livre.",
    ),
    # "avoir" for "to be", and "de" in front of an object
    "I am cold.": (
        Clause(I, verbs.BE_AS_HAVE, "present", (Phrase("cold", "froid"),)),
        "J'ai froid.",
    ),
    "We need the keys.": (
        Clause(WE, NEED, "present", (prepositional("", "de", noun("key", plural=True)),)),
        "Nous avons besoin des clés.",
    ),
    "He needs a bed.": (
        Clause(HE, NEED, "present", (prepositional("", "de", noun("bed", "a")),)),
        "Il a besoin d'un lit.",
    ),
    # agreement with the subject
    "The women are happy.": (
        is_(noun("woman", plural=True), "woman", "happy"),
        "Les femmes sont heureuses.",
    ),
    # relative clauses: the participle agrees with what stands before
    "The letters that I read were long.": (
        is_(
            noun("letter", plural=True)._replace(
                english="the letters that I read",
                french="les lettres que "
                + grammar.french_statement(
                    Clause(I, READ, "past", asked=noun("letter", plural=True))
                ),
            ),
            "letter",
            "long",
            "past",
        ),
        "Les lettres que j'ai lues étaient longues.",
    ),
}


@pytest.mark.parametrize("english", STATEMENTS)
def test_clauses_are_told_in_both_languages(english):
    clause, french = STATEMENTS[english]
    assert grammar.told(clause) == (english, french)


QUESTIONS = {
    "How many apples did you eat?": (
        Clause(YOU, EAT, "past", asked=noun("apple", plural=True)),
        noun("apple", "how many", True),
        "Combien de pommes avez-vous mangées ?",
    ),
    "Which book does he want?": (
        Clause(HE, WANT, "present"),
        noun("book", "which"),
        "Quel livre veut-il ?",
    ),
    "Which dress is she going to buy?": (
        Clause(SHE, BUY, "going to"),
        noun("dress", "which"),
        "Quelle robe va-t-elle acheter ?",
    ),
    "Which houses do they see?": (
        Clause(THEY, SEE, "present"),
        noun("house", "which", True),
        "Quelles maisons voient-ils ?",
    ),
}


@pytest.mark.parametrize("english", QUESTIONS)
def test_questions_turn_pronoun_and_verb_around(english):
    clause, phrase, french = QUESTIONS[english]
    asked = sentence(
        f"{phrase.english} {grammar.english_question(clause)}",
        f"{phrase.french} {grammar.french_inversion(clause)}",
        "?",
    )
    assert asked == (english, french)


ORDERS = {
    "Rest!": (Clause(YOU, REST, "present"), "Reposez-vous !"),
    "Don't rest!": (Clause(YOU, REST, "present", (), "not"), "Ne vous reposez pas !"),
    "Eat the apple!": (Clause(YOU, EAT, "present", (noun("apple"),)), "Mangez la pomme !"),
}


@pytest.mark.parametrize("english", ORDERS)
def test_orders(english):
    clause, french = ORDERS[english]
    assert sentence(*grammar.imperative(clause), "!") == (english, french)


def test_comparison_knows_irregular_words():
    house = noun("house")
    assert comparison(item_of("house", "big"), house) == ("bigger than", "plus grande que")
    assert comparison(item_of("cake", "good"), noun("cake")) == ("better than", "meilleur que")
    assert comparison(item_of("hotel", "expensive"), noun("hotel"), "less") == (
        "less expensive than",
        "moins cher que",
    )


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


@pytest.mark.parametrize("number", NUMBERS)
def test_tricky_numbers(number):
    assert (english_number(number), french_number(number)) == NUMBERS[number]


def french_value(words):
    """Reads French number words back, by the arithmetic of the language."""
    units = (
        "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze"
    )
    values = {word: value for value, word in enumerate(units.split())}
    values |= {"seize": 16, "vingt": 20, "trente": 30, "quarante": 40, "cinquante": 50}
    values |= {"soixante": 60}
    words = words.replace("quatre-vingts", "huitante").replace("quatre-vingt", "huitante")
    values["huitante"] = 80
    total = 0
    for word in re.split("[ -]", words):
        if word in ("cent", "cents"):
            total = 100 * max(total, 1)
        elif word != "et":
            total += values[word]
    return total


def test_every_number_reads_back():
    for number in range(1000):
        assert french_value(french_number(number)) == number
    assert len({english_number(number) for number in range(1000)}) == 1000
    with pytest.raises(ValueError, match="1000"):
        french_number(1000)


def test_feminine_numbers_and_clock_times():
    assert french_number(1, feminine=True) == "une"
    assert french_number(81, feminine=True) == "quatre-vingt-une"
    assert french_number(71, feminine=True) == "soixante et onze"
    assert clock_time(1) == ("one o'clock", "une heure")
    assert clock_time(12) == ("noon", "midi")
    assert clock_time(0, 30) == ("half past midnight", "minuit et demi")
    assert clock_time(3, 30) == ("half past three", "trois heures et demie")
    assert clock_time(4, 45) == ("a quarter to five", "cinq heures moins le quart")
    assert clock_time(11, 40) == ("twenty to noon", "midi moins vingt")


def test_pairs_are_the_same_on_every_machine(pairs):
    digest = hashlib.sha256("\n".join(map("\t".join, pairs[:2000])).encode()).hexdigest()
    # A change of the grammar changes this: paste the new value.
    assert digest[:16] == "e01be7e415b9d54b"
    assert sentence_pairs(100) == pairs[:100]
    assert sentence_pairs(100, seed=1) != pairs[:100]


def test_pairs_are_distinct_in_both_languages(pairs):
    assert len({pair[0] for pair in pairs}) == len({pair[1] for pair in pairs}) == len(pairs)


def test_one_english_sentence_has_one_translation(pairs):
    draw, translations = Draw(7), dict(pairs)
    for _ in range(40_000):
        english, french = draw.weighted(corpus._KINDS)(draw)
        assert translations.setdefault(english, french) == french


def test_sentences_are_well_formed(pairs):
    for english, french in pairs:
        assert 3 <= len(english.split(" ")) <= 20
        assert re.fullmatch(r"[A-Z][A-Za-z,' -]*[a-z][.?!]", english), english
        assert re.fullmatch(r"[A-ZÀÉÊ][\w,' -]*\w(\.| \?| !)", french), french
        assert english[-1] == french[-1]
        assert "  " not in english + french
        # Nothing is left that French shortens or contracts.
        vowel = "[aeiouhéêœà]"
        assert not re.search(rf"\b(je|ne|me|se|de|le|que) (?!huit|onze){vowel}", french), french
        # "du", but "je viens de le voir".
        assert not re.search(r"\b(à|de) les?\b(?! \w+(er|ir|ître|ndre)\b)", french), french


def test_vocabulary_is_small_and_words_come_often(pairs):
    english = collections.Counter(word for pair in pairs for word in corpus.words_of(pair[0]))
    french = collections.Counter(word for pair in pairs for word in corpus.words_of(pair[1]))
    assert 700 < len(english) < 950
    assert 1200 < len(french) < 2000
    assert sum(english.values()) / len(pairs) > 7
    once = sum(count == 1 for count in english.values())
    assert once < 0.06 * len(english)


def test_impossible_requests_are_refused(tmp_path):
    for num_pairs in (-1, corpus.MAX_PAIRS + 1):
        with pytest.raises(InputError, match="num_pairs"):
            sentence_pairs(num_pairs)
    with pytest.raises(InputError, match="num_dev=-1"):
        write_corpus(tmp_path, num_dev=-1)
    assert sentence_pairs(0) == []
    assert not list(tmp_path.iterdir())


def test_the_files_hold_splits_that_share_no_sentence(files):
    assert sorted(path.name for path in files["train.en"].parent.iterdir()) == sorted(
        f"{name}.{language}.sgm" for name in ("train", "dev", "test") for language in ("en", "fr")
    )
    read = {key: read_sgm(path) for key, path in files.items()}
    for language in ("en", "fr"):
        sides = [read[f"{name}.{language}"] for name in ("train", "dev", "test")]
        assert [len(side) for side in sides] == [8000, 150, 150]
        assert len(set().union(*sides)) == 8300
        known = {word for text in sides[0] for word in corpus.words_of(text)}
        for text in sides[1] + sides[2]:
            assert known.issuperset(corpus.words_of(text))
    whole = dict(sentence_pairs(8300))
    for name in ("train", "dev", "test"):
        for english, french in zip(read[f"{name}.en"], read[f"{name}.fr"], strict=True):
            assert whole[english] == french


def test_held_out_sentences_are_like_the_training_ones(files):
    lengths = {
        name: [len(text.split()) for text in read_sgm(files[f"{name}.en"])]
        for name in ("train", "dev", "test")
    }
    means = {name: sum(found) / len(found) for name, found in lengths.items()}
    assert means["dev"] == pytest.approx(means["train"], abs=0.8)
    assert means["test"] == pytest.approx(means["train"], abs=0.8)


def test_the_same_seed_writes_the_same_bytes(files, tmp_path):
    again = write_corpus(tmp_path, num_train=8000, num_dev=150, num_test=150)
    for key, path in files.items():
        assert again[key].read_bytes() == path.read_bytes()


def test_a_tiny_corpus_has_the_sizes_asked_for(tmp_path):
    paths = write_corpus(tmp_path, num_train=20, num_dev=10, num_test=5, seed=3)
    assert [len(read_sgm(paths[f"{name}.fr"])) for name in ("train", "dev", "test")] == [20, 10, 5]
