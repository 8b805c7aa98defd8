"""The built-in corpus: dates as babel writes them, read one way only, held out by the day."""

import sys
from datetime import date, timedelta

import pytest
from babel import Locale
from babel.dates import format_date
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError, MissingExtraError
from regard.tasks.text import dates
from regard.tasks.text.unicode import normalise

days = st.dates(dates.FIRST_DAY, dates.LAST_DAY)


@given(days)
def test_every_form_writes_what_babel_writes(day: date) -> None:
    for form in [*dates.forms(), *dates.left_out()]:
        assert form.write(day) == normalise(format_date(day, form.pattern, form.locale))


def test_every_format_of_every_locale_is_there_or_left_out() -> None:
    sorted_out = {(form.locale, form.pattern) for form in [*dates.forms(), *dates.left_out()]}
    for locale in dates.LOCALES:
        for width in ("full", "long", "medium"):
            assert (locale, Locale.parse(locale).date_formats[width].pattern) in sorted_out
    assert {form.locale for form in dates.forms()} == set(dates.LOCALES)
    assert len({locale.split("_")[0] for locale in dates.LOCALES}) == 25


def test_a_narrow_space_may_be_typed_as_a_plain_one() -> None:
    written = {form.write(date(2026, 11, 21)) for form in dates.forms() if form.locale == "ru"}
    assert {"21 ноября 2026\u202fг.", "21 ноября 2026 г."} <= written


def test_no_kept_form_reads_as_another_date() -> None:
    """Without the code under test: two days written alike, in years that it does not look at."""
    readings: dict[str, date] = {}
    for year in (1900, 1996, 2099):
        for n in range(365):
            day = date(year, 1, 1) + timedelta(days=n)
            for form in dates.forms():
                assert readings.setdefault(form.write(day).casefold(), day) == day


def test_forms_in_numbers_alone_are_kept_only_with_the_year_first() -> None:
    day = date(2026, 4, 3)
    bare = [form.write(day) for form in dates.forms() if not any(map(str.isalpha, form.write(day)))]
    assert sorted(bare) == ["2026. 4. 3.", "2026/04/03"]
    assert {form.locale for form in dates.left_out()} == {"de", "fi", "cs", "ar"}


def test_two_forms_that_collide_are_both_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Day first and month first in numbers: each reads as the other."""
    monkeypatch.setattr(dates, "LOCALES", ("en_US", "en_GB"))
    monkeypatch.setattr(dates, "WIDTHS", ("full", "short"))
    monkeypatch.setattr(dates, "_kept_and_left_out", dates._kept_and_left_out.__wrapped__)
    monkeypatch.setattr(dates, "_orders_of_numbers", lambda: frozenset(["Mdy"]))
    patterns = {form.pattern for form in dates.left_out()}
    assert "dd/MM/y" in patterns
    assert all("EEEE" in form.pattern for form in dates.forms() if form.locale == "en_GB")


def test_held_out_days_are_in_no_other_split_whatever_the_seed() -> None:
    split_days = {
        split: {target for seed in (0, 1) for _, target in dates.pairs(split, 5_000, seed)}
        for split in ("train", "valid", "test")
    }
    for first, second in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not split_days[first] & split_days[second]
    assert sum(len(dates._days(split)) for split in split_days) == (dates.LAST_DAY - dates.FIRST_DAY).days + 1


def test_pairs_are_seeded_and_distinct() -> None:
    first = list(dates.pairs("test", 1_000))
    assert first == list(dates.pairs("test", 1_000, seed=0))
    assert first != list(dates.pairs("test", 1_000, seed=1))
    assert len(set(first)) > 980  # some forms of two locales are alike: "4 mai 2026"
    assert all(date.fromisoformat(pair.target) for pair in first)


def test_pairs_do_not_change_between_releases() -> None:
    """The figures in the README rest on these draws."""
    assert list(dates.pairs("test", 2)) == [("1963年12月27日", "1963-12-27"), ("17 de jun. de 2059", "2059-06-17")]


def test_every_form_and_year_comes_up() -> None:
    pairs = list(dates.pairs("train", 4_000))
    assert {target[:4] for _, target in pairs} == {str(year) for year in range(1900, 2100)}
    counted = dict.fromkeys(dates.forms(), 0)
    for text, target in pairs:
        for form in counted:
            counted[form] += form.write(date.fromisoformat(target)) == text
    assert min(counted.values()) > 20


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="got 'dev'"):
        dates.pairs("dev", 1)  # type: ignore[arg-type]
    most = len(dates._days("test")) * len(dates.forms())
    for count in (-1, most + 1):
        with pytest.raises(ArgumentError, match=f"0 to {most}, .* got {count}"):
            dates.pairs("test", count)
    assert list(dates.pairs("test", 0)) == []
    with pytest.raises(ArgumentError, match="1900-01-01 to 2099-12-31, got 2100-01-01"):
        dates.forms()[0].write(date(2100, 1, 1))


def test_a_missing_babel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(MissingExtraError, match=r"babel is not installed.*regard\[train\]"):
        dates._pattern("de", "full")
