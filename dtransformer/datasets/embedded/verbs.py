"""The verbs of the corpus and what they go with, as tables.

A verb frame pairs an English verb with a French one and says who or what its object may
be, where one does it and how it stands in time.
"""

import functools
from typing import NamedTuple

from dtransformer.datasets.embedded import english, french, lexicon

# English verbs with an irregular past: base past participle.
_ENGLISH_IRREGULAR = {
    row.split()[0]: row.split()
    for row in """
        become became become
        break broke broken
        bring brought brought
        buy bought bought
        choose chose chosen
        come came come
        cost cost cost
        drink drank drunk
        eat ate eaten
        find found found
        forget forgot forgotten
        get got gotten
        give gave given
        go went gone
        have had had
        know knew known
        leave left left
        lose lost lost
        meet met met
        put put put
        read read read
        run ran run
        say said said
        see saw seen
        sell sold sold
        send sent sent
        show showed shown
        sing sang sung
        sleep slept slept
        speak spoke spoken
        swim swam swum
        take took taken
        tell told told
        think thought thought
        understand understood understood
        wear wore worn
        write wrote written
    """.strip().splitlines()
}

# French verbs that no rule gives:
# infinitive | present of je, il, nous, vous, ils | future stem | participle
# The form of nous also gives the imperfect: "il pleuvait".
_FRENCH_IRREGULAR = {
    row.split("|")[0].strip(): row
    for row in """
        aller | vais va allons allez vont | ir | allé
        apprendre | apprends apprend apprenons apprenez apprennent | apprendr | appris
        avoir | ai a avons avez ont | aur | eu
        boire | bois boit buvons buvez boivent | boir | bu
        comprendre | comprends comprend comprenons comprenez comprennent | comprendr | compris
        connaître | connais connaît connaissons connaissez connaissent | connaîtr | connu
        courir | cours court courons courez courent | courr | couru
        devenir | deviens devient devenons devenez deviennent | deviendr | devenu
        devoir | dois doit devons devez doivent | devr | dû
        dire | dis dit disons dites disent | dir | dit
        dormir | dors dort dormons dormez dorment | dormir | dormi
        écrire | écris écrit écrivons écrivez écrivent | écrir | écrit
        envoyer | envoie envoie envoyons envoyez envoient | enverr | envoyé
        être | suis est sommes êtes sont | ser | été
        faire | fais fait faisons faites font | fer | fait
        lire | lis lit lisons lisez lisent | lir | lu
        mettre | mets met mettons mettez mettent | mettr | mis
        ouvrir | ouvre ouvre ouvrons ouvrez ouvrent | ouvrir | ouvert
        partir | pars part partons partez partent | partir | parti
        pleuvoir | - pleut pleuvons - - | pleuvr | plu
        pouvoir | peux peut pouvons pouvez peuvent | pourr | pu
        prendre | prends prend prenons prenez prennent | prendr | pris
        revenir | reviens revient revenons revenez reviennent | reviendr | revenu
        savoir | sais sait savons savez savent | saur | su
        sortir | sors sort sortons sortez sortent | sortir | sorti
        venir | viens vient venons venez viennent | viendr | venu
        voir | vois voit voyons voyez voient | verr | vu
        vouloir | veux veut voulons voulez veulent | voudr | voulu
    """.strip().splitlines()
}

_WITH_ETRE = frozenset(
    "aller arriver devenir entrer partir rentrer rester revenir sortir tomber venir".split()
)


def english_verb(base):
    """Returns the `EnglishVerb` of a base form."""
    return {"be": english.BE, "have": english.HAVE}.get(base) or english.make_verb(
        *_ENGLISH_IRREGULAR.get(base, (base,))
    )


def french_verb(infinitive):
    """Returns the `FrenchVerb` of an infinitive; "se lever" gives a reflexive verb."""
    bare = infinitive.removeprefix("se ")
    reflexive = bare != infinitive
    auxiliary = "être" if reflexive or bare in _WITH_ETRE else "avoir"
    if bare not in _FRENCH_IRREGULAR:
        return french.regular_verb(bare, auxiliary, reflexive)
    _, present, future_stem, participle = _FRENCH_IRREGULAR[bare].split("|")
    return french.FrenchVerb(
        bare, tuple(present.split()), future_stem.strip(), participle.strip(), auxiliary, reflexive
    )


