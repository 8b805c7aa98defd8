"""Arrays as text in a page: bytes put in planes, deflated, in base64."""

import zlib
from base64 import b64encode
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
KINDS = {"f16": "<f2", "f32": "<f4", "u8": "u1", "u16": "<u2", "u32": "<u4"}
"""The types of arrays in a page, and their names in NumPy."""


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
        """Bytes in the page."""
        return 4 * -(-len(self.raw) // 3) + 48


def packed(values: npt.NDArray[Any], kind: str) -> PackedArray:
    """Put all first bytes of the numbers before all second bytes, which deflate makes smaller, and deflate them.

    >>> packed(np.zeros(1000), "f16").size < 100
    True
    """
    narrow = np.ascontiguousarray(values, KINDS[kind]).reshape(-1)
    planes = narrow.view(np.uint8).reshape(-1, narrow.itemsize).T
    return PackedArray(kind, narrow.size, zlib.compress(planes.tobytes(), 6))


class Arrays:
    """The arrays of a page, and what is left of its budget.

    >>> arrays = Arrays(100)
    >>> arrays.offer(packed(np.zeros(10), "f16")), arrays.offer(packed(np.random.rand(100), "f32"))
    (0, None)
    """

    def __init__(self, budget_bytes: float) -> None:
        self.budget_bytes = budget_bytes
        self.held: list[PackedArray] = []
        self.used_bytes = 0

    @property
    def left_bytes(self) -> float:
        """What can still be spent."""
        return self.budget_bytes - self.used_bytes

    def offer(self, *given: PackedArray) -> int | None:
        """Take the arrays, all of them or none; the place of the first, or None if they do not fit."""
        cost = sum(one.size for one in given)
        if cost > self.left_bytes:
            return None
        self.used_bytes += cost
        self.held += given
        return len(self.held) - len(given)
