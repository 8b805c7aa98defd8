"""The glossary: few terms in order, each beside a name that exists and is about it."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs/glossary.md"
ENTRIES = re.findall(r"^\| (.+?) \| (.+) \| `(regard[\w.]*)` \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
MOST = 40


def named(dotted: str) -> Any:
    """The object of a dotted name: attributes of the longest module that it begins with."""
    found: Any = importlib.import_module("regard")
    for name in dotted.split(".")[1:]:
        found = getattr(found, name)
    return found


def own_text(dotted: str) -> str:
    return f"{dotted} {named(dotted).__doc__}".lower()


def stems(*texts: str) -> set[str]:
    """The beginnings of the words that say something: `tokenise` and `tokenizer` have one stem."""
    return {word[:4] for text in texts for word in re.findall(r"[a-z]{4,}", text.lower())} - COMMON


COMMON = {"that", "whic", "from", "with", "each", "over", "into", "thei", "befo", "afte", "othe"}


def test_every_line_of_the_table_is_an_entry() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(ENTRIES) <= MOST


def test_terms_are_in_order_and_differ() -> None:
    terms = [term.lower() for term, _, _ in ENTRIES]
    assert terms == sorted(set(terms))


def test_a_meaning_is_one_sentence() -> None:
    assert [meaning for _, meaning, _ in ENTRIES if "." in meaning or len(meaning) > 110] == []


@pytest.mark.parametrize(("term", "meaning", "name"), ENTRIES, ids=[f"{term}-{name}" for term, _, name in ENTRIES])
def test_the_name_of_an_entry_exists_and_is_about_the_term(term: str, meaning: str, name: str) -> None:
    """The docstring uses the term, or two words of its meaning."""
    text = stems(own_text(name))
    assert stems(term) & text or len(stems(meaning) & text) >= 2, f"{name} says nothing of {term}"
