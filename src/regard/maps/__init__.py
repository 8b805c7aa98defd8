"""Maps of weights, computed on demand: their statistics, the sources of their weights, and their files."""

from regard.maps.attention_map import AttentionMap as AttentionMap
from regard.maps.files import load_summary as load_summary
from regard.maps.files import save_summary as save_summary
from regard.maps.generation_steps import stack as stack
from regard.maps.sources.source import Source as Source
from regard.maps.statistics.definitions import TopKeys as TopKeys
from regard.maps.statistics.pooling import Grid as Grid
from regard.maps.tensor_like import strict_maps as strict_maps

__all__ = ["AttentionMap", "Grid", "Source", "TopKeys", "load_summary", "save_summary", "stack", "strict_maps"]
