"""The self-contained page that opens in any browser."""

from regard.views.html.carried import Carried as Carried
from regard.views.html.contents import Example as Example
from regard.views.html.contents import Map as Map
from regard.views.html.page import Page as Page
from regard.views.html.page import page as page
from regard.views.html.page import save_page as save_page

__all__ = ["Carried", "Example", "Map", "Page", "page", "save_page"]
