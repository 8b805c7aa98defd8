"""The tiles of a map: a few queries of a few heads, and all their visible keys."""

import math

from regard.maps.sources.source import Source
from regard.tensors.tile_sizes import ranges, tile_shape

TILE_ELEMENTS = 1 << 20
"""The most elements of a tile's largest tensor: 4 MiB in float32. Smaller tiles fit the cache better, but more calls
cancel the gain.
"""
TILE_ROWS = 64
"""A tile reduces its heads before it has fewer queries than this, because narrow matrix products are slow."""


def groups(source: Source) -> list[tuple[range, list[range]]]:
    """Groups of flat_heads, each with the rows of its tiles. If not all fit, tiles have few flat_heads, many rows."""
    *leading, queries, keys = source.shape
    count, width = math.prod(leading), source.width
    a_row = max(1, keys * width)
    # For a small map, page faults of larger buffers would take longer than filling them.
    limit = min(TILE_ELEMENTS, max(TILE_ELEMENTS // 4, count * queries * a_row // 8))
    few, step = tile_shape(count, queries, a_row, budget=limit, few_rows=TILE_ROWS)
    # The number of tiles is unchanged, but all get about equally many flat_heads.
    few = max(1, -(-count // max(1, -(-count // few))))
    cuts, start = list[range](), 0
    while start < queries:
        # A tile gets more rows where the mask leaves them few keys.
        rows = range(start, min(start + step, queries))
        while rows.stop < queries:
            more = range(start, min(start + 2 * len(rows), queries))
            if few * len(more) * len(source.columns(more)) * width > limit:
                break
            rows = more
        cuts.append(rows)
        start = rows.stop
    return [(flat_heads, cuts) for flat_heads in ranges(count, few)]
