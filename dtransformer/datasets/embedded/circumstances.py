"""Names, places and times of the corpus, as tables of English and French.

French cells are written without elision and contraction ("le aéroport"); the rules of
`french.py` make "à l'aéroport" of them.
"""

from typing import NamedTuple

from dtransformer.datasets.embedded import french


def _pairs(table):
    rows = [row.split("|") for row in table.splitlines() if row.strip()]
    return tuple(tuple(cell.strip() for cell in row) for row in rows)


MEN = ("Paul", "Thomas", "Lucas", "Pierre", "Antoine")
WOMEN = ("Marie", "Sophie", "Claire", "Anna", "Alice")

# English | French
CITIES = _pairs("""
    Paris     | Paris
    London    | Londres
    Rome      | Rome
    Berlin    | Berlin
    Madrid    | Madrid
    Brussels  | Bruxelles
    Geneva    | Genève
""")

# English | French with its article | "in" and "to" | "from"
COUNTRIES = _pairs("""
    France            | la France     | en France       | de France
    Italy             | la Italie     | en Italie       | de Italie
    Spain             | la Espagne    | en Espagne      | de Espagne
    Germany           | la Allemagne  | en Allemagne    | de Allemagne
    Belgium           | la Belgique   | en Belgique     | de Belgique
    Japan             | le Japon      | au Japon        | du Japon
    Canada            | le Canada     | au Canada       | du Canada
    the United States | les États-Unis | aux États-Unis | des États-Unis
""")

LANGUAGES = _pairs("""
    French   | le français
    Italian  | le italien
    Spanish  | le espagnol
    German   | le allemand
    English  | le anglais
""")


class Place(NamedTuple):
    """A place with the words for being there, going there and coming from there."""

    english_at: str
    french_at: str
    english_to: str
    french_to: str
    english_from: str
    french_from: str


# noun | English "at" | French | French "at" | French "to" | what one does there
_PLACES = _pairs("""
    station      | at | la gare          | à    | à    | town meeting
    airport      | at | le aéroport      | à    | à    | town meeting
    market       | at | le marché        | à    | à    | town groceries
    supermarket  | at | le supermarché   | à    | à    | town groceries
    bank         | at | la banque        | à    | à    | town work
    hospital     | at | le hôpital       | à    | à    | town work
    restaurant   | at | le restaurant    | à    | à    | town meal meeting
    hotel        | at | le hôtel         | à    | à    | night
    museum       | at | le musée         | à    | à    | town
    library      | at | la bibliothèque  | à    | à    | town study
    school       | at | la école         | à    | à    | study sport
    office       | at | le bureau        | à    | à    | work
    pool         | at | la piscine       | à    | à    | bath
    beach        | at | la plage         | à    | à    | bath leisure
    cinema       | at | le cinéma        | à    | à    | town meeting
    park         | in | le parc          | dans | à    | outside leisure sport
    garden       | in | le jardin        | dans | dans | outside leisure sport
    street       | in | la rue           | dans | dans | outside
    kitchen      | in | la cuisine       | dans | dans | home meal
    bedroom      | in | la chambre       | dans | dans | home night
""")


def _make_places():
    places, by_use = {}, {}
    for noun, english_at, phrase, french_at, french_to, uses in _PLACES:
        place = Place(
            f"{english_at} the {noun}",
            french.contract(french_at, phrase),
            f"to the {noun}",
            french.contract(french_to, phrase),
            f"from the {noun}",
            french.contract("de", phrase),
        )
        places[noun] = place
        for use in uses.split():
            by_use.setdefault(use, []).append(place)
    at_home = Place("at home", "à la maison", "", "", "", "")
    for use in ("home", "meal", "night", "leisure", "study", "work"):
        by_use[use].append(at_home)
    return places, {use: tuple(found) for use, found in by_use.items()}


# noun -> Place; use -> places; noun -> French with its article.
PLACES, PLACES_BY_USE = _make_places()
FRENCH_PLACES = {row[0]: row[2] for row in _PLACES}

DAYS = _pairs("""
    Monday    | lundi
    Tuesday   | mardi
    Wednesday | mercredi
    Thursday  | jeudi
    Friday    | vendredi
    Saturday  | samedi
    Sunday    | dimanche
""")

MONTHS = _pairs("""
    January   | janvier
    February  | février
    March     | mars
    April     | avril
    May       | mai
    June      | juin
    July      | juillet
    August    | août
    September | septembre
    October   | octobre
    November  | novembre
    December  | décembre
""")

SEASONS = _pairs("""
    spring | au printemps
    summer | en été
    autumn | en automne
    winter | en hiver
""")

# When something happens, by the kind of time: what one does now and then happens on a day,
# what one remembers also in a week or a year.
TIMES = {
    "habit": _pairs("""
        every day             | tous les jours
        every morning         | tous les matins
        every evening         | tous les soirs
        every week            | toutes les semaines
        in the morning        | le matin
        in the evening        | le soir
        in the afternoon      | le après-midi
        on weekends           | le week-end
    """)
    + tuple((f"every {day}", f"tous les {jour}s") for day, jour in DAYS),
    "now": _pairs("""
        now                   | maintenant
        at the moment         | en ce moment
        today                 | aujourd'hui
        this morning          | ce matin
    """),
    "past day": _pairs("""
        yesterday             | hier
        yesterday morning     | hier matin
        yesterday evening     | hier soir
        this morning          | ce matin
    """)
    + tuple((f"last {day}", f"{jour} dernier") for day, jour in DAYS),
    "past period": _pairs("""
        last week             | la semaine dernière
        last month            | le mois dernier
        last year             | le année dernière
        last summer           | le été dernier
    """),
    "future day": _pairs("""
        tomorrow              | demain
        tomorrow morning      | demain matin
        tomorrow evening      | demain soir
        this evening          | ce soir
        soon                  | bientôt
    """)
    + tuple((f"next {day}", f"{jour} prochain") for day, jour in DAYS)
    + tuple((f"on {day}", jour) for day, jour in DAYS),
    "future period": _pairs("""
        next week             | la semaine prochaine
        next month            | le mois prochain
        next year             | le année prochaine
        next summer           | le été prochain
    """),
}

# Between the subject and the verb in English, behind the conjugated verb in French.
FREQUENCIES = _pairs("""
    always    | toujours
    often     | souvent
    sometimes | parfois
    rarely    | rarement
""")
