"""How a map is cut into tiles: a few queries of a few heads, and every key that they may see."""

from collections.abc import Iterator

from regard.maps.source import Source
from regard.mechanisms.tile_sizes import ranges, tile_shape

TILE_ELEMENTS = 1 << 20
"""How many numbers the largest tensor of a tile may have: 4 MiB in float32. Smaller tiles fit the cache better, but
more calls cancel the gain."""
TILE_ROWS = 64
"""A tile gets fewer heads before it gets fewer queries than this, because narrow matrix products are slow."""


def groups(source: Source) -> Iterator[tuple[range, list[range]]]:
    """Groups of cells, each with the rows of its tiles. If not all fit, a tile has few cells and many rows."""
    count, a_row = source.cells, max(1, source.keys * source.width)
    # For a small map, the first access to larger buffers would take longer than to fill them.
    limit = min(TILE_ELEMENTS, max(TILE_ELEMENTS // 4, count * source.queries * a_row // 8))
    few, rows = tile_shape(count, source.queries, a_row, budget=limit, few_rows=TILE_ROWS)
    # The number of tiles stays the same, but all get about equally many cells.
    few = max(1, -(-count // max(1, -(-count // few))))
    cuts = list(_cuts(source, few, rows, limit))
    for cells in ranges(count, few):
        yield cells, cuts


def _cuts(source: Source, cells: int, step: int, limit: int) -> Iterator[range]:
    """The rows of tiles: `step` rows each, or more if the mask leaves them few keys."""
    start, queries, width = 0, source.queries, source.width
    while start < queries:
        rows = range(start, min(start + step, queries))
        while rows.stop < queries:
            more = range(start, min(start + 2 * len(rows), queries))
            if cells * len(more) * len(source.columns(more)) * width > limit:
                break
            rows = more
        yield rows
        start = rows.stop
