"""The rules of French: elision, contraction, agreement, determiners, conjugation.

Phrases are put together without elision and contraction ("à le ami", "de le pain"); `smooth` does
both for a whole sentence at the end.
"""

import functools
import re

from harness.corpus.tables import rows

PERSONS = ("je", "il", "nous", "vous", "ils")
_ENDINGS = {
    "er": ("e", "e", "ons", "ez", "ent"),
    "ir": ("is", "it", "issons", "issez", "issent"),
    "re": ("s", "", "ons", "ez", "ent"),
    "future": ("ai", "a", "ons", "ez", "ont"),
    "imperfect": ("ais", "ait", "ions", "iez", "aient"),
}
# Infinitive to "present | future | participle".
_IRREGULAR = dict(rows("irregular verbs", ":"))
_WITH_ETRE = frozenset("aller arriver partir rester venir".split())
_STATES = frozenset("aimer avoir coûter être vouloir".split())  # Their past is the imperfect.
# English tense to French tense, or to the auxiliary verb that is used in the present.
TENSES = {"present": "present", "progressive": "present", "past progressive": "imperfect"}
TENSES |= {"past": "compound", "will": "future", "going to": "aller", "can": "pouvoir"}
TENSES |= {"must": "devoir", "want to": "vouloir"}
NEGATIONS = {"": "", "not": "pas", "never": "jamais", "no longer": "plus"}
# English determiner to French forms for masculine, feminine and plural nouns.
_DETERMINERS = {word: forms.split() for word, forms in rows("determiners", ":")}
_BEFORE_VOWEL = {"ce": "cet", "ma": "mon", "sa": "son"}
_BEFORE_VOWEL |= {"beau": "bel", "nouveau": "nouvel", "vieux": "vieil"}
# In this corpus every h is mute except in "huit".
_VOWEL = r"(?!(?:huit|onze)\b)[aàâeéèêiîoôuœyh]"
_ELIDED = re.compile(rf"\b(je|me|ne|que|le|la|de) (?={_VOWEL})", re.IGNORECASE)
_CONTRACTED = {"à le": "au", "à les": "aux", "de le": "du", "de les": "des"}


def smooth(text):
    """Return a text with its words shortened and contracted.

    Example:

    >>> smooth("je ne ai pas parlé à les enfants de le hôtel")
    "je n'ai pas parlé aux enfants de l'hôtel"
    """
    text = re.sub(r"\bde des?\b", "de", text)  # besoin de (des) clés
    text = _ELIDED.sub(lambda match: match[1][:-1] + "'", text)
    return re.sub(r"\b(à|de) les?\b", lambda match: _CONTRACTED[match[0]], text)


def before(word, following):
    """Return the form of a determiner or adjective before a word: "mon amie", "vieil ami"."""
    vowel = re.match(_VOWEL, following, re.IGNORECASE)
    return _BEFORE_VOWEL.get(word, word) if vowel else word


def pluralize(word):
    """Return the plural of a noun or an adjective."""
    if word[-1] in "sx":
        return word
    if word.endswith("al"):
        return word[:-2] + "aux"
    return word + ("x" if word.endswith("eau") else "s")


def agree(masculine, feminine, phrase):
    """Return the form of an adjective or a participle that agrees with a `phrases.Phrase`."""
    word = feminine if phrase.feminine else masculine
    return pluralize(word) if phrase.plural else word


def determiner(kind, following, feminine, plural, mass, adjective_first):
    """Return the French word for an English determiner, or for none, before some words."""
    if kind == "some" and mass:
        return "de la" if feminine else "de le"
    if kind == "some":
        return "de" if adjective_first else "des"
    return before(_DETERMINERS[kind or "the"][2 if plural else feminine], following)


@functools.cache
def _forms(infinitive):
    """Return the five forms of the present, the stem of the future and the participle."""
    if infinitive in _IRREGULAR:
        present, future, participle = _IRREGULAR[infinitive].split(" | ")
        return present.split(), future, participle
    stem, ending = infinitive[:-2], infinitive[-2:]
    present = [stem + end for end in _ENDINGS[ending]]
    if stem.endswith("g"):
        present[2] = stem + "eons"
    return present, infinitive.removesuffix("e"), stem + {"er": "é", "ir": "i", "re": "u"}[ending]


def conjugate(infinitive, tense, person):
    """Return a form of a verb, regular or of the table, in the present, imperfect or future."""
    present, future, _ = _forms(infinitive)
    index = PERSONS.index(person)
    if tense == "present":
        return present[index]
    ending = _ENDINGS[tense][index]
    if tense == "future":
        return future + ending
    stem = "ét" if infinitive == "être" else present[2].removesuffix("ons")
    return (stem.removesuffix("e") if ending[0] == "i" else stem) + ending  # mangeait, mangions


def clause(subject, verb, tense, polarity="", clitic="", agreement=None):
    """Return a subject with its verb: "elle ne va pas la lire"; see `phrases.clause`."""
    tense, after = TENSES[tense], ""
    if tense == "compound" and verb.infinitive in _STATES:
        tense = "imperfect"
    if tense == "compound":
        with_etre = verb.infinitive in _WITH_ETRE
        finite = conjugate("être" if with_etre else "avoir", "present", subject.person)
        agreement, after = subject if with_etre else agreement, _forms(verb.infinitive)[2]
        after = agree(after, after + "e", agreement) if agreement else after
    elif tense in ("present", "imperfect", "future"):
        finite = conjugate(verb.infinitive, tense, subject.person)
    else:  # the pronoun stands before the infinitive
        finite = conjugate(tense, "present", subject.person)
        clitic, after = "", f"{clitic} {verb.infinitive}"
    negation = NEGATIONS[polarity]
    start = f"{subject.french} {'ne' if negation else ''} {clitic} {finite} {negation}"
    return f"{start} {after} {verb.french_tail}"
