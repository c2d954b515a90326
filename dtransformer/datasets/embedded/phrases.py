"""Random pieces of sentences: subjects, objects, places and times."""

from dtransformer.datasets.embedded import (
    adjectives,
    circumstances,
    french,
    lexicon,
    noun_phrases,
    numerals,
)
from dtransformer.datasets.embedded.draw import Weighted
from dtransformer.datasets.embedded.noun_phrases import (
    Phrase,
    noun_phrase,
    prepositional,
)

OWNERS = ("my", "your", "his", "her", "our", "their")

_ADULTS = lexicon.nouns("adult youngster")
_KIN = lexicon.nouns("kin")
_PETS = lexicon.nouns("dog cat")
_PARENTS = Phrase("parents", "parents", plural=True, pronoun="ils", owner="their")

_SUBJECTS = Weighted({"pronoun": 50, "name": 16, "two": 3, "kin": 16, "person": 15})
_PRONOUNS = Weighted({"I": 20, "you": 14, "he": 20, "she": 20, "we": 13, "they": 13})
_PERSON_DETERMINERS = Weighted({"the": 60, "this": 18, "a": 4, "my": 6, "your": 6})

# Before an object: what the words may be, by the frame's style.
_STYLES = {
    "any": Weighted({"a": 30, "the": 20, "this": 14, "own": 14, "some": 10, "count": 12}),
    "new": Weighted({"a": 48, "some": 18, "count": 20, "several": 7, "many": 2, "this": 5}),
    "indefinite": Weighted({"a": 48, "some": 20, "count": 20, "several": 7, "many": 5}),
    "known": Weighted({"the": 60, "this": 40}),
    "the": Weighted({"the": 46, "this": 20, "own": 22, "count": 6, "of": 6}),
    "own": Weighted({"own": 48, "the": 22, "of": 16, "this": 14}),
    "named": Weighted({"own": 60, "of": 25, "the": 15}),
    "worn": Weighted({"a": 50, "own": 25, "this": 14, "the": 11}),
    "ride": Weighted({"the": 66, "this": 20, "a": 14}),
    "plain": Weighted({"some": 70, "the": 30}),
    "mass": Weighted({"some": 62, "the": 22, "measure": 16}),
}
_COUNTED = frozenset(("some", "count", "several", "many"))
PAIRS = frozenset(("shoe",))  # said in the plural
# Nobody wants, buys or writes what is such.
_UNWANTED = frozenset(("dirty", "empty", "bad", "noisy", "heavy", "famous"))
# What may follow another adjective, in English and behind the French noun.
_LAST_IN_LINE = frozenset(
    ("red", "blue", "green", "black", "white", "brown", "French", "Italian", "Spanish", "German")
)

# English, French, feminine, what it holds.
_MEASURES = (
    ("cup", "tasse", True, "cuppable"),
    ("glass", "verre", False, "bottled"),
    ("bottle", "bouteille", True, "bottled"),
)


def _measured():
    found = {}
    for english_word, french_word, feminine, names in _MEASURES:
        for noun in lexicon.nouns(names):
            text = french.contract("de", noun.french)
            article = "une" if feminine else "un"
            phrase = Phrase(
                f"a {english_word} of {noun.english}",
                f"{article} {french_word} {text}",
                feminine=feminine,
                negated=(f"a {english_word} of {noun.english}", f"de {french_word} {text}"),
            )
            found.setdefault(noun.english, []).append(phrase)
    return found


_MEASURED = _measured()


def subject(draw):
    """Returns a random person as a subject."""
    kind = draw.weighted(_SUBJECTS)
    if kind == "pronoun":
        return pronoun(draw)
    if kind == "name":
        return name(draw)
    if kind == "two":
        first, second = name(draw), name(draw)
        return first if first == second else noun_phrases.joined(first, second)
    if kind == "kin":
        return relative(draw)
    return person(draw)


def pronoun(draw):
    """Returns a random subject pronoun."""
    return noun_phrases.PRONOUNS[draw.weighted(_PRONOUNS)]


def name(draw):
    """Returns a random first name."""
    if draw.chance(50):
        return Phrase(text := draw.choice(circumstances.MEN), text, pronoun="il", owner="his")
    text = draw.choice(circumstances.WOMEN)
    return Phrase(text, text, feminine=True, pronoun="elle", owner="her")


