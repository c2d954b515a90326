"""Numbers, clock times and dates as words, each as (English, French)."""

from harness.corpus.tables import words

_SMALL, _TENS = ([pair.split("|") for pair in words(name)] for name in ("numbers", "tens"))
_ORDINALS = dict(pair.split("|") for pair in words("ordinals"))
DAYS, MONTHS = words("days"), words("months")


def number(value, feminine=False):
    """Return a number from 0 to 999, as it stands before a noun.

    Example:

    >>> number(281), number(21, feminine=True)
    (('two hundred eighty-one', 'deux cent quatre-vingt-un'), ('twenty-one', 'vingt et une'))
    """
    hundreds, rest = divmod(value, 100)
    if not hundreds:
        english, french = _below_hundred(rest)
        return english, french + "e" * (feminine and french.endswith("un"))
    english, french = number(rest, feminine) if rest else ("", "")
    several = f"{_SMALL[hundreds][1]} cent{'' if rest else 's'}" if hundreds > 1 else "cent"
    return f"{_SMALL[hundreds][0]} hundred {english}".strip(), f"{several} {french}".strip()


def _below_hundred(value):
    if value < 20:
        return _SMALL[value]
    tens, units = divmod(value, 10)
    english, french = _TENS[tens - 2]
    english += f"-{_SMALL[units][0]}" if units else ""
    units += 10 * (tens in (7, 9))
    if units == 0:
        return english, french + "s" * (tens == 8)
    return english, french + (" et " if units in (1, 11) and tens < 8 else "-") + _SMALL[units][1]


def clock_time(hour, minute):
    """Return a time of the day: an hour from 0 (midnight) to 11, minutes by fives."""
    to = minute > 30
    hour, minute = hour + to, 60 - minute if to else minute
    english, french = number(hour, feminine=True)
    french += " heures" if hour > 1 else " heure"
    if hour in (0, 12):
        english, french = ("noon", "midi") if hour else ("midnight", "minuit")
    if minute == 0:
        return english + " o'clock" * (hour > 0), french
    english_minute, french_minute = number(minute)
    if minute == 15:
        english_minute, french_minute = "a quarter", "le quart" if to else "et quart"
    if minute == 30:  # "demi" agrees with "heure"
        english_minute, french_minute = "half", "et demie" if hour else "et demi"
    if to:
        return f"{english_minute} to {english}", f"{french} moins {french_minute}"
    return f"{english_minute} past {english}", f"{french} {french_minute}"


def date(day, month):
    """Return a date: a day from 1 to 31, a month from 0 to 11."""
    english, french = number(day)
    tens, hyphen, last = english.rpartition("-")
    english_month, french_month = MONTHS[month].split("|")
    english = tens + hyphen + _ORDINALS.get(last, last + "th")
    french = "premier" if day == 1 else french
    return f"the {english} of {english_month}", f"le {french} {french_month}"
