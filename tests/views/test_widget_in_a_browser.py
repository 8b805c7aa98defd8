"""Views of a notebook in Chromium, over the comm of anywidget's protocol: their readings, against the maps."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.views import Example, Map
from tests.views.chromium import Chromium
from tests.views.notebook import Notebook, carried_comms, link_of

WORDS = ["eight", "words", "and", "one", "head", "to", "look", "at"]
LONG = 1100
"""More than a million weights a head: too many to be sent at once."""


@pytest.fixture(scope="module")
def comms() -> Iterator[None]:
    with carried_comms():
        yield


@pytest.fixture
def notebook(browser: Chromium, comms: None, tmp_path: Path) -> Notebook:
    browser.size(1000, 800)
    browser.dark(False)
    return Notebook(browser, tmp_path / "notebook.html")


def scaled(times: float = 1.0, length: int = 8) -> regard.AttentionMap:
    made = torch.Generator().manual_seed(length)
    q, k = (torch.randn(1, 2, length, 8, generator=made) for _ in range(2))
    return regard.map_of(times * q, k, mask=regard.causal())


def row_of(notebook: Notebook, cell: str) -> dict[int, float]:
    return {int(place): float(weight) for _, place, weight in notebook.run(f"return list({json.dumps(cell)});")}


def matches(found: dict[int, float], expected: Any) -> bool:
    strongest = expected.topk(min(9, int((expected > 0).sum()))).indices.tolist()
    return set(found) == set(strongest) and all(abs(found[at] - float(expected[at])) < 6e-4 for at in strongest)


def drawn(cell: str) -> str:
    return f"root({json.dumps(cell)}).querySelector('.heads')?.dataset.drawn && list({json.dumps(cell)}).length"


def test_two_views_answer_for_themselves_and_a_cell_run_again_shows_the_new_map(notebook: Notebook) -> None:
    maps = [scaled(1), scaled(5)]
    views: list[Any] = [regard.view(one, WORDS, link="heads=1&query=6") for one in maps]
    for cell, one in zip("ab", views, strict=True):
        notebook.show(cell, one)
    for cell, one in zip("ab", maps, strict=True):
        notebook.until(drawn(cell))
        assert matches(row_of(notebook, cell), one[0, 1, 6])
    # What is chosen in one is not chosen in the other.
    notebook.run("line('b')[2].click();")
    notebook.until("reading('b').includes('(query 2)')")
    assert matches(row_of(notebook, "b"), maps[1][0, 1, 2])
    assert "(query 6)" in notebook.run("return reading('a');")
    assert (link_of(views[0])["query"], link_of(views[1])["query"]) == ("6", "2")
    # The cell is run again with another map while a question of the old view is open.
    notebook.run("choose('a', 'Head', '0');")
    notebook.pump(answering=False)
    assert notebook.questions[-1]["head"] == 0
    again = scaled(9)
    notebook.show("a", regard.view(again, WORDS, link="heads=0&query=6"))
    notebook.until(drawn("a"))
    assert matches(row_of(notebook, "a"), again[0, 0, 6])
    assert not matches(row_of(notebook, "a"), maps[0][0, 0, 6])


def test_a_model_that_is_shown_twice_is_one_selection(notebook: Notebook) -> None:
    one: Any = regard.view(scaled(), WORDS, link="heads=0&query=3")
    notebook.show("a", one)
    notebook.show("b", one)
    notebook.until(drawn("a"))
    notebook.until(drawn("b"))
    notebook.run("line('a')[5].click();")
    notebook.until("reading('b').includes('(query 5)')")
    one.link = "heads=1&query=7"
    notebook.until("reading('a').includes('(query 7)') && reading('b').includes('(query 7)')")
    assert matches(row_of(notebook, "a"), scaled()[0, 1, 7])
    # Each asked with a name of its own.
    assert len({question["id"].split("-")[0] for question in notebook.questions}) == 2


def test_long_maps_are_exact_row_by_row_and_tile_by_tile(notebook: Notebook) -> None:
    one = scaled(3, length=LONG)
    every = one[0].dense()
    notebook.show("a", regard.view(one, link="heads=1&query=1003"))
    notebook.until(drawn("a"))
    assert matches(row_of(notebook, "a"), every[1, 1003])
    assert "dense" not in {question["ask"] for question in notebook.questions}
    # From a key, every query that looks at it, and those whose strongest key it is.
    notebook.run("host('a').regard().changed({ focus: { column: 40 }, pinned: true });")
    notebook.until("list('a').length && reading('a').includes('strongest key of')")
    queries = every[1].argmax(-1).eq(40).nonzero()[:, 0].tolist()
    assert f"strongest key of {len(queries)} " in notebook.run("return reading('a');")
    column = every[1, :, 40]
    assert matches(row_of(notebook, "a"), column)
    # A window, down to single cells.
    for r0, r1, c0, c1 in ((600, 1000, 100, 500), (700, 740, 610, 650)):
        notebook.run(f"host('a').regard().changed({{ window: [{r0}, {r1}, {c0}, {c1}] }});")
        notebook.until(f"notebookCells('a').window?.join() === '{r0},{r1},{c0},{c1}'")
        found = notebook.run("return notebookCells('a');")
        rows, columns = found["rows"], found["columns"]
        values = np.array(found["values"]).reshape(len(rows) - 1, -1)
        assert found["what"] == ("weight" if r1 - r0 == 40 else "largest")
        for i in range(0, len(rows) - 1, 7):
            for j in range(0, len(columns) - 1, 7):
                block = every[1, rows[i] : rows[i + 1], columns[j] : columns[j + 1]]
                assert values[i, j] == pytest.approx(float(block.max()), abs=1e-5)


def test_temperature_and_mask_are_toggled_and_the_page_opens_the_same(
    notebook: Notebook, browser: Chromium, tmp_path: Path
) -> None:
    """Teaching: one line shows eight words and one head; a link opens the same selection elsewhere."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    view: Any = regard.view(regard.map_of(q[None], k[None], mask=regard.causal()), WORDS, link="heads=1&query=4")
    notebook.show("a", view)
    notebook.until(drawn("a"))
    scores = q[1] @ k[1].T / 8**0.5
    assert "Recomputed" not in notebook.run("return reading('a');")
    notebook.run("choose('a', 'Temperature', '-1');")
    notebook.until("reading('a').includes('Recomputed: temperature 0.5')")
    assert matches(row_of(notebook, "a"), (2 * scores[4, :5]).softmax(-1))
    notebook.run("choose('a', 'Mask', 'none');")
    notebook.until("reading('a').includes('no mask') && list('a').length === 8")
    without = (2 * scores[4]).softmax(-1)
    assert matches(row_of(notebook, "a"), without)
    notebook.pump()
    assert link_of(view) == {"heads": "1", "query": "4", "temperature": "0.5", "mask": "none", "layer": "0"}
    # The mean of the heads is recomputed from every head.
    notebook.run("choose('a', 'Head', 'mean');")
    notebook.until("reading('a').includes('Recomputed') && host('a').regard().state().heads[0] === 'mean'")
    mean = ((2 * q @ k.mT) / 8**0.5).softmax(-1).mean(0)[4]
    notebook.until(f"Math.abs(Number(list('a')[0][2]) - {float(mean.max())}) < 6e-4")
    assert matches(row_of(notebook, "a"), mean)
    notebook.pump()
    path = view.save(tmp_path / "page.html")
    for link, expected in ((view.link, mean), (view.link.replace("mean", "1"), without)):
        browser.open(f"file://{path}#{link}")
        browser.until("globalThis.regard && document.querySelector('.heads')?.dataset.drawn")
        items, text = browser.run("""
          const reading = document.querySelector(".reading");
          const texts = (item) => [...item.children].map((one) => one.textContent);
          return [[...reading.querySelectorAll("li")].map(texts), reading.textContent];""")
        assert matches({int(place): float(weight) for _, place, weight in items}, expected), link
        assert "Recomputed: temperature 0.5, no mask" in text


