"""Shapes in signatures, checked at every call of a test: parameters before it, and what comes back after it.

jaxtyping's own decorator checks all parameters a second time after the call, binds them by name, and keeps a book of
axes for functions that name none. In the small steps of a search that was most of the time of a test.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import FunctionType
from typing import Any, get_args, get_type_hints

import jaxtyping
import torch

Decorator = Callable[[Any], Any]


def checked_once(jaxtyped: Callable[..., Any]) -> Callable[..., Decorator]:
    """What stands for `jaxtyping.jaxtyped`, by which jaxtyping's import hook decorates functions and classes."""

    def jaxtyped_once(*, typechecker: Decorator) -> Decorator:
        def decorate(thing: Any) -> Any:
            if not isinstance(thing, FunctionType) or inspect.isgeneratorfunction(thing):
                return jaxtyped(thing, typechecker=typechecker)
            # One within a function is made by each call of that, and its checks would be compiled each time.
            if "<locals>" in thing.__qualname__ and not any(map(_names_axes, thing.__annotations__.values())):
                return thing
            return _checked(thing, jaxtyped, typechecker)

        return decorate

    return jaxtyped_once


def _checked(function: FunctionType, jaxtyped: Callable[..., Any], typechecker: Decorator) -> Callable[..., Any]:
    function.__annotations__ = {name: _resolved(hint, function) for name, hint in function.__annotations__.items()}
    checked = typechecker(function)
    # Axes of one name are of one length, from here to its return.
    named_axes = any(map(_names_axes, function.__annotations__.values()))
    one_call = jaxtyped("context") if named_axes else nullcontext()

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable or torch.compiler.is_compiling():  # (a graph cannot hold the checks)
            return function(*arguments, **named)
        with one_call:
            return checked(*arguments, **named)

    return call


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
