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
"""The types of arrays in a page, and their names in NumPy."""


HALF_LARGEST = 60_000.0
"""Half precision ends a little above."""
ENTRY_BYTES = 100
"""What an array takes in the JSON of a page beside its bytes, and where it is named, at most."""


def halves(values: Floats) -> tuple[Floats, float]:
    """Numbers that half precision holds, and the power of two that they are to be multiplied by.

    >>> halves(np.array([1.0, 90_000.0]))
    (array([5.0e-01, 4.5e+04]), 2.0)
    """
    largest = float(values.max(initial=0.0))
    scale = 1.0 if largest <= HALF_LARGEST else float(2.0 ** np.ceil(np.log2(largest / HALF_LARGEST)))
    return values / scale, scale


def as_text(value: Any) -> str:
    """JSON that can stand in an element of HTML: "<", which could end the element, is escaped."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


class PackedArray(NamedTuple):
    """An array as it stands in a page."""

    kind: str
    length: int
    raw: bytes
    """Deflated, or as it is for a program that sends bytes itself."""

    def as_json(self) -> dict[str, Any]:
        """What decodeArray in page_codec.js reads."""
        return {"kind": self.kind, "length": self.length, "data": b64encode(self.raw).decode()}

    @property
    def size(self) -> int:
        """Bytes in the page, at most."""
        return 4 * -(-len(self.raw) // 3) + ENTRY_BYTES


def packed(values: npt.NDArray[Any], kind: str) -> PackedArray:
    """Put all first bytes of the numbers before all second bytes, which deflate makes smaller, and deflate them.

    >>> packed(np.zeros(1000), "f16").size < 150
    True
    """
    narrow = np.ascontiguousarray(values, KINDS[kind]).reshape(-1)
    planes = narrow.view(np.uint8).reshape(-1, narrow.itemsize).T
    return PackedArray(kind, narrow.size, zlib.compress(planes.tobytes(), 6))


class Arrays:
    """The arrays of a page, and what is left of its budget.

    >>> arrays = Arrays(200)
    >>> arrays.offer(packed(np.zeros(10), "f16")), arrays.offer(packed(np.random.rand(100), "f32"))
    (0, None)
    """

    def __init__(self, budget_bytes: float) -> None:
        self.budget_bytes = budget_bytes
        self.held: list[PackedArray | None] = []
        """None stands where there was an array that another has replaced."""
        self.used_bytes = 0.0

    @property
    def left_bytes(self) -> float:
        """What can still be spent."""
        return self.budget_bytes - self.used_bytes

    def offer(self, *given: PackedArray, instead: range | None = None) -> int | None:
        """Take the arrays, all or none, in place of others; the place of the first, or None if they do not fit."""
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
        """Take an array that every page has, or name the place of an equal one.

        Raises:
            TooLargeError: it does not fit.
        """
        if one in self.held:
            return self.held.index(one)
        self.spend(what, one.size)
        self.held.append(one)
        return len(self.held) - 1

    def spend(self, what: str, size: float) -> None:
        """Spend bytes on what every page has.

        Raises:
            TooLargeError: they do not fit.
        """
        self.used_bytes += size
        if self.left_bytes < 0:
            raise TooLargeError(
                f"the page's script, labels, {what} take more than the budget of {self.budget_bytes / 1e6:.2f} MB: "
                "give fewer layers or sentences, or a higher budget_mb"
            )
