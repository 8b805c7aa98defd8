"""The settings of a server, without torch."""

from dataclasses import asdict, dataclass
from typing import Any

from regard.errors import ArgumentError, MissingExtraError

MOST_TOKENS = 512
"""The most tokens of a prompt and of an answer, unless others are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    max_text: int = 5_000
    """the most characters of the texts of a request."""
    max_length: int | None = None
    """the most tokens of a sentence or prompt, and of an answer; unless given, 512, and of a translator as many as
    `translate` takes and writes."""
    max_beam: int = 16
    """the most hypotheses of a search."""
    max_body: int = 2**20
    """the most bytes of a request."""
    max_seconds: float = 60.0
    """the most seconds until an answer is whole."""
    max_waiting: int = 128
    """the most requests that wait for a model; further ones are answered 429."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 1 <= value < float("inf"):
                raise ArgumentError(f"{name} must be at least 1 and finite, got {value}")

    @property
    def most_tokens(self) -> int:
        return MOST_TOKENS if self.max_length is None else self.max_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    hosts: frozenset[str]
    """The names in the Host header that are answered, in lower case and without a port."""
    token: str | None = None
    """The secret that requests bring; None for none."""


def serve_libraries() -> Any:
    for name in ("anyio", "msgspec", "starlette", "uvicorn"):
        try:
            __import__(name)
        except ImportError:
            raise MissingExtraError(name, extra="serve") from None
