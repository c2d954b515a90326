"""The words of the corpus, as tables: every English word has one sense, hence one translation."""

import functools
from collections import namedtuple

from dtransformer.datasets.embedded import english, french

# Kind: English[/plural, where irregular, or - for none] French gender, ...
_NOUNS = """
    kin: mother/- mère f, father/- père m, brother frère m, sister sœur f, son fils m, uncle oncle m
    kin: daughter fille f, aunt tante f, cousin cousin m, friend ami m, neighbor voisin m
    person: man/men homme m, woman/women femme f, boy garçon m, girl fille f, nurse infirmière f
    person: child/children enfant m, doctor médecin m, student étudiant m, actress actrice f
    animal: dog chien m, cat chat m, horse cheval m, bird oiseau m, cow vache f, mouse/mice souris f
    fruit: apple pomme f, orange orange f, strawberry fraise f, tomato/tomatoes tomate f, egg œuf m
    food: bread/- pain m, cheese/- fromage m, meat/- viande f, rice/- riz m, soup/- soupe f
    drink: water/- eau f, milk/- lait m, tea/- thé m, coffee/- café m, wine/- vin m, beer/- bière f
    text: book livre m, letter lettre f, newspaper journal m, story histoire f
    object: key clé f, phone téléphone m, bag sac m, suitcase valise f, box boîte f, gift cadeau m
    object: umbrella parapluie m, photo photo f, watch montre f, mirror miroir m
    furniture: table table f, chair chaise f, bed lit m, lamp lampe f, sofa canapé m
    clothes: shirt chemise f, dress robe f, coat manteau m, hat chapeau m, shoe chaussure f
    vehicle: car voiture f, bike vélo m, boat bateau m
    transport: train train m, bus bus m, plane avion m
    site: station gare f, market marché m, hotel hôtel m, museum musée m, school école f
    site: hospital hôpital m, restaurant restaurant m, library bibliothèque f, beach plage f
    building: house maison f, church église f, castle château m, bridge pont m, garden jardin m
    show: movie film m, lesson leçon f, party fête f, concert concert m
"""

# English, comparative ("more" for long adjectives, - for none), masculine, feminine, place: kinds
# and nouns that it suits. It stands "before" or "after" the French noun; an "attribute" stands
# before the noun only, a "predicate" behind "is" only.
_ADJECTIVES = """
    big bigger grand grande before: site building furniture vehicle bag suitcase box
    small smaller petit petite before: object furniture animal building vehicle
    tall taller grand grande predicate: person kin
    young younger jeune jeune before: man woman doctor nurse actress
    old older vieux vieille before: man woman animal object clothes furniture vehicle building site
    new - nouveau nouvelle attribute: object clothes furniture vehicle text doctor
    good better bon bonne before: fruit food drink book story movie concert hotel restaurant
    beautiful more beau belle before: clothes building horse bird beach
    red - rouge rouge after: clothes vehicle bag suitcase box umbrella furniture apple
    black - noir noire after: clothes vehicle bag suitcase box umbrella furniture animal
    expensive more cher chère after: clothes furniture vehicle watch phone bag hotel restaurant
    interesting more intéressant intéressante after: text movie museum lesson
    intelligent more intelligent intelligente after: person kin
    cold - froid froide after: drink soup meat
    broken - cassé cassée after: lamp chair phone watch umbrella mirror
    happy happier heureux heureuse after: person kin
    tired more fatigué fatiguée predicate: person kin
    sick - malade malade predicate: person kin dog cat horse
"""

