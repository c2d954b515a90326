"""Statements of where things are and of the weather: each function returns a sentence pair."""

from dtransformer.datasets.embedded import (
    circumstances,
    figures,
    french,
    grammar,
    lexicon,
    numerals,
    phrases,
    verbs,
)
from dtransformer.datasets.embedded.draw import Weighted
from dtransformer.datasets.embedded.grammar import Clause, sentence, told
from dtransformer.datasets.embedded.noun_phrases import (
    Phrase,
    noun_phrase,
    prepositional,
)

_POSITIONS = (
    ("on", "sur"),
    ("under", "sous"),
    ("behind", "derrière"),
    ("in front of", "devant"),
    ("next to", "à côté de"),
    ("near", "près de"),
)
# Things, what they are at, and how.
_SITES = tuple(
    (lexicon.nouns(things), lexicon.nouns(sites), positions)
    for things, sites, positions in (
        ("losable book knife letter", "table chair bed sofa", _POSITIONS),
        ("losable book gift", "bag box suitcase", (("in", "dans"),)),
        ("cat dog ball", "table chair bed sofa tree car", _POSITIONS[1:]),
        (
            "restaurant hotel church school museum library shop hospital",
            "church park river castle bridge museum hospital beach",
            _POSITIONS[2:],
        ),
        ("car bike", "house church school hotel tree", _POSITIONS[2:]),
    )
)


def _site(draw, sites=_SITES):
    """Returns a random noun and a `Phrase` for where it is."""
    things, places, positions = draw.choice(sites)
    thing, place = draw.choice(things), draw.choice(places)
    if thing == place:
        return _site(draw, sites)
    own = place.kind != "building" and draw.chance(25)
    phrase = noun_phrase(place, draw.choice(phrases.OWNERS) if own else "the")
    return thing, prepositional(*draw.choice(positions), phrase)


def location(draw):
    """Your keys are on the table."""
    thing, where = _site(draw)
    subject = noun_phrase(thing, "the")
    if thing.kind != "building":
        subject = noun_phrase(thing, draw.choice(("the", *phrases.OWNERS)), draw.chance(30))
    tense = draw.choice(("present", "present", "past"))
    polarity = "not" if draw.chance(15) else ""
    return told(Clause(subject, verbs.BE, tense, (where,), polarity))


_PUT = verbs.make_verb("put", "mettre")
_PUTTING = Weighted(
    {"perfect": 4, "progressive": 3, "future": 2, "going to": 3, "just": 1, "must": 3}
)


def put(draw):
    """He has put the book on the table."""
    subject = phrases.subject(draw)
    thing, where = _site(draw, _SITES[:2])
    what = phrases.thing(draw, thing, "own", subject.owner)
    return told(Clause(subject, _PUT, draw.weighted(_PUTTING), (what, where)))


_CROWD = lexicon.nouns("student teacher woman man child")
_CROWDED = lexicon.nouns("school museum hotel village hospital church park library")
_STORED = lexicon.nouns("fruit food drink snack")
_STORES = (
    Phrase("on the table", "sur la table"),
    Phrase("in the kitchen", "dans la cuisine"),
    Phrase("in the bag", "dans le sac"),
    Phrase("in the box", "dans la boîte"),
)
_THERE_TENSES = Weighted({"present": 3, "past": 1, "future": 1})


def existence(draw):
    """There are three apples on the table. There isn't any bread in the kitchen."""
    pick = draw.below(10)
    if pick < 3:
        count = draw.between(2, 40) if draw.chance(70) else draw.between(41, 600)
        what = noun_phrase(draw.choice(_CROWD), "no-article", True, count=count)
        where = prepositional("in", "dans", noun_phrase(draw.choice(_CROWDED), "the"))
    elif pick < 5:
        noun = draw.choice(_STORED)
        mass = noun.english_plural is None
        where = draw.choice(_STORES[:2] if mass else _STORES)
        what = noun_phrase(noun, "some") if mass else phrases.thing(draw, noun, "indefinite")
    else:
        noun, where = _site(draw)
        if noun.kind == "building":
            what = noun_phrase(noun, "a", adjectives=phrases.attributes(draw, noun, 40))
        else:
            what = phrases.thing(draw, noun, "indefinite")
    negative = bool(what.negated) and draw.chance(22)
    return sentence(*_there_is(what, where, draw.weighted(_THERE_TENSES), negative))


def _there_is(what, where, tense, negative):
    be = {"present": "are" if what.plural else "is", "past": "were" if what.plural else "was"}
    be = be.get(tense, "will not be" if negative else "will be")
    form = verbs.HAVE.french.form("imperfect" if tense == "past" else tense, "il")
    if not negative:
        return (
            f"there {be} {what.english} {where.english}",
            f"il y {form} {what.french} {where.french}",
        )
    be = be if tense == "future" else grammar.english.negate(be)
    return (
        f"there {be} {what.negated[0]} {where.english}",
        f"il ne y {form} pas {what.negated[1]} {where.french}",
    )


