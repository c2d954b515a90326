"""Patterns of the corpus. Each function draws a sentence as an (English, French) pair."""

import re

from harness.corpus import english, french, lexicon, numerals, phrases
from harness.corpus.lexicon import ADJECTIVES, adjectives, nouns, verbs
from harness.corpus.phrases import PRONOUNS, Phrase, clause, joined, sentence

_PEOPLE, _PLACES = nouns("person kin"), nouns("furniture building site vehicle")
_THINGS = nouns("object text clothes furniture vehicle animal")
# The few verbs of motion are drawn more often, because their past uses "être".
_ACTIONS = verbs("event instant activity") + 3 * verbs("motion")
(_BE,), (_HAVE,) = verbs("be"), verbs("age")
_OWNERS = ("my", "your", "his", "her", "our", "their", *(f"{name}'s" for name in lexicon.NAMES))
_KNOWN, _ANY = ("the", "the", "this", "own"), ("the", "the", "a", "a", "this", "own")
_DETERMINERS = {"motion": ("the",), "liking": ("", "", "the", "this")}  # Determiners of objects.
_INSTANT, _STATE = ("past", "past", "will", "going to"), ("present", "present", "past")
_EVENT = (*_INSTANT, "progressive", "progressive", "past progressive", "can", "must", "want to")
_TENSES = {"instant": _INSTANT, "state": _STATE, "liking": _STATE, "cost": ("present", "will")}
_TENSES |= dict.fromkeys(("be", "age", "schedule"), (*_STATE, "will"))
_ADVERBS = {"past": "never", "will": "never", "progressive": "no longer", "present": "no longer"}
_LINKS = ("near|près de", "behind|derrière", "in front of|devant")
_MOODS = [item for item in ADJECTIVES if item.english in ("happy", "tired", "sick")]


def _thing(draw, options, determiners=_ANY, bare=50, negative=False):
    """Return a noun phrase for one of the nouns, in `bare` percent of cases without an adjective."""
    noun, determiner = draw.choice(options), draw.choice(determiners)
    suited = () if noun.kind == "kin" else adjectives(noun, "before", "after", "attribute")
    adjective = draw.choice(suited) if suited and not draw.chance(bare) else None
    plural = noun.english_plural != "" and (determiner == "" or draw.chance(30))
    if noun.kind == "kin" or determiner == "own":
        determiner = draw.choice(_OWNERS)
    elif determiner == "a" and (plural or not noun.english_plural):
        determiner = 2 + draw.below(11) if plural and draw.chance(40) else "some"
    elif determiner == "this" and not noun.english_plural:
        determiner = "the"
    return phrases.noun_phrase(noun, determiner, plural, adjective, negative)


def _subject(draw):
    """Return a subject: a pronoun, a name or a noun phrase."""
    if draw.chance(40):
        return draw.choice(PRONOUNS)[0]
    if draw.chance(25):
        name, feminine = draw.choice(tuple(lexicon.NAMES.items()))
        return Phrase(name, name, feminine=feminine)
    return _thing(draw, _PEOPLE, ("the", "the", "a", "this"))


def _on_and_at(draw):
    """Return two expressions of time: on a day or a date, and at a time of day."""
    date = numerals.date(1 + draw.below(28), draw.below(12))
    on = joined("on|", draw.choice((date, draw.choice(numerals.DAYS))))
    return on, joined("at|à", numerals.clock_time(draw.below(12), 5 * draw.below(12)))


def _when(draw, tense):
    """Return an adverb, a day, a date or a time. In half of the cases it is empty."""
    if draw.chance(50):
        return "|"
    if "progressive" in tense:
        return draw.choice(lexicon.TIMES["past" if "past" in tense else "present"])
    adverb = draw.choice(lexicon.TIMES["past" if tense == "past" else "future"])
    return draw.choice((adverb, *_on_and_at(draw)))


def _does(draw, options, subject=None, rest=(), tense=None, plain=False, **more):
    """Return a clause with one of the verbs, its object and `rest`. See `clause` for `more`.

    A plain clause is positive and has no expression of time.
    """
    verb, subject = draw.choice(options), subject or _subject(draw)
    tenses = _TENSES.get(verb.group, _EVENT)
    tense, polarity = tense or draw.choice(tenses), ""
    if not plain and draw.chance(25):  # "was never" would need another French tense.
        adverb = "not" if tense == "past" and tenses[0] == "present" else _ADVERBS.get(tense, "not")
        polarity = draw.choice(("not", "not", adverb))
    if verb.nouns and verb.group not in ("cost", "schedule"):
        determiners = _DETERMINERS.get(verb.group, _ANY)
        rest = (_thing(draw, verb.nouns, determiners, negative=polarity != ""), *rest)
    when = "|" if plain or verb not in _ACTIONS else _when(draw, tense)
    return clause(subject, verb, tense, polarity, *rest, when, **more)


def _quality(draw, phrase, options):
    """Return the adjective after "is", in agreement with a phrase."""
    adjective = draw.choice(options)
    degree = "very|très" if adjective.comparative != "-" and draw.chance(30) else "|"
    french_word = french.agree(adjective.masculine, adjective.feminine, phrase)
    return joined(degree, (adjective.english, french_word))


