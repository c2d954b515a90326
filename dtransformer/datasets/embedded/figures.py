"""Statements with numbers and hours: each function returns a random sentence pair."""

from dtransformer.datasets.embedded import (
    adjectives,
    circumstances,
    clauses,
    grammar,
    lexicon,
    numerals,
    phrases,
    verbs,
)
from dtransformer.datasets.embedded.draw import Weighted
from dtransformer.datasets.embedded.grammar import Clause, sentence, told
from dtransformer.datasets.embedded.noun_phrases import Phrase, noun_phrase

# Nouns, least, most, step.
_AGES = (
    ("youngster son daughter", 3, 17, 1),
    ("brother sister cousin friend neighbor student", 12, 60, 1),
    ("mother father uncle aunt teacher doctor nurse lawyer actor", 28, 70, 1),
    ("grandmother grandfather", 61, 99, 1),
    ("dog cat horse tree car bike", 2, 18, 1),
    ("church castle bridge house", 50, 900, 50),
)
_PRICES = (
    ("book newspaper umbrella ticket bag", 2, 60, 1),
    ("clothes suitcase lamp", 10, 195, 5),
    ("furniture bike camera phone", 40, 950, 10),
    ("cake sandwich pizza cup plate glass", 2, 25, 1),
)
_AGE_TENSES = Weighted({"present": 3, "past": 1, "future": 1})
_AGE_TIMES = {
    "past": (Phrase("last year", "le année dernière"),),
    "future": (Phrase("next year", "le année prochaine"),),
}
_COST = verbs.make_verb("cost", "coûter")


