"""The picture of the house is drawn from the imports as they are, and every path that a page names exists."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

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
    """The links and paths of a page that lead nowhere; paths begin at the root, in the package, or beside the page."""
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
