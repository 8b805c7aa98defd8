"""The labels of the positions of an input: tokens, patches of an image, frames of a sound."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import RegardError
from regard.tasks.pictures.token_maps import AxisLabels
from regard.tasks.viewing.seen import SeenImage
from regard.views.overlay import patch_grid


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
    """The length of a sound,"""
    step: float | None = None
    """and the time from one frame to the next, if that is known."""
    image: SeenImage | None = None

    def of(self, count: int, *, parts: int = 1) -> AxisLabels:
        """The labels of a sequence so long; None for positions.

        Args:
            count: the length of the sequence.
            parts: the sequences that the model makes of the input: a window of an image is none of its tiles.
        """
        known = next((texts for texts in self.texts if len(texts) == count), None)
        if known is None and self.size is not None:
            return _patches(count, self.size, self.patch, is_whole=parts == 1)
        if known is None and self.seconds is not None and parts == 1:
            step = self.seconds / count
            if self.step is not None:  # a model may take several of them together
                step = self.step * max(1, round(step / self.step))
            return [f"{frame * step:.2f} s" for frame in range(count)]
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


def image_places(places: InputLabels, inputs: Mapping[str, Any], config: Any, processor: Any, *, tile: int = 0) -> None:
    """The size of the image that the model gets, its patches, and the tokens of a text that stand for patches.

    Tiles are of one size: each is an image of its own, and `tile` is drawn.
    """
    pixels = inputs.get("pixel_values")
    vision = getattr(config, "vision_config", None) or config
    if isinstance(pixels, Tensor) and pixels.dim() >= 4:
        places.size = (int(pixels.shape[-2]), int(pixels.shape[-1]))
    side = getattr(vision, "patch_size", None)
    places.patch = side if isinstance(side, int) else None
    seen = _pixels(inputs, processor, tile)
    if "input_ids" not in inputs:
        places.image = None if seen is None else SeenImage(seen)
        return
    mark = next((one for name in ("image_token_id", "image_token_index")
                 if isinstance(one := getattr(config, name, None), int)), None)  # fmt: skip
    if mark is None or not places.texts:
        return
    at = [n for n, token in enumerate(inputs["input_ids"][0].tolist()) if token == mark]
    tiles = prod(pixels.shape[:-3]) if places.size is not None and pixels is not None else 1
    each = len(at) // tiles
    own = places.of(each) if places.size is not None and at and each * tiles == len(at) else None
    labels = [f"image {n}" for n in range(len(at))]
    if own is not None and "[CLS]" not in own and seen is not None:
        labels = [label if tiles == 1 else f"{n}: {label}" for n in range(tiles) for label in own]
        places.image = SeenImage(seen, at[tile * each : (tile + 1) * each])
    for place, label in zip(at, labels, strict=True):
        places.texts[0][place] = label


def sound_places(places: InputLabels, inputs: Mapping[str, Any], rate: int, extractor: Any, config: Any) -> None:
    """The length of the sound as the model gets it, and the time of a frame."""
    samples = inputs.get("input_values")
    if isinstance(samples, Tensor) and samples.dim() == 2:
        places.seconds = samples.shape[-1] / rate
        ratio = getattr(config, "inputs_to_logits_ratio", None)
        places.step = ratio / rate if isinstance(ratio, int) else None
        return
    features = next((one for one in inputs.values() if isinstance(one, Tensor) and one.dim() == 3), None)
    hop = getattr(extractor, "hop_length", None) or rate // 100
    if features is not None:
        axis = -1 if features.shape[1] == getattr(extractor, "feature_size", None) else 1
        places.seconds = features.shape[axis] * hop / rate


def _pixels(inputs: Mapping[str, Any], processor: Any, tile: int) -> Any:
    """The image (height, width, 3) in 0..1 as the model got it, its colours set back; None if it is cut up."""
    pixels = inputs.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.dim() < 4 or pixels.shape[-3] not in (1, 3):
        return None
    tiles = pixels.reshape(-1, *pixels.shape[-3:])
    image = tiles[tile if tile < len(tiles) else 0].permute(1, 2, 0).float().numpy()
    if getattr(processor, "do_normalize", False):
        image = image * np.asarray(processor.image_std) + np.asarray(processor.image_mean)
    image = image.repeat(3, -1) if image.shape[-1] == 1 else image
    return image.clip(0.0, 1.0)
