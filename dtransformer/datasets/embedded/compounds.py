"""Sentences with two clauses: each function returns a random (English, French) sentence."""

from dtransformer.datasets.embedded import (
    adjectives,
    circumstances,
    clauses,
    descriptions,
    grammar,
    lexicon,
    phrases,
    statements,
    surroundings,
    verbs,
)
from dtransformer.datasets.embedded.draw import Weighted
from dtransformer.datasets.embedded.grammar import Clause, sentence
from dtransformer.datasets.embedded.noun_phrases import PRONOUNS, Phrase, noun_phrase

# What one does, and does not, when one is tired, hungry, cold, …
_TIRED = verbs.frames("""
    rest       | se reposer  | event |  |  | leisure night
    go to bed  | se coucher  | event |  |  |
    sleep      | dormir      | event |  |  | night
    stay at home | rester à la maison | event |  |  |
    go home    | rentrer à la maison | event |  |  |
""")
_TIRED_NOT = verbs.frames("""
    dance      | danser      | event |  |  |
    go out     | sortir      | event |  |  |
    work       | travailler  | event |  |  | work
    run        | courir      | event |  |  | sport
    play tennis | jouer au tennis | event |  |  | sport
    go shopping | faire les courses | event |  |  |
""")
_HUNGRY = verbs.frames("""
    eat        | manger      | event | fruit snack | new  | meal
    eat        | manger      | event | bread soup cheese | mass | meal
    buy        | acheter     | event | snack       | new  | groceries
""")
_THIRSTY = verbs.frames("""
    drink      | boire       | event | water tea milk | mass |
    buy        | acheter     | event | water milk | mass | groceries
""")
_COLD = verbs.frames("""
    wear       | porter      | lasting | coat scarf hat | worn |
    close      | fermer      | event | door window | the |
    drink      | boire       | event | tea coffee milk | mass |
""")
_HOT = verbs.frames("""
    open       | ouvrir      | event | door window | the |
    drink      | boire       | event | water milk | mass |
    swim       | nager       | event |  |  | bath
""")
_LATE = verbs.frames("""
    run        | courir      | event |  |  | outside
    take       | prendre     | event | bus train car | ride |
""")
_RAINY = verbs.frames("""
    stay at home | rester à la maison | event |  |  |
    watch television | regarder la télévision | event |  |  | home
    read       | lire        | event | book newspaper story | new | home
    take       | prendre     | event | bus train  | ride |
    go home    | rentrer à la maison | event |  |  |
""")
_RAINY_NOT = verbs.frames("""
    go out     | sortir      | event |  |  |
    swim       | nager       | event |  |  | bath
    play football | jouer au football | event |  |  | sport
    run        | courir      | event |  |  | outside
    eat        | manger      | event | snack fruit | new | outside
""")
_BUSY_NOT = verbs.frames("""
    go out     | sortir      | event |  |  |
    rest       | se reposer  | event |  |  |
    sleep      | dormir      | event |  |  |
    have lunch | déjeuner    | event |  |  | meal
    watch television | regarder la télévision | event |  |  |
""")
_GLAD = verbs.frames("""
    sing       | chanter     | event |  |  | home
    dance      | danser      | event |  |  | home
""")

# reason (an adjective, a feeling or "weather"), what is done, what is not
_REASONS = Weighted(
    (
        (("tired", _TIRED, _TIRED_NOT), 3),
        (("sick", _TIRED, _TIRED_NOT), 3),
        (("sleepy", _TIRED, _TIRED_NOT), 2),
        (("hungry", _HUNGRY, ()), 2),
        (("thirsty", _THIRSTY, ()), 1),
        (("cold", _COLD, ()), 2),
        (("hot", _HOT, ()), 1),
        (("late", _LATE, ()), 1),
        (("busy", (), _BUSY_NOT), 2),
        (("happy", _GLAD, ()), 1),
        (("weather", _RAINY, _RAINY_NOT), 3),
    )
)


def pronoun_for(subject):
    """Returns the pronoun that takes up a subject: "my sisters" becomes "they", "elles"."""
    if subject.person != 3:
        return subject
    word = {"his": "he", "her": "she", "their": "they"}[subject.owner]
    return subject._replace(english=word, french=subject.pronoun)


def _cause(draw, subject, reason, past=False):
    """Returns the clause that gives a reason, about a subject."""
    if reason == "weather":
        return surroundings.weather_clause(draw, past, bad=True)
    tense = "past" if past else "present"
    if reason in descriptions.FEELINGS:
        return descriptions.feeling_clause(draw, subject, reason, tense)
    words = clauses.adjective_words(draw, adjectives.predicate(reason), subject)
    return clauses.copula(draw, subject, words, tense, "")


