"""The attention of a trained model as a picture, a page and numbers, and of one in training at each validation."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from regard.errors import ArgumentError, DataError, NonFiniteError, TooLargeError
from regard.files.atomic import file_errors, refuse_links, write_atomically
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.combined import shares_of_sizes
from regard.maps.sources.source import LinearSource
from regard.tasks.pictures.token_maps import TextMaps
from regard.tasks.viewing.places import EVERYTHING, Choice, ForeignAttention, SeenImage
from regard.tasks.viewing.view_input import ViewInput
from regard.views.drawing import Panel
from regard.views.figures import save_figure
from regard.views.heatmap import heatmap_grid
from regard.views.html.contents import Example, Map
from regard.views.html.page import page
from regard.views.overlay import overlay_grid
from regard.views.scales import ColourScale, ScaleName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES, PAGES, NUMBERS = (".png", ".svg", ".pdf"), (".html", ".htm"), (".json",)
"""The endings of files written."""
OTHER_PICTURES = (".jpg", ".jpeg", ".gif", ".webp", ".tif", ".tiff", ".bmp", ".eps", ".ps")
"""The endings of pictures that are not."""


class Attends(Protocol):
    """A model that shows its attention: a run of ours, or any that transformers loads."""

    def attend(self, asked: ViewInput) -> TextMaps:
        """Use the model on an input, and return its attention maps."""


class SeenText(NamedTuple):
    sentence: str
    attention: TextMaps
    image: SeenImage | None = None


class PictureFiles(NamedTuple):
    picture: Path | None
    page: Path | None
    numbers: Path | None = None

    @classmethod
    def at(cls, out: Path) -> "PictureFiles":
        """The files that a path means: one file if it ends as a picture or a page does, else both in a folder.

        >>> PictureFiles.at(Path("out/v.svg"))
        PictureFiles(picture=PosixPath('out/v.svg'), page=None, numbers=None)
        """
        ending = out.suffix.lower()
        if not out.is_dir() and ending in PICTURES:
            return cls(out, None)
        if not out.is_dir() and ending in PAGES:
            return cls(None, out)
        if not out.is_dir() and ending in NUMBERS:
            return cls(None, None, out)
        if not out.is_dir() and ending in OTHER_PICTURES:
            raise ArgumentError(
                f"files that end in {', '.join([*PICTURES, *PAGES, *NUMBERS])} are written, or a folder; got {out}"
            )
        return cls(out / "attention.png", out / "attention.html")

    @property
    def paths(self) -> list[Path]:
        return [path for path in self if path is not None]


def look_at(
    model: Attends, inputs: Sequence[ViewInput], skipped: Callable[[str], None], *, choice: Choice = EVERYTHING
) -> list[SeenText]:
    seen, problems = [], []
    for number, asked in enumerate(inputs, 1):
        try:
            found = model.attend(asked)
            image = None
            if isinstance(found, ForeignAttention):
                image = found.image
                if unproved := found.unproved:
                    more = f" and {len(unproved) - 1} more" if len(unproved) > 1 else ""
                    skipped(f"positions of {unproved[0]}{more} are numbers: their parts of the input are not proved")
            seen.append(SeenText(asked.title + choice.note, choice.of(found), image))
        except DataError as error:
            problems.append((number, error))
    if not seen and problems:
        raise problems[0][1]
    for number, problem in problems:
        skipped(f"sentence {number} of {len(inputs)} is not shown: {problem}")
    return seen


def save_pictures(
    seen: Sequence[SeenText], files: PictureFiles, *, title: str, scale: ScaleName | ColourScale = "sqrt"
) -> list[Path]:
    refuse_links(*files.paths)
    for path in files.paths:
        with file_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
    if files.picture is not None:
        save_figure(_figure(seen, title, scale), files.picture)
    if files.page is not None:
        page([page_example(*one) for one in seen], path=files.page, title=title)
    if files.numbers is not None:
        save_numbers(files.numbers, [(one.sentence, one.attention) for one in seen])
    return files.paths


def _figure(seen: Sequence[SeenText], title: str, scale: ScaleName | ColourScale) -> "Figure":
    for one in seen:
        if one.image is not None and (rows := _on_patches(one.attention, one.image)) is not None:
            return overlay_grid(one.image.pixels, rows, title=f"{one.sentence} · {one.attention.shown}", scale=scale)
    names = dict.fromkeys(f"{one.attention.shown}, mean of the heads" for one in seen)
    return heatmap_grid([panel(*one) for one in seen], title=" · ".join([title, *names]), scale=scale)


def _on_patches(attention: TextMaps, image: SeenImage) -> list[tuple[str, Any]] | None:
    """The weights on the patches of an image, for the mean and for each head; None if they are not all of them."""
    weights = attention.maps[attention.shown]
    if image.keys is None and weights.shape[-1] != weights.shape[-2]:
        return None
    panels = [("mean of the heads", _mean(weights)), *((f"head {n}", weights[n]) for n in range(len(weights)))]
    if image.keys is None:
        return panels
    # Of a text with an image, its last token looks at the patches.
    return [(name, one[-1][list(image.keys)]) for name, one in panels]


def panel(sentence: str, attention: TextMaps, image: SeenImage | None = None) -> Panel:
    """The map to show first, averaged over its heads: a translation's alignment, or a text's last layer."""
    return Panel(_mean(attention.maps[attention.shown]), *attention.labels(attention.shown), sentence)


def _mean(weights: Any) -> Any:
    return weights.average() if isinstance(weights, AttentionMap) else weights.mean(0)


def page_example(sentence: str, attention: TextMaps, image: SeenImage | None = None) -> Example:
    """Every map of a text. Of a linear recurrence, whose weights have signs, the sizes are shown as shares of a row."""
    maps, names = dict[str, Map](), dict[str, str]()
    for name, weights in attention.maps.items():
        names[name], shown = name, weights
        if isinstance(weights, AttentionMap) and isinstance(weights.source, LinearSource):
            names[name], shown = f"{name} (shares of sizes)", AttentionMap(shares_of_sizes(weights.source))
        maps[names[name]] = Map(shown, *attention.labels(name), attention.alternatives(name))
    return Example(sentence, maps, show=names[attention.shown])


MOST_WEIGHTS = 2**23
"""About 80 MB of digits."""


def save_numbers(path: Path, seen: Sequence[tuple[str, TextMaps]]) -> None:
    """Write `[{"text": ..., "maps": [{"name": ..., "queries": [...], "keys": [...], "weights": [H][T][S]}]}]`.

    AxisLabels are null where there are none; weights have five significant digits.
    """
    count = sum(one.shape.numel() for _, attention in seen for one in attention.maps.values())
    if count > MOST_WEIGHTS:
        raise TooLargeError(
            f"{path} would have {count:,} weights, and {MOST_WEIGHTS:,} are the most: choose by --layers and --heads, "
            "or write the page (.html)"
        )
    found = [
        {"text": text, "shown": attention.shown, "maps": [_of_map(name, attention) for name in attention.maps]}
        for text, attention in seen
    ]
    with file_errors(path):
        write_atomically(path, json.dumps(found, ensure_ascii=False) + "\n")


def _of_map(name: str, attention: TextMaps) -> dict[str, object]:
    queries, keys = attention.labels(name)
    weights = attention.maps[name]
    dense: Tensor = weights.dense() if isinstance(weights, AttentionMap) else weights
    if len(wrong := (~dense.isfinite()).nonzero()):
        head, query, key = wrong[0].tolist()
        value = float(dense[head, query, key])
        raise NonFiniteError(
            f"map {name!r}: weights must be finite; {value} came in head {head} at query {query}, key {key}"
        )
    numbers = [[[float(f"{one:.5g}") for one in row] for row in head] for head in dense.float().tolist()]
    return {"name": name, "queries": queries, "keys": keys, "weights": numbers}


Look = Callable[[], Sequence[tuple[str, TextMaps]]]
"""Sentences, and the model's present attention to them."""


class Snapshots:
    """Draws, for each sentence, the mean over the heads of the map that is shown first."""

    def __init__(self, look: Look, say: Callable[[str], None]) -> None:
        self._look: Look | None = look
        self._say = say

    def __call__(self) -> Mapping[str, npt.NDArray[np.uint8]]:
        """The name and pixels (height, width, 3) of the picture of now; empty if it cannot be drawn."""
        if self._look is None:
            return {}
        try:
            panels = [panel(sentence, seen) for sentence, seen in self._look()]
            return {"attention": pixels(heatmap_grid(panels, across=1))}
        except Exception as error:  # of any kind: training must go on
            self._look = None
            self._say(f"no heatmaps for TensorBoard: {' '.join(str(error).split()) or type(error).__name__}")
            return {}


def pixels(figure: "Figure") -> npt.NDArray[np.uint8]:
    """The picture of a figure, (height, width, 3): red, green and blue from 0 to 255.

    >>> from regard.views import heatmap
    >>> import torch
    >>> picture = pixels(heatmap(torch.eye(3)).figure)
    >>> picture.dtype, picture.shape[2]
    (dtype('uint8'), 3)
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]
