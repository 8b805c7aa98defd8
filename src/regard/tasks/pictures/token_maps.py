"""What a trained model attended to, over the labels that one prints."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from regard.maps.attention_map import AttentionMap
from regard.text.labels import Label


class TextMaps(Protocol):
    """The maps of a text, by name."""

    @property
    def maps(self) -> Mapping[str, AttentionMap | Tensor]:
        """Each (H, T, S)."""
        ...

    @property
    def shown(self) -> str:
        """The one to show first."""
        ...

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        """The labels of a map's rows, which look, and of its columns, which are looked at."""
        ...


class TextAttention(NamedTuple):
    """What the tokens of a text attended to among themselves."""

    texts: list[str]
    """The labels of the tokens."""
    maps: dict[str, AttentionMap | Tensor]
    """By name, each (H, T, T), first layer first."""

    @property
    def shown(self) -> str:
        """The last layer's."""
        return list(self.maps)[-1]

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        """The same on both sides."""
        return self.texts, self.texts


class Axis(NamedTuple):
    """What to print for a sequence of tokens, and the first and the last token of each label."""

    texts: list[str]
    spans: list[tuple[int, int]]


class HasLabels(Protocol):
    """Says what to print for tokens."""

    def labels(self, ids: Sequence[int]) -> list[Label]:
        """On an axis, in order."""
        ...


def axis(tokenizer: HasLabels, ids: Sequence[int]) -> Axis:
    """The labels of tokens: pieces that share a character are one."""
    labels = tokenizer.labels(ids)
    return Axis([label.text for label in labels], [label.pieces for label in labels])


def merge(weights: AttentionMap | Tensor, rows: Axis, columns: Axis) -> AttentionMap | Tensor:
    """A map over labels: mass summed over the tokens of a column's label, averaged over those of a row's."""
    if all(first == last for first, last in (*rows.spans, *columns.spans)):
        return weights  # a label each: the map stays lazy
    dense = weights.dense() if isinstance(weights, AttentionMap) else weights
    wide = torch.stack([dense[..., first : last + 1].sum(-1) for first, last in columns.spans], dim=-1)
    return torch.stack([wide[..., first : last + 1, :].mean(-2) for first, last in rows.spans], dim=-2)


def text_attention(tokenizer: HasLabels, ids: Sequence[int], maps: Mapping[str, AttentionMap]) -> TextAttention:
    """The maps (1, H, T, T) of a pass over one text."""
    labels = axis(tokenizer, ids)
    merged = {name: merge(cast(AttentionMap, weights[0]), labels, labels) for name, weights in maps.items()}
    return TextAttention(labels.texts, merged)