class Verb(NamedTuple):
    """A verb in both languages.

    `particle` follows the English verb ("up", "for"), `preposition` joins the French verb to
    its object ("à", "de"), `tail` follows the French verb ("à la maison").
    """

    english: english.EnglishVerb
    particle: str
    french: french.FrenchVerb
    preposition: str = ""
    tail: str = ""
    state: bool = False  # the simple past is the French imperfect


class Frame(NamedTuple):
    """A verb with its surroundings.

    `aspect` is "event", "instant" (never "is …ing"), "state" (its past is the French
    imperfect), "bond" (a state that is not foretold), "insight" (a state whose past is an
    event) or "lasting" (an event whose past is a state); `style` says which words may stand
    before the object, see `phrases.thing`; `uses` are keys of `circumstances.PLACES_BY_USE`.
    """

    verb: Verb
    aspect: str
    habit: bool
    objects: tuple
    style: str
    uses: tuple

    @property
    def words(self):
        """The English verb with its particle: "look for"."""
        return f"{self.verb.english.base} {self.verb.particle}".strip()


@functools.cache
def make_verb(english_words, french_words, state=False):
    """Returns a `Verb` of a table's cells.

    Example:

    >>> verb = make_verb("need", "avoir besoin de")
    >>> verb.french.infinitive, verb.tail, verb.preposition
    ('avoir', 'besoin', 'de')
    """
    base, _, particle = english_words.partition(" ")
    words = french_words.split()
    infinitive = [words.pop(0)]
    if infinitive == ["se"]:
        infinitive.append(words.pop(0))
    preposition = words.pop() if words and words[-1] in ("à", "de") else ""
    return Verb(
        english_verb(base),
        particle,
        french_verb(" ".join(infinitive)),
        preposition,
        " ".join(words),
        state,
    )


def frames(table):
    """Returns the `Frame`s of a table.

    A row reads: English verb | French verb | aspect, perhaps "habit" | objects, as
    `lexicon.nouns` takes them | style | uses.
    """
    found = []
    for row in table.splitlines():
        if not row.strip():
            continue
        english_words, french_words, aspect, objects, style, uses = (
            cell.strip() for cell in row.split("|")
        )
        kind, _, habit = aspect.partition(" ")
        found.append(
            Frame(
                make_verb(english_words, french_words, state=kind in ("state", "bond", "lasting")),
                kind,
                habit == "habit",
                lexicon.nouns(objects),
                style,
                tuple(uses.split()),
            )
        )
    return tuple(found)


# What one does to things.
TRANSITIVE = frames("""
    eat        | manger      | event habit | fruit snack | new | meal outside
    eat        | manger      | event habit | food       | mass | meal
    drink      | boire       | event habit | drink      | mass | meal
    buy        | acheter     | event habit | fruit snack | new | groceries
    buy        | acheter     | event habit | food       | mass | groceries
    buy        | acheter     | event   | clothes text object dish furniture vehicle | new |
    sell       | vendre      | event   | vehicle furniture house camera | own |
    read       | lire        | event   | readable       | any  | study leisure
    write      | écrire      | event   | written        | new  | study
    see        | voir        | instant | animal tree    | new  | outside
    see        | voir        | instant | building vehicle | new |
    look at    | regarder    | event   | picture clothes furniture | the |
    watch      | regarder    | event   | watchable      | new  | home
    listen to  | écouter     | event   | song story teacher lawyer doctor | the |
    look for   | chercher    | event   | losable knife cat dog | own | home
    find       | trouver     | instant | losable scarf shoe | own | home outside
    lose       | perdre      | instant | losable scarf shoe | own | town
    forget     | oublier     | instant | losable coat scarf | own | study work
    open       | ouvrir      | event   | openable       | the  |
    close      | fermer      | event   | closable       | the  |
    clean      | nettoyer    | event habit | cleanable  | own  |
    wash       | laver       | event habit | washable   | own  |
    wear       | porter      | lasting | clothes        | worn |
    take       | prendre     | event habit | transport | ride |
    wait for   | attendre    | event   | transport | ride |
    wait for   | attendre    | event   | person         | person | meeting
    visit      | visiter     | event   | visitable      | any  |
    repair     | réparer     | event   | machine        | own  |
    break      | casser      | instant | fragile        | own  |
    choose     | choisir     | event   | clothes movie book gift | new |
    learn      | apprendre   | event   | song lesson    | the | study
    meet       | rencontrer  | instant | person         | person | town meeting
    help       | aider       | event habit | person     | person | work
    call       | appeler     | event habit | person     | person |
    talk to    | parler à    | event habit | person     | person | outside work town
    know       | connaître   | bond    | person         | person |
    understand | comprendre  | insight | understandable | the  |
    need       | avoir besoin de | state | clothes object dish furniture | new |
    have       | avoir       | state   | owned          | new  |
    want       | vouloir     | state   | wanted clothes | new  |
    want       | vouloir     | state   | drink food     | mass |
""")

