"""Random clauses: who does what, when and where, with words that go together."""

from dtransformer.datasets.embedded import (
    circumstances,
    grammar,
    lexicon,
    phrases,
    verbs,
)
from dtransformer.datasets.embedded.draw import Weighted
from dtransformer.datasets.embedded.grammar import Clause
from dtransformer.datasets.embedded.noun_phrases import (
    OBJECT_PRONOUNS,
    Phrase,
    french_adjective,
    prepositional,
)

# Tenses by aspect. "habit" is the present of what one does again and again.
_TENSES = {
    "event": Weighted(
        {
            "progressive": 24,
            "past": 24,
            "perfect": 9,
            "future": 10,
            "going to": 16,
            "past progressive": 3,
            "just": 4,
        }
    ),
    "habitual": Weighted(
        {
            "habit": 26,
            "progressive": 18,
            "past": 18,
            "perfect": 8,
            "future": 8,
            "going to": 14,
            "past progressive": 3,
            "just": 4,
        }
    ),
    "instant": Weighted({"past": 54, "perfect": 20, "future": 12, "going to": 8, "just": 6}),
    "lasting": Weighted({"progressive": 40, "past": 30, "future": 10, "going to": 20}),
    "insight": Weighted({"present": 50, "past": 40, "future": 10}),
    "state": Weighted({"present": 70, "past": 24, "future": 6}),
    "bond": Weighted({"present": 76, "past": 24}),
}
_MODALS = Weighted({"can": 26, "must": 20, "should": 18, "could": 8, "would like to": 28})
_CHAIN_TENSES = {
    "state": Weighted({"present": 70, "past": 30}),
    "event": Weighted({"progressive": 50, "past": 40, "going to": 10}),
    "instant": Weighted({"past": 60, "perfect": 24, "going to": 16}),
}
_TIME_OF_TENSE = {
    "habit": "habit",
    "progressive": "now",
    "past": "past",
    "future": "future",
    "going to": "future",
}
_MANNERS = (("a lot", "beaucoup"), ("well", "bien"), ("very well", "très bien"))
_WELL = frozenset(("sleep", "work", "sing", "dance", "swim"))
_A_LOT = frozenset(("sleep", "work", "sing", "walk"))

_DEGREES = Weighted(
    {
        ("", ""): 64,
        ("very", "très"): 22,
        ("too", "trop"): 7,
        ("a little", "un peu"): 7,
    }
)
# What is so or not, without degrees.
_ABSOLUTE = frozenset(
    "delicious ready open closed broken late early red blue green black white brown "
    "French Italian Spanish German empty full famous beautiful pretty good".split()
)
# What can be too much or a little so.
_TOO_MUCH = frozenset(
    "big small tall old young long short expensive heavy hot cold difficult easy noisy busy tired "
    "late early sick sad dirty".split()
)


def action(draw, subject=None, subordinate=False):
    """Returns a random clause in which somebody does something.

    Args:
        draw: a `Draw`.
        subject: who does it; a random person where None.
        subordinate: whether the clause is a part of a sentence and should stay short.
    """
    subject = subject or phrases.subject(draw)
    frame = draw.choice(verbs.TRANSITIVE if draw.chance(62) else verbs.INTRANSITIVE)
    return frame_clause(draw, subject, frame, subordinate)


def animal_action(draw):
    """Returns a random clause in which an animal does something."""
    names = draw.choice(tuple(verbs.ANIMAL))
    animal = phrases.animal(draw, draw.choice(lexicon.nouns(names)))
    return frame_clause(draw, animal, draw.choice(verbs.ANIMAL[names]), alone=True)


