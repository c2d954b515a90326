"""Rules of English: regular forms, and a subject with its verb."""

_NEGATED = {"am": "am not", "will": "won't", "can": "can't"}


def inflected(word):
    """Return the plural of a regular noun, or the third person of a verb."""
    if word.endswith("y") and word[-2] not in "aeou":
        return word[:-1] + "ies"
    return word + ("es" if word.endswith(("s", "x", "ch", "sh", "go")) else "s")


def _verb_group(base, past, tense, person, split):
    """Return the words of a verb as (auxiliary, rest); `split` asks for an auxiliary."""
    third = person == "il"
    be = {"je": "am", "il": "is"}.get(person, "are")
    was = "was" if third or person == "je" else "were"
    if base == "be" and tense in ("present", "past"):
        return (be if tense == "present" else was), ""
    if tense == "want to":
        auxiliary, rest = _verb_group("want", "wanted", "present", person, split)
        return auxiliary, f"{rest} to {base}"
    finite = ("has" if base == "have" else inflected(base)) if third else base
    gerund = base.removesuffix("e") + "ing"
    return {
        "present": ("does" if third else "do", base) if split else ("", finite),
        "past": ("did", base) if split else ("", past),
        "progressive": (be, gerund),
        "past progressive": (was, gerund),
        "going to": (be, f"going to {base}"),
    }.get(tense, (tense, base))


def clause(subject, verb, tense, polarity="", question=False):
    """Return a subject with its verb: "she isn't reading", "does she"; see `phrases.clause`."""
    split = question or polarity == "not"
    auxiliary, rest = _verb_group(verb.base, verb.past, tense, subject.person, split)
    if polarity == "not":
        auxiliary, polarity = _NEGATED.get(auxiliary, auxiliary + "n't"), ""
    start = f"{auxiliary} {subject.english}" if question else f"{subject.english} {auxiliary}"
    return f"{start} {polarity} {rest} {verb.english_tail}"
