"""Objects in a notebook: maps, masks and biases as pictures, records as tables, reports as text, beside their repr."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from html import escape
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from regard.call.biases.base import Bias
from regard.call.biases.of_vectors import Shaw
from regard.call.masks.base import Mask
from regard.call.rotary.rotary import Rotary
from regard.call.shapes import Sizes
from regard.errors import MissingExtraError, RegardError
from regard.functional import Attended
from regard.lazy import Bundle
from regard.maps.attention_map import AttentionMap
from regard.maps.statistics.definitions import TopKeys
from regard.nn.embeddings import LearnedPositions, SinusoidalPositions
from regard.views.charts import faulty_row, position_table
from regard.views.drawing import MASK_SIDE, Panel
from regard.views.examples import of_sequence
from regard.views.figures import require_matplotlib
from regard.views.heatmap import head_panels, heatmap, heatmap_grid
from regard.views.html.contents import Example, Map
from regard.views.html.numbers import as_heads
from regard.views.html.page import Page
from regard.views.model import model_grid
from regard.views.scales import LinearScale
from regard.watching.analysis.relevance import AttentionRelevance, AttentionStep, Relevance
from regard.watching.analysis.tables import HeadTable
from regard.watching.checks.finding import Finding
from regard.watching.monitor import WorstHead
from regard.watching.report import count
from regard.watching.watch import Seen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LABELLED = 4
"""The most heads that are drawn with a label at each query and key."""
CELLS = 64
"""The most cells on a side of a head."""
MOST_ROWS = 40
"""The most rows of a table."""
MOST_RELEVANT = 256
"""The most tokens of which all pairs are computed for a picture."""
DARK_PAGES = (
    "body[data-jp-theme-light=false], body.vscode-dark, body.quarto-dark, body.dark, html.dark, html[theme=dark], "
    "html[data-theme=dark], body[data-theme=dark]"
)
"""How JupyterLab, VS Code, Quarto, marimo, Colab and Sphinx tell that a page is dark."""
STYLE = f"<style>:is({DARK_PAGES}) .regard-picture {{ filter: invert(0.93) hue-rotate(180deg) }}</style>"
"""White paper becomes dark and colours keep their hue, so that one picture serves both."""


@dataclass(frozen=True, slots=True)
class BiasScale(LinearScale):
    title: ClassVar[str] = "bias, added to the scores"


def bundle(shown: Any) -> Bundle:
    plain = repr(shown)
    try:
        data, metadata = display_of(shown)
    except MissingExtraError as error:
        return {"text/plain": f"{plain}\n(no picture: {error})"}, {}
    except (RegardError, RuntimeError, IndexError) as error:
        return {"text/plain": f"{plain}\n(no picture: {str(error).splitlines()[0]})"}, {}
    if "text/html" in data:
        data["text/html"] = _named(data["text/html"], plain.splitlines()[0][:200])
    return {**data, "text/plain": plain}, metadata


def _named(html: str, words: str) -> str:
    return html.replace("<img ", f'<img alt="{escape(words)}" ', 1)


@singledispatch
def display_of(shown: Any) -> Bundle:
    """A named tuple as a table of its fields; any other object has a `str` that is the longer form of its repr."""
    if fields := getattr(shown, "_fields", None):
        return {"text/html": record_html({name: getattr(shown, name) for name in fields})}, {}
    return _text(str(shown))


def _text(told: str) -> Bundle:
    style = "font-family: monospace; white-space: pre; overflow-x: auto; line-height: 1.3"
    return {"text/html": f'<pre style="{style}">{escape(told)}</pre>'}, {}


def picture_bundle(figure: "Figure | None") -> Bundle:
    from regard.views.artists import png_bundle

    assert figure is not None
    data, metadata = png_bundle(figure)
    size = " ".join(f'{side}="{pixels}"' for side, pixels in metadata["image/png"].items())
    source = f"data:image/png;base64,{b64encode(data['image/png']).decode()}"
    data["text/html"] = f'{STYLE}<img class="regard-picture" {size} style="height: auto" src="{source}">'
    return data, metadata


@display_of.register
def _(shown: AttentionMap) -> Bundle:
    require_matplotlib()
    if len(shown.shape) == 2:
        return picture_bundle(heatmap(shown, max_cells=4 * CELLS).get_figure(root=True))
    heads, batch = of_sequence(shown, 0), shown.leading[:-1]
    title = f"sequence 0 of {' x '.join(map(str, batch))}" if any(size > 1 for size in batch) else ""
    if heads.shape[0] > MOST_LABELLED or max(heads.shape[-2:]) > CELLS:
        return picture_bundle(model_grid({"heads": heads}, cells=CELLS, title=title))
    return picture_bundle(heatmap_grid(head_panels(heads), title=title))


@display_of.register
def _(shown: Attended | AttentionStep | AttentionRelevance) -> Bundle:
    parts = {name: getattr(shown, name) for name in shown._fields}
    (name,) = (name for name, part in parts.items() if isinstance(part, AttentionMap))
    data, metadata = display_of(parts.pop(name))
    return {**data, "text/html": data["text/html"] + record_html(parts)}, metadata


@display_of.register
def _(shown: WorstHead) -> Bundle:
    require_matplotlib()
    return picture_bundle(heatmap(shown.weights, title=str(shown), max_cells=4 * CELLS).get_figure(root=True))


@display_of.register
def _(shown: Map) -> Bundle:
    return display_of(Example("", {"": shown}))


@display_of.register
def _(shown: Example) -> Bundle:
    require_matplotlib()
    found = {name: as_heads(name, one.weights) for name, one in shown.maps.items()}
    if len(found) > 1 or any(len(heads) > MOST_LABELLED or max(heads.shape) > CELLS for heads in found.values()):
        data, metadata = picture_bundle(model_grid(found, cells=CELLS, title=shown.title))
        name = shown.show or list(found)[-1]
        heads, one = found[name], shown.maps[name]
        if one.rows is not None and max(heads.shape[-2:]) <= CELLS:
            title = f"{name}, mean of {count(len(heads), 'head')}"
            words = heatmap(heads.average(), one.rows, one.columns, title=title).get_figure(root=True)
            data["text/html"] += _named(picture_bundle(words)[0]["text/html"], title)
        return data, metadata
    (heads,), (one,) = found.values(), shown.maps.values()
    return picture_bundle(heatmap_grid(head_panels(heads, one.rows, one.columns), title=shown.title))


@display_of.register
def _(shown: Panel) -> Bundle:
    return picture_bundle(heatmap_grid([shown]))


@display_of.register
def _(shown: Mask) -> Bundle:
    require_matplotlib()
    return picture_bundle(heatmap(shown, title=str(shown)).get_figure(root=True))


@display_of.register
def _(shown: Bias) -> Bundle:
    if shown.reads_vectors:
        return _text(str(shown))
    heads = shown.head_count or 1
    sizes = Sizes((), heads, heads, MASK_SIDE, MASK_SIDE, True)
    of_head = shown.bind(sizes, torch.device("cpu"))
    places, zeros = range(MASK_SIDE), torch.zeros(1, heads, MASK_SIDE, 1)
    with torch.no_grad():
        numbers = of_head.block(places, places, query=zeros, key=zeros, sizes=sizes).expand(1, heads, -1, -1)[0]
    some = range(0, heads, -(-heads // MOST_LABELLED))
    panels = [Panel(numbers[head], title=f"head {head}" if heads > 1 else "") for head in some]
    more = f" ({len(some)} of {heads} heads)" if len(some) < heads else ""
    return picture_bundle(heatmap_grid(panels, title=f"{shown}{more}", scale=BiasScale()))


@display_of.register
def _(shown: Shaw) -> Bundle:
    return picture_bundle(position_table(shown.table, title=f"{shown}: row {len(shown.table) // 2} is distance 0"))


@display_of.register
def _(shown: SinusoidalPositions | LearnedPositions) -> Bundle:
    table = shown.weight if isinstance(shown, LearnedPositions) else shown(torch.zeros(CELLS, shown.dim))
    return picture_bundle(position_table(table, title=f"positions 0 to {len(table) - 1}"))


@display_of.register
def _(shown: Rotary) -> Bundle:
    """The vector (1, 0) of each pair of dimensions, turned by each position: its cosines and sines."""
    unturned = torch.zeros(CELLS, shown.dim)
    unturned[:, shown.layout.split(torch.arange(shown.rotated))[0]] = 1.0
    return picture_bundle(position_table(shown.rotate(unturned), title=f"rotated by positions 0 to {CELLS - 1}"))


@display_of.register
def _(shown: Relevance) -> Bundle:
    if max(shown.lengths.values()) > MOST_RELEVANT:
        return _text(repr(shown))
    whole = shown.dense()
    title = "relevance of the keys for the queries"
    return picture_bundle(heatmap(whole[(0,) * (whole.dim() - 2)], title=title).get_figure(root=True))


@display_of.register
def _(shown: TopKeys) -> Bundle:
    lead = (0,) * (shown.values.dim() - 2)
    values, keys = (part[lead].cpu() for part in shown)
    rows = [
        (str(query), *(f"{key} ({value:.3f})" if key >= 0 else "" for value, key in zip(*row, strict=True)))
        for query, row in enumerate(zip(values[:MOST_ROWS].tolist(), keys[:MOST_ROWS].tolist(), strict=True))
    ]
    header = ["query", "strongest key", *("" for _ in range(values.shape[1] - 1))]
    of = f"head {', '.join(map(str, lead))} of " if lead else ""
    return {"text/html": f"{table_html(header, rows)}<p>{of}{' x '.join(map(str, shown.values.shape))}</p>"}, {}


@display_of.register
def _(shown: Finding) -> Bundle:
    return _text(str(shown)) if shown.example is None else picture_bundle(faulty_row(shown))


@display_of.register
def _(shown: Seen) -> Bundle:
    require_matplotlib()
    return picture_bundle(model_grid(shown, cells=CELLS, title=type(shown.modules[""]).__name__))


@display_of.register
def _(shown: Page) -> Bundle:
    return _text(shown.report())


@display_of.register
def _(shown: HeadTable) -> Bundle:
    header, *lines = str(shown).splitlines()
    names = header.split()
    rows = [line.split() for line in lines]
    cells = (row for row in rows if len(row) == len(names))
    rest = [line for line, row in zip(lines, rows, strict=True) if len(row) != len(names)]
    below = "".join(f"<p>{escape(line)}</p>" for line in rest)
    return {"text/html": table_html(names, islice(cells, MOST_ROWS)) + below}, {}


FEW, LONGEST = 8, 120
"""The most elements of a tensor that are printed one by one, and the most characters of another value."""


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def record_html(fields: Mapping[str, Any]) -> str:
    return table_html(["", ""], [(name.replace("_", " "), _said(value)) for name, value in fields.items()])


def _said(value: Any) -> str:
    if not isinstance(value, Tensor):
        said = f"{value:.4g}" if isinstance(value, float) else str(value) or repr(value)
        return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"
    shape = " x ".join(map(str, value.shape))
    if value.numel() <= FEW:
        return ", ".join(f"{number:.4g}" for number in value.flatten().tolist()) + (f" ({shape})" if shape else "")
    if value.is_complex() or value.device.type == "meta":
        return shape
    numbers = value.detach().double().nan_to_num()
    return f"{shape}: from {float(numbers.min()):.4g} to {float(numbers.max()):.4g}, mean {float(numbers.mean()):.4g}"
