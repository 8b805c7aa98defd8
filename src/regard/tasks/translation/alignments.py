"""Alignments: which of a translator's attention maps aligns a translation with its source, and how it is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentOf:
    """One layer and head of the attention to the source, or the mean over them.

    Most toolkits print the mean over the heads of one layer. The layer that aligns best is not always the
    last: in deep Transformers it is often the last but one (Garg et al. 2019, arXiv:1909.02074, section 4.2).

    >>> AlignmentOf(layer=0, head=2)
    AlignmentOf(layer=0, head=2)
    """

    layer: int | None = -1
    """Index of the decoder's layer, from 0, or from -1 backwards; None: the mean over all of them."""
    head: int | None = None
    """Index of the head in that layer; None: the mean over all of them."""

    def of(self, maps: Mapping[str, AttentionMap], names: Sequence[str]) -> Tensor:
        """The alignment (B, T, S) from the maps (B, H, T, S) of a pass.

        Args:
            maps: the maps by name.
            names: the names of the maps whose keys are the source's tokens, first layer first.

        Raises:
            ArgumentError: the model has no such layer or head.
        """
        return torch.stack([self._in_layer(maps[name]) for name in self.chosen(names)]).mean(0)

    def chosen(self, names: Sequence[str]) -> Sequence[str]:
        """The names of the maps from which the alignment is made.

        Raises:
            ArgumentError: the model has no such layer.
        """
        return names if self.layer is None else [names[_index("layer", self.layer, len(names))]]

    def _in_layer(self, weights: AttentionMap) -> Tensor:
        if self.head is None:
            return weights.dense().mean(1)
        head = _index("head", self.head, weights.shape[1])
        return weights.only(heads=[head]).dense()[:, 0]


def _index(what: str, index: int, count: int) -> int:
    if not -count <= index < count:
        raise ArgumentError(f"expected a {what} from {-count} to {count - 1}, as the model has {count}, got {index}")
    return index % count