def frame_clause(draw, subject, frame, subordinate=False, alone=False):
    """Returns a random clause with a given verb frame.

    Args:
        draw: a `Draw`.
        subject: a `Phrase`.
        frame: a `verbs.Frame`.
        subordinate: as in `action`.
        alone: whether nobody may come along ("with my sister").
    """
    tense = draw.weighted(_TENSES["habitual" if frame.habit else frame.aspect])
    tense = plain_past(frame.verb, tense)
    times = _TIME_OF_TENSE.get(tense)
    polarity, adverb = _polarity_and_adverb(draw, tense)
    if tense == "habit":
        tense = "present"
        if polarity or adverb[0]:
            times = "routine"
    manner = ("", "")
    if times != "habit" and not adverb[0] and tense not in ("perfect", "just"):
        manner = _manner(draw, frame)
    complements = objects(draw, frame, subject, counted=polarity == "")
    if not manner[0]:
        complements += _circumstances(draw, frame, times, subordinate, alone or subordinate)
    return Clause(subject, frame.verb, tense, tuple(complements), polarity, adverb, manner)


def _polarity_and_adverb(draw, tense):
    """Returns how a tense is denied, if it is, and an adverb that goes with it."""
    pick = draw.below(100)
    if tense == "habit" and pick < 45:
        return "", draw.choice(circumstances.FREQUENCIES)
    if tense == "habit" and pick < 65:
        return draw.choice(("never", "no longer")), ("", "")
    if tense == "perfect" and pick < 30:
        return "", ("already", "déjà")
    if tense == "perfect" and pick < 65:
        return draw.choice(("not yet", "never", "not")), ("", "")
    if tense not in ("habit", "perfect", "just") and pick < 16:
        return "not", ("", "")
    return "", ("", "")


def plain_past(verb, tense):
    """Returns "perfect" for the past of "read" and "put", which English writes like the present."""
    ambiguous = verb.english.past == verb.english.base
    return "perfect" if tense == "past" and ambiguous else tense


def _manner(draw, frame):
    if frame.words in _A_LOT and draw.chance(14):
        return _MANNERS[0]
    if frame.words in _WELL and draw.chance(18):
        return draw.choice(_MANNERS[1:])
    return ("", "")


def objects(draw, frame, subject, counted=True):
    """Returns a list of the random object of a frame, empty where it takes none."""
    if not frame.objects:
        return []
    return [phrases.object_phrase(draw, frame, subject.owner, counted)]


def _circumstances(draw, frame, times, subordinate, alone):
    found = []
    if frame.uses and draw.chance(30 if subordinate else 52):
        found.append(phrases.place_at(draw, frame.uses))
    elif not alone and frame.words in _SHARED and draw.chance(36):
        companion = phrases.relative(draw, draw.choice(phrases.OWNERS))
        found.append(prepositional("with", "avec", companion))
    # What one does again and again needs a time: "he eats an apple" alone is not English.
    percent = 100 if times == "habit" else 18 if subordinate else 50
    if times and frame.aspect not in _TIMELESS and draw.chance(percent):
        if frame.words in _HOURS and times != "now":
            found.append(phrases.hour_of(draw, *_HOURS[frame.words]))
        else:
            found.append(phrases.time_of(draw, times, memorable=frame.words in _MEMORABLE))
    return found


# Between which hours one does what belongs to a time of the day.
_HOURS = {"get up": (6, 9), "go to bed": (9, 11), "have lunch": (11, 12), "have dinner": (6, 9)}
_TIMELESS = frozenset(("state", "bond", "insight"))
# What one does with somebody.
_SHARED = frozenset(
    ("walk", "swim", "dance", "sing", "go out", "have lunch", "have dinner", "go shopping")
    + ("play tennis", "play football", "watch television", "watch", "go", "visit", "work")
)
# What one remembers for more than a few days.
_MEMORABLE = frozenset(
    "buy sell visit learn go arrive leave write read repair choose meet see send give find lose "
    "bring show".split()
    + ["come back"]
)


def infinitive_action(draw, subject, frames=None, counted=True):
    """Returns a clause without a tense, as it stands behind a modal verb."""
    frame = draw.choice(frames or (_ACTIVITIES if draw.chance(45) else _WANTED))
    complements = objects(draw, frame, subject, counted)
    if frame.uses and draw.chance(38):
        complements.append(phrases.place_at(draw, frame.uses))
    return Clause(subject, frame.verb, "", tuple(complements))


