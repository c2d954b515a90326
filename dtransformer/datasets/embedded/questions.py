"""Kinds of questions: each function returns a random (English, French) sentence."""

from dtransformer.datasets.embedded import (
    adjectives,
    circumstances,
    clauses,
    descriptions,
    figures,
    grammar,
    lexicon,
    phrases,
    verbs,
)
from dtransformer.datasets.embedded.grammar import Clause, sentence
from dtransformer.datasets.embedded.noun_phrases import (
    PRONOUNS,
    Phrase,
    noun_phrase,
    prepositional,
)

# Subjects for the pronoun behind the French verb; "ai-je" is not said.
_ASKED = tuple(PRONOUNS[key] for key in ("you", "you", "he", "she", "they"))
_WHO = Phrase("who", "qui", pronoun="il", owner="his")
_COST = verbs.make_verb("cost", "coûter")
_KNOW = verbs.make_verb("know", "savoir")


def _someone(draw):
    """Returns a subject one asks about: not oneself, nor "a man"."""
    subject = phrases.subject(draw)
    known = subject.person != 1 and not subject.english.startswith(("a ", "an "))
    return subject if known else PRONOUNS["you"]


def asked(clause, english_word="", french_word=""):
    """Returns a clause as a question with "est-ce que", perhaps behind "where", "why", …."""
    english_text = f"{english_word} {grammar.english_question(clause)}".strip()
    french_text = f"{french_word} est-ce que {grammar.french_statement(clause)}".strip()
    return sentence(english_text, french_text, "?")


def _inverted(phrase, clause):
    """Returns a question with the pronoun behind the French verb: "quel livre avez-vous lu"."""
    return sentence(
        f"{phrase.english} {grammar.english_question(clause)}",
        f"{phrase.french} {grammar.french_inversion(clause)}",
        "?",
    )


def _bare(clause, tense=None):
    """Drops what a "wh" question does not hold: negation, adverbs, company, "just"."""
    tense = tense or ("past" if clause.tense in ("just", "perfect") else clause.tense)
    if clause.chain is None:
        tense = clauses.plain_past(clause.verb, tense)
    complements = tuple(x for x in clause.complements if not x.english.startswith("with "))
    empty = ("", "")
    return clause._replace(
        tense=tense, polarity="", adverb=empty, manner=empty, complements=complements
    )


def yes_or_no(draw):
    """Is Paul working today? Do you have a car?"""
    subject = _someone(draw)
    pick = draw.below(100)
    if pick < 42:
        clause = clauses.action(draw, subject)
    elif pick < 54:
        clause = clauses.motion(draw, subject)
    elif pick < 68:
        clause = clauses.modal_action(draw, subject)
    elif pick < 78:
        clause = clauses.chain_action(draw, subject)
    elif pick < 90:
        clause = descriptions.described(draw)
        if clause.subject.person == 1:
            return yes_or_no(draw)
    else:
        clause = descriptions.felt(draw, subject)
    return asked(clause._replace(polarity=""))


def where(draw):
    """Where is Paul working? Where did your sister go yesterday?"""
    frame = draw.choice(_PLACED)
    if draw.chance(20):
        frame = verbs.Frame(clauses.GO, "event", False, (), "", ())
    frame = frame._replace(uses=(), habit=False)
    clause = clauses.frame_clause(draw, _someone(draw), frame, subordinate=True)
    return asked(_bare(clause), "where", "où")


_PLACED = tuple(
    frame
    for frame in verbs.TRANSITIVE + verbs.INTRANSITIVE
    if frame.uses and frame.aspect != "state"
)


def when(draw):
    """When will the doctor come back from Rome?"""
    subject = _someone(draw)
    if draw.chance(50):
        clause = clauses.motion(draw, subject)
        rest = clause.complements[:1]
    else:
        frame = draw.choice(_DATED)
        clause = Clause(subject, frame.verb, "past")
        rest = tuple(clauses.objects(draw, frame, subject))
        if frame.uses and draw.chance(40):
            rest += (phrases.place_at(draw, frame.uses),)
    tense = draw.choice(("past", "future", "going to"))
    if clause.verb.english.past == clause.verb.english.base and tense == "past":
        tense = "future"
    return asked(_bare(clause._replace(complements=rest), tense), "when", "quand")


_DATED = tuple(
    frame
    for frame in verbs.TRANSITIVE + verbs.INTRANSITIVE
    if frame.aspect in ("event", "instant") and frame.words != "forget"
)


