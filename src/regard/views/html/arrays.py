"""Arrays as text in a page: bytes put in planes, deflated, in base64."""

import json
import zlib
from base64 import b64encode
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.errors import TooLargeError

Floats = npt.NDArray[np.floating[Any]]
KINDS = {"f16": "<f2", "f32": "<f4", "u8": "u1", "u16": "<u2", "u32": "<u4"}


HALF_LARGEST = 60_000.0
"""Half precision ends a little above."""
ENTRY_BYTES = 100
"""The most bytes of an array's JSON entry, without the data."""


def halves(values: Floats) -> tuple[Floats, float]:
    """Values as half precision, and the power of two to multiply them by.

    >>> halves(np.array([1.0, 90_000.0]))
    (array([5.0e-01, 4.5e+04]), 2.0)
    """
    largest = float(values.max(initial=0.0))
    scale = 1.0 if largest <= HALF_LARGEST else float(2.0 ** np.ceil(np.log2(largest / HALF_LARGEST)))
    return values / scale, scale


def as_text(value: Any) -> str:
    """JSON inside an HTML element: "<" could end the element and is escaped."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


class PackedArray(NamedTuple):
    kind: str
    length: int
    raw: bytes
    """Deflated bytes; plain bytes for a kernel, which sends them as buffers."""

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "length": self.length, "data": b64encode(self.raw).decode()}

    @property
    def size(self) -> int:
        return 4 * -(-len(self.raw) // 3) + ENTRY_BYTES


def packed(values: npt.NDArray[Any], kind: str) -> PackedArray:
    """Group the first bytes of all elements before the second bytes, which deflates better, and deflate."""
    narrow = np.ascontiguousarray(values, KINDS[kind]).reshape(-1)
    planes = narrow.view(np.uint8).reshape(-1, narrow.itemsize).T
    return PackedArray(kind, narrow.size, zlib.compress(planes.tobytes(), 6))


class Arrays:
    """The arrays of a page, and the rest of its budget.

    >>> arrays = Arrays(200)
    >>> arrays.offer(packed(np.zeros(10), "f16")), arrays.offer(packed(np.random.rand(100), "f32"))
    (0, None)
    """

    def __init__(self, budget_bytes: float) -> None:
        self.budget_bytes = budget_bytes
        self.held: list[PackedArray | None] = []
        """None marks the place of a replaced array."""
        self.used_bytes = 0.0

    @property
    def left_bytes(self) -> float:
        return self.budget_bytes - self.used_bytes

    def offer(self, *given: PackedArray, instead: range | None = None) -> int | None:
        """Add the arrays in place of others, all or none; the first index, or None if they do not fit."""
        gone = [one for place in instead or () if (one := self.held[place]) is not None]
        cost = sum(one.size for one in given) - sum(one.size - ENTRY_BYTES for one in gone)
        if cost > self.left_bytes:
            return None
        self.used_bytes += cost
        for place in instead or ():
            self.held[place] = None
        self.held += given
        return len(self.held) - len(given)

    def need(self, what: str, one: PackedArray) -> int:
        if one in self.held:
            return self.held.index(one)
        self.spend(what, one.size)
        self.held.append(one)
        return len(self.held) - 1

    def spend(self, what: str, size: float) -> None:
        self.used_bytes += size
        if self.left_bytes < 0:
            raise TooLargeError(
                f"the page's script, labels, {what} take more than the budget of {self.budget_bytes / 1e6:.2f} MB: "
                "give fewer layers or sentences, or a higher budget_mb"
            )