# What one may want, try or forget to do.
_WANTED = tuple(
    frame
    for frame in verbs.TRANSITIVE
    if frame.aspect in ("event", "lasting", "insight") or frame.verb.english.base in ("see", "meet")
)
_ACTIVITIES = tuple(x for x in verbs.INTRANSITIVE if x.verb.english.base != "arrive")
_HOPED = tuple(
    frame
    for frame in _WANTED + _ACTIVITIES
    if frame.verb.english.base in ("visit", "meet", "see", "buy", "sell", "swim", "find", "play")
)
_LIKED = tuple(frame for frame in verbs.INTRANSITIVE if frame.habit) + tuple(
    frame for frame in verbs.TRANSITIVE if frame.verb.english.base in ("help", "visit")
)
_LEARNED = tuple(
    frame
    for frame in verbs.INTRANSITIVE + verbs.TRANSITIVE
    if frame.verb.english.base in ("swim", "dance", "sing", "play", "repair")
)
_FORGOTTEN = tuple(frame for frame in _WANTED if frame.verb.english.base not in ("wear", "see"))
_DECIDED = tuple(frame for frame in _WANTED + _ACTIVITIES if frame.aspect == "event")
_CHAINED = {
    "decide": _DECIDED,
    "hope": _HOPED,
    "like": _LIKED,
    "learn": _LEARNED,
    "forget": _FORGOTTEN,
}


def modal_action(draw, subject=None):
    """Returns a random clause with "can", "must", "should", "could" or "would like to"."""
    subject = subject or phrases.subject(draw)
    negative = draw.chance(18)
    clause = infinitive_action(draw, subject, counted=not negative)
    complements = clause.complements
    if draw.chance(25):
        complements += (phrases.time_of(draw, "future", memorable=False),)
    return clause._replace(
        tense=draw.weighted(_MODALS),
        polarity="not" if negative else "",
        complements=complements,
    )


def chain_action(draw, subject=None):
    """Returns a random clause with "want to", "try to", "decide to" and the like."""
    subject = subject or phrases.subject(draw)
    base = draw.choice(tuple(verbs.CHAINS))
    chain = verbs.CHAINS[base]
    negative = base in ("want", "like", "try", "learn") and draw.chance(18)
    clause = infinitive_action(draw, subject, _CHAINED.get(base), not negative)
    tense = draw.weighted(_CHAIN_TENSES[chain.aspect])
    return clause._replace(tense=tense, polarity="not" if negative else "", chain=chain)


def motion(draw, subject=None):
    """Returns a random clause in which somebody goes or comes somewhere."""
    subject = subject or phrases.subject(draw)
    kind = draw.weighted(_MOTIONS)
    noun = draw.choice(_GOALS)
    near = kind.endswith("place") and noun in _AT_HOME
    if kind.endswith("abroad"):
        target = abroad(draw, kind.split()[0])
    elif kind == "to house":
        host = phrases.relative(draw, plural_too=False)
        target = Phrase(f"to {host.english}'s house", f"chez {host.french}")
    else:
        place = circumstances.PLACES[noun]
        target = Phrase(place.english_to, place.french_to)
        if kind == "from place":
            target = Phrase(place.english_from, place.french_from)
    verb = _COME_BACK if kind.startswith("from") else GO
    habit = kind == "to place" and not near
    clause = frame_clause(draw, subject, verbs.Frame(verb, "event", habit, (), "", ()))
    if near:
        return clause._replace(complements=(target,))
    means = ()
    if verb is GO and clause.polarity == "" and draw.chance(22):
        means = (draw.choice(_MEANS),)
    return clause._replace(complements=(target, *means, *clause.complements))


