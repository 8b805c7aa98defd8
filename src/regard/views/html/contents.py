"""The content of a page: a budget of bytes, spent in a fixed order.

1. Labels, a picture of at most 64 x 64 blocks of each head, and statistics of it: always.
2. For each query the strongest key of every head; then its 16 strongest keys, and the sum of the others.
3. All weights of the chosen maps or of those shown first, or a pyramid of tiles where these do not fit.
4. The queries and keys of the maps in `factors`, from which the page computes every weight.

The rest of the budget goes to the weights and tiles of the other maps. The page names everything left out.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from regard.errors import ArgumentError, ShapeError
from regard.lazy import displayed
from regard.views.html.arrays import Arrays, Floats, as_text, halves, packed
from regard.views.html.carried import Carried, Work, carry_factors, carry_strongest, carry_tiles
from regard.views.html.numbers import HeadNumbers, as_heads, common_text, mean_of_heads, numbers, spans
from regard.views.labels import axis_labels, printable, right_to_left
from regard.views.reading_order import visual_order

MEGABYTE = 1e6
LINE_BYTES = 300
"""The most bytes of a map's entry in the page."""


@displayed
class Map(NamedTuple):
    """One layer of attention with its labels."""

    weights: Any
    """(heads, T, S) or (T, S): an `AttentionMap`, a tensor or an array, from 0 up."""
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    alternatives: Sequence[Sequence[tuple[str, float]]] | None = None
    """Each query's alternative tokens with their probabilities, best first."""


@displayed
class Example(NamedTuple):
    """A sentence or a pair of sentences, with its maps."""

    title: str
    maps: Mapping[str, Map]
    """Maps by name, such as "decoder.0.cross": digits are the layer, words the sort of attention."""
    show: str = ""
    """The map shown first; "" for that with the most telling head, of the last map's kind."""


class TokenLists:
    def __init__(self, arrays: Arrays) -> None:
        self.entries: list[dict[str, Any]] = []
        self._arrays = arrays
        self._known: list[tuple[list[str], bool]] = []

    def place(self, texts: list[str], *, given: bool) -> int:
        """The index of a list among the entries, with `given` for labels and not positions."""
        if (texts, given) in self._known:
            return self._known.index((texts, given))
        self._known.append((texts, given))
        shown = [printable(text) for text in texts] if given else None
        order = visual_order(texts) if given else []
        moved = order != sorted(order)
        packed_order = self._arrays.need("the order of tokens", packed(np.array(order), "u32")) if moved else None
        direction = "rtl" if right_to_left(texts) else "ltr"
        self.entries.append({"texts": shown, "count": len(texts), "direction": direction, "order": packed_order})
        return len(self.entries) - 1


class LayerName(NamedTuple):
    kind: str
    layer: str
    """On a page; "" for a map alone whose name has no number."""
    number: int
    """In `--layers` and in the tables of `regard measure`."""


def layer_names(names: Iterable[str]) -> dict[str, LayerName]:
    """The kinds and layers of maps: by the numbers in their names, by the calls of a module that is called for each
    layer, or, where neither tells them apart, in order."""
    kinds: dict[str, list[tuple[str, list[str], list[str]]]] = {}
    for name in names:
        words = re.split(r"[.\s]+", name)
        call = [words.pop()[1:-1]] if re.fullmatch(r"\[\d+\]", words[-1]) else []
        kind = " ".join(word for word in words if not word.isdecimal())
        kinds.setdefault(kind, []).append((name, [word for word in words if word.isdecimal()], call))
    found: dict[str, LayerName] = {}
    for kind, maps in kinds.items():
        ways = ([call or numbers for _, numbers, call in maps], [numbers + call for _, numbers, call in maps])
        layers = [".".join(one) for one in next((way for way in ways if len(set(map(tuple, way))) == len(maps)), [])]
        layers = layers or list(map(str, range(len(maps))))
        is_counted = all(map(str.isdecimal, layers))
        for at, ((name, *_), layer) in enumerate(zip(maps, layers, strict=True)):
            found[name] = LayerName(kind, layer, int(layer) if is_counted else at)
    return found


def contents(
    examples: Sequence[Example], arrays: Arrays, exact: Sequence[str] | None, factors: Sequence[str]
) -> tuple[dict[str, Any], list[Carried]]:
    shown: list[dict[str, Any]] = []
    works: list[list[Work]] = []
    for example in examples:
        entry, some = _first(example, arrays)
        shown.append(entry)
        works.append(some)
    flat = [work for some in works for work in some]
    known = {work.carried.name for work in flat}
    if unknown := [name for name in (*(exact or ()), *factors) if name not in known]:
        raise ArgumentError(f"exact and factors name maps, {', '.join(sorted(known))}; got {', '.join(unknown)}")
    first = [some[entry["show"]] for some, entry in zip(works, shown, strict=True)]
    # The factors of a map give its weights; unless the caller wants both, only they are carried.
    chosen = [
        work for work in (first if exact is None else flat)
        if work.carried.name in (exact if exact is not None else known - set(factors))
    ]  # fmt: skip
    order = sorted(flat, key=lambda work: not any(work is one for one in chosen or first))
    for k in (1, 16):
        for work in order:
            carry_strongest(work, arrays, k)
    for work in chosen:
        carry_tiles(work, arrays)
    for work in flat:
        if work.carried.name in factors:
            carry_factors(work, arrays)
    for work in order:
        carry_tiles(work, arrays)
    return {"examples": shown}, [work.carried for work in flat]


