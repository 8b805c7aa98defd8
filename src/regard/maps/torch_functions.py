"""The lazy functions of torch on maps.

Each entry takes sources for maps, and returns a source (a map again), a tensor, or `NOT_LAZY` where only the matrix
would do. The names and meanings are torch's.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.maps.sources.combined import row_sums, side_by_side
from regard.maps.sources.derived import average, sum_over
from regard.maps.sources.source import Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.pooling import Grid
from regard.maps.statistics.tiles import ask, ask_all, product, transposed_product

NOT_LAZY: Any = object()


def lazily(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    entry = ENTRIES.get(name)
    if entry is None:
        return NOT_LAZY
    try:
        inspect.signature(entry).bind(*args, **kwargs)
    except TypeError:  # Arguments unknown to the entry: torch answers, or explains its error.
        return NOT_LAZY
    return entry(*args, **kwargs)


def moved(input: Source, device: Any = "cuda") -> Source:
    device = torch.device("cuda", device) if _is_integer(device) else torch.device(device)
    if device == input.device:
        return input
    if not input.has_blocks:
        input.refuse("to()")
    return input.mapped(lambda tensor: tensor.to(device))


def _squeeze(input: Source, dim: int) -> Any:
    rank = len(input.shape)
    if not isinstance(dim, int) or not -rank <= dim < rank or input.shape[dim] != 1 or dim % rank >= rank - 2:
        return NOT_LAZY
    layout = tuple(n for d, n in enumerate(input.leading) if d != dim % rank)
    return input.choose(None, layout).with_dimensions(input.dimensions.without(dim % rank))


def _joined(tensors: Sequence[Any], dim: int = 0, *, how: Callable[..., Tensor]) -> Any:
    sources = list(tensors)
    if not sources or not all(isinstance(source, Source) for source in sources):
        return NOT_LAZY
    if len({(tuple(s.shape[-2:]), s.device, len(s.shape)) for s in sources}) > 1:
        return NOT_LAZY
    first, numbers = 0, []
    for source in sources:
        numbers.append(
            torch.arange(first, first + source.flat_heads, device="cpu").view(source.leading)[..., None, None]
        )
        first += source.flat_heads
    try:
        found = how(numbers, dim)
    except (IndexError, RuntimeError):
        return NOT_LAZY
    if found.shape[-2:] != (1, 1):
        return NOT_LAZY
    flat_heads, layout = found.reshape(-1), tuple(found.shape[:-2])
    whole = side_by_side(sources, (first,))
    in_order = torch.equal(flat_heads, torch.arange(first, device="cpu"))
    made = whole.choose(None if in_order else flat_heads.to(sources[0].device), layout)
    names = next((s.dimensions for s in sources if "unknown" in s.dimensions.leading), sources[0].dimensions)
    if len(layout) > names.rank:  # (Maps that are stacked are a batch.)
        place = dim % (len(layout) + 2)
        names = names.named((*names.leading[:place], "batch", *names.leading[place:]))
    return made.with_dimensions(names)


def _reduced(
    input: Source, dim: Any = None, keepdim: bool = False, *, over: Callable[[Source, int], Source], mean: bool
) -> Any:
    source, rank = input, len(input.shape)
    dims = _dimensions(dim, rank)
    if dims is None or 0 in source.shape:
        return NOT_LAZY
    lead, last = ([d for d in dims if (d < rank - 2) is is_lead] for is_lead in (True, False))
    found = source
    for d in reversed(lead):
        found = over(found, d)
    if not last:
        layout = tuple(1 if d in dims else n for d, n in enumerate(source.leading))
        return found.choose(None, layout).with_dimensions(source.dimensions) if keepdim else found
    answer = _over_last(found, {d - rank for d in last})
    answer = answer / math.prod(source.shape[d] for d in last) if mean else answer
    for d in sorted(dims) if keepdim else ():
        answer = answer.unsqueeze(d)
    return answer


def _over_last(source: Source, dims: set[int]) -> Tensor:
    if -2 not in dims:
        return row_sums(source)
    received = source.laid_out(ask(source, st.Received())[0])
    return received.sum(-1) if -1 in dims else received


def _dimensions(dim: Any, rank: int) -> list[int] | None:
    given = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    found = sorted({d % rank for d in given if -rank <= d < rank})
    return None if len(found) < len(given) else found or list(range(rank))


def _max(input: Source, dim: Any = None, keepdim: bool = False) -> Any:
    if dim is None:
        return NOT_LAZY if keepdim else _largest(input)
    found = _of_rows(input, dim, keepdim)
    return found if found is NOT_LAZY else torch.return_types.max(found)


def _largest(source: Source) -> Any:
    if 0 in source.shape:
        return NOT_LAZY
    grid = Grid.at_most(1, 1, source.queries, source.keys)
    return source.laid_out(ask(source, st.Pooled(grid, "max"))[0]).amax()


def _argmax(input: Source, dim: Any = None, keepdim: bool = False) -> Any:
    found = NOT_LAZY if dim is None else _of_rows(input, dim, keepdim)
    return found if found is NOT_LAZY else found[1]


def _of_rows(source: Source, dim: Any, keepdim: bool) -> Any:
    if not _is_last(source, dim):
        return NOT_LAZY
    pair: list[Statistic] = [st.Largest(), st.ArgLargest(names_zeros=source.has_signs)]
    values, keys = (source.laid_out(answer[0]) for answer in ask_all(source, pair))
    found = values, keys.clamp_min(0)
    return (found[0].unsqueeze(-1), found[1].unsqueeze(-1)) if keepdim else found


def _topk(input: Source, k: Any, dim: Any = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not largest or not _is_integer(k) or not 1 <= k <= input.keys or not _is_last(input, dim):
        return NOT_LAZY
    values, keys = map(input.laid_out, ask(input, st.TopWeights(k, names_zeros=input.has_signs)))
    return torch.return_types.topk((values, keys if input.has_signs else _filled(keys)))


def _is_last(source: Source, dim: Any) -> bool:
    return _is_integer(dim) and dim in (-1, len(source.shape) - 1)


def _is_integer(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _filled(keys: Tensor) -> Tensor:
    """Keys (..., k) with the first unused keys for each -1; the weights of these are 0 too."""
    k = keys.shape[-1]
    # Of the keys 0 to k - 1 at least as many are free as are missing. A key beyond them falls into a last place.
    taken = torch.zeros(*keys.shape[:-1], k + 1, dtype=torch.bool, device=keys.device)
    taken.scatter_(-1, torch.where((keys < 0) | (keys > k), k, keys), True)
    free = taken[..., :k].to(torch.int8).argsort(dim=-1, stable=True)
    number = ((keys < 0).cumsum(-1) - 1).clamp_min(0)
    return torch.where(keys < 0, free.gather(-1, number), keys)


def _matmul(input: Any, other: Any) -> Any:
    if any(isinstance(one, Tensor) and one.is_complex() for one in (input, other)):
        return NOT_LAZY
    if isinstance(input, Source) and isinstance(other, Tensor):
        found = product(input, other[:, None] if other.dim() == 1 else other).to(input.answer_dtype)
        return found[..., 0] if other.dim() == 1 else found
    if isinstance(input, Tensor) and isinstance(other, Source) and input.dim() > 1:
        return transposed_product(other, input.mT).to(other.answer_dtype).mT
    return NOT_LAZY


ENTRIES: Mapping[str, Callable[..., Any]] = {
    "squeeze": _squeeze,
    "cpu": partial(moved, device="cpu"),
    "cuda": moved,
    "stack": partial(_joined, how=torch.stack),
    **dict.fromkeys(("cat", "concat", "concatenate"), partial(_joined, how=torch.cat)),
    "sum": partial(_reduced, over=sum_over, mean=False),
    "mean": partial(_reduced, over=average, mean=True),
    "max": _max,
    "argmax": _argmax,
    "topk": _topk,
    **dict.fromkeys(("matmul", "__matmul__"), _matmul),
    "__rmatmul__": lambda input, other: _matmul(other, input),
}