# English[/past, where irregular] tail | French tail | group | kinds and nouns of its object, or of
# its subject in "cost" and "schedule". An "instant" has no progressive.
_VERBS = """
    eat/ate | manger | event | fruit food
    drink/drank | boire | event | drink
    buy/bought | acheter | event | fruit food drink book newspaper object clothes furniture vehicle
    sell/sold | vendre | event | object clothes furniture vehicle house
    read/read | lire | event | text
    write/wrote | écrire | event | letter book story
    close | fermer | event | box bag suitcase
    visit | visiter | event | museum castle church school
    take/took | prendre | event | transport
    look at | regarder | event | photo animal clothes building person
    look for | chercher | event | object clothes dog cat person kin
    wait for | attendre | event | transport person kin
    help | aider | event | person kin
    see/saw | voir | instant | person kin animal building transport
    find/found | trouver | instant | object clothes animal
    lose/lost | perdre | instant | object clothes
    break/broke | casser | instant | lamp chair phone watch umbrella mirror
    go/went to | aller à | motion | site
    come/came from | venir de | motion | site
    stay at | rester à | motion | site
    sing/sang | chanter | activity |
    work | travailler | activity |
    play tennis | jouer à le tennis | activity |
    play the piano | jouer de le piano | activity |
    give/gave | donner | giving | text object clothes
    show | montrer | giving | text object clothes
    have/had | avoir | state | object clothes furniture vehicle animal house garden
    want | vouloir | state | object clothes furniture vehicle fruit food drink dog cat
    need | avoir besoin de | state | object clothes furniture vehicle
    like | aimer | liking | fruit food drink animal text clothes site
    be/was | être | be |
    be/was | avoir | age |
    cost/cost | coûter | cost | object clothes furniture vehicle
    leave/left | partir | schedule | transport
    arrive | arriver | schedule | transport
    end | finir | schedule | show
"""

NAMES = {"Paul": False, "Lucas": False, "Thomas": False, "Anna": True, "Alice": True, "Marie": True}
TIMES = {  # English|French
    "present": ("now|maintenant", "today|aujourd'hui", "at the moment|en ce moment"),
    "past": ("yesterday|hier", "last week|la semaine dernière", "last year|l'année dernière"),
    "future": ("tomorrow|demain", "tonight|ce soir", "next week|la semaine prochaine"),
}

Noun = namedtuple("Noun", "kind english english_plural french french_plural feminine")
Adjective = namedtuple("Adjective", "english comparative masculine feminine place")
Verb = namedtuple("Verb", "base past english_tail infinitive french_tail group nouns")


def _rows(table, separator):
    return [[cell.strip() for cell in row.split(separator)] for row in table.strip().splitlines()]


def _noun(kind, words, translation, gender):
    singular, _, plural = words.partition("/")
    plural = "" if plural == "-" else plural or english.inflected(singular)
    return Noun(kind, singular, plural, translation, french.plural_of(translation), gender == "f")


def _verb(words, translation, group, suited):
    forms, _, english_tail = words.partition(" ")
    base, _, past = forms.partition("/")
    infinitive, _, french_tail = translation.partition(" ")
    past = past or base.removesuffix("e") + "ed"
    return Verb(base, past, english_tail, infinitive, french_tail, group, nouns(suited))


NOUNS = [_noun(kind, *cell.split()) for kind, row in _rows(_NOUNS, ":") for cell in row.split(",")]


@functools.cache
def nouns(names):
    """Returns the nouns of kinds ("drink") and single words ("tea"), as a tuple."""
    return tuple(noun for noun in NOUNS if {noun.kind, noun.english} & set(names.split()))


ADJECTIVES = {Adjective(*words.split()): nouns(suited) for words, suited in _rows(_ADJECTIVES, ":")}
VERBS = [_verb(*cells) for cells in _rows(_VERBS, "|")]


@functools.cache
def adjectives(noun, *places):
    """Returns the adjectives that suit a noun and stand in one of `places`, as a tuple."""
    return tuple(item for item in ADJECTIVES if item.place in places and noun in ADJECTIVES[item])


@functools.cache
def verbs(groups):
    """Returns the verbs of some groups, as a tuple."""
    return tuple(verb for verb in VERBS if verb.group in groups.split())
