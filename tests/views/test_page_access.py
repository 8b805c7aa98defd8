"""axe finds no fault in the page and in the view of a notebook, where axe-core is installed: `make browser`."""

from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import page
from regard.views import Example, Map
from tests.views.chromium import Chromium
from tests.views.notebook import Notebook, carried_comms
from tests.views.written_dates import sentence, softmax

AXE = Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js"


pytestmark = pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: `make browser` installs it")


def serious(browser: Chromium) -> list[list[str]]:
    browser.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
    found: list[list[str]] = browser.run("""
      const { violations } = await axe.run(document);
      return violations.filter(({ impact }) => ["serious", "critical"].includes(impact))
        .flatMap(({ id, nodes }) => nodes.map(({ html }) => [id, html.slice(0, 200)]));""")
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Chromium, tmp_path: Path, theme: str) -> None:
    path = tmp_path / "page.html"
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "slept"]
    one = Example("one", {f"layer.{n}": Map(softmax(3, 8, 8, seed=n), words, words) for n in range(2)})
    page([one, sentence("fr"), sentence("ar")]).save(path)
    links = ("query=3&heads=0,2&sort=first", "query=3&view=links", "query=1&view=compare&key=1", "example=2&query=2")
    for width, some in ((1280, links), (360, links[:2])):
        browser.size(width, 800)
        for link in some:
            browser.open(f"file://{path}#{link}&theme={theme}")
            browser.until("document.querySelector('.heads')?.dataset.drawn")
            browser.run("document.querySelector('.more').open = true;")
            assert serious(browser) == [], (width, link)


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious_in_a_view(browser: Chromium, tmp_path: Path, dark: bool) -> None:
    words = ["eight", "words", "and", "one", "head", "to", "look", "at"]
    q, k = torch.randn(2, 1, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    browser.size(1000, 800)
    browser.dark(dark)
    with carried_comms():
        notebook = Notebook(browser, tmp_path / "notebook.html", dark=dark)
        view: Any = regard.view(regard.map_of(q, k, mask=regard.causal()), words, link="query=4")
        notebook.show("a", view)
        for link in ("query=4", "query=4&view=links", "query=4&heads=0,1&temperature=0.5"):
            view.link = link
            notebook.until("root('a').querySelector('.heads')?.dataset.drawn && list('a').length")
            assert notebook.run("return root('a').dataset.theme;") == ("dark" if dark else "light")
            notebook.run("document.documentElement.lang = 'en'; root('a').querySelector('.more').open = true;")
            assert serious(browser) == [], link
    browser.dark(False)


def test_a_focus_that_is_scrolled_away_is_not_named(browser: Chromium, tmp_path: Path) -> None:
    path, words = tmp_path / "page.html", [f"word{n}" for n in range(900)]
    page([Example("", {"0": Map(torch.eye(900), words, words)})]).save(path)
    browser.size(1280, 800)
    browser.open(f"file://{path}#query=500")
    browser.until("document.querySelector('.token.focus')")
    named = """
      const scroller = [...document.querySelectorAll(".scroller")].at(-1);
      const id = scroller.getAttribute("aria-activedescendant");
      return [Boolean(id), Boolean(id && document.getElementById(id))];"""
    assert browser.run(named) == [True, True]
    move = "[...document.querySelectorAll('.scroller')].at(-1).scrollTop = 0;"
    browser.run(f"{move} await new Promise((done) => setTimeout(done, 100));")
    assert browser.run(named) == [False, False]
    assert serious(browser) == []
