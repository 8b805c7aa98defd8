"""Lazy imports of a package's names (PEP 562), for a fast import."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def on_demand(
    package: str, modules: Mapping[str, Iterable[str]], *, packages: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The functions `__getattr__` and `__dir__` of a package, and its list `__all__`.

    A name stays in the package after its first access, as cheap as any other, and one object for `torch.compile`. No
    name may be that of a module in the package, because Python itself puts modules there. Type checkers read neither
    function. For them the package has the same imports under `if TYPE_CHECKING`, and `tests/core/test_structure.py`
    compares the two.

    Args:
        package: the package's name.
        modules: from the name of a module to its public names.
        packages: modules in the package accessible without an import of their own.

    Raises:
        AttributeError: the package has no such name; raised by the first function.
    """
    homes = {name: module for module, names in modules.items() for name in names}
    within = frozenset(packages)

    def get(name: str) -> Any:
        if name in within:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *within})

    return get, names, sorted(homes)
