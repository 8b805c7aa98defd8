"""The call passed from an observer to the watches, each of which saves parts of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Size, Tensor, nn

from regard.call.shapes import Dimensions
from regard.errors import RegardError
from regard.maps.sources.call import CallSource
from regard.maps.sources.factors import Factors
from regard.maps.sources.source import Source
from regard.maps.sources.values import CallValues
from regard.tensors.torch_private import is_compiled
from regard.watching.kept.arguments import ModuleArguments
from regard.watching.kept.evidence import AnyEvidence
from regard.watching.kept.rebuilding import Rebuilding
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.sequences import Moment
from regard.watching.origins.streams import Origins


class CallVectors(NamedTuple):
    """The queries, keys and values of a call, as the kernel got them; None where the model handed none over."""

    query: Tensor | None
    """(batch..., H, T, D)."""
    key: Tensor | None
    """(batch..., G, S, D)."""
    value: Tensor | None
    """(batch..., G, S, E)."""


class KeysChosen(NamedTuple):
    module: str
    each: int
    hidden: Tensor
    """The keys that it hid from all queries, bool (B, S): padding."""


@dataclass(slots=True)
class Observation:
    factors: Factors | None
    """The tensors for computing the weights; None if the weights themselves were saved."""
    notes: list[str] = field(default_factory=list)
    rebuilding: Rebuilding | str = "nothing to compare with"
    """Rebuilds rows of the output; or the reason why none can be rebuilt."""
    stored: Source | None = None
    softmax: Source | None = None
    evidence: AnyEvidence | None = None
    """The vectors that identify the next call of a generation."""
    dimensions: Dimensions | None = None
    """The names of the map's dimensions, as far as there is evidence; None for those of the call's documentation."""
    beside: CallValues = field(default_factory=CallValues)
    """The values and the gradient of the output, as far as the watch keeps them."""
    holds_keys: bool = False
    """True if the factors hold queries and keys, so that the steps of a generation can share keys."""

    @property
    def source(self) -> Source:
        if self.stored is not None:
            return self.stored
        assert self.factors is not None
        return CallSource(
            self.factors, Size(self.factors.sizes.map_shape), may_be_beside=self.beside, names=self.dimensions
        )


class ObservedCall(ABC):
    is_editable: ClassVar[bool] = False
    has_scores: ClassVar[bool] = True
    """False for a recurrence, which has no keys that could be dropped."""
    kind: str = "attention"
    """How it mixes positions, in one word of the field."""
    how: str
    origins: Origins | None = None
    """The sequences of its queries and its keys; None if unknown."""
    token: object = None
    arguments: tuple[ModuleArguments, ...] = ()
    is_over_queries: bool = False
    is_part: bool = False
    has_keys: Tensor | None = None
    dropped: float = 0.0

    @abstractmethod
    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        """Save the tensors of the map, by the rules of a watch; raises RegardError if the call cannot be read."""

    @abstractmethod
    def query_key_value(self) -> CallVectors:
        """The queries, keys and values."""


class Interceptor:
    modules: dict[str, nn.Module]
    """The modules by path. They are held: `paths` has their ids, and Python reuses the id of a freed object."""
    paths: dict[int, str]
    is_compiled: bool = False
    """True if the model, or a part of it, is compiled: it runs uncompiled while the interceptor is open."""
    keeps_graph: bool = False
    changes: Mapping[object, Callable[..., Any]] = {}
    """The functions with changeable calls, each with its replacement."""
    unfused: frozenset[int] = frozenset()
    """The ids of modules that must not run fused, because attention inside them may be changed."""
    refusal: RegardError | None = None
    """The reason why a module cannot be changed; raised when that module ends."""

    def before(self, path: str, when: Moment) -> object | None:
        """Called before each call of a function in `changes`; gives the changes of this call, or None."""
        return None

    def after(self, path: str | None, call: ObservedCall, when: Moment) -> None:
        """Called after each attention call; `path` is None outside the model."""

    def entered(self, module: nn.Module) -> None:
        """Called when the forward of a module begins."""

    def ran_elsewhere(self, module: nn.Module) -> None:
        """Called when the forward of any module begins in a thread in which the interceptor is not open."""

    def unread(self, path: str, reason: str) -> None:
        """Called if a module attends in an unreadable way."""

    def other(self, path: str, reason: str) -> None:
        """Called for a lookalike of attention."""

    def mixed(self, path: str, how: str, positions: int | None) -> None:
        """Called for a module that mixes positions (so many, if that is known) without an observed call."""

    def embedded(self, ids: Tensor, table: int, taken: int) -> None:
        """Called for ids of tokens, positions or kinds by which a table (by its id) was read, after so many calls."""

    def chose(self, choice: KeysChosen, queries: int) -> None:
        """Called for a module that chose keys for each of so many queries, by scores of its own."""

    def refuse(self, module: nn.Module, since: int, reason: str) -> None:
        """Called for a module that attended in parts: none of its own weights since call `since` is a map."""

    def withdraw(self, token: object, reason: str) -> None:
        """Called if a call turns out to be no attention after its `after`."""


def has_compiled(model: nn.Module) -> bool:
    return any(map(is_compiled, model.modules()))
