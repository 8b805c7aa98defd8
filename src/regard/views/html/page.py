"""The page: attention in one HTML file that opens in every browser, offline, without any installation.

Point at a token to see its attention, or the attention that it received, for every sentence, sort of attention, layer
and head. A page has a budget of bytes. It states its content and precision, and draws the rest as "not carried". The
browser brings the fonts, so that every script is readable.
"""

import html
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.files.atomic import file_errors, write_atomically
from regard.lazy import Displayed
from regard.tensors.kinds import refuse_wrong_kinds
from regard.views.colours import DARK, LIGHT, Theme, hexadecimal
from regard.views.examples import Viewed, examples_of, title_of
from regard.views.html.arrays import Arrays, as_text
from regard.views.html.carried import Carried, report_lines
from regard.views.html.contents import LINE_BYTES, MEGABYTE, contents

MODULES = (
    "page_codec.js", "page_worker.js", "page_numbers.js", "page_tiles.js", "page_weights.js", "page_state.js",
    "page_words.js", "page_scale.js", "page_dom.js",
    "page_text.js", "page_matrix.js", "page_links.js", "page_reading.js", "page_heads.js", "page_export.js",
    "page_controls.js", "page.js",
)  # fmt: skip
"""The files of the JavaScript; each uses only those before it."""
NOT_CARRIED = ("#f1f1f4", "#c9ccd6"), ("#22242e", "#3d4152")
"""The stripes of "not carried", on light and on dark paper."""
PRECISION = "Weights are kept in half precision: within 0.05 % of their value, or 3e-8."
"""The largest difference between a weight on the page and the given weight, in words; the page prints it."""


