"""The layers and heads of a model that are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.tasks.pictures.token_maps import TextMaps
from regard.tasks.viewing.places import ForeignAttention
from regard.views.html.contents import layer_names


@dataclass(frozen=True, slots=True)
class Choice:
    layers: Sequence[int] = ()
    heads: Sequence[int] = ()

    @property
    def note(self) -> str:
        return f" · head{'s' * (len(self.heads) > 1)} {', '.join(map(str, self.heads))}" if self.heads else ""

    def of(self, attention: TextMaps) -> TextMaps:
        """The chosen maps; layers are counted among the maps of a kind, such as those of an encoder, as a page
        and the tables of `regard measure` number them."""
        if not self.layers and not self.heads:
            return attention
        layers, kinds = layer_names(attention.maps), dict[str, list[str]]()
        for name, layer in layers.items():
            kinds.setdefault(layer.kind, []).append(name)
        found = {
            one: [name for name, layer in layers.items() if layer.number == one]
            or [names[one] for names in kinds.values() if one < 0 and -one <= len(names)]
            for one in self.layers
        }
        if absent := [one for one, names in found.items() if not names]:
            known = sorted({layer.number for layer in layers.values()})
            raise ArgumentError(
                f"--layers must be numbers of {len(known)} layers, {known[0]} to {known[-1]}; got {absent[0]}"
            )
        wanted = {name for names in found.values() for name in names} if self.layers else set(layers)
        maps = {name: self._heads(one) for name, one in attention.maps.items() if name in wanted}
        shown = attention.shown if attention.shown in maps else list(maps)[-1]
        others = {name: some for name in maps if (some := attention.alternatives(name)) is not None}
        return ForeignAttention(maps, lambda: {name: attention.labels(name) for name in maps}, shown, others)

    def _heads(self, weights: AttentionMap | Tensor) -> AttentionMap | Tensor:
        count = weights.shape[0]
        if wrong := [head for head in self.heads if not -count <= head < count]:
            raise ArgumentError(f"--heads must be numbers of {count} heads, 0 to {count - 1}; got {wrong[0]}")
        chosen: Any = weights[list(self.heads)] if self.heads else weights
        found: AttentionMap | Tensor = chosen
        return found


EVERYTHING = Choice()