def why(draw):
    """Why isn't she eating meat? Why are you sad?"""
    subject = _someone(draw)
    pick = draw.below(10)
    if pick < 2:
        mood = adjectives.predicate(draw.choice(("sad", "tired", "happy", "late", "early", "busy")))
        words = clauses.adjective_words(draw, mood, subject)
        clause = clauses.copula(draw, subject, words)
    elif pick < 4:
        clause = clauses.chain_action(draw, subject)
    else:
        clause = clauses.action(draw, subject, subordinate=True)
        if clause.verb.state:
            return why(draw)
    polarity = "not" if clause.polarity == "not" else ""
    return asked(_bare(clause)._replace(polarity=polarity), "why", "pourquoi")


def what(draw):
    """What is Marie drinking? What did you buy at the market?"""
    subject = _someone(draw)
    frame = draw.choice(_THINGS)
    tense = draw.choice(("progressive", "past", "past", "going to", "future", "would like to"))
    if frame.aspect == "instant" and tense == "progressive":
        tense = "past"
    tense = clauses.plain_past(frame.verb, tense)
    rest = ()
    if frame.uses and draw.chance(40):
        rest = (phrases.place_at(draw, frame.uses),)
    if tense in _TIMES and draw.chance(25):
        rest += (phrases.time_of(draw, _TIMES[tense], memorable=False),)
    clause = Clause(subject, frame.verb, tense, rest)
    return sentence(
        f"what {grammar.english_question(clause)}",
        f"que est-ce que {grammar.french_statement(clause)}",
        "?",
    )


_TIMES = {"past": "past", "future": "future", "going to": "future"}
_THINGS = tuple(
    frame
    for frame in verbs.TRANSITIVE
    if frame.aspect not in ("state", "insight")
    and not frame.verb.preposition
    and frame.style not in ("person", "ride")
    and frame.words not in ("visit", "open", "close")
)


def who(draw):
    """Who broke the window? Who are you talking to?"""
    if draw.chance(30):
        return _whom(draw)
    pick = draw.below(10)
    if pick < 6:
        clause = clauses.action(draw, _WHO, subordinate=True)
    elif pick < 8:
        clause = clauses.chain_action(draw, _WHO)
    else:
        clause = clauses.giving(draw, _WHO)
    polarity = "not" if clause.polarity == "not" else ""
    clause = clause._replace(polarity=polarity, adverb=("", ""))
    return sentence(*grammar.statement(clause), "?")


def _whom(draw):
    frame = draw.choice(_PERSONAL)
    tense = draw.choice(("progressive", "past", "past", "going to", "future"))
    if frame.aspect == "instant" and tense == "progressive":
        tense = "past"
    rest = ()
    if tense in _TIMES and draw.chance(40):
        rest = (phrases.time_of(draw, _TIMES[tense], memorable=False),)
    verb = frame.verb._replace(preposition="")
    word = f"{frame.verb.preposition} qui".strip()
    return asked(Clause(_someone(draw), verb, tense, rest), "who", word)


_PERSONAL = tuple(
    frame for frame in verbs.TRANSITIVE if frame.style == "person" and frame.aspect != "bond"
)


def how_many(draw):
    """How many books did you buy? How many students are there in this school?"""
    if draw.chance(25):
        nouns, holders = draw.choice(_MANY)
        many = noun_phrase(draw.choice(nouns), "how many", True)
        place = noun_phrase(draw.choice(holders), draw.choice(("the", "this", "your")))
        where_text = prepositional("in", "dans", place)
        return sentence(
            f"{many.english} are there {where_text.english}",
            f"{many.french} y a-t-il {where_text.french}",
            "?",
        )
    if draw.chance(35):
        noun, verb, tense = draw.choice(_RELATIVES), verbs.HAVE, "present"
    else:
        frame = draw.choice(_COUNTED)
        noun, verb = draw.choice(frame.objects), frame.verb
        tense = draw.choice(("past", "past", "going to", "would like to"))
        tense = "present" if frame.aspect == "state" else clauses.plain_past(verb, tense)
    many = noun_phrase(noun, "how many", True, phrases.attributes(draw, noun, 10))
    return _inverted(many, Clause(draw.choice(_ASKED), verb, tense, asked=many))


_MANY = (
    (lexicon.nouns("student teacher child"), lexicon.nouns("school village city museum library")),
    (lexicon.nouns("bedroom window bed chair"), lexicon.nouns("house hotel")),
    (lexicon.nouns("tree flower"), lexicon.nouns("garden park street")),
    (lexicon.nouns("restaurant hotel museum shop school"), lexicon.nouns("city village street")),
)
_RELATIVES = lexicon.nouns("brother sister child friend cousin son daughter uncle")
_COUNTED = tuple(
    frame
    for frame in verbs.TRANSITIVE
    if frame.words in ("eat", "buy", "read", "write", "have", "see", "find")
    and frame.style != "mass"
)


