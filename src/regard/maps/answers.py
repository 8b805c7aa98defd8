"""The one place that chooses how statistics of a map are computed: at once, by one loop over its rows, or by tiles."""

from collections.abc import Sequence

from torch import Tensor

from regard.errors import ArgumentError
from regard.maps.one_loop import in_one_loop
from regard.maps.source import Source, Statistic
from regard.maps.tiles import one_pass


def ask(source: Source, statistic: Statistic) -> tuple[Tensor, ...]:
    """The answers (cells, ...) of a statistic, without tiles if the source can do so.

    Raises:
        NotKeptError: neither the answers nor the weights were kept.
        ArgumentError: weights are below 0, and the statistic reads them as shares of a whole.
    """
    return ask_all(source, [statistic])[0]


def ask_all(source: Source, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
    """The answers of several statistics, in one pass if any of them needs tiles with every source.

    Raises:
        NotKeptError: the weights were not kept, nor the answers of one of the statistics.
        ArgumentError: weights are below 0, and one of the statistics reads them as shares of a whole.
    """
    shares = [str(statistic) for statistic in statistics if statistic.reads_shares]
    if shares and source.has_signs:
        raise ArgumentError(
            f"{', '.join(shares)} reads the weights of a query as shares of a whole, and some weights of this map are "
            f"below 0: it is {source}; dense(), received() and map @ x are exact, signs and all"
        )
    share = source.has_blocks and len(statistics) > 1 and any(s.needs_tiles for s in statistics)
    answers = [None if share else source.at_once(statistic) for statistic in statistics]
    missing = [s for s, answer in zip(statistics, answers, strict=True) if answer is None]
    if missing and not source.has_blocks:
        source.refuse(", ".join(map(str, missing)))
    found = iter((in_one_loop(source, missing) or one_pass(source, missing)) if missing else ())
    return [next(found) if answer is None else answer for answer in answers]
