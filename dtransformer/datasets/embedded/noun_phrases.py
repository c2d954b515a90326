"""Noun phrases, built in both languages at once.

A `Phrase` is a piece of a sentence in English and French, with what the rest of the sentence
must agree with. The French text is not shortened yet ("le ami"): `grammar.sentence` does that.
"""

from typing import NamedTuple

from dtransformer.datasets.embedded import english, french, numerals


class Phrase(NamedTuple):
    """Words in both languages, with what the rest of the sentence must agree with.

    `negated` holds both texts under negation where they differ ("any bread", "de pain").
    `pronoun` is the French subject pronoun, `owner` the English word for what is its own.
    """

    english: str
    french: str
    person: int = 3
    plural: bool = False
    feminine: bool = False
    negated: tuple = ()
    pronoun: str = ""
    owner: str = ""

    @property
    def verb_person(self):
        """Which of `french.PERSONS` the French verb agrees with."""
        if self.person == 1:
            return "nous" if self.plural else "je"
        if self.person == 2:
            return "vous"
        return "ils" if self.plural else "il"


# "you" is one polite man, "they" are men or mixed: English leaves it open, a corpus must not.
PRONOUNS = {
    "I": Phrase("I", "je", 1, False, False, (), "je", "my"),
    "you": Phrase("you", "vous", 2, False, False, (), "vous", "your"),
    "he": Phrase("he", "il", 3, False, False, (), "il", "his"),
    "she": Phrase("she", "elle", 3, False, True, (), "elle", "her"),
    "we": Phrase("we", "nous", 1, True, False, (), "nous", "our"),
    "they": Phrase("they", "ils", 3, True, False, (), "ils", "their"),
}


class ObjectPronoun(NamedTuple):
    """A pronoun as an object: "him" is "le", and "lui" for "to him"."""

    english: str
    french_direct: str
    french_indirect: str
    feminine: bool = False
    plural: bool = False


OBJECT_PRONOUNS = {
    "I": ObjectPronoun("me", "me", "me"),
    "you": ObjectPronoun("you", "vous", "vous"),
    "he": ObjectPronoun("him", "le", "lui"),
    "she": ObjectPronoun("her", "la", "lui", feminine=True),
    "we": ObjectPronoun("us", "nous", "nous", plural=True),
    "they": ObjectPronoun("them", "les", "leur", plural=True),
}

# Pronouns after "than".
STRESSED_PRONOUNS = {
    "I": Phrase("me", "moi"),
    "you": Phrase("you", "vous"),
    "he": Phrase("him", "lui"),
    "she": Phrase("her", "elle"),
    "we": Phrase("us", "nous"),
    "they": Phrase("them", "eux"),
}


def _bearer(feminine, plural):
    """Returns the French subject pronoun and the English possessive that take up a noun."""
    if plural:
        return "elles" if feminine else "ils", "their"
    return ("elle", "her") if feminine else ("il", "his")


def noun_phrase(noun, determiner, plural=False, adjectives=(), count=None, possessor=None):
    """Returns a noun with its determiner and adjectives.

    Args:
        noun: a `lexicon.Noun`.
        determiner: "the", "a", "some", "this", "my", …, "many", "several",
            "which", "how many", "generic" (cats, les chats) or "no-article".
        plural: whether it is plural.
        adjectives: `adjectives.Adjective`s in English order.
        count: a number behind the determiner.
        possessor: a `Phrase` whose the thing is ("my brother's car").

    Returns:
        A `Phrase`.

    Example:

    >>> noun_phrase(lexicon.NOUNS["tree"], "this", plural=True, count=21)[:2]
    ('these twenty-one trees', 'ces vingt et un arbres')
    """
    words = [noun.french_plural if plural else noun.french]
    for item in adjectives:
        if item.place == "before":
            words.insert(0, french_adjective(item, noun.feminine, plural, before=words[0]))
    adjective_first = len(words) > 1
    words += [french_adjective(x, noun.feminine, plural) for x in adjectives if x.place == "after"]
    english_words = [item.english for item in adjectives]
    english_words.append(noun.english_plural if plural else noun.english)
    if count is not None:
        words.insert(0, numerals.french_number(count, noun.feminine))
        english_words.insert(0, numerals.english_number(count))
    french_rest, english_rest = " ".join(words), " ".join(english_words)
    mass = noun.english_plural is None
    article = french.determiner(
        determiner, french_rest, noun.feminine, plural, mass, adjective_first
    )
    french_text = f"{article} {french_rest}".strip()
    english_text = _determined(determiner, english_rest, plural)
    negated = ()
    if possessor is not None:
        english_text = f"{english.possessive(possessor.english)} {english_rest}"
        french_text = f"{french_text} {french.contract('de', possessor.french)}"
    elif determiner in ("a", "some"):
        any_text = f"any {english_rest}" if determiner == "some" else english_text
        negated = (any_text, f"de {french_rest}")
    pronoun, owner = _bearer(noun.feminine, plural)
    return Phrase(
        english_text,
        french_text,
        plural=plural,
        feminine=noun.feminine,
        negated=negated,
        pronoun=pronoun,
        owner=owner,
    )


