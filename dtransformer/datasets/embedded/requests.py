"""Requests, orders and proposals: each function returns a random (English, French) sentence."""

from dtransformer.datasets.embedded import (
    circumstances,
    clauses,
    grammar,
    phrases,
    verbs,
)
from dtransformer.datasets.embedded.grammar import Clause, sentence
from dtransformer.datasets.embedded.noun_phrases import PRONOUNS, Phrase

_YOU, _WE = PRONOUNS["you"], PRONOUNS["we"]
_FAVORS = tuple(
    frame
    for frame in verbs.TRANSITIVE
    if frame.words
    in ("open", "close", "clean", "wash", "repair", "call", "help", "wait for", "buy", "look for")
)
_ORDERS = _FAVORS + tuple(
    frame
    for frame in verbs.TRANSITIVE + verbs.INTRANSITIVE
    if frame.words
    in ("eat", "drink", "take", "choose", "listen to", "look at", "read", "work", "sleep", "rest")
    + ("learn", "write", "stay at home", "go home", "go to bed", "visit", "forget", "lose", "run")
    + ("play the piano", "listen to the radio", "get up")
)


def request(draw):
    """Can you open the window, please? Could you give me a glass of water, please?"""
    if draw.chance(45):
        frame = draw.choice(verbs.GIVING)
        clitic = grammar.object_clitic(draw.choice(("I", "we", "he", "she", "they")), direct=False)
        verb = frame.verb._replace(preposition="")
        item = clauses.given(draw, frame, "your")
        clause = Clause(_YOU, verb, "", (item,), clitic=clitic)
    else:
        frame = draw.choice(_FAVORS)
        clause = Clause(_YOU, frame.verb, "", tuple(clauses.objects(draw, frame, _YOU)))
    clause = clause._replace(tense="can" if draw.chance(70) else "could")
    return sentence(
        f"{grammar.english_question(clause)}, please",
        f"est-ce que {grammar.french_statement(clause)}, si il vous plaît",
        "?",
    )


def order(draw):
    """Close the door, please. Don't forget your keys!"""
    frame = draw.choice(_ORDERS)
    if frame.style in ("new", "any"):
        frame = frame._replace(style="known" if frame.words in ("buy", "choose") else "the")
    complements = clauses.objects(draw, frame, _YOU, counted=False)
    if frame.uses and draw.chance(30):
        complements.append(phrases.place_at(draw, frame.uses))
    negative = frame.words in ("forget", "lose") or draw.chance(40)
    clause = Clause(_YOU, frame.verb, "present", tuple(complements), "not" if negative else "")
    english_text, french_text = grammar.imperative(clause)
    if draw.chance(45):
        return sentence(f"{english_text}, please", f"{french_text}, si il vous plaît")
    return sentence(english_text, french_text, "!")


def proposal(draw):
    """Let's go to the cinema!"""
    if draw.chance(40):
        place = draw.choice(tuple(circumstances.PLACES.values()))
        clause = Clause(_WE, clauses.GO, "present", (Phrase(place.english_to, place.french_to),))
    else:
        clause = clauses.infinitive_action(draw, _WE)._replace(tense="present")
    english_text, french_text = grammar.imperative(clause)
    return sentence(f"let's {english_text}", french_text, "!")
