"""The kinds of a stack's layers, written as a pattern that repeats: "5 sliding, 1 full"."""

import re

from regard.errors import ArgumentError, require

RECURRENT = ("gated_delta", "mamba2", "lightning")
"""Linear attention, which reads from left to right: a gated delta net, Mamba-2, lightning attention."""
KINDS = ("full", "sliding", *RECURRENT)
"""Self-attention to every key that the mask allows, or to those in the window; and linear attention."""


def read_layers(pattern: str) -> tuple[str, ...]:
    """The kinds of a pattern's layers. Layer n of a stack has kind n modulo their number.

    Args:
        pattern: kinds separated by commas, each perhaps after a number of layers.

    >>> read_layers("2 sliding, full")
    ('sliding', 'sliding', 'full')
    """
    require(pattern, str, "layers", 'the kinds of layers, like "5 sliding, 1 full" (their number is num_layers)')
    kinds: list[str] = []
    for part in pattern.split(","):
        read = re.fullmatch(r"\s*(?:([1-9][0-9]{0,3})\s+)?(\w+)\s*", part)
        if read is None or read[2] not in KINDS:
            raise ArgumentError(
                f'layers are written like "5 sliding, 1 full", with the kinds {", ".join(KINDS)}; got {pattern!r}'
            )
        kinds += [read[2]] * int(read[1] or 1)
    return tuple(kinds)
