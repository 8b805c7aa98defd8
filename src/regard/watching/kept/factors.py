"""The factors of one observed attention call (queries, keys and row state), the source of its map."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from regard.call.masks.base import And, Mask
from regard.call.shapes import Sizes, repeated
from regard.kernels import BACKENDS, row_state
from regard.kernels.base import Call, row_sum_error
from regard.maps.sources.call_factors import GivenFactors
from regard.maps.sources.row_shift import RowShift
from regard.tensors.guards import autocasts, is_inference, is_recorded
from regard.tensors.tensor_tree import tensors_mapped
from regard.tensors.tile_sizes import fitting, ranges
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS, GivenMask
from regard.watching.kept.saved_tensor import SavedTensor, first_stale

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""How far the sum of the checked row may be from 1; beyond a kernel's log-sum-exp is not used."""


class Factors:
    """A call and its row state, each given or computed at the first read, and their source tensors.

    `call` is a `Call`, or a function that makes one from saved tensors (an input and its weights). A row state from an
    operator `of` torch is verified at the first read, and recomputed if it is wrong.
    """

    def __init__(
        self,
        sizes: Sizes,
        call: Call | Callable[[], Call],
        *,
        state: Tensor | SavedTensor | Callable[[], Tensor] | None = None,
        held: Iterable[SavedTensor] = (),
        of: str | None = None,
        notes: list[str] | None = None,
        even: Tensor | None = None,
        graph: bool = False,
        is_deferred: bool = False,
    ) -> None:
        self.sizes = sizes
        self._is_deferred = is_deferred
        """True if the call is made of the saved copies, on demand."""
        self._context = with_graph if graph else undisturbed
        self.even = even
        """Rows the model spread evenly because its mask left them no key, as in `GivenMask`."""
        self._make: Callable[[], Call] | None = None
        """Makes the call; None once it is made."""
        if isinstance(call, Call):
            self.form = call
        else:
            self._make = call
        self._state = state
        self.held = tuple(held)
        """The tensors the model must not overwrite; if the call may be a step, queries first and then keys."""
        self.keys: Keys | None = None
        self._of = of
        self._notes = [] if notes is None else notes
        self._row_shift = RowShift()

    @cached_property
    def form(self) -> Call:
        """The call, not checked: for its shapes, dtypes and devices."""
        return self.call

    @property
    def call(self) -> Call:
        """The call; raises OverwrittenError if the model has overwritten its tensors."""
        stale = first_stale(self.held if self.keys is None else (*self.held, self.keys.kept))
        if stale is not None:
            stale.check()
        if self._make is None:
            self.form.require_same("a map", self._state if isinstance(self._state, Tensor) else None)
        else:
            with self._context():
                self.form, self._make = self._make(), None
            if not self._is_deferred:
                # The computed call has tensors of its own, out of the model's reach.
                self.held = ()
        if self.keys is not None:
            return replace(self.form, key=self.keys.tensor[:, :, : self.sizes.keys])
        return self.form

    @property
    def state(self) -> Tensor:
        """The row state; if no kernel gave an exact one, one pass over the scores computes it."""
        return self._state_of(self.call)

    def _state_of(self, call: Call) -> Tensor:
        self._check(call)
        assert not isinstance(self._state, SavedTensor), "the check has read it"
        if self._state is None:
            with self._context():
                self._state = row_state(call)
        elif not isinstance(self._state, Tensor):
            with self._context():
                self._state = self._state()
        return self._state

    @property
    def known_state(self) -> Tensor | None:
        """The row state; None for a log-sum-exp of the scores not yet computed."""
        self._check(self.call)
        return None if self._state is None else self.state

    @property
    def reading(self) -> tuple[Call, Tensor]:
        """The call and its row state, both of shifted rows where the bias is far from 0."""
        call = self.call
        state = self._state_of(call)
        if call.bias is None:
            return call, state
        with self._context():
            return self._row_shift.applied(call, state)

    @property
    def is_stale(self) -> bool:
        """True if the model has overwritten tensors of the call."""
        return first_stale(self.held if self.keys is None else (*self.held, self.keys.kept)) is not None

    def check_state(self) -> None:
        """Check a kernel's row state now, if it can still be read."""
        if self._of is not None and not self.is_stale:
            self._check(self.call)

    def _check(self, call: Call) -> None:
        """Drop a kernel's row state if it is inexact, or wrong (with a warning)."""
        if isinstance(self._state, SavedTensor):
            self._state = self._state.tensor
        if self._of is None or not isinstance(self._state, Tensor):
            return
        operator, self._of = self._of, None
        self._state, miss = checked(call, self._state)
        if self._state is None:
            said = f"{operator} gave a log-sum-exp with which a row sums to 1 {miss:+.1e}: computed anew"
            self._notes.append(said)
        elif not BACKENDS["fused"].has_exact_state(call):
            self._state = None

    def __reduce__(self) -> tuple[object, ...]:
        """A copy (`copy`, `pickle`) is read at once, because the model keeps the source tensors."""
        return GivenFactors, (self.call, self.state)

    def follow(self, keys: "Keys") -> None:
        """Read the keys from `keys`, which grow with the steps, and drop our copy."""
        assert self._make is None, "its keys were compared"
        self.keys, self.held = keys, (self.held[0], *self.held[2:])
        self.form = replace(self.form, key=self.form.key.new_empty(0))

    def tensors(self) -> list[Tensor]:
        tensors = [kept.tensor for kept in self.held]
        if self.keys is not None:
            tensors.append(self.keys.tensor)
        if self._make is None:
            tensors += [self.form.query, self.form.key]
        if isinstance(self._state, Tensor | SavedTensor):
            tensors.append(self._state if isinstance(self._state, Tensor) else self._state.tensor)
        return tensors

    def mapped(self, change: Callable[[Tensor], Tensor]) -> GivenFactors:
        """Read all, and apply a change to each tensor; the model can no longer overwrite the result."""
        return GivenFactors(*tensors_mapped((self.call, self.state), change))


