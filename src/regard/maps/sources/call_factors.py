"""The factors of a call that a map reads: queries, keys and the state of each row."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from regard.call.shapes import Sizes
from regard.errors import OverwrittenError
from regard.kernels import row_state
from regard.kernels.base import Call
from regard.maps.sources.row_shift import RowShift
from regard.tensors.guards import is_compiling
from regard.tensors.tensor_tree import tensors_mapped, tensors_of_tree
from regard.tensors.torch_private import counted_version, version_counter


class CallFactors(Protocol):
    """The factors of a call's weights. A watch has its own class, which may share tensors with the model."""

    @property
    def sizes(self) -> Sizes:
        """The sizes of the call, available without reading it."""

    @property
    def call(self) -> Call:
        """The call, checked at each access; do not hold it."""

    @property
    def state(self) -> Tensor:
        """The normalizer of each row (B, H, T), such as the log-sum-exp."""

    @property
    def known_state(self) -> Tensor | None:
        """The row state; None for a log-sum-exp not yet computed."""

    @property
    def reading(self) -> tuple[Call, Tensor]:
        """The call and its row state, both of shifted rows where the bias is far from 0."""

    def unchecked(self) -> tuple[Call, Tensor, Callable[[float], bool] | None]:
        """The same, and a check of a row state that is a kernel's and not checked yet.

        It tells whether the row state is right, from the largest |ln of a sum of weights| of the last queries.
        """

    def tensors(self) -> list[Tensor]:
        """The tensors in memory now."""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "CallFactors":
        """The same with the tensors changed."""


class Unwritten:
    """The tensors of a call, with their versions when it ran: a map holds the caller's tensors, not copies."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        # While compiling there are no versions, and an inference tensor has none.
        self._versions = () if is_compiling() else (*map(counted_version, tensors),)

    def check(self) -> None:
        """Check that the tensors are unchanged since then.

        A part of something larger passes, because the rest may have been written to: a cache with room for more keys.

        Raises:
            OverwrittenError: one was written to.
        """
        for place, (tensor, version) in enumerate(zip(self._tensors, self._versions, strict=False)):
            if version is not None and version_counter(tensor) != version and not _is_part(tensor):
                name = NAMES[place] if place < len(NAMES) else "tensors of the mask, the bias or the score"
                raise OverwrittenError(
                    f"the {name} {tuple(tensor.shape)} of this map have been written to since its call, and a map "
                    f"holds them, not a copy: hand the call a clone(), or read the map before"
                )


NAMES = ("queries", "keys")


def needs_gradient(tensors: Sequence[Tensor]) -> bool:
    """Whether any of the tensors needs a gradient."""
    return True in [one.requires_grad for one in tensors]


def tensors_of_call(call: Call) -> list[Tensor]:
    """The tensors behind the weights of a call: query and key first."""
    return tensors_of_tree(call.query, call.key, call.score, call.normalization, call.mask, call.bias)


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


class GivenFactors:
    """A given call and its row state, computed at the first read if the kernel has no exact one."""

    __slots__ = ("__weakref__", "_call", "_row_shift", "_state", "_unwritten")

    def __init__(self, call: Call, state: Tensor | None, unwritten: Unwritten | None = None) -> None:
        self._call = call
        self._state = state
        self._row_shift = None if call.bias is None else RowShift()
        if unwritten is None:
            unwritten = Unwritten(tensors_of_call(call))
        self._unwritten = unwritten

    def __reduce__(self) -> tuple[object, ...]:
        return GivenFactors, (self.call, self.known_state)

    @property
    def sizes(self) -> Sizes:
        return self._call.sizes

    @property
    def call(self) -> Call:
        """The call.

        Raises:
            OverwrittenError: one of its tensors was written to.
        """
        self._unwritten.check()
        return self._call

    @property
    def state(self) -> Tensor:
        if self._state is None:
            # The first read may need no gradient, and a later one may.
            with torch.enable_grad():
                self._state = row_state(self.call)
        return self._state

    @property
    def reading(self) -> tuple[Call, Tensor]:
        call, state = self.call, self.state
        if self._row_shift is None:
            return call, state
        with torch.enable_grad():  # As for the row state itself, the first read may need no gradient.
            return self._row_shift.applied(call, state)

    def unchecked(self) -> tuple[Call, Tensor, None]:
        return *self.reading, None

    @property
    def known_state(self) -> Tensor | None:
        return self._state

    def tensors(self) -> list[Tensor]:
        return [self._call.query, self._call.key, *(() if self._state is None else (self._state,))]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "GivenFactors":
        return GivenFactors(*tensors_mapped((self.call, self._state), change))
