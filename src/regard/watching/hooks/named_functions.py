"""The functions of other packages that are observed by their names: each is replaced where the model finds it.

The tables of names belong to the readers.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial, wraps
from inspect import signature, unwrap
from types import FunctionType
from typing import Any

from torch import nn

from regard.tensors.guards import is_compiling
from regard.watching.hooks.observers import known_thread
from regard.watching.readers.kernel_arguments import ENGINE, KERNELS
from regard.watching.readers.recurrent_calls import LIGHTNING, RECURRENCES, observe_lightning
from regard.watching.readers.traced_calls import FunctionObserver

_lock = threading.RLock()
PASSED_BY = frozenset(
    {*sys.stdlib_module_names, "torch", "transformers", "numpy", "scipy", "sympy", "triton", "regard"}
)
"""Packages whose other modules hold no kernel of a third one: there are some thousand of these."""

Home = tuple[Any, str]
"""A Python module, a class or a module of the model, and the name of a function of it."""
_replaced: dict[Home, tuple[Callable[..., Any], int]] = {}
"""By place, the function that was there, and how many open watches replaced it."""


_BARE: set[str] = set()
"""The Python modules among which no kernel was found last."""


def _places(modules: list[nn.Module]) -> dict[Home, FunctionObserver]:
    found: dict[Home, FunctionObserver] = {}
    kinds: set[type] = set()
    for one in modules:
        kinds.update(type(one).__mro__)
    for kind in kinds:
        home, forward = sys.modules.get(kind.__module__), vars(kind).get("forward")
        for name, observe in RECURRENCES.items():
            if hasattr(home, name):
                found[home, name] = observe
        if kind.__module__.partition(".")[0] not in PASSED_BY and _takes(forward, ENGINE.parameters):
            found[kind, "forward"] = ENGINE.observe
    for one in modules:
        if hasattr(one, LIGHTNING[0]) and all(hasattr(one, name) for name in LIGHTNING):
            owner: Any = next(kind for kind in type(one).__mro__ if "forward" in vars(kind))
            found[owner, "forward"] = observe_lightning
    return found | _kernels(modules)


def _kernels(modules: list[nn.Module]) -> dict[Home, FunctionObserver]:
    if sys.modules.keys() == _BARE:
        return {}
    names, known = list(sys.modules), {}
    packages = {name for name in names if "flash" in name or "xformers" in name or "varlen" in name}
    for name, kernel in KERNELS.items():
        for package in packages:
            function = getattr(sys.modules[package], name, None)
            if _takes(function, kernel.parameters):
                known[id(_itself(function))] = kernel.observe
    if not known:
        _BARE.clear()
        _BARE.update(names)
        return {}
    others = (name for name in names if name.partition(".")[0] not in PASSED_BY)
    return {
        (owner, place): known[id(_itself(one))]
        for owner in [*map(sys.modules.get, {*packages, *others}), *modules]
        for place, one in list(getattr(owner, "__dict__", {}).items())
        # Of ten thousand values, most are told by their type.
        if type(one) in CALLABLE and id(_itself(one)) in known
    }


CALLABLE = frozenset({FunctionType, partial})


def _itself(value: object) -> object:
    value = value.func if type(value) is partial else value
    return unwrap(value) if callable(value) and hasattr(value, "__wrapped__") else value


def _takes(function: Any, parameters: frozenset[str]) -> bool:
    return type(function) is FunctionType and parameters <= set(signature(function).parameters)


def replace_functions(modules: Iterable[nn.Module]) -> list[Home]:
    found = []
    with _lock:
        for home, observe in _places(list(modules)).items():
            owner, name = home
            original, users = _replaced.get(home, (getattr(owner, name), 0))
            if not users:
                setattr(owner, name, _observing(original, observe))
            _replaced[home] = original, users + 1
            found.append(home)
    return found


def put_functions_back(places: Iterable[Home]) -> None:
    with _lock:
        for home in places:
            original, users = _replaced.pop(home)
            if users > 1:
                _replaced[home] = original, users - 1
            else:
                setattr(*home, original)


def late_kernels(modules: Iterable[nn.Module]) -> list[str]:
    """The kernels that were loaded since the functions were replaced. A name that a module took from its package since
    then has what stood there, and gets the function itself."""
    found = []
    with _lock:
        for owner, name in _kernels(list(modules)):
            value = getattr(owner, name)
            if (owner, name) in _replaced:
                continue
            if (original := getattr(value, "observed", None)) is not None:
                setattr(owner, name, original)
            else:
                found.append(f"{name} of {getattr(owner, '__name__', type(owner).__name__)}")
    return found


def _observing(original: Callable[..., Any], observe: FunctionObserver) -> Callable[..., Any]:
    function = original.func if isinstance(original, partial) else original

    @wraps(function)
    def observing(*args: Any, **kwargs: Any) -> Any:
        thread = None if is_compiling() else known_thread()
        if thread is None or not thread.watches or thread.is_reading:
            return original(*args, **kwargs)
        return observe(thread, original, args, kwargs)

    observing.observed = original  # type: ignore[attr-defined]
    return observing