def _draw_row(draw, rows):
    names, low, high, step = draw.choice(rows)
    number = low + step * draw.below((high - low) // step + 1)
    return draw.choice(lexicon.nouns(names)), number


def age(draw):
    """My grandfather is eighty-one years old."""
    subject, years = aged(draw)
    if draw.chance(30):
        subject = phrases.pronoun(draw) if draw.chance(60) else phrases.name(draw)
        years = draw.between(5, 99)
    english_text = f"{numerals.english_number(years)} years old"
    words = Phrase(english_text, f"{numerals.french_number(years)} ans")
    tense = draw.weighted(_AGE_TENSES)
    return told(Clause(subject, verbs.BE_AS_HAVE, tense, (words, *_AGE_TIMES.get(tense, ()))))


def aged(draw):
    """Returns a subject and an age that suits it."""
    noun, years = _draw_row(draw, _AGES)
    determiner = draw.choice(phrases.OWNERS if noun.kind == "kin" else ("this", "the"))
    return noun_phrase(noun, determiner), years


def price(draw):
    """These shoes cost eighty-five euros."""
    subject, euros = priced(draw)
    english_text = f"{numerals.english_number(euros)} euros"
    words = Phrase(english_text, f"{numerals.french_number(euros)} euros")
    return told(Clause(subject, _COST, "present", (words,)))


def priced(draw):
    """Returns a subject and a price that suits it."""
    noun, euros = _draw_row(draw, _PRICES)
    determiner = draw.choice(("this", "this", "the", "your"))
    plural = draw.chance(25) or noun.english in phrases.PAIRS
    return noun_phrase(noun, determiner, plural, phrases.attributes(draw, noun, 20)), euros


def clock(draw):
    """It is half past three."""
    english_time, french_time = numerals.clock_time(draw.below(12), 5 * draw.below(12))
    return sentence(f"it is {english_time}", f"il est {french_time}")


# Subjects and what they do at an hour, with the earliest and the latest.
_OPENING = (verbs.make_verb("open", "ouvrir"), 7, 11)
_CLOSING = (verbs.make_verb("close", "fermer"), 4, 11)
_LEAVING = (verbs.make_verb("leave", "partir"), 1, 12)
_ARRIVING = (verbs.make_verb("arrive", "arriver"), 1, 12)
_STARTING = (verbs.make_verb("start", "commencer"), 1, 12)
_LAST = verbs.make_verb("last", "durer")
SCHEDULES = (
    (lexicon.nouns("museum restaurant library shop"), (_OPENING, _CLOSING)),
    (lexicon.nouns("train bus plane"), (_LEAVING, _ARRIVING)),
    (lexicon.nouns("scheduled"), (_STARTING,)),
)


def schedule(draw):
    """The museum opens at nine o'clock. The train from Paris …: it leaves at noon."""
    nouns, events = draw.choice(SCHEDULES)
    noun, (verb, first, last) = draw.choice(nouns), draw.choice(events)
    hour = phrases.hour_of(draw, first, last)
    more = draw.chance(40)
    if noun.kind == "transport":
        subject = noun_phrase(noun, draw.choice(("the", "our")))
        city, ville = draw.choice(circumstances.CITIES)
        where = Phrase(f"in {city}", f"à {ville}")
        if verb is _LEAVING[0]:
            where = Phrase(f"from {city}", f"de {ville}")
        tense = draw.choice(("present", "future", "past"))
        return told(Clause(subject, verb, tense, (where, hour) if more else (hour,)))
    if verb is _STARTING[0]:
        subject = noun_phrase(noun, draw.choice(("the", "our")))
        if more:
            lasting = Phrase(*phrases.duration(draw, "minute hour"))
            return told(Clause(subject, _LAST, "present", (lasting,)))
        return told(Clause(subject, verb, draw.choice(("present", "future")), (hour,)))
    subject = noun_phrase(noun, draw.choice(("the", "this")))
    day, jour = draw.choice(circumstances.DAYS)
    every = Phrase(f"every {day}", f"tous les {jour}s")
    return told(Clause(subject, verb, "present", (hour, every) if more else (hour,)))


_BIRTHDAY = lexicon.Noun("", "birthday", "birthdays", "anniversaire", "anniversaires", False)


def birthday(draw):
    """My birthday is in May."""
    month, mois = draw.choice(circumstances.MONTHS)
    subject = noun_phrase(_BIRTHDAY, draw.choice(("my", "your", "his", "her")))
    if draw.chance(60):
        who = phrases.relative(draw, plural_too=False)
        subject = noun_phrase(_BIRTHDAY, "the", possessor=who)
    return told(Clause(subject, verbs.BE, "present", (Phrase(f"in {month}", f"en {mois}"),)))


def until_now(draw, clause, units="month year", dates=True):
    """Returns a clause with "for three years" or "since Monday" as a sentence.

    English has the perfect there, French the present.

    Args:
        draw: a `Draw`.
        clause: a `Clause` in an English perfect.
        units: what the time is counted in.
        dates: whether "since Monday" and "since May" may come instead.
    """
    if dates and draw.chance(25):
        word, mot = draw.choice(circumstances.DAYS + circumstances.MONTHS)
        since = Phrase(f"since {word}", f"depuis {mot}")
    else:
        words, mots = phrases.duration(draw, units)
        since = Phrase(f"for {words}", f"depuis {mots}")
    clause = clause._replace(complements=(*clause.complements, since))
    french_clause = clause._replace(tense="present")
    return sentence(grammar.english_statement(clause), grammar.french_statement(french_clause))


_KNOW = verbs.make_verb("know", "connaître", state=True)
_LASTING_MOODS = ("sick", "tired", "happy", "sad", "busy")
_LASTING = tuple(
    frame
    for frame in verbs.INTRANSITIVE + verbs.TRANSITIVE
    if frame.words
    in ("sleep", "work", "run", "swim", "walk", "dance", "rest", "wait for", "look for", "read")
    + ("play tennis", "play football", "play the piano", "watch television", "repair")
    + ("listen to the radio", "clean", "talk to")
)


def lasting(draw):
    """She has been waiting for the bus for twenty minutes. I worked for two hours."""
    subject = phrases.subject(draw)
    pick = draw.below(4)
    if pick == 0:
        whom = phrases.name(draw) if draw.chance(50) else phrases.person(draw)
        whom = phrases.person(draw) if whom == subject else whom
        return until_now(draw, Clause(subject, _KNOW, "perfect", (whom,)))
    if pick == 1:
        mood = adjectives.predicate(draw.choice(_LASTING_MOODS))
        words = clauses.adjective_words(draw, mood, subject, degrees=False)
        return until_now(draw, clauses.copula(draw, subject, words, "perfect", ""), "hour day week")
    frame = draw.choice(_LASTING)
    clause = Clause(subject, frame.verb, "perfect progressive", _with_place(draw, frame, subject))
    if pick == 2:
        if frame.words in ("work", "play the piano"):
            return until_now(draw, clause)
        return until_now(draw, clause, "minute hour", dates=False)
    words, mots = phrases.duration(draw, "minute hour")
    during = Phrase(f"for {words}", f"pendant {mots}")
    tense = clauses.plain_past(frame.verb, draw.choice(("past", "past", "past", "future")))
    return told(clause._replace(tense=tense, complements=(*clause.complements, during)))


def _with_place(draw, frame, subject):
    found = clauses.objects(draw, frame, subject)
    if frame.uses and draw.chance(35):
        found.append(phrases.place_at(draw, frame.uses))
    return tuple(found)
