"""Numbers and clock times as words, in English and in French."""

_ENGLISH_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_ENGLISH_TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()

_FRENCH_SMALL = (
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze "
    "seize dix-sept dix-huit dix-neuf"
).split()
_FRENCH_TENS = "- - vingt trente quarante cinquante soixante soixante quatre-vingt".split()
_FRENCH_TENS.append("quatre-vingt")


def english_number(number):
    """Returns a number from 0 to 999 as English words.

    Args:
        number: an integer from 0 to 999.

    Returns:
        The words, without "and" after the hundreds, as in American English.

    Example:

    >>> english_number(281)
    'two hundred eighty-one'
    """
    _check(number)
    hundreds, rest = divmod(number, 100)
    words = [_ENGLISH_SMALL[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        tens, units = divmod(rest, 10)
        words.append(_ENGLISH_TENS[tens] + (f"-{_ENGLISH_SMALL[units]}" if units else ""))
    elif rest or not hundreds:
        words.append(_ENGLISH_SMALL[rest])
    return " ".join(words)


def french_number(number, feminine=False):
    """Returns a number from 0 to 999 as French words, as they stand before a noun.

    The traditional spelling: hyphens below one hundred only, "et" in 21, 31, … 71, an "s" for
    several whole hundreds and for eighty when nothing follows.

    Args:
        number: an integer from 0 to 999.
        feminine: whether the counted noun is feminine ("une", "vingt et une").

    Returns:
        The words.

    Example:

    >>> french_number(281)
    'deux cent quatre-vingt-un'
    """
    _check(number)
    hundreds, rest = divmod(number, 100)
    words = []
    if hundreds > 1:
        words.append(_FRENCH_SMALL[hundreds])
    if hundreds:
        words.append("cents" if hundreds > 1 and not rest else "cent")
    if rest or not hundreds:
        words.append(_french_below_hundred(rest))
    text = " ".join(words)
    # "onze" ends in another word than "un", so that only 1, 21, … 61, 81 change.
    if feminine and (text == "un" or text.endswith((" un", "-un"))):
        text += "e"
    return text


def clock_time(hour, minute=0):
    """Returns a time of the day as people say it.

    Args:
        hour: 0 (midnight) to 12 (noon).
        minute: a multiple of five, 0 to 55.

    Returns:
        A tuple of the English and the French words.

    Example:

    >>> clock_time(3, 30)
    ('half past three', 'trois heures et demie')
    """
    english_hour, french_hour = _hour(hour)
    if minute == 0:
        return (english_hour if hour in (0, 12) else f"{english_hour} o'clock"), french_hour
    if minute == 30:
        # "demi" agrees with "heure"; "midi" and "minuit" are masculine.
        half = "demi" if hour in (0, 12) else "demie"
        return f"half past {english_hour}", f"{french_hour} et {half}"
    if minute < 30:
        french_minute = "et quart" if minute == 15 else french_number(minute)
        return f"{_minute(minute)} past {english_hour}", f"{french_hour} {french_minute}"
    english_hour, french_hour = _hour(hour + 1)
    left = 60 - minute
    french_minute = "le quart" if left == 15 else french_number(left)
    return f"{_minute(left)} to {english_hour}", f"{french_hour} moins {french_minute}"


def _check(number):
    if not 0 <= number <= 999:
        raise ValueError(f"Number words are known for 0 to 999. Received: {number}.")


def _french_below_hundred(number):
    if number < 20:
        return _FRENCH_SMALL[number]
    tens, units = divmod(number, 10)
    stem = _FRENCH_TENS[tens]
    if tens in (7, 9):
        units += 10
    if units == 0:
        return "quatre-vingts" if tens == 8 else stem
    if units in (1, 11) and tens < 8:
        return f"{stem} et {_FRENCH_SMALL[units]}"
    return f"{stem}-{_FRENCH_SMALL[units]}"


def _hour(hour):
    if hour == 0:
        return "midnight", "minuit"
    if hour == 12:
        return "noon", "midi"
    return english_number(hour), f"{french_number(hour, feminine=True)} heure{'s' * (hour > 1)}"


def _minute(minute):
    return "a quarter" if minute == 15 else english_number(minute)
