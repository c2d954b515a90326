"""Statements of what people do, have and like: each function returns a random sentence pair."""

from dtransformer.datasets.embedded import (
    circumstances,
    clauses,
    grammar,
    lexicon,
    phrases,
    verbs,
)
from dtransformer.datasets.embedded.draw import Weighted
from dtransformer.datasets.embedded.grammar import Clause, sentence, told
from dtransformer.datasets.embedded.noun_phrases import (
    Phrase,
    joined,
    noun_phrase,
    prepositional,
)

_FRONTED = frozenset(
    time for kind in ("past day", "future day") for time in circumstances.TIMES[kind]
)


def action(draw):
    """Paul is reading a newspaper in the garden. Tomorrow, we will play tennis."""
    clause = clauses.action(draw)
    *others, last = clause.complements or (None,)
    if others and last[:2] in _FRONTED and draw.chance(12):
        texts = grammar.statement(clause._replace(complements=tuple(others)))
        return sentence(f"{last.english}, {texts[0]}", f"{last.french}, {texts[1]}")
    return told(clause)


def animal(draw):
    """The black cat is sleeping in the garden."""
    return told(clauses.animal_action(draw))


def modal(draw):
    """You should take the train."""
    return told(clauses.modal_action(draw))


def chain(draw):
    """She is trying to repair the bike."""
    return told(clauses.chain_action(draw))


def motion(draw):
    """We are going to the market by bike."""
    return told(clauses.motion(draw))


def giving(draw):
    """He gave an old book to his sister."""
    return told(clauses.giving(draw))


def pronoun_object(draw):
    """I met her at the station. She sent me a letter."""
    return told(clauses.pronoun_object(draw))


def possession(draw):
    """I have three brothers. We need a new table."""
    subject = phrases.subject(draw)
    if draw.chance(65):
        return told(clauses.frame_clause(draw, subject, draw.choice(_STATES)))
    noun = draw.choice(_RELATIVES)
    if draw.chance(65):
        relatives = noun_phrase(noun, "no-article", True, count=draw.between(2, 6))
        return told(Clause(subject, verbs.HAVE, "present", (relatives,)))
    determiner = draw.choice(("many", "several", "a"))
    relatives = noun_phrase(noun, determiner, plural=determiner != "a")
    polarity = "not" if determiner == "a" and draw.chance(50) else ""
    return told(Clause(subject, verbs.HAVE, "present", (relatives,), polarity))


_STATES = tuple(frame for frame in verbs.TRANSITIVE if frame.aspect in ("state", "bond", "insight"))
_RELATIVES = lexicon.nouns("brother sister son daughter cousin friend uncle aunt")


def liking(draw):
    """Sophie loves strawberries. He prefers tea to coffee."""
    subject = phrases.subject(draw)
    first, second = two_tastes(draw)
    if draw.chance(22):
        second = prepositional("to", "à", second)
        return told(Clause(subject, _PREFER, "present", (first, second)))
    verb = draw.weighted(_LIKINGS)
    polarity = "not" if verb is LIKE and draw.chance(34) else ""
    if not polarity and draw.chance(20):
        first = joined(first, second)
    return told(Clause(subject, verb, "present", (first,), polarity))


LIKE = verbs.make_verb("like", "aimer")
_LIKINGS = Weighted(((LIKE, 55), (verbs.make_verb("love", "adorer"), 45)))
_PREFER = verbs.make_verb("prefer", "préférer")
_TASTES = tuple(
    lexicon.nouns(names)
    for names in (
        "animal",
        "fruit",
        "food",
        "drink",
        "snack",
        "song movie story book",
        "museum castle church",
        "beach garden flower tree",
    )
)


def two_tastes(draw):
    """Returns two things of a kind, in general: "tea", "coffee"."""
    nouns = draw.choice(_TASTES)
    one, two = draw.choice(nouns), draw.choice(nouns)
    return (_in_general(draw, one), _in_general(draw, two)) if one != two else two_tastes(draw)


def _in_general(draw, noun):
    plural = noun.english_plural is not None
    return noun_phrase(noun, "generic", plural, phrases.attributes(draw, noun, 22))


def language(draw):
    """They speak Italian very well. I am learning Spanish."""
    subject = phrases.subject(draw)
    word, langue = draw.choice(circumstances.LANGUAGES)
    if draw.chance(50):
        tense = draw.weighted(_LEARNING_TENSES)
        return told(Clause(subject, _LEARN, tense, (Phrase(word, langue),)))
    polarity = "not" if draw.chance(25) else ""
    spoken = Clause(
        subject, _SPEAK, "present", (Phrase(word, langue.removeprefix("le ")),), polarity
    )
    manner, manière = draw.choice(_LANGUAGE_MANNERS[: 2 if polarity else 3])
    # English says how at the end, French behind the verb.
    return sentence(
        f"{grammar.english_statement(spoken)} {manner}".strip(),
        grammar.french_statement(spoken._replace(manner=("", manière))),
    )


_SPEAK, _LEARN = verbs.make_verb("speak", "parler"), verbs.make_verb("learn", "apprendre")
_LANGUAGE_MANNERS = (("", ""), ("well", "bien"), ("very well", "très bien"))
_LEARNING_TENSES = Weighted(
    {"progressive": 4, "past": 3, "going to": 3, "would like to": 3, "must": 2, "future": 2}
)
