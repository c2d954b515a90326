"""Clauses, put into words in both languages: tenses, negation, questions, orders.

A `Clause` says who does what, when and whether. The French text is not shortened yet
("je ai"): `sentence` does that at the end.
"""

from typing import NamedTuple

from dtransformer.datasets.embedded import english, french, verbs
from dtransformer.datasets.embedded.noun_phrases import OBJECT_PRONOUNS, Phrase

# Tenses in which French conjugates an auxiliary: the verb, its tense, what links.
_FRENCH_AUXILIARIES = {
    "going to": ("aller", "present", ""),
    "just": ("venir", "present", "de"),
    "can": ("pouvoir", "present", ""),
    "could": ("pouvoir", "conditional", ""),
    "must": ("devoir", "present", ""),
    "should": ("devoir", "conditional", ""),
    "would like to": ("vouloir", "conditional", ""),
}


_FRENCH_TENSES = {
    "present": "present",
    "progressive": "present",
    "past": "compound",
    "perfect": "compound",
    "past progressive": "imperfect",
    "future": "future",
}


# English word, French word, whether English has "not".
POLARITIES = {
    "": ("", "", False),
    "not": ("", "pas", True),
    "never": ("never", "jamais", False),
    "no longer": ("no longer", "plus", False),
    "not yet": ("yet", "pas encore", True),
}


class Clitic(NamedTuple):
    """An object pronoun; `direct` is None or what a participle agrees with."""

    english: str
    french: str
    direct: tuple | None = None  # feminine, plural


class Clause(NamedTuple):
    """Who does what, when, and whether.

    Args:
        subject: a `Phrase`.
        verb: a `verbs.Verb`.
        tense: as in `english.auxiliary_and_rest`.
        complements: `Phrase`s behind the verb: object, place, time.
        polarity: a key of `POLARITIES`.
        adverb: (English, French) between the English subject and verb ("often").
        manner: (English, French) behind the English verb ("a lot").
        chain: a `verbs.Chain` before the verb ("want to").
        clitic: a `Clitic` before the verb.
        asked: a `Phrase` that stands before the verb as its object, for agreement.
    """

    subject: Phrase
    verb: verbs.Verb
    tense: str
    complements: tuple = ()
    polarity: str = ""
    adverb: tuple = ("", "")
    manner: tuple = ("", "")
    chain: verbs.Chain | None = None
    clitic: Clitic | None = None
    asked: Phrase | None = None


def statement(clause):
    """Returns the (English, French) of a clause as it is told."""
    return english_statement(clause), french_statement(clause)


def english_statement(clause):
    """Returns the English words of a clause as it is told."""
    auxiliary, rest = _english_verb(clause, POLARITIES[clause.polarity][2])
    return _join(clause.subject.english, auxiliary, rest)


def english_question(clause):
    """Returns the English words of a clause with the auxiliary before the subject."""
    auxiliary, rest = _english_verb(clause, True)
    return _join(auxiliary, clause.subject.english, rest)


def english_infinitive(clause):
    """Returns the English words of a clause from the base form of its verb on."""
    return _join(clause.verb.english.base, _english_tail(clause))


def _english_verb(clause, needs_auxiliary):
    subject, polarity = clause.subject, POLARITIES[clause.polarity]
    first = clause.chain.verb if clause.chain else clause.verb
    auxiliary, rest = english.auxiliary_and_rest(
        first.english, clause.tense, subject.person, subject.plural, needs_auxiliary
    )
    if polarity[2]:
        auxiliary = english.negate(auxiliary)
    if clause.chain:
        rest = _join(rest, "to", clause.verb.english.base)
    return auxiliary, _join(polarity[0], clause.adverb[0], rest, _english_tail(clause))


def _english_tail(clause):
    words = [clause.verb.particle]
    if clause.clitic:
        words.append(clause.clitic.english)
    words.append(clause.manner[0])
    return _join(*words, *_texts(clause, 0))


def french_statement(clause):
    """Returns the French words of a clause as it is told, before elision."""
    return _join(clause.subject.french, french_predicate(clause))


def french_inversion(clause):
    """Returns the French words of a question with the pronoun behind the verb: "a-t-il mangé"."""
    return french_predicate(clause, inverted=True)


