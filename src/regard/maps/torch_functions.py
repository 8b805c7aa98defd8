"""What functions of torch mean for a map, where they have a meaning that needs no matrix.

Each entry takes the sources in place of the maps, and returns a source (a map again), a tensor, or `NOT_LAZY` if only
the matrix can answer. The names are those of torch, and mean what they mean there.
"""

import inspect
import math
import string
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from regard.maps import extremes
from regard.maps import statistics as st
from regard.maps.cast_source import CastSource
from regard.maps.combined_sources import ScaledSource, SumSource, row_sums, side_by_side
from regard.maps.derived_sources import FoldedSource, SelectionSource, average
from regard.maps.extremes import NOT_LAZY
from regard.maps.products import product, transposed_product
from regard.maps.source import Source
from regard.maps.stack_source import StackSource
from regard.maps.tiles import ask
from regard.maps.transposed_source import TransposedSource
from regard.mechanisms.guards import has_values

VIEWS = frozenset(
    {
        "view", "reshape", "flatten", "unflatten", "permute", "transpose", "swapaxes", "swapdims", "movedim",
        "moveaxis", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "narrow", "select", "unbind",
        "split", "chunk", "tensor_split", "adjoint", "t", "view_as", "reshape_as", "atleast_2d", "atleast_3d",
    }
)  # fmt: skip
"""The functions that return views of a contiguous tensor."""
OF_SHAPE = frozenset(
    {
        "stride", "is_contiguous", "element_size", "storage_offset", "is_floating_point", "is_complex", "is_signed",
        "is_conj", "is_neg", "is_inference", "numel", "nelement", "ndimension", "size", "dim", "is_same_size",
        "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones",
        "new_full", "new_empty", "new_tensor",
    }
)  # fmt: skip
"""The functions that read no weight, only shape, dtype and device."""
NUMPYS = {"axis": "dim", "keepdims": "keepdim"}