def relative(draw, owner=None, plural_too=True):
    """Returns "my mother", "her brothers", "Paul's uncle", "our parents"."""
    owner = owner or draw.choice(("my", "my", "my", "your", "his", "her", "our", "their"))
    if plural_too and draw.chance(8):
        determiner = french.determiner(owner, "parents", plural=True)
        return _PARENTS._replace(english=f"{owner} parents", french=f"{determiner} parents")
    noun = draw.choice(_KIN)
    plural = plural_too and noun.english_plural is not None and draw.chance(18)
    if draw.chance(10):
        return noun_phrase(noun, "the", plural, possessor=name(draw))
    return noun_phrase(noun, owner, plural, attributes(draw, noun, 10))


def person(draw, plural_too=True):
    """Returns "the young doctor", "this man", "my teacher", "the students"."""
    noun = draw.choice(_ADULTS)
    plural = plural_too and draw.chance(22)
    determiner = draw.weighted(_PERSON_DETERMINERS)
    if determiner == "a" and plural:
        determiner = "the"
    if determiner in ("my", "your") and noun.english not in ("teacher", "doctor", "lawyer"):
        determiner = "the"
    return noun_phrase(noun, determiner, plural, attributes(draw, noun, 28))


def one_person(draw, owner=None):
    """Returns a name, a relative or another person, as an object."""
    pick = draw.below(10)
    if pick < 3:
        return name(draw)
    return relative(draw, owner) if pick < 7 else person(draw)


def animal(draw, noun):
    """Returns an animal as a subject."""
    if noun in _PETS and draw.chance(60):
        if draw.chance(20):
            return noun_phrase(noun, "the", possessor=name(draw))
        determiner = draw.choice(OWNERS + ("the", "this"))
        return noun_phrase(noun, determiner, draw.chance(15), attributes(draw, noun, 20))
    determiner = "the" if draw.chance(80) else "this"
    return noun_phrase(noun, determiner, draw.chance(35), attributes(draw, noun, 30))


def attributes(draw, noun, percent):
    """Returns a tuple of adjectives that may stand beside a noun, mostly empty."""
    options = adjectives.ATTRIBUTES.get(noun.english)
    if not options or not draw.chance(percent):
        return ()
    first = draw.choice(options)
    if first.place == "before" and draw.chance(20):
        second = draw.choice(options)
        if second.english in _LAST_IN_LINE:
            return (first, second)
    return (first,)


def object_phrase(draw, frame, owner="my", counted=True):
    """Returns a random object for a verb frame.

    Args:
        draw: a `Draw`.
        frame: a `verbs.Frame` with objects.
        owner: the English possessive of the subject ("his").
        counted: as in `thing`.

    Returns:
        A `Phrase`, behind the verb's preposition where it has one.
    """
    if frame.style == "person":
        phrase = one_person(draw, owner if draw.chance(60) else None)
    else:
        phrase = thing(draw, draw.choice(frame.objects), frame.style, owner, counted)
    if frame.verb.preposition:
        phrase = prepositional("", frame.verb.preposition, phrase)
    return phrase


def thing(draw, noun, style, owner="my", counted=True):
    """Returns a noun that is no person with random words around it.

    Args:
        draw: a `Draw`.
        noun: a `lexicon.Noun`.
        style: a key of `_STYLES`; nouns without a plural have their own.
        owner: the English possessive of the subject ("his").
        counted: whether "three" or "several" may stand before it (not under negation).

    Returns:
        A `Phrase`.
    """
    if noun.english_plural is None and style in ("new", "any"):
        style = "mass"
    determiner = draw.weighted(_STYLES[style])
    if determiner in _COUNTED and not counted:
        determiner = "some"
    if determiner == "of" and noun.kind in ("thought", "work", "show"):
        determiner = "the"
    if noun.english in PAIRS and determiner in ("a", "count"):
        determiner = "some"
    plural = determiner in _COUNTED and noun.english_plural is not None
    if determiner == "measure":
        if noun.english in _MEASURED:
            return draw.choice(_MEASURED[noun.english])
        determiner = "some"
    if not plural and noun.english_plural is not None and determiner in ("the", "this", "own"):
        plural = style != "ride" and (draw.chance(18) or noun.english in PAIRS)
    if determiner == "of":
        possessor = name(draw) if draw.chance(40) else relative(draw, plural_too=False)
        return noun_phrase(noun, "the", plural, attributes(draw, noun, 8), possessor=possessor)
    words = attributes(draw, noun, 34)
    if style in ("new", "worn", "ride") and any(item.english in _UNWANTED for item in words):
        words = ()
    if determiner == "count":
        return noun_phrase(
            noun, "no-article", True, words, count=2 + draw.below(draw.between(1, 10))
        )
    if determiner == "own":
        determiner = owner if draw.chance(80) else draw.choice(OWNERS)
    return noun_phrase(noun, determiner, plural, words)


