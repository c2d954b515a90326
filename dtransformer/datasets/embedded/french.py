"""The rules of French: elision, contraction, agreement, determiners, conjugation.

Phrases are written without elision ("le ami", "je ai") while they are put together, and
`elide` shortens the words of a whole sentence at the end.
"""

from typing import NamedTuple

VOWELS = "aàâeéèêëiîïoôuùûyœ"
# Words before which nothing is shortened although they start with a vowel or an h.
NEVER_ELIDED_BEFORE = frozenset("huit huitième haut haute onze onzième".split())
# Words that lose their last vowel before another vowel.
ELIDED = frozenset("je me ne se le la de que ce".split())

# Adjectives with a form of their own before a masculine noun that starts with a vowel.
VOWEL_FORMS = {"beau": "bel", "nouveau": "nouvel", "vieux": "vieil"}
INVARIABLE = frozenset(("marron", "en retard", "en avance"))

PERSONS = ("je", "il", "nous", "vous", "ils")
REFLEXIVES = {"je": "me", "il": "se", "nous": "nous", "vous": "vous", "ils": "se"}

_POSSESSIVES = {  # owner -> before a masculine, a feminine, a plural noun
    "my": ("mon", "ma", "mes"),
    "your": ("votre", "votre", "vos"),
    "his": ("son", "sa", "ses"),
    "her": ("son", "sa", "ses"),
    "our": ("notre", "notre", "nos"),
    "their": ("leur", "leur", "leurs"),
}


def starts_with_vowel(text):
    """Returns whether words are shortened before `text` (the h of this lexicon is silent)."""
    first = text.split(" ", 1)[0].rstrip(",")
    return first[:1].lower() in VOWELS + "h" and first not in NEVER_ELIDED_BEFORE


def elide(text):
    """Returns a sentence with its words shortened before vowels.

    Example:

    >>> elide("je ai le ami de Anna parce que il ne est pas ici")
    "j'ai l'ami d'Anna parce qu'il n'est pas ici"
    """
    words = text.split(" ")
    pieces = []
    for word, following in zip(words, words[1:] + [""]):
        if word in ELIDED and starts_with_vowel(following):
            pieces.append(word[:-1] + "'")
        elif word == "si" and following in ("il", "ils"):
            pieces.append("s'")
        else:
            pieces.append(word + " ")
    return "".join(pieces).rstrip(" ")


def contract(preposition, phrase):
    """Returns a preposition joined to a noun phrase: "au", "aux", "du", "des".

    After "de", the indefinite and partitive articles vanish ("besoin de pain").

    Example:

    >>> contract("à", "le marché"), contract("de", "les enfants"), contract("de", "le ami")
    ('au marché', 'des enfants', 'de le ami')
    """
    if not phrase:
        return preposition
    head, _, last = preposition.rpartition(" ")
    article, _, noun = phrase.partition(" ")
    if last == "de" and article in ("des", "du", "de"):
        joined = f"de {noun.removeprefix('la ').removeprefix('le ')}"
    elif last in ("à", "de") and article == "les":
        joined = f"{'aux' if last == 'à' else 'des'} {noun}"
    elif last in ("à", "de") and article == "le" and not starts_with_vowel(noun):
        joined = f"{'au' if last == 'à' else 'du'} {noun}"
    else:
        joined = f"{last} {phrase}"
    return f"{head} {joined}".strip()


def plural_of(word):
    """Returns the plural of a noun or of a masculine or feminine adjective."""
    if word in INVARIABLE or word[-1] in "sxz":
        return word
    if word.endswith(("eau", "eu")) and word != "bleu":
        return word + "x"
    if word.endswith("al"):
        return word[:-2] + "aux"
    return word + "s"


def agree(word, feminine, plural):
    """Returns a past participle in a gender and a number.

    Example:

    >>> agree("arrivé", feminine=True, plural=True), agree("pris", False, True)
    ('arrivées', 'pris')
    """
    word = word + "e" if feminine else word
    return plural_of(word) if plural else word


def adjective(masculine, feminine_form, feminine, plural, before=""):
    """Returns an adjective in a gender and a number.

    Args:
        masculine: the masculine singular.
        feminine_form: the feminine singular.
        feminine: whether the noun is feminine.
        plural: whether the noun is plural.
        before: the word that follows where the adjective stands before the noun ("bel ami").

    Returns:
        The form.
    """
    word = feminine_form if feminine else masculine
    if plural:
        return plural_of(word)
    if before and not feminine and starts_with_vowel(before):
        return VOWEL_FORMS.get(word, word)
    return word


