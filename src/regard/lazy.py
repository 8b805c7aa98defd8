"""Lazy imports of a package's names (PEP 562), for a fast import, and of the module that draws its objects."""

import dis
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import CodeType
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


def on_demand(package: str, *, drawn_by: str = "") -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The functions `__getattr__` and `__dir__` of a package, and its list `__all__`.

    The names are those that the package imports under `if TYPE_CHECKING`: Python compiles these imports, and never runs
    them. A name stays in the package after its first access, as cheap as any other, and one object for `torch.compile`.
    No name may be that of a module in the package, because Python itself puts modules there.

    Args:
        package: the package's name, in whose own code this is called.
        drawn_by: the module whose `bundle(shown)` draws the package's `Displayed` objects; imported at the first.

    Raises:
        AttributeError: the package has no such name; raised by the first function.
    """
    known = vars(sys.modules[package])
    homes = {name: home for name, home in _imports(sys._getframe(1).f_code) if name not in known}
    if drawn_by:
        DRAWN_BY[package] = drawn_by

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names, sorted(name for name, home in homes.items() if home != package)


def _imports(code: CodeType) -> Iterator[tuple[str, str]]:
    module = ""
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME":
            module = one.argval
        elif one.opname == "IMPORT_FROM":
            yield one.argval, module
