"""The names that the code of a function reads, with the attributes that it takes of each."""

import dis
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

Chain = tuple[str, ...]
"""Attributes taken one of another: ("config", "width") of `self.config.width`; () for the object as a whole."""
RECORDS = frozenset({"append", "extend", "add", "update", "setdefault"})
"""Methods by which code writes into a container: one that it uses for nothing else decides nothing."""


class NamesUsed(NamedTuple):
    """The names of a function's code and of the functions inside it."""

    read: dict[str, frozenset[Chain]]
    """Names of variables, of the own function or outside, with the chains of attributes read of each."""
    written: frozenset[str]
    """Variables outside and attributes that the code writes itself, such as counters."""


@lru_cache(maxsize=1024)
def names_used(code: CodeType) -> NamesUsed:
    """The names that code reads and writes.

    >>> names = names_used((lambda i, j: i - j < limits.width).__code__)
    >>> sorted(names.read["limits"]), "j" in names.read, names.written
    ([('width',)], True, frozenset())
    """
    read: dict[str, set[Chain]] = {}
    written: set[str] = set()
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PUSH_NULL", "CACHE")]
    for place, step in enumerate(steps):
        if step.opname in ("STORE_DEREF", "STORE_GLOBAL", "STORE_NAME", "STORE_ATTR"):
            written.add(step.argval)
        elif step.opname.startswith("LOAD_") and step.opname.partition("_")[2].startswith(_VARIABLES):
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            for name in names:
                # Of two variables loaded at once, the attribute is taken of the last.
                read.setdefault(name, set()).add(_chain(steps, place + 1) if name is names[-1] else ())
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            its = names_used(inner)
            written |= its.written
            for name, chains in its.read.items():
                read.setdefault(name, set()).update(chains)
    return NamesUsed({name: frozenset(chains) for name, chains in read.items()}, frozenset(written))


_VARIABLES = ("FAST", "DEREF", "GLOBAL", "NAME", "CLASSDEREF", "FROM_DICT_OR")


def _chain(steps: list[dis.Instruction], place: int) -> Chain:
    taken: list[str] = []
    for step in steps[place:]:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        taken.append(step.argval)
    return tuple(taken)