def _first(example: Example, arrays: Arrays) -> tuple[dict[str, Any], list[Work]]:
    labels = TokenLists(arrays)
    works = [_begun(example, name, one, labels, arrays) for name, one in example.maps.items()]
    maps = [work.entry for work in works]
    entry = example_entry(example, maps, labels, most_telling(maps))
    arrays.spend("labels, the names of maps and their numbers", len(as_text(entry)) + LINE_BYTES * len(works))
    return entry, works


def example_entry(example: Example, maps: list[dict[str, Any]], labels: TokenLists, first: int) -> dict[str, Any]:
    alternatives: list[list[list[tuple[str, float]]]] = []
    for entry, (name, one) in zip(maps, example.maps.items(), strict=True):
        told = None if one.alternatives is None else alternatives_of(name, one.alternatives, entry["shape"][1])
        if told is not None and told not in alternatives:
            alternatives.append(told)
        entry["alternatives"] = None if told is None else alternatives.index(told)
    show = list(example.maps).index(example.show) if example.show else first
    text = {"title": example.title, "labels": labels.entries}
    return {**text, "alternatives": alternatives, "maps": maps, "show": show}


def most_telling(maps: Sequence[Mapping[str, Any]]) -> int:
    best, most = len(maps) - 1, -1.0
    for place, entry in enumerate(maps):
        values = [value for value in entry["statistics"].get("telling", ())[: entry["shape"][0]] if value is not None]
        if entry["kind"] == maps[-1]["kind"] and max(values, default=-1.0) >= most:
            best, most = place, max(values, default=-1.0)
    return best


def alternatives_of(
    name: str, given: Sequence[Sequence[tuple[str, float]]], queries: int
) -> list[list[tuple[str, float]]]:
    if len(given) != queries:
        raise ShapeError(f"map {name!r} needs alternatives for each of its {queries} queries; {len(given)} came")
    found = [[(printable(text), float(f"{probability:.4g}")) for text, probability in some] for some in given]
    if bad := [one for some in found for one in some if not 0 <= one[1] <= 1]:
        raise ArgumentError(f"map {name!r}: probabilities of alternatives must lie in 0..1; got {bad[0]}")
    return found


def _begun(example: Example, name: str, one: Map, labels: TokenLists, arrays: Arrays) -> Work:
    heads = as_heads(name, one.weights)
    count, queries, keys = heads.shape
    rows, columns = axis_labels(one.rows, queries, "rows"), axis_labels(one.columns, keys, "columns")
    found = [numbers(name, heads, common_text(rows, columns))]
    mean = mean_of_heads(heads)
    if mean is not None:
        found.append(numbers(name, mean, None))
    largest = max(top for each in found for top in each.largest)
    scale = halves(np.array([largest]))[1]
    masked = spans(heads)
    of_kind = layer_names(example.maps)[name]
    entry = {
        "kind": of_kind.kind,
        "layer": of_kind.layer,
        "name": name,
        "shape": [count, queries, keys],
        "mean": mean is not None,
        "rows": labels.place(rows, given=one.rows is not None),
        "columns": labels.place(columns, given=one.columns is not None),
        "scale": scale,
        "spans": None if masked is None else arrays.need("the rows of a mask", packed(masked, "u32")),
        "pictures": [_picture(each, scale, arrays) for each in found],
        "largest": [float(f"{top:.5g}") for each in found for top in each.largest],
        "withoutSink": [float(f"{top:.5g}") for each in found for top in each.without_sink],
        "statistics": {
            key: [value for each in found for value in each.statistics.get(key, [None] * len(each.largest))]
            for key in found[0].statistics
        },
        "top": {},
        "exact": {},
        "tiles": {},
        "factors": None,
    }
    carried = Carried(example.title, name, count + len(found) - 1)
    carried.exact = carried.heads if found[0].cells.grid.is_whole else 0
    return Work(entry, carried, heads, mean, found, masked)


def _picture(of: HeadNumbers, scale: float, arrays: Arrays) -> dict[str, Any]:
    """The small pictures of heads: the largest weight and the sum of each block; one picture for single weights."""
    cells, sizes = of.cells, (of.cells.grid.rows, of.cells.grid.columns)
    largest, mass, mass_scale = cells.largest, None, 1.0
    if cells.grid.is_whole:
        largest = cells.mean if largest is None else largest
    elif cells.mean is not None:
        rows, columns = (np.diff([bins.edge(at) for at in range(bins.count + 1)]) for bins in sizes)
        mass, mass_scale = halves(cells.mean * rows[:, None] * columns)

    def placed(values: Floats | None) -> int | None:
        return None if values is None else arrays.need("pictures of each head", packed(values, "f16"))

    return {
        "grid": [bins.count for bins in sizes],
        "largest": placed(None if largest is None else largest / scale),
        "mass": placed(mass),
        "massScale": mass_scale,
    }
