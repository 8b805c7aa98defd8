"""One browser for all the tests that open a page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.views.chromium import CHROMIUM, Chromium
from tests.views.tab import Tab


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if not CHROMIUM:
        pytest.skip("Chromium is not installed: the page is not opened")
    one = Chromium(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def tab(browser: Chromium, tmp_path: Path) -> Tab:
    browser.size(1280, 800)
    browser.dark(False)
    return Tab(browser, tmp_path / "page.html")
