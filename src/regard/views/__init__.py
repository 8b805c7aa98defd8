"""Attention on paper and on screen: heatmaps with matplotlib, and a page that opens in any browser."""

from regard.views.heatmap import Panel as Panel
from regard.views.heatmap import head_panels as head_panels
from regard.views.heatmap import heatmap as heatmap
from regard.views.heatmap import heatmap_grid as heatmap_grid
from regard.views.html import Example as Example
from regard.views.html import Map as Map
from regard.views.html import page as page
from regard.views.html import save_page as save_page
from regard.views.model import model_example as model_example
from regard.views.model import model_grid as model_grid

__all__ = [
    "Example",
    "Map",
    "Panel",
    "head_panels",
    "heatmap",
    "heatmap_grid",
    "model_example",
    "model_grid",
    "page",
    "save_page",
]
