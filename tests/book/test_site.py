"""The site: no warning as it is built; its pages and downloads, where `make docs` has built it and names it in SITE."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.book.chapters import CHAPTERS
from tests.views.chromium import Chromium
from tests.views.test_page_access import AXE, serious

FROM_THE_WEB = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)=\"(?:https?:)?//[^>]*>")


@pytest.fixture
def site() -> Path:
    if "SITE" not in os.environ:
        pytest.skip("`make docs` builds the site and looks at it")
    return Path(os.environ["SITE"]).absolute()


@pytest.mark.slow
def test_no_page_warns(tmp_path: Path) -> None:
    """Links, formulas, docstrings and tables of contents; the chapters run in other tests."""
    if "SITE" in os.environ:
        pytest.skip("the site has just been built so")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "dummy", "-d", str(tmp_path)]
    off = ["-D", "nb_execution_mode=off", "-D", "toc_object_entries=0"]
    done = subprocess.run([*command, *off, "docs", str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_pages_need_no_network(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    assert len(pages) > 60
    assert [path.name for path in pages if FROM_THE_WEB.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_is_a_notebook_and_a_script_too(site: Path, chapter: str) -> None:
    assert f"](book/{chapter}.html)" in (site / "llms.txt").read_text(encoding="utf-8")
    first, *others = json.loads((site / f"book/{chapter}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert "".join(first["source"]).startswith("%pip install")
    assert len([cell for cell in others if cell["metadata"].get("jupyter", {}).get("source_hidden")]) == 3
    assert not any("{in-models}" in "".join(cell["source"]) for cell in others)
    compile((site / f"book/{chapter}.py").read_text(encoding="utf-8"), chapter, "exec")


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(site: Path, browser: Chromium, dark: bool) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: `make browser` installs it")
    browser.dark(dark)
    browser.size(1280, 900)
    found = {}
    for page in ("index", "pictures", f"book/{CHAPTERS[1]}", "reference/align", "maps"):
        browser.open(f"file://{site}/{page}.html")
        found[page] = serious(browser)
    browser.dark(False)
    assert {page: said for page, said in found.items() if said} == {}
