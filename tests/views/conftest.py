"""One browser for all the tests that open a page."""

from collections.abc import Iterator

import pytest

from tests.views.chromium import CHROMIUM, Chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser; absent Chromium, the test is passed over and says so."""
    if not CHROMIUM:
        pytest.skip("Chromium is not installed: the page is not opened")
    one = Chromium(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()
