"""The attention of a foreign model to one input, with the labels of each map."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.maps.attention_map import AttentionMap
from regard.tasks.pictures.token_maps import Alternative, AxisLabels


class SeenImage(NamedTuple):
    """An image as the model got it."""

    pixels: Any
    """(height, width, 3) in 0..1."""
    keys: Sequence[int] | None = None
    """The positions of its patches among those of a text; None if the model reads nothing else."""


class ForeignAttention(NamedTuple):
    """The maps of one input."""

    maps: Mapping[str, AttentionMap | Tensor]
    """By the path of the module, each (H, T, S)."""
    axes: Mapping[str, tuple[AxisLabels, AxisLabels]]
    """The labels of queries and keys of each map."""
    shown: str
    choices: Mapping[str, list[list[Alternative]]] = {}
    image: "SeenImage | None" = None

    def labels(self, name: str) -> tuple[AxisLabels, AxisLabels]:
        return self.axes[name]

    def alternatives(self, name: str) -> list[list[Alternative]] | None:
        return self.choices.get(name)
