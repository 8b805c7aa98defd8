"""Statistics by name, several together: from names to statistics, and from answers to results."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal, get_args

from torch import Tensor

from regard.errors import ArgumentError
from regard.maps.sources.source import Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.definitions import TopKeys
from regard.maps.statistics.pooling import Grid

How = Literal["mean", "sum", "max"]
Of = Literal["value", "size"]
Summary = dict[str, Any]
"""A tensor by each name; of top_keys, a `TopKeys`."""
Answers = Mapping[Statistic, tuple[Tensor, ...]]
STATISTICS = (
    "received", "entropy", "participation_ratio", "distance", "top_weight", "top_key", "top_keys",
    "top_p_count", "pooled", "pooled_mean", "pooled_sum", "pooled_max",
)  # fmt: skip
USUAL = ("received", "entropy", "top_keys", "pooled")


def check_names(names: Sequence[str], where: str) -> None:
    if unknown := [name for name in names if name not in STATISTICS]:
        raise ArgumentError(f"{where} knows {', '.join(STATISTICS)}; got {', '.join(map(repr, unknown))}")


def by_name(
    names: Sequence[str],
    queries: int,
    keys: int,
    *,
    k: int,
    p: float,
    rows: int,
    columns: int,
    how: How,
    distance: Statistic | None = None,
) -> dict[str, Statistic]:
    def picture(kind: How) -> Statistic:
        return pooled(rows, columns, queries, keys, kind)

    makers: dict[str, Callable[[], Statistic]] = {
        "received": st.Received,
        "entropy": st.Entropy,
        "participation_ratio": st.ParticipationRatio,
        "distance": lambda: st.Distance(keys - queries) if distance is None else distance,
        "top_weight": st.Largest,
        "top_key": st.ArgLargest,
        "top_keys": lambda: st.TopWeights.of(k, keys),
        "top_p_count": lambda: top_p_count(p),
        "pooled": lambda: picture(how),
        **{f"pooled_{kind}": partial(picture, kind) for kind in get_args(How)},
    }
    check_names(names, "summary()")
    return {name: makers[name]() for name in names}


def as_summary(source: Source, named: Mapping[str, Statistic], answers: Answers) -> Summary:
    """From answers (flat_heads, ...) of named statistics to results, laid out as the map."""
    return {name: finished(source, statistic, answers[statistic]) for name, statistic in named.items()}


def finished(source: Source, statistic: Statistic, answers: tuple[Tensor, ...]) -> Tensor | TopKeys:
    match statistic:
        case st.TopWeights():
            return TopKeys(*map(source.laid_out, answers))
    return source.laid_out(answers[0])


def top_p_count(p: float) -> Statistic:
    if not isinstance(p, Real | Tensor) or not 0 < p <= 1:
        raise ArgumentError(f"top_p_count needs a share p in (0, 1], got {p!r}")
    return st.TopPCount(float(p))


def pooled(rows: int, columns: int, queries: int, keys: int, how: How) -> Statistic:
    if how not in ("mean", "sum", "max"):
        raise ArgumentError(f"how must be 'mean', 'sum' or 'max', got {how!r}")
    return st.Pooled(Grid.at_most(rows, columns, queries, keys), how)
