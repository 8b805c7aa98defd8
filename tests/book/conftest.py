"""The browser of the tests of views opens the site too."""

from tests.views.conftest import browser as browser
