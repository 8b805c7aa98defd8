"""The attention of a foreign model with labels of the positions: tokens, patches of an image, frames of a sound;
and the layers and heads that are shown of any model.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from regard.errors import ArgumentError, RegardError
from regard.maps.attention_map import AttentionMap
from regard.tasks.pictures.token_maps import Alternative, AxisLabels, TextMaps
from regard.tasks.viewing.image_cells import ImageCells, Pixels, mosaic
from regard.tasks.viewing.proved_places import ClaimedAxis, NoPart
from regard.views.html.contents import layer_names
from regard.views.overlay import PatchGrid, patch_grid


class SeenImage(NamedTuple):
    pixels: Any
    """(height, width, 3) in 0..1."""
    keys: Sequence[int] | None = None
    """The positions of its patches among those of a text; None if the model reads nothing else."""


@dataclass(frozen=True)
class ForeignAttention:
    maps: Mapping[str, AttentionMap | Tensor]
    """By the path of the module, each (H, T, S)."""
    prove: Callable[[], Mapping[str, tuple[AxisLabels, AxisLabels]]]
    """Finds the labels of queries and keys of each map, of axes for which they are proved; it is asked once."""
    shown: str
    choices: Mapping[str, list[list[Alternative]]] = field(default_factory=dict)
    picture: "SeenImage | None" = None

    @cached_property
    def axes(self) -> Mapping[str, tuple[AxisLabels, AxisLabels]]:
        return self.prove()

    @property
    def image(self) -> "SeenImage | None":
        return None if self.axes[self.shown][1] is None else self.picture

    @property
    def unproved(self) -> list[str]:
        return [name for name in self.maps if None in self.axes[name]]

    def labels(self, name: str) -> tuple[AxisLabels, AxisLabels]:
        return self.axes[name]

    def alternatives(self, name: str) -> list[list[Alternative]] | None:
        return self.choices.get(name)


@dataclass(slots=True)
class InputLabels:
    text: ClaimedAxis | None = None
    """A sequence of tokens."""
    written: ClaimedAxis | None = None
    """The tokens that a decoder writes, each in the place of that which it reads for it,"""
    read: ClaimedAxis | None = None
    """and those that it reads."""
    size: tuple[int, int] | None = None
    """The height and width in pixels of an image,"""
    patch: int | None = None
    """and the side of its patches, if that is known."""
    seconds: float | None = None
    """The length of a sound with the padding behind it,"""
    heard: float = math.inf
    """without it,"""
    step: float | None = None
    """and the time from one frame to the next, if that is known."""
    image: SeenImage | None = None
    _known: dict[tuple[int, int, int], list[ClaimedAxis]] = field(default_factory=dict)

    def of(self, count: int, *, sequences: int = 1, sequence: int = 0) -> list[ClaimedAxis]:
        if (key := (count, sequences, sequence)) not in self._known:
            self._known[key] = [*self._found(count, sequences, sequence)]
        return self._known[key]

    def _found(self, count: int, sequences: int, sequence: int) -> Iterator[ClaimedAxis]:
        if self.text is not None and len(self.text.labels) == count:
            yield self.text
        if self.size is not None and count > 1:
            sides = (self.patch, None) if sequences == 1 else (self.patch,) if self.patch is not None else ()
            grids = (_grid(count, self.size, side) for side in dict.fromkeys(sides))
            yield from (_patches(grid, side, sequence) for grid, side in grids if grid is not None)
        if self.seconds is not None and sequences == 1:
            step = self.seconds / count
            if self.step is not None:  # a model may take several of them together
                step = self.step * max(1, round(step / self.step))
            times = [frame * step for frame in range(count)]
            labels = [f"{time:.2f}s" if time < self.heard else f"pad:{time:.2f}s" for time in times]
            yield ClaimedAxis(labels, (), is_time=True)


def _grid(count: int, size: tuple[int, int], side: int | None) -> "tuple[PatchGrid | None, int | None]":
    try:
        return patch_grid(count, size, patch=side), side
    except RegardError:
        return None, side


def _patches(grid: PatchGrid, side: int | None, tile: int) -> ClaimedAxis:
    others = ["[CLS]", *(f"[R{n}]" for n in range(1, grid.extra))][: grid.extra]
    cells = ImageCells(
        grid.rows, grid.columns, ((tile,),), height=grid.rows * (side or 0), width=grid.columns * (side or 0)
    )
    each = [*cells.each()]
    labels = [*others, *(f"{row},{column}" for row, column in each)]
    return ClaimedAxis(labels, [*[NoPart.OWN] * grid.extra, *each], cells)


def of_tokens(labels: list[str], name: str) -> ClaimedAxis:
    return ClaimedAxis(labels, [(name, place) for place in range(len(labels))])


def image_places(
    places: InputLabels, inputs: Mapping[str, Any], config: Any, processor: Any, size: tuple[int, int], *, tile: int = 0
) -> None:
    """The size of the image that the model gets, its patches, and the tokens of a text that stand for patches.

    Of an image of this height and width that is cut into tiles, all are drawn in their places if these are found;
    another `tile` than the first is drawn alone.
    """
    pixels = inputs.get("pixel_values")
    vision = getattr(config, "vision_config", None) or config
    if isinstance(pixels, Tensor) and pixels.dim() >= 4:
        places.size = (int(pixels.shape[-2]), int(pixels.shape[-1]))
    side = getattr(vision, "patch_size", None)
    side = side[0] if isinstance(side, list | tuple) and len(set(side)) == 1 else side
    places.patch = side if isinstance(side, int) else None
    tiles = _tiles(inputs, processor)
    if "input_ids" not in inputs:
        places.image = None if tiles is None else SeenImage(tiles[tile if tile < len(tiles) else 0])
        return
    mark = next((one for name in ("image_token_id", "image_token_index")
                 if isinstance(one := getattr(config, name, None), int)), None)  # fmt: skip
    if mark is None or places.text is None:
        return
    at = [n for n, token in enumerate(inputs["input_ids"][0].tolist()) if token == mark]
    found = (None if tiles is None or not at else
             (_in_place(places, tiles, at, size) if len(tiles) > 1 and tile == 0 else None)
             or _of_tiles(places, tiles, at, tile))  # fmt: skip
    labels, parts = [*places.text.labels], [*places.text.parts]
    for n, place in enumerate(at):
        labels[place], parts[place] = f"image {n}", NoPart.UNKNOWN
    for place, (label, part) in ({} if found is None else found[0]).items():
        labels[place], parts[place] = label, part
    places.text = ClaimedAxis(labels, parts, None if found is None else found[1])


_Labelled = tuple[dict[int, tuple[str, tuple[int, int]]], ImageCells]
"""Labels of positions, with their cells."""


def _in_place(places: InputLabels, tiles: Pixels, at: Sequence[int], size: tuple[int, int]) -> _Labelled | None:
    found = mosaic(tiles, size)
    whole = None if found is None else found.keys(at, places.patch or tiles.shape[1])
    if whole is None:
        return None
    pixels, keys, cells = whole
    places.image = SeenImage(pixels, keys)
    named = {key: (f"{row},{column}", (row, column)) for key, (row, column) in zip(keys, cells.each(), strict=True)}
    return named, cells


def _of_tiles(places: InputLabels, tiles: Pixels, at: Sequence[int], tile: int) -> _Labelled | None:
    each, rest = divmod(len(at), len(tiles))
    own = next((one for one in ([] if rest else places.of(each)) if one.cells is not None), None)
    if own is None or own.cells is None or NoPart.OWN in own.parts or tile >= len(tiles):
        return None
    places.image = SeenImage(tiles[tile], at[tile * each : (tile + 1) * each])
    rows = own.cells.rows
    cells = ImageCells(rows * len(tiles), own.cells.columns, tuple((n,) for n in range(len(tiles))))
    names = own.labels if len(tiles) == 1 else [f"{n}: {label}" for n in range(len(tiles)) for label in own.labels]
    return {place: (label, part) for place, label, part in zip(at, names, cells.each(), strict=True)}, cells


def sound_places(
    places: InputLabels, inputs: Mapping[str, Any], rate: int, extractor: Any, config: Any, *, samples: int
) -> None:
    """The length of the sound as the model gets it, with padding behind its own samples, and the time of a frame."""
    places.heard = samples / rate
    values = inputs.get("input_values")
    if isinstance(values, Tensor) and values.dim() == 2:
        places.seconds = values.shape[-1] / rate
        ratio = getattr(config, "inputs_to_logits_ratio", None)
        places.step = ratio / rate if isinstance(ratio, int) else None
        return
    features = next((one for one in inputs.values() if isinstance(one, Tensor) and one.dim() == 3), None)
    hop = getattr(extractor, "hop_length", None) or rate // 100
    if features is not None:
        axis = -1 if features.shape[1] == getattr(extractor, "feature_size", None) else 1
        places.seconds = features.shape[axis] * hop / rate


def _tiles(inputs: Mapping[str, Any], processor: Any) -> Pixels | None:
    """The tiles (N, height, width, 3) in 0..1 as the model got them, their colours set back; None if it is cut up."""
    pixels = inputs.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.dim() < 4 or pixels.shape[-3] not in (1, 3):
        return None
    tiles = pixels.reshape(-1, *pixels.shape[-3:]).permute(0, 2, 3, 1).float().numpy()
    if getattr(processor, "do_normalize", False):
        tiles = tiles * np.asarray(processor.image_std) + np.asarray(processor.image_mean)
    tiles = tiles.repeat(3, -1) if tiles.shape[-1] == 1 else tiles
    return tiles.clip(0.0, 1.0)


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