_MOTIONS = Weighted(
    {"to place": 46, "to abroad": 16, "to house": 10, "from place": 16, "from abroad": 12}
)
_GOALS = tuple(place for place in circumstances.PLACES if place != "street")
_AT_HOME = frozenset(("kitchen", "bedroom", "garden"))
GO = verbs.make_verb("go", "aller")
_COME_BACK = verbs.make_verb("come back", "revenir")
_MEANS = (
    Phrase("by car", "en voiture"),
    Phrase("by train", "en train"),
    Phrase("by bus", "en bus"),
    Phrase("by bike", "à vélo"),
    Phrase("on foot", "à pied"),
)


def abroad(draw, direction):
    """Returns a city or country behind "to" or "from"."""
    if draw.chance(55):
        city, ville = draw.choice(circumstances.CITIES)
        return Phrase(f"{direction} {city}", f"{'à' if direction == 'to' else 'de'} {ville}")
    country, _, to, origin = draw.choice(circumstances.COUNTRIES)
    return Phrase(f"{direction} {country}", to if direction == "to" else origin)


def giving(draw, subject=None):
    """Returns a random clause in which somebody gives, shows or tells somebody something."""
    subject = subject or phrases.subject(draw)
    frame = draw.choice(verbs.GIVING)
    clause = _bare_clause(draw, subject, frame)
    receiver = phrases.one_person(draw, subject.owner)
    if receiver == subject:
        receiver = phrases.relative(draw, "my")
    to_whom = prepositional("to", frame.verb.preposition, receiver)
    item = given(draw, frame, subject.owner, counted=clause.polarity == "")
    return clause._replace(complements=(item, to_whom, *clause.complements))


def given(draw, frame, owner, counted=True):
    """Returns what is given in a frame of `verbs.GIVING`."""
    return phrases.thing(draw, draw.choice(frame.objects), frame.style, owner, counted)


def pronoun_object(draw, subject=None):
    """Returns a random clause with an object pronoun: "I saw her", "she gives me a book"."""
    subject = subject or phrases.subject(draw)
    giving_something = draw.chance(45)
    frame = draw.choice(verbs.GIVING if giving_something else _PERSONAL)
    key = draw.choice(tuple(OBJECT_PRONOUNS))
    # "I see me" and "we see me" are not said.
    if subject.person == 1 and key in ("I", "we") or subject.person == 2 and key == "you":
        key = "they"
    clause = _bare_clause(draw, subject, frame)
    clitic = grammar.object_clitic(key, direct=not frame.verb.preposition)
    complements = clause.complements
    if giving_something:
        item = given(draw, frame, subject.owner, counted=clause.polarity == "")
        complements = (item, *complements)
    return clause._replace(complements=complements, clitic=clitic)


def _bare_clause(draw, subject, frame):
    """Returns a random clause of a frame without its object; the verb loses its preposition."""
    frame = frame._replace(
        verb=frame.verb._replace(preposition=""), objects=(), uses=frame.uses[:1]
    )
    return frame_clause(draw, subject, frame)


_PERSONAL = tuple(
    frame
    for frame in verbs.TRANSITIVE
    if frame.style == "person" or frame.verb.english.base == "see"
)


def copula(draw, subject, predicate, tense=None, polarity=None):
    """Returns the clause "subject is predicate"; the predicate is (English, French)."""
    if tense is None:
        tense = draw.weighted(_COPULA_TENSES)
    if polarity is None:
        polarity = "not" if draw.chance(16) else ""
    return Clause(subject, verbs.BE, tense, (Phrase(*predicate),), polarity)


_COPULA_TENSES = Weighted({"present": 66, "past": 22, "future": 12})


def adjective_words(draw, item, subject, degrees=True):
    """Returns an adjective in agreement with a subject, perhaps with "very"."""
    word = french_adjective(item, subject.feminine, subject.plural)
    degree, degree_fr = ("", "")
    if degrees and item.english not in _ABSOLUTE:
        degree, degree_fr = draw.weighted(_DEGREES)
        if degree in ("too", "a little") and item.english not in _TOO_MUCH:
            degree, degree_fr = "very", "très"
    return f"{degree} {item.english}".strip(), f"{degree_fr} {word}".strip()
