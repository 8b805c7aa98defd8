"""The names of things on a page: the tokens of queries and keys, and the kind and layer of a map."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from regard.views.html.arrays import Arrays, packed
from regard.views.labels import printable, right_to_left
from regard.views.reading_order import visual_order


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
    layer, or, where neither tells them apart, in order.

    >>> layer_names(["decoder.0.cross", "decoder.1.cross"])["decoder.1.cross"]
    LayerName(kind='decoder cross', layer='1', number=1)
    >>> [one.layer for one in layer_names(["albert.0.attention [0]", "albert.0.attention [1]"]).values()]
    ['0', '1']
    """
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
