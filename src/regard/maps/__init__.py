"""What can be asked of weights that are never stored: statistics, products, choices, averages, files."""

from regard.maps.base import LazyMap as LazyMap
from regard.maps.base import Transposed as Transposed
from regard.maps.derived import stack as stack
from regard.maps.files import load_summary as load_summary
from regard.maps.files import save_summary as save_summary
from regard.maps.spectrum import Spectrum as Spectrum
from regard.maps.statistics import TopK as TopK

__all__ = ["LazyMap", "Spectrum", "TopK", "Transposed", "load_summary", "save_summary", "stack"]
