"""Rotary positions: query and key are rotated by angles, with scalings for longer contexts."""

from regard.call.rotary.rotary import Half as Half
from regard.call.rotary.rotary import Interleaved as Interleaved
from regard.call.rotary.rotary import Layout as Layout
from regard.call.rotary.rotary import Rotary as Rotary
from regard.call.rotary.scalings import DynamicNTK as DynamicNTK
from regard.call.rotary.scalings import Llama3 as Llama3
from regard.call.rotary.scalings import LongRoPE as LongRoPE
from regard.call.rotary.scalings import PositionInterpolation as PositionInterpolation
from regard.call.rotary.scalings import Scaling as Scaling
from regard.call.rotary.scalings import YaRN as YaRN

__all__ = [
    "DynamicNTK", "Half", "Interleaved", "Layout", "Llama3", "LongRoPE", "PositionInterpolation", "Rotary", "Scaling",
    "YaRN",
]  # fmt: skip
