"""Computation of statistics: directly, by one loop over rows, or in one shared pass over tiles.

A tile has a few queries of a few heads, and all their visible keys. Its weights exist only while the statistics read
it, and are recomputed, tile by tile, for a gradient: memory is linear in T and S.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.call.shapes import without_autocast
from regard.errors import ArgumentError
from regard.kernels.tiled import Tile
from regard.maps.loop.one_loop import in_one_loop
from regard.maps.loop.triton_statistics import in_kernels
from regard.maps.sources.source import Part, Scratch, Source, Statistic
from regard.maps.statistics.tile_groups import groups
from regard.tensors.guards import is_recorded


def ask(source: Source, statistic: Statistic) -> tuple[Tensor, ...]:
    """The answers (flat_heads, ...) of a statistic, without tiles if possible."""
    return ask_all(source, [statistic])[0]


def ask_all(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    """The answers of several statistics, in one pass if one of them always needs tiles."""
    _refuse_signs(source, statistics)
    with without_autocast(source.device):
        by_kernels = in_kernels(source, statistics)
        if by_kernels is not None:
            return by_kernels  # They leave out rounding themselves.
        answers = _answers(source, statistics)
        return [one.without_rounding(answer) for one, answer in zip(statistics, answers, strict=True)]


def _refuse_signs(source: Source, statistics: Sequence[Statistic]) -> None:
    if source.has_signs and any(one.reads_shares for one in statistics):
        shares = ", ".join(str(one) for one in statistics if one.reads_shares)
        raise ArgumentError(
            f"{shares} reads the weights of a query as shares of a whole, and some weights of this map are "
            f"below 0: it is {source}; dense(), received() and map @ x are exact, signs and all"
        )


def _answers(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    has_blocks, any_tiles = source.has_blocks, any(one.needs_tiles for one in statistics)
    share = has_blocks and len(statistics) > 1 and any_tiles
    answers = dict[int, tuple[Tensor, ...]]()
    missing = list[Statistic]()
    for place, statistic in enumerate(statistics):
        answer = None if share else source.at_once(statistic)
        if answer is None:
            missing.append(statistic)
        else:
            answers[place] = answer
    if not missing:
        return list(answers.values())
    if not has_blocks:
        source.refuse(", ".join(map(str, missing)))
    found = in_one_loop(source, missing) or one_pass(source, missing)
    for place, answer in answers.items():
        found.insert(place, answer)
    return found


def one_pass(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    """Every statistic's answers of shape (flat_heads, ...), from one pass over the tiles."""
    totals: list[Any] = [None] * len(statistics)
    has_graph = is_recorded()
    scratch = None if has_graph else Scratch()
    for flat_heads, cuts in groups(source):
        part = source.part(flat_heads, scratch)
        for rows in cuts:
            # A reduction needs at least one key; here its weight is 0.
            tile = Tile(flat_heads, rows, source.columns(rows) or range(1))
            if has_graph:
                # The tensors of a tile are freed at once and recomputed in the backward pass.
                found = checkpoint(_read, part, tile, statistics, use_reentrant=False, preserve_rng_state=False)
            else:
                found = _read(part, tile, statistics)
            for place, statistic in enumerate(statistics):
                totals[place] = statistic.add(totals[place], found[place], tile, source)
    for place, statistic in enumerate(statistics):
        totals[place] = statistic.end(totals[place])
    return totals


def _read(part: Part, tile: Tile, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    piece, found = part(tile.rows, tile.columns), dict[int, tuple[Tensor, ...]]()
    for place in sorted(range(len(statistics)), key=lambda n: statistics[n].overwrites):
        found[place] = statistics[place].read(piece, tile)
    return [found[place] for place in range(len(statistics))]