def action(draw):
    """They aren't reading any letters. Anna went to the station yesterday."""
    return sentence(_does(draw, _ACTIONS))


def state(draw):
    """She needs a new lamp. The doctor doesn't like cats."""
    return sentence(_does(draw, verbs("state liking")))


def question(draw):
    """Did you find the black cat? Why is she selling her house? Who is waiting for my brother?"""
    if draw.chance(20):
        return sentence(_does(draw, _ACTIONS, Phrase("who", "qui"), plain=True), mark="?")
    word = draw.choice(("|", "where|où", "when|quand", "why|pourquoi"))
    return sentence(word, "|est-ce que", _does(draw, _ACTIONS, plain=True, question=True), mark="?")


def giving(draw):
    """Lucas is showing his photos to the nurse."""
    receiver = joined("to|à", _thing(draw, _PEOPLE, _KNOWN))
    return sentence(_does(draw, verbs("giving"), rest=(receiver,)))


def pronoun(draw):
    """I didn't see her. He gave us a book."""
    subject = _subject(draw)
    others = [row for row in PRONOUNS if {row[0].person, subject.person} & {"il", "ils"}]
    other, english_word, direct, indirect = draw.choice(others)
    if draw.chance(50):
        return sentence(_does(draw, verbs("giving"), subject, clitic=(english_word, indirect)))
    verb = draw.choice([verb for verb in _ACTIONS if set(_PEOPLE) <= set(verb.nouns)])
    more = {"clitic": (english_word, direct), "agreement": other}
    return sentence(_does(draw, (verb._replace(nouns=()),), subject, **more))


def description(draw):
    """The shoes are very expensive. My sister isn't tired."""
    noun = draw.choice(_PEOPLE + _THINGS)
    subject = _thing(draw, (noun,), _KNOWN, bare=100)
    quality = _quality(draw, subject, adjectives(noun, "before", "after", "predicate"))
    return sentence(_does(draw, (_BE,), subject, (quality,)))


def because(draw):
    """She slept because she was sick."""
    subject, tense = _subject(draw), draw.choice(("progressive", "past", "will"))
    fact = _does(draw, verbs("event motion activity"), subject, tense=tense, plain=True)
    subject, reason_tense = phrases.taken_up(subject), "past" if tense == "past" else "present"
    mood = _quality(draw, subject, _MOODS)
    reason = _does(draw, (_BE,), subject, (mood,), reason_tense)
    return sentence(fact, "because|parce que", reason)


def comparison(draw):
    """My house is bigger than this church. The doctor isn't as happy as Paul's aunt."""
    adjective = draw.choice([item for item in ADJECTIVES if item.comparative != "-"])
    noun = draw.choice(ADJECTIVES[adjective])
    others = [item for item in nouns(noun.kind) if item in ADJECTIVES[adjective] and item != noun]
    subject, other = (_thing(draw, x, _KNOWN, bare=100) for x in ([noun], others or [noun]))
    word = french.agree(adjective.masculine, adjective.feminine, subject)
    degree = (f"as {adjective.english} as", f"aussi {word} que")
    if draw.chance(70):
        more = adjective.comparative.replace("more", f"more {adjective.english}")
        degree = (f"{more} than", re.sub("plus bonn?", "meilleur", f"plus {word} que"))
    return sentence(_does(draw, (_BE,), subject, (degree, other)))


def location(draw):
    """The keys are near the lamp. Anna was in front of the church."""
    subject = draw.choice((_subject(draw), _thing(draw, _THINGS, _KNOWN)))
    place = (draw.choice(_LINKS), _thing(draw, _PLACES, _KNOWN))
    return sentence(_does(draw, (_BE,), subject, place))


def existence(draw):
    """There are two cats behind the sofa. There wasn't a car near the station."""
    tense, polarity = draw.choice(_TENSES["be"]), draw.choice(("", "", "not"))
    thing = _thing(draw, _THINGS, ("a",), negative=polarity != "")
    there_is = english.clause(thing._replace(english="there"), _BE, tense, polarity)
    il_y_a = french.clause(Phrase("", "il"), _HAVE, tense, polarity, clitic="y")
    return sentence((there_is, il_y_a), thing, draw.choice(_LINKS), _thing(draw, _PLACES, _KNOWN))


def price(draw):
    """The black shoes cost eighty-one euros."""
    cost, amount = verbs("cost"), joined(numerals.number(2 + draw.below(998)), "euros|euros")
    return sentence(_does(draw, cost, _thing(draw, cost[0].nouns, _KNOWN), (amount,), plain=True))


def age(draw):
    """Her uncle is seventy-one years old."""
    years = joined(numerals.number(2 + draw.below(98)), "years old|ans")
    return sentence(_does(draw, (_HAVE,), rest=(years,), plain=True))


def schedule(draw):
    """The train leaves on Monday at half past nine."""
    verb = draw.choice(verbs("schedule"))
    subject = _thing(draw, verb.nouns, ("the", "this"))
    return sentence(_does(draw, (verb,), subject, _on_and_at(draw), plain=True))


PATTERNS = (action, action, action, action, state, state, question, question, question, giving)
PATTERNS += (pronoun, description, because, comparison, location, existence, price, age, schedule)
