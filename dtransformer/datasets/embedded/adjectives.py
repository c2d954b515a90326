"""The adjectives of the corpus and the nouns they suit, as a table."""

from typing import NamedTuple

from dtransformer.datasets.embedded import lexicon


class Adjective(NamedTuple):
    """An adjective in both languages.

    `comparative` is the English word before "than", "more" for the long ones, empty where
    nothing is compared. `place` is "before" or "after" the French noun.
    """

    english: str
    comparative: str
    masculine: str
    feminine: str
    place: str


# Nouns that an adjective, or many, suits.
_SUITED = {
    "@sized": "house garden kitchen bedroom car boat table bed box bag dog cat tree village city "
    "school hotel museum shop cake suitcase park plate key ball",
    "@colored": "shirt dress coat hat shoe scarf car bike boat bag suitcase umbrella ball box "
    "chair sofa lamp door cup plate",
    "@made": "car movie restaurant song newspaper city bike cheese wine",
    "@fine": "book restaurant hotel movie teacher doctor idea answer question wine coffee bread "
    "cheese cake pizza song game lesson student trip actor school baker",
    "@looks": "dress hat coat house church castle bridge garden village city beach flower song "
    "photo horse bird trip",
    "@lasting": "house church castle bridge tree car bike bed school hotel",
    "@long": "letter book story movie lesson trip street river bridge",
    "@costly": "house car hotel restaurant bike camera phone bag coat dress ticket sofa lamp",
    "@hard": "question problem word lesson game",
    "@told": "book movie story question idea lesson museum trip letter answer",
    "@useful": "book umbrella idea answer phone lesson bike",
    "@weighty": "letter question problem idea lesson word answer",
    "@holding": "glass cup bottle box bag restaurant hotel bus train",
    "@loud": "street city hotel restaurant train bus child neighbor",
    "@opened": "door window museum restaurant library shop church box bag",
    "@soiled": "kitchen car plate glass shirt coat shoe window street",
    "@warmed": "soup tea coffee milk water",
    "@replaced": "house car bike bed table chair lamp phone camera coat dress shirt shoe bag book "
    "teacher neighbor school hotel restaurant shop bridge office hospital song game movie idea",
    "@worn": "book coat hat shoe photo song",
    "@tasty": "bread cheese soup chocolate snack strawberry apple coffee wine",
    "@pretty": "dress garden house lamp photo village scarf",
    "@known": "actor museum song movie restaurant castle book lawyer",
}

# Each: English, comparative, masculine, feminine, place | nouns it may stand beside |
# nouns after whose "is" it may stand. One English adjective may have two rows, with other
# nouns: "an old man" is "un vieil homme", and "he is old" is "il est âgé".
_ADJECTIVES = """
big bigger grand grande before | @sized | @sized
small smaller petit petite before | @sized | @sized
little - petit petite before | boy girl | -
tall taller grand grande after | - | person tree
young younger jeune jeune before | man woman teacher doctor nurse student actor lawyer | adult kin
old - vieux vieille before | @worn man woman friend neighbor @lasting | -
old older vieux vieille after | - | @lasting dog cat horse
old older âgé âgée after | - | adult mother father grandmother grandfather uncle aunt
new - nouveau nouvelle before | @replaced | -
good better bon bonne before | @fine | @fine
bad - mauvais mauvaise before | idea answer movie book coffee restaurant hotel student song trip | -
beautiful more beau belle before | @looks | @looks
pretty - joli jolie before | @pretty flower song | @pretty
long longer long longue before | @long | @long dress coat
short - court courte after | dress coat | dress coat
red - rouge rouge after | @colored apple flower bird | @colored flower
blue - bleu bleue after | @colored flower bird | @colored flower
green - vert verte after | @colored apple | @colored
black - noir noire after | @colored dog cat horse rabbit | @colored
white - blanc blanche after | @colored dog cat horse rabbit wine flower bird | @colored flower
brown - marron marron after | shoe coat bag suitcase sofa hat | shoe coat bag suitcase sofa hat
rich richer riche riche after | man woman lawyer actor | adult uncle aunt cousin neighbor
strong stronger fort forte after | coffee tea | man woman father brother horse coffee tea
happy happier heureux heureuse after | man woman child | person
sad - triste triste after | story song movie child | person story song movie
kind - gentil gentille before | man woman boy girl neighbor nurse | person
clever more intelligent intelligente after | child student boy girl | person dog
funny funnier drôle drôle after | story movie | person story movie
famous more célèbre célèbre after | @known | @known
tired more fatigué fatiguée after | - | person horse
sick - malade malade after | - | person dog cat
busy - occupé occupée after | - | person
ready - prêt prête after | - | person soup cake pizza
late - en_retard en_retard after | - | person bus train plane
early - en_avance en_avance after | - | person bus train
expensive more cher chère after | @costly | @costly
heavy heavier lourd lourde after | suitcase bag box table | suitcase bag box table bike
hot - chaud chaude after | - | @warmed
cold - froid froide after | - | @warmed
fresh - frais fraîche after | bread fish milk egg | bread fish milk egg
delicious - délicieux délicieuse after | - | @tasty
interesting more intéressant intéressante after | @told | @told
important more important importante after | @weighty | @weighty
difficult more difficile difficile after | @hard | @hard
easy easier facile facile after | @hard | @hard
useful more utile utile after | @useful | @useful
noisy - bruyant bruyante after | @loud | @loud
empty - vide vide after | glass bottle box | @holding
full - plein pleine after | - | @holding
open - ouvert ouverte after | - | @opened
closed - fermé fermée after | - | @opened
broken - cassé cassée after | - | fragile
dirty - sale sale after | shirt glass plate shoe | @soiled
French - français française after | @made actor student | @made actor teacher neighbor
Italian - italien italienne after | @made actor student | @made actor neighbor
Spanish - espagnol espagnole after | @made actor student | @made teacher nurse
German - allemand allemande after | @made student | @made doctor teacher
"""


def _nouns(cell):
    words = [_SUITED.get(word, word) for word in cell.split() if word != "-"]
    return lexicon.nouns(" ".join(words))


def _parse_adjectives():
    attributes, predicates = {}, {}
    for row in lexicon.rows(_ADJECTIVES):
        cells, beside, after_be = row.split("|")
        word, comparative, masculine, feminine, place = cells.split()
        item = Adjective(
            word,
            comparative.strip("-"),
            masculine.replace("_", " "),
            feminine.replace("_", " "),
            place,
        )
        for table, cell in ((attributes, beside), (predicates, after_be)):
            for noun in _nouns(cell):
                table.setdefault(noun.english, []).append(item)
    return (
        {word: tuple(items) for word, items in attributes.items()},
        {word: tuple(items) for word, items in predicates.items()},
    )


# English noun -> the adjectives that may stand beside it; … that may follow "is".
ATTRIBUTES, PREDICATES = _parse_adjectives()


def predicate(word):
    """Returns the adjective that says how a person is ("tired")."""
    return next(item for item in PREDICATES["man"] if item.english == word)
