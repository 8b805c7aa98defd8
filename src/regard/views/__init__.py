"""Attention on paper and on screen: pictures with matplotlib, and a page that opens in any browser."""

from regard.views.charts import alignment as alignment
from regard.views.charts import faulty_row as faulty_row
from regard.views.charts import position_table as position_table
from regard.views.colours import DARK as DARK
from regard.views.colours import LIGHT as LIGHT
from regard.views.colours import Theme as Theme
from regard.views.drawing import Panel as Panel
from regard.views.examples import model_example as model_example
from regard.views.figures import save_figure as save_figure
from regard.views.heatmap import head_panels as head_panels
from regard.views.heatmap import heatmap as heatmap
from regard.views.heatmap import heatmap_grid as heatmap_grid
from regard.views.html.carried import Carried as Carried
from regard.views.html.contents import Example as Example
from regard.views.html.contents import Map as Map
from regard.views.html.page import Page as Page
from regard.views.labels import printable as printable
from regard.views.model import model_grid as model_grid
from regard.views.overlay import SMOOTH as SMOOTH
from regard.views.overlay import WHOLE_PATCHES as WHOLE_PATCHES
from regard.views.overlay import PatchGrid as PatchGrid
from regard.views.overlay import Upsampling as Upsampling
from regard.views.overlay import overlay as overlay
from regard.views.overlay import overlay_grid as overlay_grid
from regard.views.overlay import patch_grid as patch_grid
from regard.views.reading_order import visual_order as visual_order
from regard.views.scales import ColourScale as ColourScale
from regard.views.scales import Limits as Limits
from regard.views.scales import LinearScale as LinearScale
from regard.views.scales import LogScale as LogScale
from regard.views.scales import RowScale as RowScale
from regard.views.scales import SquareRootScale as SquareRootScale
from regard.views.terminal import HalfBlocks as HalfBlocks
from regard.views.terminal import Printing as Printing
from regard.views.terminal import Table as Table
from regard.views.terminal import map_text as map_text

__all__ = [
    "DARK", "LIGHT", "SMOOTH", "WHOLE_PATCHES", "Carried", "ColourScale", "Example", "HalfBlocks",
    "Limits", "LinearScale", "LogScale", "Map", "Page", "Panel", "PatchGrid", "Printing", "RowScale",
    "SquareRootScale", "Table", "Theme", "Upsampling", "alignment", "faulty_row", "head_panels", "heatmap",
    "heatmap_grid", "map_text", "model_example", "model_grid", "overlay", "overlay_grid", "patch_grid",
    "position_table", "printable", "save_figure", "visual_order",
]  # fmt: skip
