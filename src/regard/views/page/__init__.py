"""The self-contained page that opens in any browser."""

from regard.views.page.html import Example as Example
from regard.views.page.html import Map as Map
from regard.views.page.html import page as page
from regard.views.page.html import save_page as save_page

__all__ = [
    "Example",
    "Map",
    "page",
    "save_page",
]
