"""The page: attention in one HTML file that opens in every browser, offline, without any installation.

If you point at a token, you see the tokens that it attended to, or the tokens that attended to it, for every sentence,
kind of attention, layer and head. The page holds the weights as base64 of float16 or uint8, with 2 or 1 bytes for each
weight (times 4/3), and states this precision. The browser has the fonts, so that every script is readable.
"""

import html
import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError, ShapeError, TooLargeError
from regard.storage.atomic import write_atomically
from regard.views.colours import hex_ramp
from regard.views.labels import printable, right_to_left
from regard.views.values import Picture, Pooling, picture

WeightPrecision = Literal["float16", "uint8"]
"""The type in which the page holds the weights."""

PRECISIONS = {
    "float16": "Weights are kept in half precision: within 0.05 % of their value, or 3e-8.",
    "uint8": "Weights are kept in 8 bits: within 0.2 % of the largest weight of their map.",
}
"""The largest difference between a weight on the page and the given weight, in words; the page prints it."""

MODULES = ("page_weights.js", "page_state.js", "page_dom.js", "page_drawing.js", "page_parts.js", "page.js")
"""The files of the JavaScript; each uses only those before it."""


class Map(NamedTuple):
    """One layer of attention with its labels."""

    weights: Any
    """(heads, T, S) or (T, S): an `AttentionMap`, a tensor or an array, from 0 up."""
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None


class Example(NamedTuple):
    """One sentence or pair of sentences, and all of its maps that the page shows."""

    title: str
    maps: Mapping[str, Map]
    """Maps by name. The numbers in a name are the layer, and the words are the kind: "decoder.0.cross"."""
    show: str = ""
    """The name of the map that is shown first; "" for the last map."""


