"""The attention of a trained model, as maps over the printed labels of its tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from regard.lazy import displayed
from regard.maps.attention_map import AttentionMap
from regard.tasks.text.codec import Codec

AxisLabels = list[str] | None
"""One for each token, or None for positions."""


class TextMaps(Protocol):
    @property
    def maps(self) -> Mapping[str, AttentionMap | Tensor]:
        """The maps by name, each (H, T, S)."""

    @property
    def shown(self) -> str:
        """The name of the map to show first."""

    def labels(self, name: str) -> tuple[AxisLabels, AxisLabels]:
        """The labels of a map's rows (queries) and of its columns (keys); None for positions."""

    def alternatives(self, name: str) -> "list[list[Alternative]] | None":
        """For each row of a map the tokens that were most probable in its place; None unless asked for."""


class Alternative(NamedTuple):
    text: str
    probability: float


@displayed
class TextAttention(NamedTuple):
    texts: list[str]
    maps: dict[str, Any]
    """The maps by name, each (H, T, T), first layer first."""

    @property
    def shown(self) -> str:
        return list(self.maps)[-1]

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        return self.texts, self.texts

    def alternatives(self, name: str) -> list[list[Alternative]] | None:
        return None


class Axis(NamedTuple):
    texts: list[str]
    spans: list[tuple[int, int]]


class LabelsEach(Protocol):
    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        """One label for each token."""


def axis(tokenizer: Codec, ids: Sequence[int]) -> Axis:
    labels = tokenizer.labels(ids)
    return Axis([label.text for label in labels], [label.pieces for label in labels])


def merge(weights: AttentionMap | Tensor, rows: Axis, columns: Axis) -> AttentionMap | Tensor:
    """Turn a map over tokens into one over labels: the weights of a key's tokens are summed, a query's averaged."""
    if all(first == last for first, last in (*rows.spans, *columns.spans)):
        return weights  # each token has a label of its own, and the map stays lazy
    dense = weights.dense() if isinstance(weights, AttentionMap) else weights
    wide = torch.stack([dense[..., first : last + 1].sum(-1) for first, last in columns.spans], dim=-1)
    return torch.stack([wide[..., first : last + 1, :].mean(-2) for first, last in rows.spans], dim=-2)


def text_attention(tokenizer: LabelsEach, ids: Sequence[int], maps: Mapping[str, AttentionMap]) -> TextAttention:
    """The maps of one text, from the maps (1, H, T, T). They stay lazy, of any length: each token has a label."""
    return TextAttention(tokenizer.label_of_each(ids), {name: weights[0] for name, weights in maps.items()})
