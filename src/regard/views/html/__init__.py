"""The self-contained page that opens in any browser."""

from regard.views.html.page import Example as Example
from regard.views.html.page import Map as Map
from regard.views.html.page import page as page
from regard.views.html.page import save_page as save_page

__all__ = [
    "Example",
    "Map",
    "page",
    "save_page",
]