def _effect(draw, subject, tense, done, not_done):
    """Returns the clause of what one does, or does not do, for a reason."""
    refused = bool(not_done) and (not done or draw.chance(45))
    frame = draw.choice(not_done if refused else done)
    complements = clauses.objects(draw, frame, subject, counted=not refused)
    if frame.uses and draw.chance(40):
        complements.append(phrases.place_at(draw, frame.uses))
    tense = clauses.plain_past(frame.verb, tense)
    return Clause(subject, frame.verb, tense, tuple(complements), "not" if refused else "")


def _linked(first, english_link, french_link, second):
    one, two = grammar.statement(first), grammar.statement(second)
    return sentence(one[0] + english_link + two[0], one[1] + french_link + two[1])


def because(draw):
    """She is going to bed because she is tired. He is hungry, so he is eating a sandwich."""
    reason, done, not_done = draw.weighted(_REASONS)
    first = phrases.subject(draw)
    second = pronoun_for(first)
    past = draw.chance(45)
    tense = "past" if past else "progressive"
    if draw.chance(70):
        effect = _effect(draw, first, tense, done, not_done)
        return _linked(effect, " because ", " parce que ", _cause(draw, second, reason, past))
    if reason == "weather":
        second = first
    effect = _effect(draw, second, tense, done, not_done)
    return _linked(_cause(draw, first, reason, past), ", so ", ", donc ", effect)


# Two actions side by side sound natural in one tense and at one time.
_SIDE_BY_SIDE = frozenset(("progressive", "past", "future", "going to"))


def both(draw):
    """Paul is reading a book and Marie is writing a letter."""
    first, second = phrases.subject(draw), phrases.subject(draw)
    one = clauses.action(draw, first, subordinate=True)
    two = clauses.action(draw, second, subordinate=True)
    fits = first != second and one.tense == two.tense and one.tense in _SIDE_BY_SIDE
    if not fits or one.polarity or two.polarity or one.verb.state or two.verb.state:
        return both(draw)
    return _linked(one, " and ", " et ", two)


def but(draw):
    """I like tea, but I don't like coffee. She wanted to swim, but she was sick."""
    subject = phrases.subject(draw)
    again = pronoun_for(subject)
    if draw.chance(55):
        one, two = statements.two_tastes(draw)
        first = Clause(subject, statements.LIKE, "present", (one,))
        second = Clause(again, statements.LIKE, "present", (two,))
        if draw.chance(30):
            return _linked(first._replace(polarity="not"), ", but ", ", mais ", second)
        return _linked(first, ", but ", ", mais ", second._replace(polarity="not"))
    past = draw.chance(40)
    reason = draw.choice(("tired", "sick", "busy", "late", "weather"))
    wish = clauses.infinitive_action(draw, subject)
    if reason == "weather":
        wish = Clause(subject, draw.choice(_OUTSIDE).verb, "")
    wish = wish._replace(tense="past" if past else "present", chain=verbs.CHAINS["want"])
    return _linked(wish, ", but ", ", mais ", _cause(draw, again, reason, past))


_OUTSIDE = tuple(frame for frame in _RAINY_NOT if not frame.objects)


def when(draw):
    """I was sleeping when Paul called me."""
    subject = phrases.subject(draw)
    frame = draw.choice(_INTERRUPTED)
    complements = clauses.objects(draw, frame, subject)
    if draw.chance(45) and frame.uses:
        complements.append(phrases.place_at(draw, frame.uses))
    scene = Clause(subject, frame.verb, "past progressive", tuple(complements))
    return _linked(scene, " when ", " quand ", _interruption(draw, subject))


_INTERRUPTED = tuple(x for x in verbs.INTRANSITIVE + verbs.TRANSITIVE if x.aspect == "event")
_ARRIVE, _COME_BACK = verbs.make_verb("arrive", "arriver"), verbs.make_verb("come back", "revenir")
_CALL, _SEE = verbs.make_verb("call", "appeler"), verbs.make_verb("see", "voir")


def _interruption(draw, subject):
    if draw.chance(20):
        start = verbs.CHAINS["start"]
        return Clause(surroundings.IT, draw.choice(surroundings.FALLING), "past", chain=start)
    other = phrases.subject(draw)
    while other.owner == subject.owner:
        other = phrases.subject(draw)
    if draw.chance(50):
        return Clause(other, draw.choice((_ARRIVE, _COME_BACK)), "past")
    key = next(key for key, pronoun in PRONOUNS.items() if pronoun.owner == subject.owner)
    clitic = grammar.object_clitic(key, True, subject.feminine, subject.plural)
    return Clause(other, draw.choice((_CALL, _SEE)), "past", clitic=clitic)


