"""The nouns of the corpus, as tables.

A noun stands in one table, its kind; a verb asks for kinds (`verbs.py`), so that nobody
eats a table. A row reads

    english[/plural]  french[/plural]  gender

with an underscore for a space, a plural only where it is irregular, and "-" for a plural
that does not exist. Every English word has one sense here, hence one translation.
"""

import functools
from typing import NamedTuple

from dtransformer.datasets.embedded import english, french


class Noun(NamedTuple):
    """A noun in both languages; a plural is None where there is none."""

    kind: str
    english: str
    english_plural: str
    french: str
    french_plural: str
    feminine: bool


_NOUN_TABLES = {
    "kin": """
        mother/-      mère          f
        father/-      père          m
        grandmother/- grand-mère    f
        grandfather/- grand-père    m
        brother       frère         m
        sister        sœur          f
        son           fils          m
        daughter      fille         f
        uncle         oncle         m
        aunt          tante         f
        cousin        cousin        m
        friend        ami           m
        neighbor      voisin        m
    """,
    "youngster": """
        boy           garçon        m
        girl          fille         f
        child/children  enfant      m
    """,
    "adult": """
        man/men       homme         m
        woman/women   femme         f
        teacher       professeur    m
        doctor        médecin       m
        nurse         infirmière    f
        baker         boulanger     m
        student       étudiant      m
        actor         acteur        m
        lawyer        avocat        m
    """,
    "animal": """
        dog           chien         m
        cat           chat          m
        horse         cheval        m
        bird          oiseau        m
        rabbit        lapin         m
    """,
    "fruit": """
        apple         pomme         f
        orange        orange        f
        strawberry    fraise        f
        tomato/tomatoes  tomate      f
        potato/potatoes  pomme_de_terre/pommes_de_terre  f
        egg           œuf           m
    """,
    "snack": """
        cake          gâteau        m
        sandwich      sandwich      m
        pizza         pizza         f
    """,
    "food": """
        bread/-       pain          m
        cheese/-      fromage       m
        meat/-        viande        f
        fish/-        poisson       m
        rice/-        riz           m
        chocolate/-   chocolat      m
        soup/-        soupe         f
    """,
    "drink": """
        water/-       eau           f
        milk/-        lait          m
        tea/-         thé           m
        coffee/-      café          m
        wine/-        vin           m
    """,
    "text": """
        book          livre         m
        letter        lettre        f
        newspaper     journal       m
        story         histoire      f
    """,
    "object": """
        key           clé           f
        phone         téléphone     m
        bag           sac           m
        suitcase      valise        f
        box           boîte         f
        umbrella      parapluie     m
        ticket        billet        m
        photo         photo         f
        gift          cadeau        m
        ball          ballon        m
        camera        appareil_photo/appareils_photo  m
    """,
    "dish": """
        glass         verre         m
        cup           tasse         f
        plate         assiette      f
        knife/knives  couteau       m
        bottle        bouteille     f
    """,
    "furniture": """
        table         table         f
        chair         chaise        f
        bed           lit           m
        lamp          lampe         f
        sofa          canapé        m
    """,
    "part": """
        door          porte         f
        window        fenêtre       f
    """,
    "clothes": """
        shirt         chemise       f
        dress         robe          f
        coat          manteau       m
        hat           chapeau       m
        shoe          chaussure     f
        scarf/scarves écharpe       f
    """,
    "vehicle": """
        car           voiture       f
        bike          vélo          m
        boat          bateau        m
    """,
    "transport": """
        bus           bus           m
        train         train         m
        plane         avion         m
    """,
    "building": """
        house         maison        f
        church        église        f
        castle        château       m
        bridge        pont          m
        school        école         f
        hotel         hôtel         m
        museum        musée         m
        hospital      hôpital       m
        restaurant    restaurant    m
        library       bibliothèque  f
        shop          magasin       m
    """,
    "room": """
        kitchen       cuisine       f
        bedroom       chambre       f
        office        bureau        m
    """,
    "area": """
        city          ville         f
        village       village       m
        park          parc          m
        garden        jardin        m
        beach         plage         f
        street        rue           f
        river         rivière       f
    """,
    "nature": """
        tree          arbre         m
        flower        fleur         f
    """,
    "thought": """
        idea          idée          f
        answer        réponse       f
        question      question      f
        problem       problème      m
        word          mot           m
    """,
    "work": """
        lesson        leçon         f
    """,
    "show": """
        movie         film          m
        song          chanson       f
        game          match/matchs           m
        trip          voyage        m
    """,
}

# Sets that cut across the tables: what verbs ask for besides whole kinds.
_GROUPS = {
    "person": "kin youngster adult",
    "openable": "door window box bag suitcase gift letter bottle",
    "closable": "door window box bag suitcase",
    "cuppable": "tea coffee",
    "bottled": "water milk wine",
    "written": "letter book story",
    "readable": "book letter newspaper story",
    "picture": "photo flower garden river beach tree house",
    "watchable": "movie game",
    "machine": "car bike boat phone camera chair lamp bed",
    "fragile": "glass cup plate bottle window chair lamp phone camera",
    "washable": "shirt dress scarf car plate cup glass knife",
    "cleanable": "kitchen bedroom office house table window car",
    "given": "gift book photo flower key bag cake ticket umbrella newspaper",
    "sendable": "letter photo book gift ticket",
    "losable": "key phone ticket bag umbrella hat camera photo",
    "visitable": "museum castle church village city school",
    "understandable": "question problem answer word lesson story",
    "wanted": "bike book cake dog cat camera pizza car house",
    "owned": "car bike boat house dog cat horse camera garden bed sofa phone umbrella book idea "
    "question problem ticket",
    "scheduled": "movie lesson game trip",
}


def _parse_noun(kind, row):
    english_cell, french_cell, gender = row.split()
    singular, _, plural = english_cell.replace("_", " ").partition("/")
    french_singular, _, french_plural = french_cell.replace("_", " ").partition("/")
    if plural == "-":
        return Noun(kind, singular, None, french_singular, None, gender == "f")
    return Noun(
        kind,
        singular,
        plural or english.plural_of(singular),
        french_singular,
        french_plural or french.plural_of(french_singular),
        gender == "f",
    )


def rows(table):
    """Returns the lines of a table that are not empty."""
    return [row for row in table.splitlines() if row.strip()]


NOUNS = {
    noun.english: noun
    for kind, table in _NOUN_TABLES.items()
    for noun in (_parse_noun(kind, row) for row in rows(table))
}


@functools.cache
def nouns(names):
    """Returns the nouns of kinds, groups and single words, as a tuple in table order.

    Args:
        names: a string of kinds ("food"), groups ("openable") and nouns ("key").

    Returns:
        A tuple of `Noun`.

    Raises:
        KeyError: a name that is none of them.

    Example:

    >>> [noun.french for noun in nouns("drink")][:2]
    ['eau', 'lait']
    """
    found = []
    for name in names.split():
        if name in _NOUN_TABLES:
            found += [noun for noun in NOUNS.values() if noun.kind == name]
        elif name in _GROUPS:
            found += nouns(_GROUPS[name])
        else:
            found.append(NOUNS[name.replace("_", " ")])
    return tuple(dict.fromkeys(found))
