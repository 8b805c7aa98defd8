"""The site, built without running its chapters: no warning, no address of the web, files to download, and axe."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.book.chapters import CHAPTERS
from tests.views.chromium import CHROMIUM, Chromium
from tests.views.test_page_access import AXE, serious

OFFLINE = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*(?:src|href)=\"(?:https?:)?//[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    off = ["-D", "nb_execution_mode=off", "-D", "suppress_warnings=myst-nb.lexer"]
    done = subprocess.run([*command, *off, "-d", str(out / "trees"), str(ROOT / "docs"), str(out)], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return out


@pytest.mark.slow
def test_the_site_is_whole_and_works_offline(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    assert len(pages) > 60
    assert [path.name for path in pages if OFFLINE.search(path.read_text(encoding="utf-8"))] == []
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    for chapter in CHAPTERS:
        assert f"](book/{chapter}.html)" in listed
        notebook = json.loads((site / f"book/{chapter}.ipynb").read_text(encoding="utf-8"))
        first, *others = notebook["cells"]
        assert "".join(first["source"]).startswith("%pip install")
        folded = [cell for cell in others if cell["metadata"].get("jupyter", {}).get("source_hidden")]
        assert len(folded) == 3
        assert not any("{in-models}" in "".join(cell["source"]) for cell in others)
        compile((site / f"book/{chapter}.py").read_text(encoding="utf-8"), chapter, "exec")


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and AXE.is_file()), reason="Chromium or axe-core is not installed: `make browser`")
def test_axe_finds_nothing_serious_on_the_site(site: Path, browser: Chromium) -> None:
    for dark in (False, True):
        browser.dark(dark)
        for page in ("index", "gallery", f"book/{CHAPTERS[0]}", "reference/maps", "command-line"):
            browser.size(1280, 900)
            browser.open(f"file://{site}/{page}.html")
            assert serious(browser) == [], (page, dark)
    browser.dark(False)
