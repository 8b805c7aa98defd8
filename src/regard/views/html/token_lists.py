"""The names of things on a page: the tokens of queries and keys, and the kind and layer of a map."""

import re
from typing import Any

import numpy as np

from regard.views.html.arrays import Arrays, packed
from regard.views.labels import printable, right_to_left
from regard.views.reading_order import visual_order


class TokenLists:
    """The label lists of an example, shared by maps with equal labels."""

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


def kind_and_layer(name: str) -> dict[str, str]:
    """The parts of a map's name: "decoder.0.cross" is layer "0" of the kind "decoder cross".

    >>> kind_and_layer("decoder.0.cross")
    {'kind': 'decoder cross', 'layer': '0'}
    """
    words = re.split(r"[.\s]+", name)
    return {
        "kind": " ".join(word for word in words if not word.isdecimal()),
        "layer": ".".join(word for word in words if word.isdecimal()),
    }
