"""The built-in task: to translate dates as people write them, in 25 languages, to ISO 8601.

The dates are written in the forms of CLDR, the locale data of common software: the full, long and medium format of each
locale, through `babel`. Formats with a narrow no-break space, which keyboards lack, also exist with a plain space.
Formats read as another date in another locale are left out. The code computes these, see `left_out`.
"""

import functools
import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from types import ModuleType
from typing import Literal, get_args

from regard.errors import ArgumentError, needs
from regard.tasks.text.pairs import Pair
from regard.tasks.text.unicode import normalise

Split = Literal["train", "valid", "test"]

# fmt: off
LOCALES = (
    "en_US", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "pl", "ru", "uk", "tr",
    "el", "fi", "cs", "hu", "vi", "id", "zh", "ja", "ko", "ar", "he", "hi", "th",
)
# fmt: on
WIDTHS = ("full", "long", "medium")
FIRST_DAY, LAST_DAY = date(1900, 1, 1), date(2099, 12, 31)
HELD_OUT_SHARE = 20
"""One day in this many is held out for validation, and one for the test."""

NARROW_SPACE = "\N{NARROW NO-BREAK SPACE}"

_YEARS = [date(year, 1, 1) for year in range(FIRST_DAY.year, LAST_DAY.year + 1)]
_MONTHS = [date(2000, month, 1) for month in range(1, 13)]
_JANUARY = [date(2000, 1, day) for day in range(1, 32)]
_SYMBOLS: dict[str, tuple[Callable[[date], int], Sequence[date]]] = {
    "y": (lambda day: day.year, _YEARS),
    "M": (lambda day: day.month, _MONTHS),
    "d": (lambda day: day.day, _JANUARY),
    "E": (lambda day: day.weekday(), _JANUARY[:7]),
    "c": (lambda day: day.weekday(), _JANUARY[:7]),
    "G": (lambda day: 0, _JANUARY[:1]),
}
"""For each symbol of a CLDR pattern: the field of the day that decides its text, and days with all its values."""


@dataclass(frozen=True, slots=True)
class _Part:
    number: Callable[[date], int]
    texts: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Form:
    locale: str
    pattern: str
    parts: tuple[_Part, ...] = field(repr=False, compare=False)

    def write(self, day: date) -> str:
        if not FIRST_DAY <= day <= LAST_DAY:
            raise ArgumentError(f"expected a day from {FIRST_DAY} to {LAST_DAY}, got {day}; take one in between")
        return normalise("".join([part.texts[part.number(day)] for part in self.parts]))


def pairs(split: Split, count: int, seed: int = 0) -> Iterator[Pair]:
    """Dates in random forms, each with its ISO 8601 form. No two share both day and form.

    Each day always belongs to the same split, whatever the seed is. So no held-out day was ever seen in training,
    in any language.
    """
    days, every_form = _days(split), forms()
    most = len(days) * len(every_form)
    if not 0 <= count <= most:
        raise ArgumentError(f"expected a count from 0 to {most}, which is all that {split!r} has, got {count}")
    drawn = random.Random(f"{split} {seed}").sample(range(most), count)
    places = (divmod(number, len(every_form)) for number in drawn)
    return (Pair(every_form[form].write(days[day]), days[day].isoformat()) for day, form in places)


def forms() -> tuple[Form, ...]:
    return _kept_and_left_out()[0]


def left_out() -> tuple[Form, ...]:
    """The forms left out of the task, because another locale reads them as another date.

    >>> [(form.locale, form.pattern) for form in left_out() if form.locale != "ar"]
    [('de', 'dd.MM.y'), ('fi', 'd.M.y'), ('cs', 'd. M. y')]
    """
    return _kept_and_left_out()[1]


@functools.cache
def _days(split: Split) -> tuple[date, ...]:
    if split not in get_args(Split):
        raise ArgumentError(f"expected a split out of {', '.join(get_args(Split))}, got {split!r}")
    every_day = (FIRST_DAY + timedelta(days=n) for n in range((LAST_DAY - FIRST_DAY).days + 1))
    return tuple(day for day in every_day if _split(day) == split)


def _split(day: date) -> Split:
    digest = hashlib.blake2b(day.isoformat().encode(), digest_size=8).digest()
    held_out: dict[int, Split] = {0: "valid", 1: "test"}
    return held_out.get(int.from_bytes(digest, "big") % HELD_OUT_SHARE, "train")


def _babel() -> ModuleType:
    with needs("babel", extra="train"):
        import babel
        import babel.dates
    return babel


def _pattern(locale: str, width: str) -> str:
    return str(_babel().Locale.parse(locale).date_formats[width].pattern)


def _forms_of(locale: str) -> Iterator[Form]:
    for pattern in dict.fromkeys(_pattern(locale, width) for width in WIDTHS):
        for variant in dict.fromkeys((pattern, pattern.replace(NARROW_SPACE, " "))):
            yield Form(locale, variant, tuple(_parts(locale, variant)))


def _parts(locale: str, pattern: str) -> Iterator[_Part]:
    for kind, value in _babel().dates.tokenize_pattern(pattern):
        yield _symbol(locale, *value) if kind == "field" else _Part(lambda day: 0, {0: value})


@functools.cache
def _symbol(locale: str, symbol: str, width: int) -> _Part:
    number, days = _SYMBOLS[symbol]
    format_date = _babel().dates.format_date
    return _Part(number, {number(day): format_date(day, symbol * width, locale) for day in days})


@functools.cache
def _kept_and_left_out() -> tuple[tuple[Form, ...], tuple[Form, ...]]:
    """All forms in two groups: those with one reading for every day, and the others. A leap year and a common year are
    enough to check: every form names the year, and only the weekdays depend on it."""
    every_form = [form for locale in LOCALES for form in _forms_of(locale)]
    days = [date(2000, 1, 1) + timedelta(days=n) for n in range(366 + 365)]
    written = {form: [form.write(day).casefold() for day in days] for form in every_form}
    readings: dict[str, set[date]] = defaultdict(set)
    for texts in written.values():
        for day, text in zip(days, texts, strict=True):
            readings[text] |= {day} | _readings_as_numbers(text)
    ambiguous = {form for form, texts in written.items() if any(len(readings[text]) > 1 for text in texts)}
    kept = tuple(form for form in every_form if form not in ambiguous)
    return kept, tuple(form for form in every_form if form in ambiguous)


def _readings_as_numbers(text: str) -> set[date]:
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if len(numbers) != 3 or any(character.isalpha() for character in text):
        return set()
    found = (_day(dict(zip(order, numbers, strict=True))) for order in _orders_of_numbers())
    return {day for day in found if day}


def _day(numbers: Mapping[str, int]) -> date | None:
    try:
        day = date(numbers["y"], numbers["M"], numbers["d"])
    except ValueError:
        return None
    return day if FIRST_DAY <= day <= LAST_DAY else None


@functools.cache
def _orders_of_numbers() -> frozenset[str]:
    """The orders of year, month and day in the short formats of all locales: "Mdy", "dMy", "yMd"."""
    return frozenset("".join(dict.fromkeys(re.findall("[yMd]", _pattern(locale, "short")))) for locale in LOCALES)