def french_adjective(item, feminine, plural, before=""):
    """Returns the French form of an `Adjective`, see `french.adjective`."""
    return french.adjective(item.masculine, item.feminine, feminine, plural, before)


def _determined(determiner, rest, plural):
    if determiner == "a":
        return f"{english.article(rest)} {rest}"
    if determiner in ("generic", "no-article"):
        return rest
    if determiner == "this" and plural:
        determiner = "these"
    return f"{determiner} {rest}"


def prepositional(english_word, french_word, phrase):
    """Returns a phrase behind a preposition, with contraction: "to the station", "à la gare"."""
    negated = ()
    if phrase.negated:
        english_text, french_text = phrase.negated
        negated = (
            f"{english_word} {english_text}".strip(),
            french.contract(french_word, french_text),
        )
    return phrase._replace(
        english=f"{english_word} {phrase.english}".strip(),
        french=french.contract(french_word, phrase.french),
        negated=negated,
    )


def superlative(noun, item, scope, plural=False):
    """Returns "the biggest house in the village", "la plus grande maison du village".

    Args:
        noun: a `lexicon.Noun`.
        item: an `adjectives.Adjective` with a comparative.
        scope: a `Phrase` for what one chooses among ("the village").
        plural: whether it is plural.

    Returns:
        A `Phrase`.
    """
    most = english.superlative(item.comparative)
    most = f"{most} {item.english}" if item.comparative == "more" else most
    head = noun.french_plural if plural else noun.french
    word = french_adjective(item, noun.feminine, plural)
    article = french.determiner("the", "", noun.feminine, plural)
    degree = french.comparative(word)
    if item.place == "before":
        french_text = f"{article} {degree} {head}"
    else:
        french_text = f"{article} {head} {article} {degree}"
    return Phrase(
        f"the {most} {noun.english_plural if plural else noun.english} in {scope.english}",
        f"{french_text} {french.contract('de', scope.french)}",
        plural=plural,
        feminine=noun.feminine,
    )


def comparison(item, subject, kind="more"):
    """Returns the (English, French) of "taller than", "more useful than", "as tall as".

    Args:
        item: an `adjectives.Adjective` with a comparative.
        subject: the `Phrase` that is compared.
        kind: "more", "less" (of long adjectives) or "as".
    """
    word = french_adjective(item, subject.feminine, subject.plural)
    if kind == "as":
        return f"as {item.english} as", f"aussi {word} que"
    if kind == "less":
        return f"less {item.english} than", f"moins {word} que"
    long = item.comparative == "more"
    english_text = f"more {item.english}" if long else item.comparative
    return f"{english_text} than", f"{french.comparative(word)} que"


def joined(first, second):
    """Returns "first and second" as a subject."""
    feminine = first.feminine and second.feminine
    pronoun, owner = _bearer(feminine, plural=True)
    return Phrase(
        f"{first.english} and {second.english}",
        f"{first.french} et {second.french}",
        plural=True,
        feminine=feminine,
        pronoun=pronoun,
        owner=owner,
    )
