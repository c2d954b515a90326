"""Statements of how people and things are: each function returns a random sentence pair."""

from dtransformer.datasets.embedded import (
    adjectives,
    clauses,
    lexicon,
    noun_phrases,
    phrases,
    verbs,
)
from dtransformer.datasets.embedded.draw import Weighted
from dtransformer.datasets.embedded.grammar import Clause, told
from dtransformer.datasets.embedded.noun_phrases import Phrase, noun_phrase

_PERSONS = ("kin", "adult", "youngster")
_DESCRIBED = tuple(
    noun
    for noun in lexicon.NOUNS.values()
    if noun.english in adjectives.PREDICATES and noun.kind not in _PERSONS
)
# Things nobody calls his own.
_PUBLIC = frozenset("building area transport nature part food drink show".split())
# What one may be tomorrow and is not today.
_PASSING = frozenset(
    "tired sick busy ready late early happy sad rich famous hot cold open closed full empty noisy "
    "delicious interesting expensive difficult easy useful good".split()
)


def description(draw):
    """My brother is very tall. These shoes are too expensive."""
    return told(described(draw))


def described(draw, tense=None):
    """Returns a random clause that says how somebody or something is."""
    pick = draw.below(100)
    if pick < 45:
        subject = phrases.pronoun(draw) if pick < 22 else phrases.name(draw)
        options = adjectives.PREDICATES["woman" if subject.feminine else "man"]
    elif pick < 60:
        noun = draw.choice(lexicon.nouns("kin adult youngster"))
        determiner = draw.choice(phrases.OWNERS if noun.kind == "kin" else ("the", "this"))
        subject = noun_phrase(noun, determiner, noun.english_plural is not None and draw.chance(22))
        options = adjectives.PREDICATES[noun.english]
    else:
        noun = draw.choice(_DESCRIBED)
        subject = known_thing(draw, noun)
        options = adjectives.PREDICATES[noun.english]
    item = draw.choice(options)
    words = clauses.adjective_words(draw, item, subject)
    clause = clauses.copula(draw, subject, words, tense)
    if clause.tense == "future" and item.english not in _PASSING:
        return clause._replace(tense="present")
    return clause


def known_thing(draw, noun):
    """Returns a known thing as a subject: "the house", "this book", "Paul's car"."""
    plural = noun.english_plural is not None and draw.chance(24)
    if noun.kind in _PUBLIC:
        return noun_phrase(noun, draw.choice(("the", "the", "this")), plural)
    if draw.chance(14):
        return noun_phrase(noun, "the", plural, possessor=phrases.name(draw))
    return noun_phrase(noun, draw.choice(("the", "this", *phrases.OWNERS)), plural)


def comparison(draw):
    """Paul is taller than his brother. This bike is as expensive as my bike."""
    if draw.chance(55):
        subject, other, item = _compared_persons(draw)
    else:
        subject, other, item = _compared_things(draw)
    kind = draw.choice(("more", "more", "more", "as"))
    if kind == "more" and item.comparative == "more" and draw.chance(30):
        kind = "less"
    words, mots = noun_phrases.comparison(item, subject, kind)
    target = Phrase(f"{words} {other.english}", f"{mots} {other.french}")
    polarity = "not" if draw.chance(12) else ""
    tense = "past" if draw.chance(12) else "present"
    return told(Clause(subject, verbs.BE, tense, (target,), polarity))


def _compared_persons(draw):
    subject = phrases.subject(draw)
    items = adjectives.PREDICATES["woman" if subject.feminine else "man"]
    item = draw.choice([item for item in items if item.comparative])
    other = phrases.relative(draw, subject.owner)
    if draw.chance(40):
        key = draw.choice(tuple(noun_phrases.STRESSED_PRONOUNS))
        # "I am taller than me" is not said, nor "we are taller than me".
        ourselves = subject.person == 1 and key in ("I", "we")
        if noun_phrases.PRONOUNS[key].owner != subject.owner and not ourselves:
            other = noun_phrases.STRESSED_PRONOUNS[key]
    return subject, phrases.name(draw) if other == subject else other, item


def _compared_things(draw):
    item = draw.choice(tuple(_COMPARABLE))
    first = draw.choice(_COMPARABLE[item])
    second = draw.choice([noun for noun in _COMPARABLE[item] if noun.kind == first.kind])
    if first == second:
        return noun_phrase(first, "this"), noun_phrase(first, draw.choice(phrases.OWNERS)), item
    return known_thing(draw, first), known_thing(draw, second), item


def _comparable():
    found = {}
    for noun in _DESCRIBED:
        for item in adjectives.PREDICATES[noun.english]:
            if item.comparative:
                found.setdefault(item, []).append(noun)
    return found


_COMPARABLE = _comparable()

# What is the oldest, biggest, … and where.
_SCOPES = (
    ("building", ("city", "village")),
    ("adult youngster", ("school", "village", "city")),
    ("street park garden", ("city", "village")),
    ("bedroom", ("house",)),
    ("dog cat horse", ("village",)),
    ("tree flower", ("garden", "park", "village")),
)
_SEE, _VISIT = verbs.make_verb("see", "voir"), verbs.make_verb("visit", "visiter")