def test_a_view_opens_with_its_most_telling_head(notebook: Notebook) -> None:
    """The kernel knows it when it is first asked; a choice of the reader comes before."""
    even, first, back = torch.full((3, 8, 8), 1 / 8)
    first, back = first * 0 + torch.eye(8)[0], torch.eye(8).roll(3, -1)
    one: Any = regard.view([Example("", {"0": Map(torch.stack([even, first, back]))})])
    notebook.show("a", one)
    notebook.until("root('a').querySelector('.heads')?.dataset.drawn && !root('a').dataset.busy")
    assert notebook.run("return host('a').regard().state().heads;") == [2]
    assert notebook.run("return root('a').querySelector('.about').textContent;").startswith("Head 2 of layer 0")
    assert {question["ask"] for question in notebook.questions} == {"numbers", "dense"}
    one.link = "heads=mean"
    notebook.until("root('a').querySelector('.about')?.textContent.startsWith('Mean of the heads')")


def test_keys_are_heard_inside_alone(notebook: Notebook, browser: Chromium) -> None:
    notebook.show("a", regard.view(scaled(), WORDS, link="heads=0&query=1"))
    notebook.until(drawn("a"))
    head = "return host('a').regard().state().heads[0];"
    notebook.run("globalThis.outside = []; document.addEventListener('keydown', (event) => outside.push(event.key));")
    browser.press("h")
    assert (notebook.run(head), notebook.run("return outside;")) == (0, ["h"])
    notebook.run("tokens('a').focus();")
    browser.press("h")
    browser.press("x")
    notebook.until("host('a').regard().state().heads[0] === 1")
    assert notebook.run("return outside;") == ["h", "x"]
    notebook.run("root('a').querySelector('input[type=search]').focus();")
    browser.press("a")
    assert notebook.run("return [outside.length, host('a').regard().state().find];") == [2, "a"]


