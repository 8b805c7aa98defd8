"""What axe says of the page, where axe-core is installed: `make browser`."""

from pathlib import Path

import pytest

from regard.views import Example, Map, page
from tests.views.chromium import Chromium
from tests.views.written_dates import sentence, softmax

AXE = Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js"


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: `make browser` installs it")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Chromium, tmp_path: Path, theme: str) -> None:
    path = tmp_path / "page.html"
    words = ["the", "cat", "sat", "on", "the", "mat", "and", "slept"]
    one = Example("one", {f"layer.{n}": Map(softmax(3, 8, 8, seed=n), words, words) for n in range(2)})
    page([one, sentence("fr"), sentence("ar")]).save(path)
    browser.size(1280, 800)
    for link in ("query=3&heads=0,2", "query=3&view=links", "query=1&view=compare&key=1", "example=2&query=2"):
        browser.open(f"file://{path}#{link}&theme={theme}")
        browser.until("document.querySelector('.heads')?.dataset.drawn")
        browser.run("document.querySelector('.more').open = true;")
        browser.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
        found = browser.run("return (await axe.run(document)).violations.map(({ id, impact }) => [id, impact]);")
        assert [one for one in found if one[1] in ("serious", "critical")] == []
