"""The rules of English: articles, plurals, verb forms, and the words around the verb."""

from typing import NamedTuple

# Spelling and sound part ways in these words.
_CONSONANT_SOUND = ("use", "euro", "one")
_VOWEL_SOUND = ("hour",)

_NEGATED = {  # contractions; "am" has none
    "am": "am not",
    "can": "can't",
    "will": "won't",
    "must": "must not",
}


def article(following):
    """Returns "a" or "an" for the words that follow."""
    if following.startswith(_VOWEL_SOUND):
        return "an"
    if following.startswith(_CONSONANT_SOUND):
        return "a"
    return "an" if following[0].lower() in "aeiou" else "a"


def plural_of(noun):
    """Returns the regular plural of a noun."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def possessive(phrase):
    """Returns the possessive of a noun phrase: "Paul's", "my parents'"."""
    return phrase + ("'" if phrase.endswith("s") and phrase[0].islower() else "'s")


def negate(auxiliary):
    """Returns an auxiliary with "not": "don't", "isn't", "am not"."""
    return _NEGATED.get(auxiliary, auxiliary + "n't")


def superlative(comparative):
    """Returns the superlative of a comparative: "biggest", "best", "most" of "more"."""
    known = {"better": "best", "more": "most"}
    return known.get(comparative) or comparative.removesuffix("er") + "est"


class EnglishVerb(NamedTuple):
    """An English verb's forms; "am", "are" and "were" are known to `auxiliary_and_rest`."""

    base: str
    third: str
    past: str
    participle: str
    gerund: str


# Verbs that double their last letter before an ending.
_DOUBLED = frozenset("run swim put get forget prefer".split())


def make_verb(base, past=None, participle=None):
    """Returns a verb, regular where no past is given.

    Example:

    >>> make_verb("try")
    EnglishVerb(base='try', third='tries', past='tried', participle='tried', gerund='trying')
    """
    stem = base + base[-1] if base in _DOUBLED else base
    if base.endswith(("ch", "sh", "s", "x", "o")):
        third = base + "es"
    elif base.endswith("y") and base[-2] not in "aeiou":
        third = base[:-1] + "ies"
    else:
        third = base + "s"
    if past is None and base.endswith("e"):
        past = base + "d"
    elif past is None:
        past = base[:-1] + "ied" if third.endswith("ies") else stem + "ed"
    if base.endswith("e") and not base.endswith("ee"):
        stem = base[:-1]
    return EnglishVerb(base, third, past, participle or past, stem + "ing")


BE = EnglishVerb("be", "is", "was", "been", "being")
HAVE = EnglishVerb("have", "has", "had", "had", "having")

# Tenses made of an auxiliary and the verb's base form, with words in between.
_WITH_BASE = {
    "future": ("will", ""),
    "can": ("can", ""),
    "could": ("could", ""),
    "must": ("must", ""),
    "should": ("should", ""),
    "would like to": ("would", "like to"),
}


def auxiliary_and_rest(verb, tense, person, plural, needs_auxiliary=False):
    """Returns the words of the verb, split where a subject or "not" may enter.

    Args:
        verb: an `EnglishVerb`.
        tense: "present", "progressive", "past", "past progressive", "perfect",
            "perfect progressive", "just", "future", "going to" or a modal ("can", "could",
            "must", "should", "would like to").
        person: 1, 2 or 3.
        plural: whether the subject is plural.
        needs_auxiliary: whether a question or a negation asks for "do".

    Returns:
        A tuple of the auxiliary (empty where there is none) and the rest.

    Example:

    >>> auxiliary_and_rest(make_verb("eat", "ate", "eaten"), "past", 3, False, True)
    ('did', 'eat')
    """
    third = person == 3 and not plural
    if tense in _WITH_BASE:
        auxiliary, between = _WITH_BASE[tense]
        return auxiliary, f"{between} {verb.base}".strip()
    if tense in ("perfect", "just"):
        between = "just " if tense == "just" else ""
        return ("has" if third else "have"), between + verb.participle
    if tense == "perfect progressive":
        return ("has" if third else "have"), f"been {verb.gerund}"
    if tense == "progressive":
        return _be("present", person, plural), verb.gerund
    if tense == "past progressive":
        return _be("past", person, plural), verb.gerund
    if tense == "going to":
        return _be("present", person, plural), f"going to {verb.base}"
    if verb is BE:
        return _be(tense, person, plural), ""
    if needs_auxiliary:
        return ("did" if tense == "past" else "does" if third else "do"), verb.base
    return "", (verb.past if tense == "past" else verb.third if third else verb.base)


def _be(tense, person, plural):
    if plural or person == 2:
        return "were" if tense == "past" else "are"
    if tense == "past":
        return "was"
    return "am" if person == 1 else "is"
