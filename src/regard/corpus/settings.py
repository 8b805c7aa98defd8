"""The settings of `Measure`: names and numbers, read without torch."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from os import PathLike, fspath
from typing import Any, Literal

from regard.errors import ArgumentError, MissingExtraError

MEANS = ("entropy", "distance", "self", "previous", "first", "induction", "duplicate", "top_weight")
"""The statistics that are means over queries, as in `regard.watching.head_table`."""
OF_KEYS = ("received", "top_keys")
"""Those of the attention that each key receives."""
NAMED_STATISTICS = (*MEANS, *OF_KEYS)
USUAL_STATISTICS = ("entropy", "distance", "first", "previous", "induction")

CorpusEngine = Literal["processes", "ray"]
"""The engine that shares out the shards."""
Own = Callable[[Any, Any], Any]
"""(weights, tokens) -> a number for each head (H,), or for each query (H, T), whose mean is taken."""


# Without slots: Ray derives a class from a callable's, and gives its objects an attribute.
@dataclass(frozen=True)
class MeasureSettings:
    """The settings of `Measure`, which has their meanings."""

    model: str | PathLike[str]
    statistics: Sequence[str] = USUAL_STATISTICS
    _: KW_ONLY
    text: str = "text"
    id: str = "id"
    layers: Sequence[int] = ()
    heads: Sequence[int] = ()
    max_tokens: int | None = None
    keys: int = 8
    threads: int = 1
    device: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", fspath(self.model))
        for name in ("statistics", "layers", "heads"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str | int) else tuple(given))
        if not self.statistics or len(set(self.statistics)) < len(self.statistics):
            raise ArgumentError(f"statistics must be one or more, each once; got {list(self.statistics)}")
        for name in self.statistics:
            if name not in NAMED_STATISTICS and not all(name.partition(":")):
                meant = get_close_matches(name, NAMED_STATISTICS, n=1)
                raise ArgumentError(
                    "statistics: expected names that `regard measure --help` lists, or module:function; "
                    f"got {name!r}{f', perhaps {meant[0]}' if meant else ''}"
                )
        for name, least in (("max_tokens", 2), ("keys", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ArgumentError(f"{name} must be at least {least}, got {value}")

    @property
    def numbers(self) -> list[str]:
        """The statistics that are a number for each head."""
        return [name for name in self.statistics if name != "top_keys"]


def arrow_library() -> Any:
    """The package `pyarrow`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingExtraError("pyarrow", extra="measure") from None
    return pyarrow


def ray_library() -> Any:
    """The package `ray`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", extra="ray") from None
    return ray
