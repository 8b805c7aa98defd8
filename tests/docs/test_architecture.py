"""The picture of the house is drawn from the imports as they are, and every path that a page names exists."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT) for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
)
FENCED = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
NAMED = re.compile(r"`([\w./-]*/[\w.-]+\.(?:py|md|js|css|toml|txt|yml))`")
"""A file in a span of code, with its folder: `files/atomic.py`."""


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_architecture", ROOT / "docs/make_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "make_architecture", module)  # where dataclasses look names up
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sound(drawing: ModuleType) -> str:
    return str(drawing.svg())


def test_the_picture_is_the_house_as_it_is(sound: str) -> None:
    drawn = (ROOT / "docs/images/architecture.svg").read_text(encoding="utf-8")
    assert drawn == sound, "the imports have changed: python docs/make_architecture.py draws them anew"


def test_every_room_says_what_it_is_for(drawing: ModuleType) -> None:
    assert set(drawing.imports()) == set(drawing.ROOMS)


def missing(page: Path, text: str) -> list[str]:
    prose = FENCED.sub("", text)
    beside, bases = ROOT / page.parent, (ROOT, ROOT / "src/regard", ROOT / page.parent)
    lost = [link for link in LINK.findall(prose) if ":" not in link and not (beside / link).exists()]
    return lost + [name for name in NAMED.findall(prose) if not any((base / name).exists() for base in bases)]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert missing(page, (ROOT / page).read_text(encoding="utf-8")) == []


def test_a_path_that_leads_nowhere_is_seen() -> None:
    text = "[a](lost.md), [b](maps.md), `files/atomic.py`, `files/lost.py`, `docs/gone.md`\n```\n`a/b.py`\n```\n"
    assert missing(Path("docs/page.md"), text) == ["lost.md", "files/lost.py", "docs/gone.md"]


def test_the_index_of_the_design_notes_names_every_page() -> None:
    index = (ROOT / "docs/design/README.md").read_text(encoding="utf-8")
    assert all(page.name in index for page in (ROOT / "docs/design").glob("*.md") if page.name != "README.md")


PAGE = Path(__file__).parents[2] / "docs/glossary.md"
ENTRIES = re.findall(r"^\| (.+?) \| (.+) \| `(regard[\w.]*)` \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
MOST = 40


def named(dotted: str) -> Any:
    found: Any = importlib.import_module("regard")
    for name in dotted.split(".")[1:]:
        found = getattr(found, name)
    return found


def own_text(dotted: str) -> str:
    return f"{dotted} {named(dotted).__doc__}".lower()


def stems(*texts: str) -> set[str]:
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
