"""The weights of maps as numbers, in one file of JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from regard.errors import TooLargeError
from regard.files.atomic import file_errors, write_atomically
from regard.maps.attention_map import AttentionMap
from regard.tasks.pictures.token_maps import TextMaps

MOST_WEIGHTS = 2**23
"""About 80 MB of digits."""


def save_numbers(path: Path, seen: Sequence[tuple[str, TextMaps]]) -> None:
    """Write `[{"text": ..., "maps": [{"name": ..., "queries": [...], "keys": [...], "weights": [H][T][S]}]}]`.

    AxisLabels are null where there are none; weights have five significant digits.

    Raises:
        TooLargeError: there are more than 2^23 weights.
        FileError: the file cannot be written; an older one stays as it was.
    """
    count = sum(one.numel() for _, attention in seen for one in attention.maps.values())
    if count > MOST_WEIGHTS:
        raise TooLargeError(
            f"{path} would have {count:,} weights, and {MOST_WEIGHTS:,} are the most: choose by --layers and --heads, "
            "or write the page (.html)"
        )
    found = [
        {"text": text, "shown": attention.shown, "maps": [_of_map(name, attention) for name in attention.maps]}
        for text, attention in seen
    ]
    with file_errors(path):
        write_atomically(path, json.dumps(found, ensure_ascii=False) + "\n")


def _of_map(name: str, attention: TextMaps) -> dict[str, object]:
    queries, keys = attention.labels(name)
    weights = attention.maps[name]
    dense: Tensor = weights.dense() if isinstance(weights, AttentionMap) else weights
    numbers = [[[float(f"{one:.5g}") for one in row] for row in head] for head in dense.float().tolist()]
    return {"name": name, "queries": queries, "keys": keys, "weights": numbers}