def page(
    examples: Iterable[Example],
    *,
    title: str = "Attention",
    precision: WeightPrecision = "float16",
    max_cells: int = 512,
    pooling: Pooling = "max",
    limit_bytes: int = 64 * 2**20,
) -> str:
    """One HTML document that shows the examples.

    Args:
        examples: sentences with their maps; the reader of the page chooses one.
        title: the heading, and the title of the window.
        precision: "float16" (each weight within 0.05 %) or "uint8" (half the size, within 0.2 % of the
            largest weight of the map).
        max_cells: the most queries and keys of a map; a longer map is pooled exactly in blocks, and the page says so.
        pooling: the value of a block of weights: its largest weight ("max"), or the sum over its keys averaged over
            its queries ("mass").
        limit_bytes: the most bytes of weights; a document with more is refused.

    Returns:
        The document. It loads nothing else, so it works from a file and offline.

    Raises:
        ShapeError: a map is not (heads, T, S) or (T, S), or has not one label for each token.
        NonFiniteError: a weight is NaN or infinite.
        TooLargeError: the document would exceed `limit_bytes`; raised before any weight is computed.
        ArgumentError: there are no examples or no maps, a name or an argument does not exist, or a weight is below 0.
        NotKeptError: only statistics were kept of a map, and this picture is not among them.

    >>> import torch
    >>> words = ["le", "chat"]
    >>> text = page([Example("le chat", {"encoder.0": Map(torch.eye(2)[None], words, words)})])
    >>> text[:15], "http:" in text, "https:" in text
    ('<!doctype html>', False, False)
    """
    if precision not in PRECISIONS:
        raise ArgumentError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    chosen = list(examples)
    if not chosen or not all(example.maps for example in chosen):
        raise ArgumentError("a page needs at least one example, and each example at least one map")
    _check_size(chosen, precision=precision, max_cells=max_cells, limit_bytes=limit_bytes)
    data = {
        "title": title,
        "note": PRECISIONS[precision],
        "colours": {"light": hex_ramp(), "dark": hex_ramp(dark=True)},
        "examples": [_example(example, precision, max_cells, pooling) for example in chosen],
    }
    parts = {
        "title": html.escape(title.encode("utf-8", "replace").decode()),
        "style": _resource("page.css"),
        "script": script(),
        # "<" could end the HTML element that holds the data. In JSON it can be escaped.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], _resource("page.html"))


def save_page(path: str | os.PathLike[str], examples: Iterable[Example], **options: Any) -> Path:
    """Write `page(examples, **options)` to a file, either all of it or nothing.

    Args:
        path: the file to write or replace.
        options: the keyword arguments of `page`.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written; an older one stays as it was.
        RegardError: see `page`.
    """
    write_atomically(path, page(examples, **options))
    return Path(path)


def script() -> str:
    """The JavaScript of the page as one module that exports `render(root, data, start)`.

    >>> "export function render(" in script(), "import " in script()
    (True, False)
    """
    modules = (_resource(name) for name in MODULES)
    return "\n".join(re.sub(r"(?m)^import [^;]*;\n", "", module) for module in modules)


def _resource(name: str) -> str:
    return files("regard.views.html").joinpath(name).read_text(encoding="utf-8").rstrip("\n")


def _check_size(examples: Sequence[Example], *, precision: WeightPrecision, max_cells: int, limit_bytes: int) -> None:
    weight_bytes = (2 if precision == "float16" else 1) * 4 / 3
    total = 0.0
    for example in examples:
        for name, one in example.maps.items():
            *heads, rows, columns = _shape(name, one.weights)
            total += prod(heads) * min(rows, max_cells) * min(columns, max_cells) * weight_bytes
    if total > limit_bytes:
        raise TooLargeError(
            f"the page would hold {total / 2**20:.1f} MiB of weights, more than limit_bytes = "
            f"{limit_bytes / 2**20:.1f} MiB: give fewer layers or sentences, a smaller max_cells "
            f"(now {max_cells}), precision='uint8', or a higher limit"
        )


def _shape(name: str, weights: Any) -> tuple[int, ...]:
    shape = tuple(getattr(weights, "shape", ()))
    if len(shape) not in (2, 3) or 0 in shape:
        raise ShapeError(f"map {name!r} must have shape (heads, queries, keys), none of them 0; got {shape}")
    return shape


def _example(example: Example, precision: WeightPrecision, max_cells: int, pooling: Pooling) -> dict[str, Any]:
    """The data of one example in the page. Lists of labels that several maps share are stored once."""
    names = list(example.maps)
    if example.show and example.show not in names:
        raise ArgumentError(f"show must name one of the maps {', '.join(names)}; got {example.show!r}")
    labels: list[list[str]] = []

    def place(texts: list[str]) -> int:
        shown = [printable(text) for text in texts]
        if shown not in labels:
            labels.append(shown)
        return labels.index(shown)

    maps = []
    for name, one in example.maps.items():
        heads = _heads(one, max_cells, pooling)
        first = heads[0]
        maps.append(
            {
                **_kind_and_layer(name),
                "rows": place(first.rows),
                "columns": place(first.columns),
                "block": first.block,
                "even": first.is_even,
                "pooling": pooling,
                **_encoded(name, np.stack([head.values for head in heads]), precision),
            }
        )
    return {
        "title": example.title,
        "labels": labels,
        "directions": ["rtl" if right_to_left(texts) else "ltr" for texts in labels],
        "maps": maps,
        "show": names.index(example.show) if example.show else len(names) - 1,
    }


def _heads(one: Map, max_cells: int, pooling: Pooling) -> list[Picture]:
    weights = one.weights
    heads = [weights] if len(weights.shape) == 2 else [weights[head] for head in range(weights.shape[0])]
    return [picture(head, one.rows, one.columns, max_cells=max_cells, pooling=pooling) for head in heads]


def _kind_and_layer(name: str) -> dict[str, str]:
    """The parts of a map's name: "decoder.0.cross" is layer "0" of the kind "decoder cross"."""
    words = re.split(r"[.\s]+", name)
    return {
        "kind": " ".join(word for word in words if not word.isdecimal()),
        "layer": ".".join(word for word in words if word.isdecimal()),
    }


def _encoded(name: str, values: npt.NDArray[np.floating[Any]], precision: WeightPrecision) -> dict[str, Any]:
    """The weights as text, with the numbers that decodeMap in page_weights.js needs to read it."""
    largest = float(values.max())
    if values.min() < 0:
        raise ArgumentError(f"map {name!r}: the page shows weights from 0 up; got {values.min()}")
    if precision == "float16" and largest > float(np.finfo(np.float16).max):
        raise ArgumentError(f"map {name!r} holds {largest}, too large for float16: use precision='uint8'")
    scale = largest or 1.0
    narrow = values.astype("<f2") if precision == "float16" else np.rint(values / scale * 255).astype(np.uint8)
    return {
        "shape": values.shape,
        "precision": precision,
        "scale": scale,
        # The weight of the darkest colour: a softmax may be rounded to a little over 1, other weights may be far above.
        "top": 1.0 if largest < 1.001 else largest,
        "data": b64encode(narrow.tobytes()).decode(),
    }