def french_predicate(clause, inverted=False):
    """Returns the French words from the verb on, before elision.

    Order: ne, pronouns, conjugated verb, pas, adverb, participle, link, pronouns, infinitive,
    complements; the pronouns stand before the verb they belong to.
    """
    clitic = _french_clitic(clause)
    negation = POLARITIES[clause.polarity][1]
    forms, infinitives = _french_forms(clause)
    finite = forms[0]
    if inverted:
        pronoun = clause.subject.pronoun
        needs_t = finite[-1] in "ae" and pronoun[0] in "ie"
        finite = f"{finite}-{'t-' if needs_t else ''}{pronoun}"
    if infinitives:
        infinitives[-1:] = [clitic, infinitives[-1]]
        clitic = ""
    return _join(
        "ne" if negation else "",
        clitic,
        finite,
        negation,
        clause.adverb[1],
        clause.manner[1],
        *forms[1:],
        *infinitives,
        clause.verb.tail,
        *_texts(clause, 1),
    )


def imperative(clause):
    """Returns the (English, French) of an order to "you", or to "we" without its "let's".

    A reflexive pronoun stands behind the verb, but before it under negation.

    Example:

    >>> imperative(Clause(PRONOUNS["you"], make_verb("rest", "se reposer"), "present"))
    ('rest', 'reposez-vous')
    """
    french_text = french_predicate(clause)
    if clause.verb.french.reflexive and not clause.polarity:
        pronoun, finite, rest = (french_text + " ").split(" ", 2)
        french_text = f"{finite}-{pronoun} {rest}".strip()
    negation = "don't" if clause.polarity == "not" else ""
    return _join(negation, english_infinitive(clause)), french_text


def _french_forms(clause):
    """Returns the conjugated words and the words of the infinitives behind them."""
    waiting = [(clause.verb.french, clause.verb.state, "")]
    if clause.chain:
        chain = clause.chain
        waiting.insert(0, (chain.verb.french, chain.verb.state, chain.link))
    if clause.tense in _FRENCH_AUXILIARIES:
        name, tense, link = _FRENCH_AUXILIARIES[clause.tense]
        first = verbs.AUXILIARIES[name]
    else:
        first, state, link = waiting.pop(0)
        tense = _FRENCH_TENSES[clause.tense]
        if state and clause.tense == "past":
            tense = "imperfect"
    infinitives = []
    for verb, _, next_link in waiting:
        infinitives += [link, verb.infinitive]
        link = next_link
    person = clause.subject.verb_person
    if tense != "compound":
        return [first.form(tense, person)], infinitives
    auxiliary = verbs.BE.french if first.auxiliary == "être" else verbs.HAVE.french
    participle = first.participle if infinitives else _participle(clause, first)
    return [auxiliary.form("present", person), participle], infinitives


def _participle(clause, verb):
    """Agrees with the subject after être, with an object that stands before after avoir."""
    if verb.auxiliary == "être":
        return french.agree(verb.participle, clause.subject.feminine, clause.subject.plural)
    if clause.asked is not None:
        return french.agree(verb.participle, clause.asked.feminine, clause.asked.plural)
    if clause.clitic and clause.clitic.direct:
        return french.agree(verb.participle, *clause.clitic.direct)
    return verb.participle


def _french_clitic(clause):
    if clause.verb.french.reflexive:
        return french.REFLEXIVES[clause.subject.verb_person]
    return clause.clitic.french if clause.clitic else ""


def _texts(clause, language):
    negative = clause.polarity != ""
    return [
        phrase.negated[language] if negative and phrase.negated else phrase[language]
        for phrase in clause.complements
    ]


def _join(*words):
    return " ".join([word for word in words if word])


def object_clitic(key, direct, feminine=False, plural=False):
    """Returns the `Clitic` of an object pronoun.

    Args:
        key: a key of `OBJECT_PRONOUNS`.
        direct: whether it is the direct object ("le") or who receives ("lui").
        feminine: whether "me" or "you" is a woman.
        plural: whether "you" are several.
    """
    pronoun = OBJECT_PRONOUNS[key]
    if not direct:
        return Clitic(pronoun.english, pronoun.french_indirect)
    agreement = (pronoun.feminine or feminine, pronoun.plural or plural)
    return Clitic(pronoun.english, pronoun.french_direct, agreement)


def told(clause):
    """Returns a clause as a finished sentence."""
    return sentence(*statement(clause))


def sentence(english_text, french_text, mark="."):
    """Returns a finished pair: shortened, with a capital and a mark at the end.

    French puts a space before "?" and "!".

    Example:

    >>> sentence("where is the hotel", "où est le hôtel", "?")
    ('Where is the hotel?', "Où est l'hôtel ?")
    """
    french_text = french.elide(french_text)
    space = "" if mark == "." else " "
    return (
        f"{english_text[0].upper()}{english_text[1:]}{mark}",
        f"{french_text[0].upper()}{french_text[1:]}{space}{mark}",
    )
