"""The tensors and plain values that functions, modules and other objects hold, and whether one has changed since.

A map and a backward pass evaluate masks, biases and scores again, with what these hold by then.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import zip_longest
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from regard.tensors.fingerprint import Fingerprint, first_changed
from regard.tensors.guards import is_compiling
from regard.tensors.names_used import RECORDS, Chain, names_used
from regard.tensors.torch_private import DisableTorchFunction

MOST_LEAVES = 1 << 12
"""The most tensors and values looked at: a function that holds a data set does not cost its size in each call."""
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LIBRARIES = frozenset({"torch", "regard", "numpy", "builtins", "functools", "math", "typing", "collections"})
_OF_MODULE = frozenset(vars(nn.Module()))
"""The attributes of each module; `training` among them, because a map is read after `eval()`."""
_CONTAINERS = (tuple, list, dict, set, frozenset)
_NOTHING = object()


class Captures:
    """The tensors and plain values that objects held when this was made.

    Tensors in closures, defaults, globals that a function's code names, attributes that it reads, partial functions,
    bound methods, modules (all parameters and buffers), dataclasses and containers. Names that the code itself writes,
    such as counters, are left out.

    >>> widths = []
    >>> def mask(i, j, widths=widths):
    ...     return i - j < widths[-1]
    >>> held = Captures(mask)
    >>> held.changed()
    >>> widths.append(5)
    >>> held.changed()
    'the length of `widths` (0 when the call ran, 1 now)'
    """

    __slots__ = ("_held", "_objects")

    def __init__(self, *objects: Any, names: Iterable[str] = ()) -> None:
        self._objects = [*zip_longest(names, objects, fillvalue="")]
        self._held: list[tuple[str, Any]] = []
        if not is_compiling():
            with DisableTorchFunction():
                self._held = [
                    (name, Fingerprint(held) if isinstance(held, Tensor) else held)
                    for name, held in leaves(self._objects)
                ]

    def __bool__(self) -> bool:
        return bool(self._held)

    def changed(self) -> str | None:
        """The first change since, in words; None if there is none. It synchronizes once, at most, on each device."""
        tensors: list[tuple[Fingerprint, Any]] = []
        names: list[str] = []
        now = leaves(self._objects) if self._held else iter(())
        for name, then in self._held:
            found_name, found = next(now, (None, None))
            if found_name != name:
                return name
            if isinstance(then, Fingerprint):
                tensors.append((then, found))
                names.append(name if not isinstance(found, Tensor) else f"{name} {tuple(found.shape)}")
            elif type(found) is not type(then) or (found != then and (found == found or then == then)):
                return f"{name} ({then!r} when the call ran, {found!r} now)"
        added = next(now, None)
        if added is not None:
            return f"{added[0]} (not there when the call ran)"
        place = first_changed(tensors)
        return None if place is None else names[place]


def leaves(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each tensor and plain value that named objects hold, with its name, in an order that does not change.

    >>> [name for name, _ in leaves([("", nn.Linear(2, 1))])]
    ['the parameter `weight`', 'the parameter `bias`', 'the value `in_features`', 'the value `out_features`']
    """
    walk = _Walk()
    for name, each in named:
        for count, leaf in enumerate(walk.of(name, each)):
            if count == MOST_LEAVES:
                return
            yield leaf


Leaves = Iterator[tuple[str, Any]]


