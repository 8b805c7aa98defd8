"""Rotary positions: query and key are turned by angles, which can be scaled for longer contexts."""

from regard.mechanisms.rotary.layouts import Half as Half
from regard.mechanisms.rotary.layouts import Interleaved as Interleaved
from regard.mechanisms.rotary.layouts import Layout as Layout
from regard.mechanisms.rotary.rotary import Rotary as Rotary
from regard.mechanisms.rotary.scalings import DynamicNTK as DynamicNTK
from regard.mechanisms.rotary.scalings import Llama3 as Llama3
from regard.mechanisms.rotary.scalings import LongRoPE as LongRoPE
from regard.mechanisms.rotary.scalings import PositionInterpolation as PositionInterpolation
from regard.mechanisms.rotary.scalings import Scaling as Scaling
from regard.mechanisms.rotary.scalings import YaRN as YaRN

__all__ = [
    "DynamicNTK",
    "Half",
    "Interleaved",
    "Layout",
    "Llama3",
    "LongRoPE",
    "PositionInterpolation",
    "Rotary",
    "Scaling",
    "YaRN",
]