def superlative(draw):
    """This is the oldest house in the village. We saw the biggest tree in the park."""
    noun, item, scopes = draw.choice(_SUPERLATIVES)
    determiner = draw.choice(("the", "the", "the", "the", "this", "our", "my"))
    scope = noun_phrase(lexicon.NOUNS[draw.choice(scopes)], determiner)
    phrase = noun_phrases.superlative(noun, item, scope, draw.chance(15))
    if noun.kind in ("building", "area", "nature") and draw.chance(40):
        verb = _VISIT if noun.english in ("museum", "castle", "church") else _SEE
        tense = draw.choice(("past", "perfect", "going to", "future"))
        return told(Clause(phrases.subject(draw), verb, tense, (phrase,)))
    if noun.kind == "adult" and not phrase.plural and draw.chance(60):
        names = [phrases.name(draw) for _ in range(4)]
        same = [name for name in names if name.feminine == noun.feminine]
        subject = same[0] if same else noun_phrases.PRONOUNS["she" if noun.feminine else "he"]
        return told(Clause(subject, verbs.BE, "present", (phrase,)))
    return _this_is(draw, phrase)


_SUPERLATIVES = tuple(
    (noun, item, scopes)
    for names, scopes in _SCOPES
    for noun in lexicon.nouns(names)
    for item in adjectives.ATTRIBUTES.get(noun.english, ())
    if item.comparative
)


def _this_is(draw, phrase):
    subject = Phrase("these" if phrase.plural else "this", "ce", plural=phrase.plural)
    polarity = "not" if draw.chance(10) else ""
    # After "ce n'est pas" the article stays: "ce n'est pas une bonne idée".
    return told(Clause(subject, verbs.BE, "present", (phrase._replace(negated=()),), polarity))


_IDENTIFIED = lexicon.nouns("text object clothes vehicle furniture building thought show animal")


def identity(draw):
    """These are my new shoes. This is a good idea."""
    if draw.chance(35):
        return _this_is(draw, phrases.relative(draw))
    noun = draw.choice(_IDENTIFIED)
    if draw.chance(40):
        return _this_is(draw, noun_phrase(noun, "a", adjectives=phrases.attributes(draw, noun, 90)))
    return _this_is(draw, phrases.thing(draw, noun, "named"))


# English, French masculine, French feminine.
_OCCUPATIONS = (
    ("doctor", "médecin", "médecin"),
    ("teacher", "professeur", "professeure"),
    ("student", "étudiant", "étudiante"),
    ("nurse", "infirmier", "infirmière"),
    ("baker", "boulanger", "boulangère"),
    ("lawyer", "avocat", "avocate"),
    ("actor", "acteur", "actrice"),
)
_BECOME = verbs.make_verb("become", "devenir")


def occupation(draw):
    """Her aunt is a lawyer. He wants to be a doctor."""
    subject = phrases.subject(draw)
    word, masculine, feminine = draw.choice(_OCCUPATIONS)
    noun = lexicon.Noun("", word, f"{word}s", masculine, f"{masculine}s", False)
    if subject.feminine:
        noun = noun._replace(french=feminine, french_plural=f"{feminine}s")
    english_text = noun_phrase(
        noun, "no-article" if subject.plural else "a", subject.plural
    ).english
    # French puts no article before an occupation.
    what = Phrase(english_text, noun.french_plural if subject.plural else noun.french)
    pick = draw.below(100)
    if pick < 14:
        return told(Clause(subject, verbs.BE, "present", (what,), chain=verbs.CHAINS["want"]))
    if pick < 34:
        return told(Clause(subject, _BECOME, draw.choice(("past", "future", "going to")), (what,)))
    tense = draw.choice(("present", "present", "past", "future"))
    return told(Clause(subject, verbs.BE, tense, (what,)))


_NATIONS = tuple(item for item in adjectives.ATTRIBUTES["car"] if item.english[0].isupper())
_COME = verbs.make_verb("come", "venir")


def origin(draw):
    """Marie comes from Spain. They are Italian."""
    subject = phrases.subject(draw)
    if draw.chance(60):
        return told(Clause(subject, _COME, "present", (clauses.abroad(draw, "from"),)))
    words = clauses.adjective_words(draw, draw.choice(_NATIONS), subject, degrees=False)
    return told(clauses.copula(draw, subject, words, "present"))


# "to be" in English, "to have" in French.
FEELINGS = {
    "hungry": "faim",
    "thirsty": "soif",
    "cold": "froid",
    "hot": "chaud",
    "sleepy": "sommeil",
    "afraid": "peur",
    "right": "raison",
    "wrong": "tort",
}
_VERY = frozenset(("hungry", "thirsty", "cold", "hot"))
_FEELING_TENSES = Weighted({"present": 3, "past": 1})


def feeling(draw):
    """The children are hungry."""
    return told(felt(draw, phrases.subject(draw)))


def felt(draw, subject):
    """Returns a random clause that says that somebody is hungry, cold, right, …."""
    polarity = "not" if draw.chance(20) else ""
    word = draw.choice(tuple(FEELINGS))
    return feeling_clause(draw, subject, word, draw.weighted(_FEELING_TENSES), polarity)


def feeling_clause(draw, subject, word, tense, polarity=""):
    """Returns the clause of a feeling, perhaps with "very"."""
    what = Phrase(word, FEELINGS[word])
    if word in _VERY and draw.chance(22):
        what = Phrase(f"very {word}", f"très {FEELINGS[word]}")
    return Clause(subject, verbs.BE_AS_HAVE, tense, (what,), polarity)


def pain(draw):
    """My sister has a headache."""
    polarity = draw.choice(("", "", "", "not", "no longer"))
    what = Phrase("a headache", "mal à la tête")
    tense = draw.weighted(_FEELING_TENSES)
    return told(Clause(phrases.subject(draw), verbs.HAVE, tense, (what,), polarity))