class _Walk:
    """A walk through objects that hold one another, each entered once."""

    def __init__(self) -> None:
        self._seen: dict[object, object] = {}  # With the objects: one made on the way would give its id to the next.

    def of(self, path: str, held: Any, chain: Chain = ()) -> Leaves:
        """The leaves of an object of which code reads a chain of attributes; () stands for all of it."""
        if isinstance(held, Tensor):
            kind = "parameter" if isinstance(held, nn.Parameter) else "tensor"
            yield f"the {kind} `{path}`", held
        elif isinstance(held, _VALUES):
            yield f"the value `{path}`", held
        elif not isinstance(held, type) and (id(held), chain) not in self._seen:
            self._seen[id(held), chain] = held
            yield from self._attribute(path, held, chain) if chain else self._whole(path, held)

    def _whole(self, path: str, held: Any) -> Leaves:
        if isinstance(held, FunctionType):
            yield from self._function(held)
        elif isinstance(held, MethodType):
            yield from self._method(path, held.__func__, held.__self__)
        elif isinstance(held, partial):
            yield from self.of(path, (held.func, held.args, held.keywords))
        elif isinstance(held, nn.Module):
            yield from self._module(path, held)
        elif isinstance(held, (set, frozenset)):
            yield f"the set `{path}`", tuple(sorted(map(repr, held)))
        elif isinstance(held, _CONTAINERS):
            yield f"the length of `{path}`", len(held)
            for key, part in held.items() if isinstance(held, dict) else enumerate(held):
                yield from self.of(f"{path}[{key!r}]", part)
        elif type(held).__module__ == "numpy":
            if hasattr(held, "__array_interface__") and held.dtype.kind in "biufc":
                yield f"the array `{path}`", torch.as_tensor(held)
        elif not isinstance(held, ModuleType):
            yield from self._object(path, held)

    def _function(self, function: FunctionType) -> Leaves:
        code, read, written = function.__code__, *names_used(function.__code__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            # An empty cell has no value yet.
            if name not in written and (held := next(iter(_contents(cell)), _NOTHING)) is not _NOTHING:
                for chain in sorted(read.get(name, ((),))):
                    yield from self.of(name, held, chain)
        defaults = function.__defaults__ or ()
        last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, held in (*zip(last, defaults, strict=True), *(function.__kwdefaults__ or {}).items()):
            yield from self.of(name, held)
        if (function.__module__ or "torch").partition(".")[0] not in _LIBRARIES:
            for name in sorted(read.keys() - written - {*code.co_freevars, *code.co_varnames}):
                if name in function.__globals__:
                    for chain in sorted(read[name]):
                        yield from self.of(name, function.__globals__[name], chain)

    def _method(self, path: str, function: Any, owner: Any) -> Leaves:
        """The leaves of a bound method: of its owner only the attributes that its code reads."""
        if not isinstance(function, FunctionType):
            yield from self.of(path, owner)
            return
        yield from self._function(function)
        read, written = names_used(function.__code__)
        for chain in sorted(read.get(next(iter(function.__code__.co_varnames), ""), ())):
            if not chain or chain[0] not in written:
                yield from self.of(path, owner, chain)

    def _attribute(self, path: str, owner: Any, chain: Chain) -> Leaves:
        """The leaves of an attribute, of an instance or of its class."""
        name, rest = chain[0], chain[1:]
        inner, found = f"{path}.{name}" if path else name, _attribute(owner, name)
        if isinstance(owner, _CONTAINERS):
            if name not in RECORDS:
                yield from self.of(path, owner)
        elif isinstance(found, property):
            yield from self._method(path, found.fget, owner)
        elif isinstance(found, FunctionType) and name not in getattr(owner, "__dict__", ()):
            yield from self._method(path, found, owner)
        elif isinstance(found, (staticmethod, classmethod)):
            yield from self.of(inner, found.__func__)
        elif found is not _NOTHING:
            yield from self.of(inner, found, rest)
        elif not isinstance(owner, (ModuleType, FunctionType)):
            yield from self.of(path, owner)

    def _module(self, path: str, module: nn.Module) -> Leaves:
        written = names_used(code).written if (code := getattr(type(module).forward, "__code__", None)) else ()
        for name, value in {**_parts(module), **vars(module)}.items():
            if name not in _OF_MODULE and name not in written:
                yield from self.of(f"{path}.{name}" if path else name, value)

    def _object(self, path: str, held: Any) -> Leaves:
        called = _of_class(type(held), "__call__")
        written = names_used(called.__code__).written if isinstance(called, FunctionType) else ()
        for name in (*_slots(type(held)), *getattr(held, "__dict__", ())):
            if name not in written:
                yield from self.of(f"{path}.{name}" if path else name, getattr(held, name, None))
        if isinstance(called, FunctionType):
            yield from self._function(called)


def _contents(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, without running code of the owner's class."""
    for inner in (getattr(owner, "__dict__", {}), _parts(owner) if isinstance(owner, nn.Module) else {}):
        if name in inner:
            return inner[name]
    return getattr(owner, name, _NOTHING) if name in _slots(type(owner)) else _of_class(type(owner), name)


def _of_class(kind: type, name: str) -> Any:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), _NOTHING)


def _parts(module: nn.Module) -> dict[str, Any]:
    """The parameters, buffers and modules that a module holds itself."""
    its = module.named_parameters(recurse=False), module.named_buffers(recurse=False), module.named_children()
    return {name: part for parts in its for name, part in parts}


def _slots(kind: type) -> tuple[str, ...]:
    found = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    return tuple(name for names in found for name in ([names] if isinstance(names, str) else names) if name[:2] != "__")
