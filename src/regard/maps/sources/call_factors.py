"""The factors of a call that a map reads: queries, keys and the state of each row."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from regard.call.shapes import Sizes
from regard.errors import GradientError, OverwrittenError
from regard.kernels import row_state
from regard.kernels.base import Call
from regard.maps.sources.row_shift import RowShift
from regard.tensors.byte_size import is_part
from regard.tensors.guards import is_compiling, is_recorded
from regard.tensors.tensor_tree import tensors_mapped, tensors_of_tree
from regard.tensors.torch_private import DisableTorchFunction, counted_version, version_counter, viewed

if TYPE_CHECKING:
    from regard.tensors.fingerprint import Fingerprint


class CallFactors(Protocol):
    """The factors of a call's weights. A watch has its own class, which may share tensors with the model."""

    @property
    def sizes(self) -> Sizes:
        """The sizes of the call, available without reading it."""

    @property
    def call(self) -> Call:
        """The call, checked at each access; do not hold it."""

    @property
    def form(self) -> Call:
        """The call, not checked: for its shapes, dtypes and devices."""

    @property
    def state(self) -> Tensor:
        """The normalizer of each row (B, H, T), such as the log-sum-exp."""

    @property
    def known_state(self) -> Tensor | None:
        """The row state; None for a log-sum-exp not yet computed."""

    @property
    def reading(self) -> tuple[Call, Tensor]:
        """The call and its row state, both of shifted rows where the bias is far from 0."""

    def tensors(self) -> list[Tensor]:
        """The tensors in memory now."""

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "CallFactors":
        """The same with the tensors changed."""


class Unwritten:
    """The queries and keys of a call when it ran: a map holds the caller's tensors, not copies.

    A version shows most writes. It does not show those of torch's fused optimizers to a leaf, those to an inference
    tensor, and whether a write to a cache with room for more keys was to these: such tensors leave a fingerprint.
    """

    __slots__ = ("_marks", "_tensors")

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        # While compiling there are no versions.
        self._marks = () if is_compiling() else (*map(_mark, tensors),)

    def check(self) -> None:
        """Check that the tensors are unchanged since then."""
        marked = [*zip(NAMES, self._tensors, self._marks, strict=False)]
        changed = [n for n, tensor, mark in marked if isinstance(mark, int) and version_counter(tensor) != mark]
        if not changed:
            taken = {n: (mark, tensor) for n, tensor, mark in marked if not isinstance(mark, int)}
            changed = _differing(taken)
        if changed:
            tensor = self._tensors[NAMES.index(changed[0])]
            raise OverwrittenError(
                f"the {changed[0]} {tuple(tensor.shape)} of this map have been written to since its call, and a map "
                f"holds them, not a copy: hand the call a clone(), or read the map before"
            )


NAMES = ("queries", "keys")


def _mark(tensor: Tensor) -> "int | Fingerprint":
    version = counted_version(tensor)
    if version is None or (version and is_part(tensor)) or (tensor.requires_grad and tensor.is_leaf):
        from regard.tensors.fingerprint import Fingerprint

        with DisableTorchFunction():
            return Fingerprint(tensor)
    return version


def _differing(taken: "dict[str, tuple[Fingerprint, Tensor]]") -> list[str]:
    if not taken:
        return []
    from regard.tensors.fingerprint import first_changed

    place = first_changed(list(taken.values()))
    return [] if place is None else [list(taken)[place]]


def needs_gradient(tensors: Sequence[Tensor]) -> bool:
    """Whether any of the tensors needs a gradient."""
    return True in [one.requires_grad for one in tensors]


def tensors_of_call(call: Call) -> list[Tensor]:
    """The tensors behind the weights of a call: query and key first."""
    return tensors_of_tree(call.query, call.key, call.score, call.normalization, call.mask, call.bias)


class GivenFactors:
    """A given call and its row state, computed at the first read if the kernel has no exact one."""

    __slots__ = ("__weakref__", "_call", "_row_shift", "_state", "_unwritten")

    def __init__(self, call: Call, state: Tensor | None) -> None:
        self._call = call
        self._state = state
        self._row_shift = None if call.bias is None else RowShift()
        self._unwritten = Unwritten(call.query, call.key)

    def __reduce__(self) -> tuple[object, ...]:
        return GivenFactors, (self.call, self.known_state)

    @property
    def sizes(self) -> Sizes:
        return self._call.sizes

    @property
    def call(self) -> Call:
        """The call."""
        self._unwritten.check()
        self._call.require_same("a map", self._state)
        return self._call

    @property
    def form(self) -> Call:
        return self._call

    @property
    def state(self) -> Tensor:
        if self._state is None or (not self._state.requires_grad and self._needs_graph()):
            # The first read may need no gradient, and a later one may.
            with torch.enable_grad():
                self._state = row_state(self.call)
        return self._state

    def _needs_graph(self) -> bool:
        """Whether a tensor takes a gradient that took none when the call ran."""
        if not is_recorded():
            return False
        for name, tensor in zip(NAMES, (self._call.query, self._call.key), strict=True):
            if tensor.requires_grad and tensor.grad_fn is None and viewed(tensor) is not None:
                raise GradientError(
                    f"the {name} {tuple(tensor.shape)} of this map took no gradient when the call ran, and take one "
                    "now: call requires_grad_() before, or read the map under torch.no_grad()"
                )
        return needs_gradient(tensors_of_call(self._call))

    @property
    def reading(self) -> tuple[Call, Tensor]:
        call, state = self.call, self.state
        if self._row_shift is None:
            return call, state
        with torch.enable_grad():  # As for the row state itself, the first read may need no gradient.
            return self._row_shift.applied(call, state)

    @property
    def known_state(self) -> Tensor | None:
        return self._state

    def tensors(self) -> list[Tensor]:
        return [self._call.query, self._call.key, *(() if self._state is None else (self._state,))]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "GivenFactors":
        call, state = tensors_mapped((self.call, self._state), change)
        if call.snapshot is not None:
            from regard.kernels.snapshot import with_new_snapshot

            call = with_new_snapshot(call)
        return GivenFactors(call, state)