def test_what_cannot_be_read_is_said_in_its_place(notebook: Notebook) -> None:
    bad = torch.full((4, 4), 0.25)
    bad[2, 1] = torch.nan
    maps = {"0": Map(bad), "1": Map(torch.full((4, 4), 0.25))}
    notebook.show("a", regard.view([Example("", maps, "0")], link="query=1"))
    notebook.until("reading('a').includes('weights must be finite')")
    assert "at query 2, key 1" in notebook.run("return reading('a');")
    notebook.run("choose('a', 'Layer', '1');")
    notebook.until("list('a').length === 4")
    assert row_of(notebook, "a") == dict.fromkeys(range(4), 0.25)


@pytest.mark.parametrize(("dark", "width"), [(False, 360), (True, 900)])
def test_it_fits_its_cell_in_the_theme_around_and_leaves_a_picture(
    browser: Chromium, comms: None, tmp_path: Path, dark: bool, width: int
) -> None:
    browser.size(width, 760)
    notebook = Notebook(browser, tmp_path / "notebook.html", dark=dark)
    view: Any = regard.view(scaled(), WORDS, link="heads=0&query=4")
    notebook.show("a", view)
    notebook.until(drawn("a"))
    seen = notebook.run("""
      const edge = (one) => one.getBoundingClientRect().right;
      const around = (one) => one.parentNode.closest(".card, .regard");
      const parts = [...root('a').querySelectorAll('.card, .recompute *')];
      const box = root('a').getBoundingClientRect(), last = root('a').querySelector(".strip").getBoundingClientRect();
      return { theme: root('a').dataset.theme, width: document.documentElement.scrollWidth,
        height: host('a').clientHeight,
        out: parts.filter((part) => edge(part) > edge(around(part)) + 1).length,
        below: last.bottom > box.bottom + 1 };""")
    assert seen == {"theme": "dark" if dark else "light", "width": width, "height": 560, "out": 0, "below": False}
    end = time.monotonic() + 10
    while view.still is None and time.monotonic() < end:
        notebook.pump()
        time.sleep(0.05)
    assert view.still[:8] == b"\x89PNG\r\n\x1a\n"
    bundle = view._still_bundle()
    assert f'class="{view.place}"' in bundle["text/html"]
    assert bundle["text/plain"] == repr(view)
    # While the view is there, the picture is hidden; it is shown when the view is gone.
    notebook.run(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(bundle['text/html'])});")
    hidden = "return getComputedStyle(document.querySelector('[class^=regard-still]')).display;"
    assert notebook.run(hidden) == "none"
    notebook.run("cells.a.remove();")
    assert notebook.run(hidden) == "block"
    assert notebook.run("return document.querySelector('[class^=regard-still] img').naturalWidth > 200;")
