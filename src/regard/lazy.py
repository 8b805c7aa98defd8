"""Lazy imports of a package's names (PEP 562), for a fast import, and of the module that draws its objects."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

Bundle = tuple[dict[str, Any], dict[str, Any]]
"""Contents by MIME type and their metadata, as IPython's display protocol has them."""
DRAWN_BY: dict[str, str] = {}
"""From the name of a package to the module that draws its objects for notebooks."""
T = TypeVar("T")


class Displayed:
    """An object that a notebook shows as a picture or a table; `on_demand` knows the module that makes it."""

    __slots__ = ()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        places = [place for place in DRAWN_BY if f"{type(self).__module__}.".startswith(f"{place}.")]
        drawn: Bundle = import_module(DRAWN_BY[max(places, key=len, default="regard")]).bundle(self)
        return drawn


def displayed(named_tuple: type[T]) -> type[T]:
    """Decorate a named tuple, which can have no other base: a notebook shows it as it does a `Displayed`."""
    named_tuple._repr_mimebundle_ = vars(Displayed)["_repr_mimebundle_"]  # type: ignore[attr-defined]
    return named_tuple


def on_demand(
    package: str, modules: Mapping[str, Iterable[str]], *, packages: Iterable[str] = (), drawn_by: str = ""
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
        drawn_by: the module whose `bundle(shown)` draws the package's `Displayed` objects; imported at the first.

    Raises:
        AttributeError: the package has no such name; raised by the first function.
    """
    homes = {name: module for module, names in modules.items() for name in names}
    within = frozenset(packages)
    if drawn_by:
        DRAWN_BY[package] = drawn_by

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
