"""The attention of a foreign model with labels of the positions: tokens, patches of an image, frames of a sound."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from regard.errors import RegardError
from regard.maps.attention_map import AttentionMap
from regard.tasks.pictures.token_maps import Alternative, AxisLabels
from regard.tasks.viewing.mosaic import Pixels, mosaic
from regard.views.overlay import patch_grid


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


@dataclass(slots=True)
class InputLabels:
    """The labels known of one input."""

    texts: list[list[str]] = field(default_factory=list)
    """AxisLabels of sequences of tokens."""
    written: list[str] = field(default_factory=list)
    """AxisLabels of the tokens that a decoder writes,"""
    read: list[str] = field(default_factory=list)
    """and of those that it reads for them."""
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

    def of(self, count: int, *, parts: int = 1) -> AxisLabels:
        """The labels of a sequence so long; None for positions."""
        known = next((texts for texts in self.texts if len(texts) == count), None)
        if known is None and self.size is not None:
            return _patches(count, self.size, self.patch, is_whole=parts == 1)
        if known is None and self.seconds is not None and parts == 1:
            step = self.seconds / count
            if self.step is not None:  # a model may take several of them together
                step = self.step * max(1, round(step / self.step))
            times = [frame * step for frame in range(count)]
            return [f"{time:.2f}s" if time < self.heard else f"pad:{time:.2f}s" for time in times]
        return known


def _patches(count: int, size: tuple[int, int], patch: int | None, *, is_whole: bool) -> AxisLabels:
    """Row and column of each patch, after the tokens that are none; larger patches where an image is whole."""
    if count == 1:
        return None
    for side in (patch, None) if is_whole else (patch,) if patch is not None else ():
        try:
            grid = patch_grid(count, size, patch=side)
        except RegardError:
            continue
        others = ["[CLS]", *(f"[R{n}]" for n in range(1, grid.extra))][: grid.extra]
        return [*others, *(f"{row},{column}" for row in range(grid.rows) for column in range(grid.columns))]
    return None


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
    if mark is None or not places.texts:
        return
    at = [n for n, token in enumerate(inputs["input_ids"][0].tolist()) if token == mark]
    labels = {place: f"image {n}" for n, place in enumerate(at)}
    if tiles is not None and at:
        labels |= _in_place(places, tiles, at, size) if len(tiles) > 1 and tile == 0 else {}
        if places.image is None:
            labels |= _of_tiles(places, tiles, at, tile)
    for place, label in labels.items():
        places.texts[0][place] = label


def _in_place(places: InputLabels, tiles: Pixels, at: Sequence[int], size: tuple[int, int]) -> dict[int, str]:
    """All tiles of an image in their places."""
    found = mosaic(tiles, size)
    whole = None if found is None else found.keys(at, places.patch or tiles.shape[1])
    if whole is None:
        return {}
    places.image = SeenImage(*whole)
    columns = patch_grid(len(whole[1]), whole[0].shape[:2], extra=0).columns
    return {place: f"{n // columns},{n % columns}" for n, place in enumerate(whole[1])}


def _of_tiles(places: InputLabels, tiles: Pixels, at: Sequence[int], tile: int) -> dict[int, str]:
    """One tile alone, where each has as many tokens."""
    each, rest = divmod(len(at), len(tiles))
    own = None if rest else places.of(each)
    if own is None or "[CLS]" in own or tile >= len(tiles):
        return {}
    places.image = SeenImage(tiles[tile], at[tile * each : (tile + 1) * each])
    labels = own if len(tiles) == 1 else [f"{n}: {label}" for n in range(len(tiles)) for label in own]
    return dict(zip(at, labels, strict=True))


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