def lazily(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The answer of a function of torch without any matrix, or NOT_LAZY."""
    # NumPy's names of arguments, which torch takes too.
    kwargs = {NUMPYS.get(key, key): value for key, value in kwargs.items() if (key, value) != ("out", None)}
    if "input" in kwargs:
        args, kwargs = (kwargs["input"], *args), {key: value for key, value in kwargs.items() if key != "input"}
    if args and isinstance(args[0], Source):
        if name in VIEWS:
            return _view(name, args[0], args[1:], kwargs)
        if name in OF_SHAPE:
            return _of_shape(name, args[0], args[1:], kwargs)
    entry = ENTRIES.get(name)
    if entry is None:
        return NOT_LAZY
    try:
        inspect.signature(entry).bind(*args, **kwargs)
    except TypeError:  # Arguments that the entry does not know: torch says what is wrong with them, if anything is.
        return NOT_LAZY
    return entry(*args, **kwargs)


def _of_shape(name: str, source: Source, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The answer for a contiguous tensor without memory; what it makes is on the map's device."""
    shadow = torch.empty(source.shape, dtype=source.answer_dtype, device="meta")
    others = [torch.empty(o.shape, dtype=o.answer_dtype, device="meta") if isinstance(o, Source) else o for o in args]
    makes = name.endswith("_like") or name.startswith("new_")
    kwargs = {"device": source.device, **kwargs} if makes else kwargs
    function = getattr(Tensor, name, None) or getattr(torch, name)
    return function(shadow, *others, **kwargs)


# -- layout ------------------------------------------------------------------------------------------------


def _view(name: str, source: Source, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A rearrangement of the dimensions before queries and keys, if it leaves these two as they are."""
    function = getattr(Tensor, name, None) or getattr(torch, name)
    shadows = function(torch.empty(source.shape, device="meta", dtype=torch.float32), *args, **kwargs)
    several = isinstance(shadows, tuple | list)
    turned = {_turns_last(shadow, source) for shadow in (shadows if several else [shadows])}
    if None in turned or len(turned) > 1:
        return NOT_LAZY
    numbers = torch.arange(source.cells, device=source.device).view(*source.leading, 1, 1).expand(source.shape)
    views = function(numbers, *args, **kwargs)
    chosen = [source.choose(v[..., 0, 0].reshape(-1), tuple(v.shape[:-2])) for v in (views if several else [views])]
    chosen = [TransposedSource.of_source(one) for one in chosen] if turned == {True} else chosen
    return tuple(chosen) if several else chosen[0]


def _turns_last(shadow: Tensor, source: Source) -> bool | None:
    """Whether the last two dimensions of a view are the contiguous tensor's in the other order; None if others.

    They are told apart by their steps in memory.
    """
    if shadow.dtype != torch.float32 or shadow.dim() < 2:
        return None
    sizes, steps = tuple(source.shape[-2:]), (source.shape[-1], 1)

    def same(expected: tuple[int, ...], at: tuple[int, ...]) -> bool:
        found = tuple(shadow.shape[-2:]), tuple(shadow.stride()[-2:])
        return found[0] == expected and all(
            a == b for a, b, size in zip(found[1], at, expected, strict=True) if size > 1
        )

    return False if same(sizes, steps) else True if same(sizes[::-1], steps[::-1]) else None


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return _joined(tensors, dim, torch.stack)


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    sources = list(tensors)
    if all(isinstance(s, Source) for s in sources) and dim in (-2, len(sources[0].shape) - 2):
        alike = len({(s.leading, s.keys, s.dtype, s.device) for s in sources}) == 1
        return StackSource(tuple(sources), (0,) * len(sources)) if alike else NOT_LAZY
    return _joined(sources, dim, torch.cat)


def _joined(tensors: Sequence[Any], dim: int, how: Callable[..., Tensor]) -> Any:
    """Maps side by side along a dimension before queries and keys: their cells are numbered, and the numbers joined."""
    sources = list(tensors)
    if not sources or not all(isinstance(source, Source) for source in sources):
        return NOT_LAZY
    if len({(tuple(s.shape[-2:]), s.device, len(s.shape)) for s in sources}) > 1:
        return NOT_LAZY
    first, numbers = 0, []
    for source in sources:
        numbers.append(torch.arange(first, first + source.cells, device="cpu").view(source.leading)[..., None, None])
        first += source.cells
    try:
        found = how(numbers, dim)
    except (IndexError, RuntimeError):
        return NOT_LAZY
    if found.shape[-2:] != (1, 1):
        return NOT_LAZY
    cells, layout = found.reshape(-1), tuple(found.shape[:-2])
    whole = side_by_side(sources, (first,))
    in_order = torch.equal(cells, torch.arange(first, device="cpu"))
    return whole.choose(None if in_order else cells.to(sources[0].device), layout)


# -- sums --------------------------------------------------------------------------------------------------


def _sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _reduced(input, dim, keepdim, dtype, mean=False)


def _mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _reduced(input, dim, keepdim, dtype, mean=True)


def _reduced(source: Any, dim: Any, keepdim: bool, dtype: torch.dtype | None, *, mean: bool) -> Any:
    """A sum or mean: over leading dimensions a map, over queries what keys receive, over keys the sums of rows."""
    rank = len(source.shape)
    dims = extremes.dimensions(dim, rank)
    if dims is None or 0 in source.shape or not (dtype is None or _is_floating(dtype)):
        return NOT_LAZY
    dims = dims[::-1]
    lead, last = ([d for d in dims if (d < rank - 2) is is_lead] for is_lead in (True, False))
    found: Source = source
    for d in lead:
        found = average(found, d, None)
    # Leading dimensions were averaged, and the last two are summed.
    unit = 1 / math.prod(source.shape[d] for d in last) if mean else float(math.prod(source.shape[d] for d in lead))
    if last:
        answer = _over_last(found, {d - rank for d in last}) * unit
        for d in sorted(dims) if keepdim else ():
            answer = answer.unsqueeze(d)
        return answer if dtype is None else answer.to(dtype)
    if keepdim:
        found = found.choose(None, tuple(1 if d in dims else n for d, n in enumerate(source.leading)))
    found = found if mean else ScaledSource(found, torch.full((1, 1, 1), unit, dtype=found.dtype, device=found.device))
    return found if dtype is None else CastSource.of_dtype(found, dtype)


def _over_last(source: Source, dims: set[int]) -> Tensor:
    """Sums over queries (-2), over keys (-1) or over both."""
    if -2 not in dims:
        return row_sums(source)
    received = source.laid_out(ask(source, st.Received())[0])
    return received.sum(-1) if -1 in dims else received


# -- products ----------------------------------------------------------------------------------------------


def _matmul(input: Any, other: Any) -> Any:
    if any(isinstance(one, Tensor) and one.is_complex() for one in (input, other)):
        return NOT_LAZY
    if isinstance(input, Source) and isinstance(other, Tensor):
        if other.dim() == 1:
            return _cast(input, product(input, other[:, None]))[..., 0]
        return _cast(input, product(input, other))
    if isinstance(input, Tensor) and isinstance(other, Source) and input.dim() > 1:
        return _cast(other, transposed_product(other, input.mT)).mT
    return NOT_LAZY


def _cast(source: Source, answer: Tensor) -> Tensor:
    return answer.to(source.answer_dtype)


def _einsum(equation: str, *operands: Any) -> Any:
    """One map and one tensor, if either queries or keys are summed over, and the other stays."""
    given = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else list(operands)
    if len(given) != 2 or sum(isinstance(o, Source) for o in given) != 1:
        return NOT_LAZY
    terms, arrow, out = equation.replace(" ", "").partition("->")
    labels = terms.split(",")
    if not arrow or len(labels) != 2:
        return NOT_LAZY
    at = next(n for n, o in enumerate(given) if isinstance(o, Source))
    if "..." in equation:
        if not isinstance(given[1 - at], Tensor):
            return NOT_LAZY
        labels, out, given[1 - at] = _spelled_out(labels, out, given, at)
    if any(len(label) != len(one.shape) for label, one in zip(labels, given, strict=True)):
        return NOT_LAZY
    source, x = given[at], given[1 - at]
    mine, other = labels[at], labels[1 - at]
    if len(set(mine)) < len(mine) or len(set(other)) < len(other) or not isinstance(x, Tensor):
        return NOT_LAZY
    *lead, query, key = list(mine)
    summed, stays = (key, query) if query not in other else (query, key)
    if summed not in other or summed in out or stays in other or stays not in out:
        return NOT_LAZY
    rest = [label for label in other if label not in lead and label != summed]
    # The tensor as (leading..., summed, rest), with 1 where it has no such dimension.
    arranged = torch.einsum(f"{other}->{''.join([c for c in lead if c in other])}{summed}{''.join(rest)}", x)
    shape = [source.shape[n] if c in other else 1 for n, c in enumerate(lead)]
    arranged = arranged.reshape(*shape, arranged.shape[len([c for c in lead if c in other])], -1)
    found = product(source, arranged) if summed == key else transposed_product(source, arranged)
    found = found.unflatten(-1, [x.shape[other.index(c)] for c in rest] or [1])
    found = found if rest else found[..., 0]
    return _cast(source, torch.einsum(f"{''.join(lead)}{stays}{''.join(rest)}->{out}", found))


def _spelled_out(labels: list[str], out: str, given: list[Any], at: int) -> tuple[list[str], str, Tensor]:
    """An equation with letters in place of `...`, and the tensor beside the map without its dimensions of 1 there.

    Torch aligns what `...` stands for at the right; the tensor may have fewer of these dimensions, or 1 in place of
    the map's number.
    """
    free = [c for c in string.ascii_letters if c not in "".join(labels) + out]
    count = max(len(one.shape) - len(label) + 3 for label, one in zip(labels, given, strict=True) if "..." in label)
    letters = "".join(free[:count])
    spelled = [
        label.replace("...", letters[count - (len(one.shape) - len(label) + 3) :]) if "..." in label else label
        for label, one in zip(labels, given, strict=True)
    ]
    x, sizes = given[1 - at], dict(zip(spelled[at], given[at].shape, strict=False))
    ones = [n for n, c in enumerate(spelled[1 - at]) if c in letters and x.shape[n] == 1 and sizes.get(c, 1) != 1]
    spelled[1 - at] = "".join(c for n, c in enumerate(spelled[1 - at]) if n not in ones)
    return spelled, out.replace("...", letters), x.squeeze(ones) if ones else x


# -- arithmetic --------------------------------------------------------------------------------------------


def _mul(input: Any, other: Any) -> Any:
    source, factor = (input, other) if isinstance(input, Source) else (other, input)
    factor = _number(factor)
    if factor is None:
        return NOT_LAZY
    given = factor if isinstance(factor, Tensor) else torch.as_tensor(factor, dtype=source.dtype, device=source.device)
    if given.dim() > len(source.shape) or given.is_complex():
        return NOT_LAZY
    shadow = torch.empty(source.shape, dtype=source.answer_dtype, device="meta")
    answer = torch.result_type(shadow, factor)
    given = given.reshape(*[1] * (len(source.shape) - given.dim()), *given.shape).to(source.dtype)
    if any(n not in (1, m) for n, m in zip(given.shape, source.shape, strict=True)):
        return NOT_LAZY
    if any(n != 1 for n in given.shape[:-2]):
        given = given.expand(*source.leading, *given.shape[-2:])
    return CastSource.of_dtype(ScaledSource(source, given.reshape(-1, *given.shape[-2:])), answer)


def _number(given: Any) -> Tensor | int | float | None:
    """A tensor or a real number, NumPy's too; None if it is neither."""
    if isinstance(given, Tensor | int | float):
        return given
    return float(given) if isinstance(given, Real) else None


def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    other = _number(other)
    if not isinstance(input, Source) or other is None or rounding_mode is not None:
        return NOT_LAZY
    divisor = other if isinstance(other, Tensor) else torch.as_tensor(other, dtype=input.dtype, device=input.device)
    if divisor.is_complex() or not has_values(divisor):
        return NOT_LAZY
    inverse = 1 / divisor.to(input.dtype)
    # 0 / 1e-40 is 0, and the inverse of 1e-40 is infinite: 0 times that would be NaN.
    if bool((inverse.isinf() & (divisor != 0)).any()):
        return NOT_LAZY
    # The inverse is as exact as the map, and the answer has the dtype that the divisor gives it.
    found = _mul(input, inverse)
    return found if found is NOT_LAZY else CastSource.of_dtype(found, _dtype_of(_mul(input, other)))


def _neg(input: Any) -> Any:
    return _mul(input, -1.0)


def _add(input: Any, other: Any, *, alpha: float = 1) -> Any:
    if not isinstance(input, Source) or not isinstance(other, Source):
        # sum(maps) begins with 0 + map.
        source, number = (input, other) if isinstance(input, Source) else (other, input)
        return source if _is_zero(number) else NOT_LAZY
    if input.shape != other.shape or input.device != other.device:
        return NOT_LAZY
    before = input.parts if isinstance(input, SumSource) else (input,)
    return SumSource((*before, other if alpha == 1 else _mul(other, alpha)))


def _sub(input: Any, other: Any, *, alpha: float = 1) -> Any:
    if isinstance(input, Source) and isinstance(other, Source):
        return _add(input, other, alpha=-alpha)
    return input if isinstance(input, Source) and _is_zero(other) else NOT_LAZY


def _is_zero(other: Any) -> bool:
    return isinstance(other, int | float) and other == 0


def _abs(input: Any) -> Any:
    return FoldedSource(input, Tensor.abs, "the absolute values") if input.has_signs else input


def _square(input: Any) -> Any:
    return FoldedSource(input, Tensor.square, "the squares")


def _pow(input: Any, exponent: Any) -> Any:
    is_two = isinstance(exponent, int | float) and exponent == 2
    return _square(input) if isinstance(input, Source) and is_two else NOT_LAZY


def _mse_loss(input: Any, target: Any, *, reduction: str = "mean", **others: Any) -> Any:
    return _loss(_square, input, target, reduction, others)


def _l1_loss(input: Any, target: Any, *, reduction: str = "mean", **others: Any) -> Any:
    return _loss(_abs, input, target, reduction, others)


def _loss(of: Callable[[Any], Any], input: Any, target: Any, reduction: str, others: Mapping[str, Any]) -> Any:
    """The mean or sum of a function of the difference of two maps, without the other options that losses have."""
    both = isinstance(input, Source) and isinstance(target, Source) and not any(v is not None for v in others.values())
    difference = _sub(input, target) if both else NOT_LAZY
    if difference is NOT_LAZY or reduction not in ("mean", "sum", "none"):
        return NOT_LAZY
    found = of(difference)
    return found if reduction == "none" else _mean(found) if reduction == "mean" else _sum(found)


# -- dtype and place ---------------------------------------------------------------------------------------


def _as_dtype(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda input: CastSource.of_dtype(input, dtype)


def _same(input: Any, *_: Any, **__: Any) -> Any:
    return input


def _dtype_of(other: Any) -> torch.dtype:
    return other.answer_dtype if isinstance(other, Source) else other.dtype


def _is_floating(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _index_select(input: Any, dim: int, index: Any) -> Any:
    """Some places of one dimension, in the order of the index."""
    if not isinstance(index, Tensor) or index.dim() != 1 or not len(index):
        return NOT_LAZY
    rank = len(input.shape)
    if not -rank <= dim < rank or not 0 <= int(index.min()) <= int(index.max()) < input.shape[dim]:
        return NOT_LAZY
    dim, index = dim % rank, index.long()
    if dim < rank - 2:
        cells = torch.arange(input.cells, device=input.device).view(input.leading).index_select(dim, index)
        return input.choose(cells.reshape(-1), tuple(cells.shape))
    both = [range(input.queries), range(input.keys)]
    return SelectionSource(input, *(index if at == dim - rank else both[at] for at in (-2, -1)))


ENTRIES: Mapping[str, Callable[..., Any]] = {
    "stack": _stack,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "sum": _sum,
    "mean": _mean,
    "max": extremes.max_,
    "min": extremes.min_,
    "amax": extremes.amax,
    "amin": extremes.amin,
    "argmax": extremes.argmax,
    "argmin": extremes.argmin,
    "topk": extremes.topk,
    **dict.fromkeys(("matmul", "__matmul__"), _matmul),
    "bmm": lambda input, mat2: _matmul(input, mat2) if len(input.shape) == len(mat2.shape) == 3 else NOT_LAZY,
    "__rmatmul__": lambda input, other: _matmul(other, input),
    "einsum": _einsum,
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _mul),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__div__"), _div),
    **dict.fromkeys(("neg", "negative", "__neg__"), _neg),
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("sub", "subtract", "__sub__"), _sub),
    **dict.fromkeys(("abs", "absolute", "__abs__"), _abs),
    "square": _square,
    **dict.fromkeys(("pow", "__pow__"), _pow),
    "mse_loss": _mse_loss,
    "l1_loss": _l1_loss,
    "float": _as_dtype(torch.float32),
    "type_as": lambda input, other: CastSource.of_dtype(input, _dtype_of(other)),
    "type": lambda input, dtype: CastSource.of_dtype(input, dtype) if _is_floating(dtype) else NOT_LAZY,
    "double": _as_dtype(torch.float64),
    "half": _as_dtype(torch.float16),
    "bfloat16": _as_dtype(torch.bfloat16),
    "detach": lambda input: input.mapped(Tensor.detach),
    "__pos__": _same,
    "positive": _same,
    "index_select": _index_select,
    **dict.fromkeys(("clone", "contiguous"), _same),
}
"""What each function means, by its name in torch."""