def which(draw):
    """Which dress did she choose?"""
    frame = draw.choice(_CHOSEN)
    noun = draw.choice(frame.objects)
    plural = frame.style != "ride" and draw.chance(22)
    thing = noun_phrase(noun, "which", plural, phrases.attributes(draw, noun, 8))
    tense = draw.choice(("past", "past", "going to", "would like to", "future"))
    tense = clauses.plain_past(frame.verb, tense)
    return _inverted(thing, Clause(draw.choice(_ASKED), frame.verb, tense, asked=thing))


_CHOSEN = tuple(
    frame
    for frame in verbs.TRANSITIVE
    if frame.words in ("choose", "buy", "read", "watch", "visit", "take", "wear", "sell", "repair")
    and frame.style != "mass"
)


def where_is(draw):
    """Where are my keys? Excuse me, where is the station? Do you know where Paul's dog is?"""
    place = draw.chance(45)
    if place:
        word, mot = draw.choice(_SOUGHT)
        subject = Phrase(f"the {word}", mot)
    else:
        noun = draw.choice(_MISSED)
        determiner = draw.choice(phrases.OWNERS if noun.kind == "kin" else ("the", *phrases.OWNERS))
        plural = noun.english_plural is not None and draw.chance(30)
        subject = noun_phrase(noun, determiner, plural)
    tense = "present" if place or draw.chance(75) else "past"
    clause = Clause(subject, verbs.BE, tense)
    # French puts the noun behind the verb, also inside "do you know where …".
    french_text = f"où {grammar.french_predicate(clause)} {subject.french}"
    if tense == "present" and draw.chance(25):
        place_known = Phrase(f"where {grammar.english_statement(clause)}", french_text)
        return asked(Clause(_someone(draw), _KNOW, "present", (place_known,)))
    english_text = f"where {grammar.english_question(clause)}"
    if place and draw.chance(50):
        return sentence(f"excuse me, {english_text}", f"excusez-moi, {french_text}", "?")
    return sentence(english_text, french_text, "?")


_SOUGHT = tuple(item for item in circumstances.FRENCH_PLACES.items() if item[0] != "street")
_MISSED = lexicon.nouns("losable cat dog car bike shoe coat child knife glass kin")


def how_old(draw):
    """How old is your sister? How old are they?"""
    if draw.chance(25):
        clause = Clause(draw.choice(_ASKED), verbs.BE_AS_HAVE, "present")
        return _inverted(Phrase("how old", "quel âge"), clause)
    subject = phrases.name(draw) if draw.chance(25) else figures.aged(draw)[0]
    clause = Clause(subject, verbs.BE_AS_HAVE, "present")
    return sentence(
        f"how old {grammar.english_question(clause)}",
        f"quel âge {grammar.french_predicate(clause)} {subject.french}",
        "?",
    )


def how_much(draw):
    """How much do these shoes cost?"""
    subject, _ = figures.priced(draw)
    clause = Clause(subject, _COST, "present")
    return sentence(
        f"how much {grammar.english_question(clause)}",
        f"combien {grammar.french_predicate(clause)} {subject.french}",
        "?",
    )


def how(draw):
    """How are you going to the station?"""
    place = draw.choice(circumstances.PLACES_BY_USE["town"])
    target = Phrase(place.english_to, place.french_to)
    if draw.chance(45):
        target = clauses.abroad(draw, "to")
    tense = draw.choice(("progressive", "past", "future", "going to"))
    rest = (target,)
    if tense in _TIMES and draw.chance(40):
        rest += (phrases.time_of(draw, _TIMES[tense]),)
    return asked(Clause(_someone(draw), clauses.GO, tense, rest), "how", "comment")


def what_time(draw):
    """What time does the museum open? What time will the train arrive tomorrow?"""
    nouns, events = draw.choice(figures.SCHEDULES)
    noun, (verb, _, _) = draw.choice(nouns), draw.choice(events)
    subject = noun_phrase(noun, draw.choice(("the", "this", "your", "our")))
    clause = Clause(subject, verb, "present")
    if noun.kind == "transport" and draw.chance(50):
        day = Phrase(*draw.choice(circumstances.TIMES["future day"][:4]))
        clause = clause._replace(
            subject=noun_phrase(noun, "the"), tense="future", complements=(day,)
        )
    return asked(clause, "what time", "à quelle heure")