_LIVE = verbs.make_verb("live", "habiter", state=True)
_HOMES = lexicon.nouns("house village city hotel castle")
_LIVING = Weighted({"present": 3, "past": 2, "future": 1, "going to": 1, "for": 2})


def residence(draw):
    """My uncle lives in a small house. She has lived in Paris for three years."""
    subject = phrases.subject(draw)
    where = phrases.town_or_country(draw)
    if draw.chance(55):
        noun = draw.choice(_HOMES)
        home = noun_phrase(noun, "a", adjectives=phrases.attributes(draw, noun, 70))
        # "il n'habite plus dans une maison": behind a preposition the article stays.
        where = prepositional("in", "dans", home._replace(negated=()))
    tense = draw.weighted(_LIVING)
    if tense == "for":
        return figures.until_now(draw, Clause(subject, _LIVE, "perfect", (where,)))
    polarity = "no longer" if tense == "present" and draw.chance(35) else ""
    return told(Clause(subject, _LIVE, tense, (where,), polarity))


_DISTANT = lexicon.nouns(
    "hotel school museum hospital church castle beach village restaurant office"
)


def distance(draw):
    """The station is three hundred meters from the hotel."""
    first, second = draw.choice(_DISTANT), draw.choice(_DISTANT)
    if first == second:
        return distance(draw)
    number, unit, unité = 50 * draw.between(2, 19), "meters", "mètres"
    if draw.chance(50):
        number, unit, unité = draw.between(2, 60), "kilometers", "kilomètres"
    ours = first.english in ("hotel", "school", "village", "office") and draw.chance(50)
    subject = noun_phrase(first, "our" if ours else "the")
    origin = noun_phrase(second, "the")
    where = Phrase(
        f"{numerals.english_number(number)} {unit} from {origin.english}",
        f"à {numerals.french_number(number)} {unité} {french.contract('de', origin.french)}",
    )
    return told(Clause(subject, verbs.BE, "present", (where,)))


IT = Phrase("it", "il", pronoun="il")
_THE_WEATHER = Phrase("the weather", "il", pronoun="il")
_IT_IS = verbs.make_verb("be", "faire", state=True)
FALLING = (verbs.make_verb("rain", "pleuvoir"), verbs.make_verb("snow", "neiger"))
# English and French of "it is …" and "the weather is …", and whether one stays at home.
_WEATHER = (
    (IT, "cold", "froid", True),
    (IT, "very cold", "très froid", True),
    (IT, "hot", "chaud", False),
    (IT, "too hot", "trop chaud", False),
    (IT, "dark", "nuit", True),
    (_THE_WEATHER, "nice", "beau", False),
    (_THE_WEATHER, "bad", "mauvais", True),
)
_TENSES = Weighted({"present": 50, "past": 30, "future": 20})
_FALLING_TENSES = Weighted({"progressive": 40, "past": 20, "future": 20, "going to": 20})
_TIMES = {
    "progressive": "now",
    "present": "now",
    "past": "past day",
    "future": "future day",
    "going to": "future day",
}


def weather(draw):
    """It was very cold in Berlin yesterday."""
    polarity = "not" if draw.chance(15) else ""
    if draw.chance(45):
        clause = Clause(IT, draw.choice(FALLING), draw.weighted(_FALLING_TENSES), (), polarity)
    else:
        subject, word, mot, _ = draw.choice(_WEATHER)
        clause = Clause(subject, _IT_IS, draw.weighted(_TENSES), (Phrase(word, mot),), polarity)
    complements = clause.complements
    if draw.chance(50):
        complements += (phrases.town_or_country(draw),)
    if draw.chance(45):
        complements += (Phrase(*draw.choice(circumstances.TIMES[_TIMES[clause.tense]])),)
    return told(clause._replace(complements=complements))


def weather_clause(draw, past, bad):
    """Returns a random clause about the weather as it is or was.

    Args:
        draw: a `Draw`.
        past: whether it was so.
        bad: whether the weather keeps one at home.
    """
    if bad and draw.chance(50):
        return Clause(IT, draw.choice(FALLING), "past progressive" if past else "progressive")
    options = [row for row in _WEATHER if row[3] == bad]
    subject, word, mot, _ = draw.choice(options)
    return Clause(subject, _IT_IS, "past" if past else "present", (Phrase(word, mot),))


def climate(draw):
    """It often snows in Canada in winter."""
    frequency = draw.choice(circumstances.FREQUENCIES)
    around = (phrases.town_or_country(draw), phrases.season_or_month(draw))
    if draw.chance(60):
        return told(Clause(IT, draw.choice(FALLING), "present", around, "", frequency))
    subject, word, mot, _ = draw.choice(_WEATHER[:4])
    return told(Clause(subject, _IT_IS, "present", (Phrase(word, mot), *around), "", frequency))