# What one does without an object.
INTRANSITIVE = frames("""
    sleep      | dormir      | event habit |  |  | night leisure
    work       | travailler  | event habit |  |  | work
    run        | courir      | event habit |  |  | outside sport
    swim       | nager       | event habit |  |  | bath
    walk       | marcher     | event habit |  |  | outside
    sing       | chanter     | event habit |  |  | home outside
    dance      | danser      | event habit |  |  | home outside
    arrive     | arriver     | event   |  |  | meeting work study
    leave      | partir      | event   |  |  |
    stay at home | rester à la maison | event habit |  |  |
    go out     | sortir      | event habit |  |  |
    go home    | rentrer à la maison | event habit |  |  |
    get up     | se lever    | event habit |  |  |
    go to bed  | se coucher  | event habit |  |  |
    rest       | se reposer  | event habit |  |  | leisure night
    have lunch | déjeuner    | event habit |  |  | meal
    have dinner | dîner      | event habit |  |  | meal
    go shopping | faire les courses | event habit |  |  |
    play tennis | jouer au tennis | event habit |  |  | sport
    play football | jouer au football | event habit |  |  | sport
    play the piano | jouer du piano | event habit |  |  | home
    watch television | regarder la télévision | event habit |  |  | home
    listen to the radio | écouter la radio | event habit |  |  | home
""")

# What animals do.
ANIMAL = {
    "dog cat rabbit horse": frames("""
        sleep      | dormir      | event habit |  |  | outside home
        run        | courir      | event   |  |  | outside
        drink      | boire       | event   | water | plain |
    """),
    "dog cat": frames("""
        eat        | manger      | event   | meat fish | plain | home
        drink      | boire       | event   | milk  | plain |
        look at    | regarder    | event   | bird cat dog rabbit | the |
        look at    | regarder    | event   | youngster man woman | ride |
        stay at home | rester à la maison | event |  |  |
    """),
    "bird": frames("""
        sing       | chanter     | event habit |  |  | outside
        drink      | boire       | event   | water | plain |
        eat        | manger      | event   | strawberry | known | outside
    """),
}

# What one gives to somebody: the object comes first, the person after "to".
GIVING = frames("""
    give       | donner à    | event   | given          | any  |
    show       | montrer à   | event   | photo flower garden clothes ticket car | any |
    send       | envoyer à   | event   | sendable       | any  |
    bring      | apporter à  | event   | given          | any  |
    tell       | raconter à  | event   | story          | any  |
""")


class Chain(NamedTuple):
    """A verb that takes another verb: "want to eat", "essayer de manger"."""

    verb: Verb
    link: str  # what French puts before the infinitive
    aspect: str


def _parse_chain(row):
    english_words, french_words, aspect = (cell.strip() for cell in row.split("|"))
    base = english_words.removesuffix(" to")
    infinitive, _, link = french_words.partition(" ")
    return Chain(make_verb(base, infinitive, state=aspect == "state"), link, aspect)


CHAINS = {
    chain.verb.english.base: chain
    for chain in map(
        _parse_chain,
        """
    want to     | vouloir      | state
    like to     | aimer        | state
    hope to     | espérer      | state
    try to      | essayer de   | event
    decide to   | décider de   | instant
    forget to   | oublier de   | instant
    start to    | commencer à  | instant
    learn to    | apprendre à  | event
""".strip().splitlines(),
    )
}

BE = Verb(english_verb("be"), "", french_verb("être"), state=True)
BE_AS_HAVE = Verb(english_verb("be"), "", french_verb("avoir"), state=True)  # "be hungry"
HAVE = Verb(english_verb("have"), "", french_verb("avoir"), state=True)
AUXILIARIES = {
    name: french_verb(name) for name in ("aller", "venir", "pouvoir", "devoir", "vouloir")
}
