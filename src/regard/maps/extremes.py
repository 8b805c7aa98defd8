"""The largest and the smallest weights by torch's names: max, min, amax, amin, argmax, argmin, topk.

Each takes a source, and means what it means for a tensor. The answer is NOT_LAZY if only the matrix can give it.
"""

from typing import Any

import torch
from torch import Tensor

from regard.maps import statistics as st
from regard.maps.combined_sources import ScaledSource
from regard.maps.derived_sources import LargestSource
from regard.maps.pooling import Grid
from regard.maps.source import Source, Statistic
from regard.maps.tiles import ask, ask_all

NOT_LAZY: Any = object()
"""The answer of an entry that has none without the matrix."""


def dimensions(dim: Any, rank: int) -> list[int] | None:
    """The dimensions that `dim` names, from the first on; None if torch has something to say against it.

    >>> dimensions(None, 2), dimensions([], 2), dimensions((-1, 0), 2), dimensions((1, -1), 2)
    ([0, 1], [0, 1], [0, 1], None)
    """
    given = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    found = sorted({d % rank for d in given if -rank <= d < rank})
    return None if len(found) < len(given) else found or list(range(rank))


def max_(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """As `torch.max`: of all weights a number; over the keys values and indices."""
    if dim is None:
        return NOT_LAZY if keepdim else amax(input)
    found = _of_rows(input, dim, keepdim)
    return found if found is NOT_LAZY else torch.return_types.max(found)


def min_(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """As `torch.min`."""
    if dim is None:
        return NOT_LAZY if keepdim else amin(input)
    found = _of_rows(_negative(input), dim, keepdim)
    return found if found is NOT_LAZY else torch.return_types.min((-found[0], found[1]))


def argmax(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """As `torch.argmax`; of equal weights the first."""
    found = NOT_LAZY if dim is None else _of_rows(input, dim, keepdim)
    return found if found is NOT_LAZY else found[1]


def argmin(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """As `torch.argmin`; of equal weights the first."""
    return argmax(_negative(input), dim, keepdim)


def amax(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    """As `torch.amax`: over heads and batches alone a map again."""
    source, rank = input, len(input.shape)
    if (dims := dimensions(dim, rank)) is None or 0 in source.shape:
        return NOT_LAZY
    last = {d - rank for d in dims} & {-1, -2}
    if not last:
        return _largest_of(source, dims, keepdim)
    if last == {-1}:
        found = source.laid_out(ask(source, st.Largest())[0]).unsqueeze(-1)
    else:
        grid = Grid.at_most(1, 1 if -1 in last else source.keys, source.queries, source.keys)
        found = source.laid_out(ask(source, st.Pooled(grid, "max"))[0])
    found = found.amax([d for d in dims if d < rank - 2], keepdim=True) if dims[0] < rank - 2 else found
    return found if keepdim else found.squeeze(tuple(dims))


def amin(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
    """As `torch.amin`: over heads and batches alone a map again."""
    found = amax(_negative(input), dim, keepdim)
    return found if found is NOT_LAZY else _negative(found) if isinstance(found, Source) else -found


def _largest_of(source: Source, dims: list[int], keepdim: bool) -> Source:
    """The largest over dimensions before queries and keys, which are put last and taken as one."""
    cells = torch.arange(source.cells, device=source.device).view(source.leading)
    others = [d for d in range(len(source.leading)) if d not in dims]
    cells = cells.permute(*others, *dims).flatten(len(others))
    found = LargestSource(source.choose(cells.reshape(-1), tuple(cells.shape)))
    if not keepdim:
        return found
    return found.choose(None, tuple(1 if d in dims else n for d, n in enumerate(source.leading)))


def topk(input: Any, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    """As `torch.topk` over the keys: every index is that of a key, and none comes twice."""
    source = input if largest else _negative(input)
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= source.keys or not _is_last(source, dim):
        return NOT_LAZY
    if source.has_signs:
        values, keys = map(source.laid_out, ask(source, st.TopWeights(k, names_zeros=True)))
    else:
        values, keys = map(source.laid_out, ask(source, st.TopWeights(k)))
        keys = _filled(keys)
    return torch.return_types.topk((values if largest else -values, keys))


def _of_rows(source: Source, dim: Any, keepdim: bool) -> Any:
    """The largest of each query and the first key that has it; a row of zeros has its first key."""
    if not _is_last(source, dim):
        return NOT_LAZY
    pair: list[Statistic] = [st.Largest(), st.ArgLargest(names_zeros=source.has_signs)]
    values, keys = (source.laid_out(answer[0]) for answer in ask_all(source, pair))
    found = values, keys.clamp_min(0)
    return (found[0].unsqueeze(-1), found[1].unsqueeze(-1)) if keepdim else found


def _is_last(source: Source, dim: Any) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, len(source.shape) - 1)


def _negative(source: Source) -> Source:
    return ScaledSource(source, torch.full((1, 1, 1), -1.0, dtype=source.dtype, device=source.device))


def _filled(keys: Tensor) -> Tensor:
    """Keys (..., k) with others in place of each -1: the first that are not among them, whose weights are 0 too."""
    k = keys.shape[-1]
    # Of the keys 0 to k - 1 as many are free as are missing, or more. A key beyond them falls into a last place.
    taken = torch.zeros(*keys.shape[:-1], k + 1, dtype=torch.bool, device=keys.device)
    taken.scatter_(-1, torch.where((keys < 0) | (keys > k), k, keys), True)
    free = taken[..., :k].to(torch.int8).argsort(dim=-1, stable=True)
    number = ((keys < 0).cumsum(-1) - 1).clamp_min(0)
    return torch.where(keys < 0, free.gather(-1, number), keys)