def place_at(draw, uses):
    """Returns a place where one does what `uses` names, or None where there are none."""
    if not uses:
        return None
    place = draw.choice(circumstances.PLACES_BY_USE[draw.choice(uses)])
    return Phrase(place.english_at, place.french_at)


def town_or_country(draw):
    """Returns "in Paris", "in Japan"."""
    if draw.chance(60):
        english_name, french_name = draw.choice(circumstances.CITIES)
        return Phrase(f"in {english_name}", f"à {french_name}")
    country = draw.choice(circumstances.COUNTRIES)
    return Phrase(f"in {country[0]}", country[2])


def time_of(draw, kind, memorable=True):
    """Returns a random time.

    Args:
        draw: a `Draw`.
        kind: "habit", "routine" (an hour or a season, as after "often"), "now", "past" or
            "future".
        memorable: whether it may lie a week, a month or a year from now.

    Returns:
        A `Phrase`.
    """
    form = draw.weighted(_TIME_FORMS[kind])
    if form == "month" and kind == "future" and not memorable:
        form = "word"
    if form == "hour":
        return hour_of(draw)
    if form == "season" or form == "month":
        return season_or_month(draw, form)
    if form == "count":
        units = "day week month year" if memorable else "day"
        english_text, french_text = duration(draw, units)
        if kind == "past":
            return Phrase(f"{english_text} ago", f"il y a {french_text}")
        return Phrase(f"in {english_text}", f"dans {french_text}")
    if kind in ("past", "future"):
        kind += " period" if memorable and draw.chance(36) else " day"
    return Phrase(*draw.choice(circumstances.TIMES[kind]))


_TIME_FORMS = {
    "habit": Weighted({"hour": 20, "season": 6, "month": 4, "word": 70}),
    "routine": Weighted({"hour": 60, "season": 25, "month": 15}),
    "now": Weighted({"word": 1}),
    "past": Weighted({"count": 14, "hour": 8, "word": 78}),
    "future": Weighted({"count": 8, "hour": 16, "month": 7, "word": 69}),
}


def season_or_month(draw, form=""):
    """Returns "in winter", "en hiver" or "in May", "en mai"."""
    if form == "season" or not form and draw.chance(60):
        season, saison = draw.choice(circumstances.SEASONS)
        return Phrase(f"in {season}", saison)
    month, mois = draw.choice(circumstances.MONTHS)
    return Phrase(f"in {month}", f"en {mois}")


def hour_of(draw, first=1, last=12):
    """Returns "at half past three", "à trois heures et demie", between two hours."""
    hour = draw.between(first, last)
    minute = draw.choice((0, 0, 0, 15, 30, 30, 45, 10, 20, 40, 50)) if hour < 12 else 0
    english_time, french_time = numerals.clock_time(hour, minute)
    return Phrase(f"at {english_time}", f"à {french_time}")


# English, French, feminine, the longest that is said.
_UNITS = {
    "minute": ("minutes", "minutes", True, 50),
    "hour": ("hours", "heures", True, 12),
    "day": ("days", "jours", False, 10),
    "week": ("weeks", "semaines", True, 6),
    "month": ("months", "mois", False, 10),
    "year": ("years", "ans", False, 20),
}


def duration(draw, units):
    """Returns the (English, French) of "three days" in one of `units`, a string of words."""
    english_unit, french_unit, feminine, longest = _UNITS[draw.choice(units.split())]
    count = draw.between(2, longest)
    return (
        f"{numerals.english_number(count)} {english_unit}",
        f"{numerals.french_number(count, feminine)} {french_unit}",
    )
