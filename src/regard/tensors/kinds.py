"""Arguments of a wrong kind, refused by the annotations of a public function or class."""

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, TypeVar, Union, get_args, get_origin

from regard.errors import ArgumentError, RegardError

Public = TypeVar("Public", bound=Callable[..., Any])
Test = tuple[Callable[[Any], bool], str]
"""Whether a value is of a kind, and the words for that kind."""
NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def refuse_wrong_kinds(public: Public) -> Public:
    """Decorate a public function or class: an argument of another kind than its annotation raises ArgumentError.

    The annotations are asked once the function has failed by another error than ours, so that a call that works costs
    nothing, and a function's own errors stay. They tell numbers, text, truth values, tensors, sequences, functions and
    classes, alone or as one of several; elements and annotations in quotes are not looked at.
    """
    function: Any = public.__init__ if inspect.isclass(public) else public

    @wraps(function)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RegardError:
            raise
        except Exception as error:
            if wrong := _wrong(inspect.signature(function), args, kwargs):
                raise ArgumentError(wrong) from error
            raise

    if not inspect.isclass(public):
        return refusing  # type: ignore[return-value]
    setattr(public, "__init__", refusing)  # noqa: B010 (mypy takes a plain assignment for another method)
    return public


def _wrong(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return ""
    for name, one in given.items():
        parameter = signature.parameters[name]
        kinds = list(_tests(parameter.annotation)) if parameter.kind in NAMED else []
        if kinds and not any(is_right(one) for is_right, _ in kinds):
            words = " or ".join(dict.fromkeys(said for _, said in kinds))
            return f"{name} must be {words}, got {type(one).__name__}: {one!r:.80}"
    return ""


def _tests(annotation: Any) -> Iterator[Test]:
    """The kinds that an annotation allows; none if any of them cannot be told."""
    if annotation is inspect.Parameter.empty:
        return
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    found = [_test(NoneType if part is None else part) for part in parts]
    if None not in found:
        yield from (one for one in found if one is not None)


def _test(kind: Any) -> Test | None:
    kind, origin = getattr(kind, "array_type", kind), get_origin(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if origin is Literal:
        kinds = tuple({type(one) for one in get_args(kind)})
        return lambda given: isinstance(given, kinds), f"one of {', '.join(map(repr, get_args(kind)))}"
    if origin is not None and issubclass(origin, Sequence):
        return _sequence(get_args(kind))
    kind = origin or kind
    if kind is Callable or not inspect.isclass(kind) or kind in (object, Any) or Protocol in kind.__bases__:
        return (callable, "a function") if kind is Callable else None
    return lambda given: isinstance(given, kind), "a mapping" if kind.__name__ == "Mapping" else f"a {kind.__name__}"


def _sequence(elements: tuple[Any, ...]) -> Test:
    """A list, an array or, of numbers, a tensor; text is a sequence of text alone. `tuple[A, B]` has its length."""
    is_of_text, length = elements[:1] == (str,), 0 if len(elements) < 2 or ... in elements else len(elements)

    def is_right(given: Any) -> bool:
        from torch import Tensor  # (the command line's help goes without torch)

        other = Tensor if is_of_text else str
        is_one = isinstance(given, Sequence) or getattr(given, "ndim", 0) > 0
        return is_one and not isinstance(given, other) and (not length or len(given) == length)

    return is_right, f"{length} values" if length else "a sequence"


def _is_whole(given: Any) -> bool:
    try:
        return not isinstance(given, bool) and isinstance(operator.index(given), int)
    except TypeError:
        return False


def _is_number(given: Any) -> bool:
    return not isinstance(given, bool) and (isinstance(given, Real) or getattr(given, "ndim", None) == 0)


_SIMPLE: dict[Any, Test] = {
    int: (_is_whole, "a whole number"),
    float: (_is_number, "a number"),
    str: (lambda given: isinstance(given, str), "text"),
    bool: (lambda given: isinstance(given, bool) or str(getattr(given, "dtype", "")) == "bool", "True or False"),
    NoneType: (lambda given: given is None, "None"),
}