def if_clause(draw):
    """If it rains tomorrow, we will stay at home. If you are tired, you should rest."""
    subject = phrases.subject(draw)
    reason, done, not_done = draw.weighted(_REASONS)
    if reason == "weather" or draw.chance(30):
        condition = surroundings.weather_clause(draw, past=False, bad=draw.chance(70))
        fine = (
            condition.verb not in surroundings.FALLING and condition.complements[0].english in _FINE
        )
        condition = condition._replace(tense="present")
        if draw.chance(60):
            time = Phrase(*draw.choice(_SOON))
            condition = condition._replace(complements=(*condition.complements, time))
        effect = _effect(draw, subject, "future", _RAINY_NOT if fine else _RAINY, ())
    else:
        condition = _cause(draw, subject, reason)
        tense = draw.choice(("future", "should") if not_done else ("future", "should", "can"))
        effect = _effect(draw, pronoun_for(subject), tense, done, not_done)
    one, two = grammar.statement(condition), grammar.statement(effect)
    return sentence(f"if {one[0]}, {two[0]}", f"si {one[1]}, {two[1]}")


_FINE = frozenset(("hot", "too hot", "nice"))
_SOON = tuple(time for time in circumstances.TIMES["future day"] if time[0] != "soon")

_THINK, _SAY = verbs.make_verb("think", "penser"), verbs.make_verb("say", "dire")
_KNOW, _HOPE = verbs.make_verb("know", "savoir"), verbs.make_verb("hope", "espérer")
_OPINIONS = Weighted(((_THINK, 40), (_SAY, 30), (_KNOW, 20), (_HOPE, 20)))


def opinion(draw):
    """They think that this movie is too long. He says that Paul is working."""
    thinker = phrases.subject(draw)
    verb = draw.weighted(_OPINIONS)
    pick = draw.below(10)
    if verb is _HOPE:
        wish = clauses.infinitive_action(draw, phrases.subject(draw))
        content = wish._replace(tense="future")
    elif pick < 4:
        content = descriptions.described(draw, draw.choice(("present", "present", "past")))
    elif pick < 5:
        content = descriptions.felt(draw, phrases.subject(draw))
    elif pick < 6:
        content = surroundings.weather_clause(draw, draw.chance(40), draw.chance(60))
    else:
        content = clauses.action(draw, subordinate=True)
    return _linked(Clause(thinker, verb, "present"), " that ", " que ", content)


_HEADS = lexicon.nouns("man woman boy girl doctor teacher nurse student")
_ABOUT = (
    (verbs.make_verb("know", "connaître"), "present"),
    (_SEE, "past"),
    (verbs.make_verb("meet", "rencontrer"), "past"),
    (verbs.make_verb("look for", "chercher"), "progressive"),
)


def relative_subject(draw):
    """The woman who works at the bank is my aunt. I know the man who is repairing the car."""
    noun = draw.choice(_HEADS)
    head = noun_phrase(noun, "the", draw.chance(15), phrases.attributes(draw, noun, 15))
    who = head._replace(english=f"{head.english} who", french=f"{head.french} qui")
    relative = clauses.action(draw, who, subordinate=True)
    while relative.tense in ("future", "past progressive") or relative.polarity:
        relative = clauses.action(draw, who, subordinate=True)
    whole = head._replace(**dict(zip(("english", "french"), grammar.statement(relative))))
    if draw.chance(40):
        verb, tense = draw.choice(_ABOUT)
        return grammar.told(Clause(phrases.subject(draw), verb, tense, (whole,)))
    if draw.chance(45) and not head.plural:
        kin = noun_phrase(draw.choice(_SAME_GENDER[head.feminine]), draw.choice(phrases.OWNERS))
        return grammar.told(Clause(whole, verbs.BE, "present", (kin,)))
    item = draw.choice(adjectives.PREDICATES[noun.english])
    words = clauses.adjective_words(draw, item, head)
    return grammar.told(clauses.copula(draw, whole, words, "present"))


_SAME_GENDER = {
    False: lexicon.nouns("cousin neighbor friend uncle brother"),
    True: lexicon.nouns("sister aunt daughter"),
}


def relative_object(draw):
    """The letter that Marie wrote is very long."""
    frame, noun = draw.choice(_MADE)
    plural = noun.english_plural is not None and draw.chance(22)
    head = noun_phrase(noun, "the", plural)
    tense = draw.choice(("past", "past", "perfect", "progressive"))
    if tense == "progressive" and frame.aspect == "instant":
        tense = "past"
    tense = clauses.plain_past(frame.verb, tense)
    maker = Clause(phrases.subject(draw), frame.verb, tense, asked=head)
    texts = grammar.statement(maker)
    whole = head._replace(
        english=f"{head.english} that {texts[0]}", french=f"{head.french} que {texts[1]}"
    )
    words = clauses.adjective_words(draw, draw.choice(adjectives.PREDICATES[noun.english]), head)
    then = "past" if tense == "past" and draw.chance(40) else "present"
    return grammar.told(clauses.copula(draw, whole, words, then))


_MADE = tuple(
    (frame, noun)
    for frame in verbs.TRANSITIVE
    if frame.words in ("buy", "read", "write", "see", "watch", "find", "wear", "visit", "choose")
    for noun in frame.objects
    if frame.style != "mass" and noun.english in adjectives.PREDICATES
)