class Keys:
    """The keys of the last step of a generation; the keys of each earlier step are their beginning."""

    def __init__(self, tensor: Tensor, kept: SavedTensor) -> None:
        self.tensor = tensor
        self.kept = kept


def undisturbed() -> AbstractContextManager[object]:
    """A context without gradients, autocast and inference tensors, so a read is exact wherever it happens."""
    casting = autocasts()
    return _exactly(torch.no_grad(), casting) if casting or is_recorded() or is_inference() else nullcontext()


def with_graph() -> AbstractContextManager[object]:
    """The same with gradients."""
    return _exactly(recorded(), autocasts())


@contextmanager
def recorded() -> Iterator[None]:
    """A context with gradients, under the autocast of the call that is read in it. Saved-tensor hooks of others
    (torch.utils.checkpoint counts the tensors of a block) see nothing of a read."""
    keeps = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
    with torch.inference_mode(False), torch.enable_grad(), keeps:
        yield


def _exactly(gradients: AbstractContextManager[object], casting: tuple[str, ...]) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(gradients)
    for kind in casting:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def checked(call: Call, lse: Tensor) -> tuple[Tensor | None, float]:
    """A kernel's log-sum-exp, or None if the last row of weights does not sum to 1 with it; and the error."""
    with undisturbed():
        miss = row_sum_error(call, lse)
    return (lse if miss <= _tolerance(call) else None), miss


def _tolerance(call: Call) -> float:
    return TOLERANCE.get(call.query.dtype, 1e-3)


def masked(call: Call, given: GivenMask, also: Mask | None) -> Call:
    """Put a call under more masks; rows the model spreads evenly get a query of 0."""
    if also is None and given.mask is None and given.bias is None and given.even is None:
        return call
    bound = None if also is None else also.bind(call.sizes, call.query.device)
    masks = [m for m in (call.mask, bound, given.mask) if m is not None]
    mask = None if not masks else masks[0] if len(masks) == 1 else And(tuple(masks))
    query = call.query if given.even is None else call.query.masked_fill(given.even[..., None], 0.0)
    return replace(call, query=query, mask=mask, bias=call.bias if given.bias is None else given.bias)


def weighted(call: Call, state: Tensor, value: Tensor) -> Tensor:
    """P V for a value (B, G or H, S, E), a few rows at a time; P are the weights the map reads."""
    with undisturbed():
        sizes, pieces = call.sizes, []
        value = repeated(value.to(call.compute_dtype), sizes.heads)
        step = fitting(CHUNK_ELEMENTS, sizes.flat_batch * sizes.heads * sizes.keys)
        for rows in ranges(sizes.queries, step):
            scores = call.scores(rows, range(sizes.keys))
            pieces.append(call.normalization.weights(scores, state[..., rows.start : rows.stop]) @ value)
        return torch.cat(pieces, dim=2)


def share_keys(before: Factors | None, after: Factors) -> None:
    """If the keys of a step begin with those of the step before, keep only the longer ones, for both."""
    if before is None or before.is_stale:
        return
    longer = after.call.key
    if not _begins_with(longer, before.call.key):
        return
    keys = before.keys or Keys(longer, after.held[1])
    keys.tensor, keys.kept = longer, after.held[1]
    if before.keys is None:
        before.follow(keys)
    after.follow(keys)


def _begins_with(longer: Tensor, key: Tensor) -> bool:
    same = key.shape[:2] == longer.shape[:2] and key.shape[3] == longer.shape[3] and key.shape[2] <= longer.shape[2]
    same = same and key.dtype == longer.dtype
    return same and bool(torch.equal(longer[:, :, : key.shape[2]], key))