@dataclass(frozen=True, repr=False)
class Page(Displayed):
    """A page, and a report of its content.

    >>> import torch
    >>> from regard.views import Example, Map
    >>> made = page([Example("", {"0": Map(torch.eye(2))})])
    >>> print(made.report())
    the page has 0.1 of 8.0 MB
    0: every weight of every head
    """

    text: str
    carried: list[Carried]
    """The content for each map."""
    used_bytes: int
    budget_bytes: float
    """The requested bound."""

    def __repr__(self) -> str:
        return f"Page({len(self.carried)} maps, {self.used_bytes / MEGABYTE:.1f} MB; save() writes it)"

    def report(self) -> str:
        """The content: its bytes, and a line for the maps with the same."""
        return "\n".join(_report(self.used_bytes, self.budget_bytes, self.carried))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a file, either all of it or nothing.

        Raises:
            FileError: the file cannot be written; an older one stays as it was.
        """
        with file_errors(path):
            write_atomically(path, self.text)
        return Path(path)


@refuse_wrong_kinds
def page(
    shown: Viewed,
    tokens: Any = None,
    path: str | os.PathLike[str] | None = None,
    *,
    source: Sequence[str] | None = None,
    sequence: int = 0,
    title: str = "",
    budget_mb: float = 8.0,
    exact: Sequence[str] | None = None,
    factors: Sequence[str] = (),
) -> Page:
    """One HTML document of the examples.

    Args:
        shown: the recording of `regard.watch`; attention maps or tensors (batch..., H, T, S), one or several, such as
            the `attentions` of transformers; a model; a pair of a model and its inputs; or examples: sentences with
            their maps, of which the reader of the page chooses one.
        tokens: labels for every axis of as many queries or keys. Examples have labels of their own. Beside a model,
            its inputs: one argument, a tuple of them, or a mapping.
        path: a file to write it to; None writes none.
        source: labels of another sequence, likewise.
        sequence: the sequence of the batch, counted through all its dimensions.
        title: the heading, and the title of the window; "" for the name of the watched model's class.
        budget_mb: the most millions of bytes of the document. It is spent on a small picture and statistics of every
            head; on the strongest keys of each query; on the weights of the `exact` maps, or a pyramid of tiles where
            these do not fit; on `factors`; then on the weights and tiles of the other maps.
        exact: names of the maps whose weights come first; None for each example's first shown map outside `factors`.
        factors: names of maps with queries and keys in the page, so that every weight is exact at every length. A head
            takes 4 (T + S) D bytes. Only for a softmax of scaled dot products under causal, length and window masks.

    Returns:
        The document with its report. It loads nothing else, so it works from a file and offline.

    Raises:
        ShapeError: a map is not (heads, T, S) or (T, S), or has not one label for each token.
        NonFiniteError: a weight is NaN or infinite.
        TooLargeError: the page's script, labels and small pictures alone exceed the budget.
        ArgumentError: there are no examples or no maps, a name or an argument does not exist, a weight is below 0, or
            a map in `factors` has none.
        NotKeptError: the recording holds only statistics of a map, without a picture.
        FileError: the file cannot be written; an older one stays as it was.

    >>> import torch
    >>> from regard.views import Example, Map
    >>> words = ["le", "chat"]
    >>> text = page([Example("le chat", {"encoder.0": Map(torch.eye(2)[None], words, words)})]).text
    >>> text[:15], "http:" in text, "https:" in text
    ('<!doctype html>', False, False)
    """
    title = title_of(shown, title)
    examples = examples_of(shown, tokens, source, sequence, title)
    if not 0 < budget_mb < float("inf"):
        raise ArgumentError(f"budget_mb must be above 0; got {budget_mb}")
    parts = {
        "title": html.escape(title.encode("utf-8", "replace").decode()),
        "style": resource("page.css"),
        "script": script(),
        "render": "render",
        "data": "",
    }
    arrays, about = Arrays(budget_mb * MEGABYTE), {"title": title, "note": PRECISION, "colours": page_colours()}
    arrays.spend("and what it says of itself", len(document_of(parts).encode()) + len(as_text(about)) + LINE_BYTES)
    shown_data, carried = contents(examples, arrays, exact, factors)
    said = _report(arrays.used_bytes, arrays.budget_bytes, carried)
    packed = [None if one is None else one.as_json() for one in arrays.held]
    parts["data"] = as_text({**about, **shown_data, "carried": said, "arrays": packed})
    text = document_of(parts)
    made = Page(text, carried, len(text.encode()), budget_mb * MEGABYTE)
    if path is not None:
        made.save(path)
    return made


def document_of(parts: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], resource("page.html"))


def _report(used_bytes: float, budget_bytes: float, carried: Sequence[Carried]) -> list[str]:
    sizes = f"the page has {used_bytes / MEGABYTE:.1f} of {budget_bytes / MEGABYTE:.1f} MB"
    return [sizes, *report_lines(carried)]


def page_colours() -> dict[str, Any]:
    return {"light": _colours(LIGHT, NOT_CARRIED[0]), "dark": _colours(DARK, NOT_CARRIED[1])}


def _colours(theme: Theme, unknown: tuple[str, str]) -> dict[str, Any]:
    return {
        "ramp": [hexadecimal(one) for one in theme.colours()],
        "diverging": [hexadecimal(one) for one in theme.signed_colours()],
        "heads": theme.accents,
        "masked": theme.masked,
        "hatch": theme.hatch,
        "unknown": unknown[0],
        "unknownStripe": unknown[1],
    }


def script() -> str:
    """The JavaScript of the page as one module that exports `render(root, data, options)`.

    >>> "export function render(" in script(), "import " in script()
    (True, False)
    """
    return one_module(resource(name) for name in MODULES)


def one_module(modules: Iterable[str]) -> str:
    """Modules as one: without their imports, and without lines of comments, which a page need not carry.

    >>> one_module(["// One.\\nexport const a = 1;", 'import { a } from "./a.js";\\n/**\\n * B.\\n */\\na * 2; // 2'])
    'export const a = 1;\\na * 2; // 2'
    """
    return "\n".join(re.sub(r"(?m)^(import [^;]*;|\s*(//|/\*\*|\*( |/|$)).*)\n", "", module) for module in modules)


def resource(name: str) -> str:
    return files("regard.views.html").joinpath(name).read_text(encoding="utf-8").rstrip("\n")
