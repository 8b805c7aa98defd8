"""Shapes in signatures, checked at every call of a test: parameters before it, and its result after it.

jaxtyping's own decorator checks all parameters a second time after the call, binds them by name, and keeps a book of
axes for functions that name none. A search calls its small steps thousands of times with the same shapes: a process
checks each function once for each set of shapes and types, since no annotation of ours asks for more.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import is_dataclass
from functools import wraps
from types import FunctionType
from typing import Any, get_args, get_type_hints

import jaxtyping
import torch
from beartype.door import die_if_unbearable

Decorator = Callable[[Any], Any]


def checked_once(jaxtyped: Callable[..., Any]) -> Callable[..., Decorator]:
    """What stands for `jaxtyping.jaxtyped`, by which jaxtyping's import hook decorates functions and classes."""

    def jaxtyped_once(*, typechecker: Decorator) -> Decorator:
        def decorate(thing: Any) -> Any:
            if isinstance(thing, type) and is_dataclass(thing):
                made = vars(thing).get("__init__")
                if isinstance(made, FunctionType) and not hasattr(made, "__wrapped__"):  # (once, if decorated twice)
                    setattr(thing, "__init__", _checked(made, jaxtyped, typechecker))  # noqa: B010
                return thing
            # One within a function is made by each call of that, and its checks would be compiled each time.
            if "<locals>" in thing.__qualname__ and not any(map(_names_axes, thing.__annotations__.values())):
                return thing
            if not isinstance(thing, FunctionType) or inspect.isgeneratorfunction(thing):
                return jaxtyped(thing, typechecker=typechecker)
            return _checked(thing, jaxtyped, typechecker)

        return decorate

    return jaxtyped_once


def _checked(function: FunctionType, jaxtyped: Callable[..., Any], typechecker: Decorator) -> Callable[..., Any]:
    function.__annotations__ = {name: _resolved(hint, function) for name, hint in function.__annotations__.items()}
    checked = typechecker(function)
    # Axes of one name are of one length, from here to its return.
    named_axes = any(map(_names_axes, function.__annotations__.values()))
    one_call = jaxtyped("context") if named_axes else nullcontext()
    results: dict[Any, set[Any]] = {}  # for each set of shapes that has passed, those of its results

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable or torch.compiler.is_compiling():  # (a graph cannot hold the checks)
            return function(*arguments, **named)
        given = _shapes(arguments), _shapes(named)
        if given not in results:
            with one_call:
                result = checked(*arguments, **named)
            results[given] = {_shapes(result)}
            return result
        result = function(*arguments, **named)
        if (found := _shapes(result)) not in results[given]:
            with one_call:
                for name, value in [*_named(function, arguments, named), ("return", result)]:
                    die_if_unbearable(value, function.__annotations__.get(name, Any))
            results[given].add(found)
        return result

    return call


def _named(function: FunctionType, arguments: Any, named: Any) -> Iterator[tuple[str, Any]]:
    """Each argument with the name of its parameter, those of `*arguments` and `**named` one by one."""
    signature = inspect.signature(function)
    for name, value in signature.bind(*arguments, **named).arguments.items():
        kind = signature.parameters[name].kind
        each = value if kind == kind.VAR_POSITIONAL else value.values() if kind == kind.VAR_KEYWORD else [value]
        yield from ((name, one) for one in each)


PLAIN = frozenset({int, float, type(None)})
"""Types of which a check reads nothing more."""


def _shapes(value: Any) -> Any:
    """All that a check reads of a value: dtypes, shapes, types, and the words and numbers that a `Literal` names."""
    kind: Any = type(value)
    if kind in PLAIN:
        return kind
    if isinstance(value, torch.Tensor):
        return value.dtype, None if value.is_nested else value.shape
    if isinstance(value, list | tuple):
        if PLAIN.issuperset(kinds := set(map(type, value))):  # a search hands on lists of thousands of numbers
            return kind, *(map(type, value) if isinstance(value, tuple) else [frozenset(kinds)])
        return kind, *map(_shapes, value)
    if isinstance(value, dict):
        return dict, *((_shapes(key), _shapes(one)) for key, one in value.items())
    return (kind, value) if isinstance(value, str | bool) else kind


def _resolved(hint: Any, function: FunctionType) -> Any:
    """An annotation without quotes; as jaxtyping has it, one of something that is defined below says nothing."""

    def one() -> None: ...

    one.__annotations__ = {"value": hint}
    try:
        return get_type_hints(one, function.__globals__, include_extras=True)["value"]
    except Exception:  # whatever an expression in quotes can raise
        return Any


def _names_axes(hint: Any) -> bool:
    if isinstance(hint, str) or (isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)):
        return True  # (in quotes it may)
    return any(map(_names_axes, get_args(hint)))
