"""The interceptor of a model's attention calls: its handlers run before and after each call. A watch, a run with edits
and `regard.on_attention` are interceptors. A call without changes keeps every bit."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from regard.errors import RegardError
from regard.tensors.torch_private import is_compiled
from regard.watching.kept.sequences import Moment
from regard.watching.running.observed_call import KeysChosen, ObservedCall


class Interceptor:
    modules: dict[str, nn.Module]
    """The modules by path. They are held: `paths` has their ids, and Python reuses the id of a freed object."""
    paths: dict[int, str]
    is_compiled: bool = False
    """True if the model, or a part of it, is compiled: it runs uncompiled while the interceptor is open."""
    keeps_graph: bool = False
    """True if its maps carry gradients."""
    changes: Mapping[object, Callable[..., Any]] = {}
    """The functions with changeable calls, each with its replacement."""
    unfused: frozenset[int] = frozenset()
    """The ids of modules that must not run fused, because attention inside them may be changed."""
    refusal: RegardError | None = None
    """The reason why a module cannot be changed; raised when that module ends."""

    def before(self, path: str, when: Moment) -> object | None:
        """Called before each call of a function in `changes`.

        Returns:
            The changes of this call, for the function in `changes`; None for no change.
        """
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
        """Called for ids of tokens, of positions or of kinds that a table (by its id) was read by, after so many
        calls."""

    def chose(self, choice: KeysChosen, queries: int) -> None:
        """Called for a module that chose keys for each of so many queries, by scores of its own."""

    def refuse(self, module: nn.Module, since: int, reason: str) -> None:
        """Called for a module that attended in parts: none of its own weights since call `since` is a map."""

    def withdraw(self, token: object, reason: str) -> None:
        """Called if a call turns out to be no attention after its `after`."""


def has_compiled(model: nn.Module) -> bool:
    return any(map(is_compiled, model.modules()))
