"""`checking`: check the values of every call, not only the shapes.

A check of values costs a pass over every tensor, synchronises a GPU and would break a compiled graph. So calls check
shapes alone, and values too under `regard.call.checks.checking()`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from regard.call.masks.basic import Causal, Lengths
from regard.call.masks.patterns import Documents, Window
from regard.errors import ArgumentError, NonFiniteError, ShapeError

IS_CHECKING: ContextVar[bool] = ContextVar("regard.call.checks.checking", default=False)


@contextmanager
def checking(enabled: bool = True) -> Iterator[None]:
    """Check the values of every `attention` call inside the block; the error names the fault, its place and a remedy.

    Checks: query, key, value and every tensor of the score, the normalization and the bias are finite (-inf in a bias
    excludes a pair and is allowed); kernel widths are above 0; lengths lie within 0..S; positions and document ids are
    integers. The checks hold for the current thread or task. Calls traced by torch.compile are not checked.

    Args:
        enabled: False switches off the checks of an outer `checking()`.

    Raises:
        NonFiniteError: a call inside the block has NaN or infinity.
        ArgumentError: a call inside the block has a length or a width out of its range.
        ShapeError: a call inside the block has positions or ids that are not integers.

    >>> import regard
    >>> x = torch.tensor([[0.0, 1.0], [2.0, torch.nan]])
    >>> with regard.call.checks.checking():
    ...     regard.attention(x, x, x)
    Traceback (most recent call last):
    regard.errors.NonFiniteError: query[1, 1] is nan: find where it comes from; padding must be finite, masked or not
    """
    token = IS_CHECKING.set(enabled)
    try:
        yield
    finally:
        IS_CHECKING.reset(token)


def check_values(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        _require_finite(name, tensor)
    for name, option in options.items():
        for part in _parts(option):
            _check_part(name, part, keys=key.shape[-2])


def _check_part(name: str, part: Any, *, keys: int) -> None:
    match part:
        case Tensor():
            _require_finite(name, part, is_bias=name == "bias")
        case Lengths():
            if (place := _first((part.valid < 0) | (part.valid > keys))) is not None:
                raise ArgumentError(
                    f"{_at('lengths', part.valid, place)}, outside 0..{keys}: a length counts the keys from the first "
                    f"on, and this call has {keys} of them"
                )
        case Causal():
            _require_integers("causal's offset", part.offset)
        case Window():
            _require_integers("window's offset", part.offset)
        case Documents():
            _require_integers("document ids", part.ids)
            _require_integers("document ids of keys", part.key_ids)
        case _:
            _check_fields(name, part)


def _check_fields(name: str, part: Any) -> None:
    for field, number in _fields(part):
        if not isinstance(number, float | Tensor):
            continue
        tensor = torch.as_tensor(number)
        what = f"{type(part).__name__}.{field} of {name}="
        _require_finite(what, tensor)
        if field == "width" and (place := _first(tensor <= 0)) is not None:
            raise ArgumentError(f"{_at(what, tensor, place)}: the width of a kernel must be above 0")


def _parts(option: Any) -> Iterator[Any]:
    yield option
    for _, inner in _fields(option):
        for one in inner if isinstance(inner, tuple) else (inner,):
            if is_dataclass(one):
                yield from _parts(one)


def _fields(part: Any) -> list[tuple[str, Any]]:
    if not is_dataclass(part) or isinstance(part, type):
        return []
    return [(field.name, getattr(part, field.name)) for field in fields(part)]


def _require_finite(what: str, tensor: Tensor, *, is_bias: bool = False) -> None:
    if not tensor.is_floating_point():
        return
    wrong = tensor.isnan() | tensor.isposinf() if is_bias else ~tensor.isfinite()
    if (place := _first(wrong)) is not None:
        todo = "find where it comes from; " + (
            "only -inf may stand in a bias, where it excludes" if is_bias else "padding must be finite, masked or not"
        )
        raise NonFiniteError(f"{_at(what, tensor, place)}: {todo}")


def _require_integers(what: str, positions: Any) -> None:
    if isinstance(positions, Tensor) and (positions.is_floating_point() or positions.is_complex()):
        raise ShapeError(f"{what} must be integers, got {positions.dtype}: positions.long()")


def _first(wrong: Tensor) -> tuple[int, ...] | None:
    return tuple(wrong.nonzero()[0].tolist()) if bool(wrong.any()) else None


def _at(what: str, tensor: Tensor, place: tuple[int, ...]) -> str:
    where = f"[{', '.join(map(str, place))}]" if place else ""
    return f"{what}{where} is {tensor[place].item():g}"
