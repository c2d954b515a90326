"""Words of the corpus. Every English word has one sense and hence one translation."""

import functools
from collections import namedtuple

from harness.corpus import english, french
from harness.corpus.tables import rows

NAMES = {name: gender == "f" for name, gender in rows("names")}
# Lists of "English|French" texts by tense.
TIMES = {tense: words.split(", ") for tense, words in rows("times", ": ")}

Noun = namedtuple("Noun", "kind english english_plural french french_plural feminine")
Adjective = namedtuple("Adjective", "english comparative masculine feminine place")
Verb = namedtuple("Verb", "base past english_tail infinitive french_tail group nouns")


def _noun(kind, words, translation, gender):
    singular, _, plural = words.partition("/")
    plural = "" if plural == "-" else plural or english.inflected(singular)
    return Noun(kind, singular, plural, translation, french.pluralize(translation), gender == "f")


def _verb(words, translation, group, suited):
    forms, _, english_tail = words.partition(" ")
    base, _, past = forms.partition("/")
    infinitive, _, french_tail = translation.partition(" ")
    past = past or base.removesuffix("e") + "ed"
    return Verb(base, past, english_tail, infinitive, french_tail, group, nouns(suited))


NOUNS = [_noun(kind, *cell.split()) for kind, row in rows("nouns", ":") for cell in row.split(",")]


@functools.cache
def nouns(names):
    """Return the nouns of kinds ("drink") and single words ("tea"), as a tuple."""
    return tuple(noun for noun in NOUNS if {noun.kind, noun.english} & set(names.split()))


ADJECTIVES = {Adjective(*words.split()): nouns(suited) for words, suited in rows("adjectives", ":")}
VERBS = [_verb(*cells) for cells in rows("verbs", "|")]


@functools.cache
def adjectives(noun, *places):
    """Return the adjectives that suit a noun and stand in one of `places`, as a tuple."""
    return tuple(item for item in ADJECTIVES if item.place in places and noun in ADJECTIVES[item])


@functools.cache
def verbs(groups):
    """Return the verbs of some groups, as a tuple."""
    return tuple(verb for verb in VERBS if verb.group in groups.split())
