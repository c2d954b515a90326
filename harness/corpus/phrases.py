"""Noun phrases and clauses, built in both languages together."""

import re
from typing import NamedTuple

from harness.corpus import english, french, numerals


class Phrase(NamedTuple):
    """Words in both languages; `person` is one of `french.PERSONS`."""

    english: str
    french: str
    person: str = "il"
    feminine: bool = False

    @property
    def plural(self):
        """True if the phrase is plural."""
        return self.person in ("nous", "ils")


# Columns: subject, English object, French direct object, French indirect object. "you" is always a
# polite singular masculine and "they" is masculine, so that every sentence has one translation.
PRONOUNS = (
    (Phrase("I", "je", "je"), "me", "me", "me"),
    (Phrase("you", "vous", "vous"), "you", "vous", "vous"),
    (Phrase("he", "il"), "him", "le", "lui"),
    (Phrase("she", "elle", "il", True), "her", "la", "lui"),
    (Phrase("we", "nous", "nous"), "us", "nous", "nous"),
    (Phrase("they", "ils", "ils"), "them", "les", "leur"),
)


def taken_up(phrase):
    """Return the pronoun that refers to a subject, such as "she" for "my sister"."""
    if phrase.person not in ("il", "ils"):
        return phrase
    english_word = "they" if phrase.plural else "she" if phrase.feminine else "he"
    word = ("elle" if phrase.feminine else "il") + "s" * phrase.plural
    return phrase._replace(english=english_word, french=word)


def noun_phrase(noun, determiner, plural=False, adjective=None, negative=False):
    """Return the phrase of a `lexicon.Noun` with a determiner and an optional `lexicon.Adjective`.

    The determiner is a key of `french.determiner`, a number from 2 on, or an owner ("Paul's").
    The object of a negated verb is negative: "any bread", "pas de pain".
    """
    phrase = Phrase("", "", "ils" if plural else "il", noun.feminine)
    words = noun.french_plural if plural else noun.french
    first = adjective is not None and adjective.place != "after"
    if adjective is not None:
        form = french.agree(adjective.masculine, adjective.feminine, phrase)
        words = f"{french.before(form, words)} {words}" if first else f"{words} {form}"
    if isinstance(determiner, int):
        determiner, word = numerals.number(determiner, noun.feminine)
    else:
        kind, owner = (determiner, "") if determiner[-2:] != "'s" else ("the", determiner[:-2])
        if negative and kind in ("a", "some"):
            determiner, kind = ("any" if kind == "some" else "a"), "any"
        mass = noun.kind in ("food", "drink")
        word = french.determiner(kind, words, noun.feminine, plural, mass, first)
        words += f" de {owner}" if owner else ""
    determiner = "these" if plural and determiner == "this" else determiner
    english_noun = noun.english_plural if plural else noun.english
    english_words = f"{determiner} {adjective.english if adjective else ''} {english_noun}"
    return phrase._replace(english=english_words, french=f"{word} {words}")


def joined(*parts):
    """Return the joined (English, French) of phrases, pairs or "English|French" texts."""
    pairs = [part.split("|") if isinstance(part, str) else part[:2] for part in parts]
    return tuple(" ".join(words) for words in zip(*pairs, strict=True))


def clause(
    subject, verb, tense, polarity="", *rest, question=False, clitic=("", ""), agreement=None
):
    """Return the (English, French) of a clause.

    Args:
        subject: A `Phrase`.
        verb: A `lexicon.Verb`.
        tense: A key of `french.TENSES`.
        polarity: A key of `french.NEGATIONS`.
        *rest: Parts after the verb, see `joined`.
        question: Boolean, whether the English auxiliary comes first.
        clitic: (English, French) of an object pronoun.
        agreement: `Phrase` of a direct object pronoun. The participle agrees with it.
    """
    english_words = english.clause(subject, verb, tense, polarity, question)
    french_words = french.clause(subject, verb, tense, polarity, clitic[1], agreement)
    return joined((english_words, french_words), (clitic[0], ""), *rest)


def sentence(*parts, mark="."):
    """Return joined parts as a sentence with elisions, a capital letter and a final mark."""
    english_text, french_text = (" ".join(text.split()) for text in joined(*parts))
    english_text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", english_text) + mark
    french_text = french.smooth(french_text) + (mark if mark == "." else f" {mark}")
    return tuple(text[0].upper() + text[1:] for text in (english_text, french_text))