def comparative(word):
    """Returns an agreed adjective in the comparative: "plus grand", but "meilleur"."""
    if word in ("bon", "bons", "bonne", "bonnes"):
        return "meilleur" + word.removeprefix("bonn").removeprefix("bon")
    return f"plus {word}"


def determiner(kind, following, feminine=False, plural=False, mass=False, adjective_first=False):
    """Returns the French word for an English determiner.

    Args:
        kind: the English determiner ("the", "a", "some", "this", "my", "which", …).
        following: the words that stand after it, for "cet", "mon amie", "de l'eau".
        feminine: whether the noun is feminine.
        plural: whether the noun is plural.
        mass: whether the noun is a substance ("some bread").
        adjective_first: whether an adjective stands before the noun ("de grandes maisons").

    Returns:
        The determiner before elision; an empty string for "no-article".
    """
    vowel = starts_with_vowel(following)
    if kind in ("the", "generic"):
        return "les" if plural else "la" if feminine else "le"
    if kind == "a":
        return "une" if feminine else "un"
    if kind == "some":
        if mass:
            return "de la" if feminine else "de le" if vowel else "du"
        return "de" if adjective_first else "des"
    if kind == "this":
        return "ces" if plural else "cette" if feminine else "cet" if vowel else "ce"
    if kind == "which":
        return adjective("quel", "quelle", feminine, plural)
    if kind in _POSSESSIVES:
        masculine_form, feminine_form, plural_form = _POSSESSIVES[kind]
        if plural:
            return plural_form
        return feminine_form if feminine and not vowel else masculine_form
    return {
        "many": "beaucoup de",
        "how many": "combien de",
        "several": "plusieurs",
        "no-article": "",
    }[kind]


class FrenchVerb(NamedTuple):
    """A French verb with what cannot be derived from its infinitive."""

    infinitive: str
    present: tuple  # one form for each of PERSONS
    future_stem: str
    participle: str
    auxiliary: str = "avoir"
    reflexive: bool = False

    def form(self, tense, person):
        """Returns the form of a simple tense.

        Args:
            tense: "present", "imperfect", "future" or "conditional".
            person: one of `PERSONS`.

        Returns:
            The form without the subject.

        Example:

        >>> regular_verb("manger").form("imperfect", "nous")
        'mangions'
        """
        index = PERSONS.index(person)
        if tense == "present":
            return self.present[index]
        if tense == "future":
            return self.future_stem + ("ai", "a", "ons", "ez", "ont")[index]
        ending = ("ais", "ait", "ions", "iez", "aient")[index]
        stem = self.future_stem if tense == "conditional" else self._imperfect_stem(ending)
        return stem + ending

    def _imperfect_stem(self, ending):
        if self.infinitive == "être":
            return "ét"
        stem = self.present[2].removesuffix("ons")
        if ending[0] == "i":  # "mangeons" but "mangions", "commençons" but "commencions"
            if stem.endswith("ge"):
                return stem[:-1]
            if stem.endswith("ç"):
                return stem[:-1] + "c"
        return stem


# Verbs in -er whose stem changes before a silent ending: stem -> stem there.
# The second element says whether the future changes too.
_STEM_CHANGES = {
    "acheter": ("achèt", True),
    "lever": ("lèv", True),
    "préférer": ("préfèr", False),
    "espérer": ("espèr", False),
    "appeler": ("appell", True),
    "nettoyer": ("nettoi", True),
    "essayer": ("essai", True),
}


def regular_verb(infinitive, auxiliary="avoir", reflexive=False):
    """Returns the verb of a regular infinitive in -er, -ir (like finir) or -re (like attendre)."""
    stem, ending = infinitive[:-2], infinitive[-2:]
    future_stem = infinitive
    if ending == "er":
        changed, in_future = _STEM_CHANGES.get(infinitive, (stem, False))
        future_stem = changed + "er" if in_future else infinitive
        plural = stem + "e" if stem.endswith("g") else stem
        plural = stem[:-1] + "ç" if stem.endswith("c") else plural
        present = (changed + "e", changed + "e", plural + "ons", stem + "ez", changed + "ent")
        participle = stem + "é"
    elif ending == "ir":
        present = tuple(stem + end for end in ("is", "it", "issons", "issez", "issent"))
        participle = stem + "i"
    else:
        future_stem = infinitive[:-1]
        present = tuple(stem + end for end in ("s", "", "ons", "ez", "ent"))
        participle = stem + "u"
    return FrenchVerb(infinitive, present, future_stem, participle, auxiliary, reflexive)
