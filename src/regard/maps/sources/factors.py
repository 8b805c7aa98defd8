r"""Rows with biases so far from 0 that their log-sum-exp has no digits left for the weights.

$\mathrm{lse} = m + \ln \sum_j \exp(s_j - m)$ is one scalar. If the scores of a whole row are near $m = -10^9$, float32
has steps of 64 there, and the sum is lost: each weight is read as 1. The weights are those of the scores less $m$:
$P_j = \exp((s_j - m) - \mathrm{lse}')$ with $\mathrm{lse}' = \ln \sum_j \exp(s_j - m)$.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.call.biases.base import Bias, BlockBias
from regard.call.normalizations import Softmax, SoftmaxWithSink, any_coarse, coarse_rows
from regard.call.scores.base import Score
from regard.call.shapes import Rows, Sizes, take_rows
from regard.errors import GradientError
from regard.kernels import BACKENDS, row_state
from regard.kernels.base import Call, row_sum_error
from regard.tensors.fresh import Fresh
from regard.tensors.guards import has_values, in_transform, is_recorded
from regard.tensors.tensor_tree import tensors_mapped, tensors_of_tree
from regard.tensors.torch_private import viewed
from regard.tensors.undisturbed import undisturbed


class RowShift:
    def __init__(self) -> None:
        self._is_known = False
        self._peak: Tensor | None = None
        self._state: Tensor | None = None

    def applied(self, call: Call, state: Tensor) -> tuple[Call, Tensor]:
        normalization = call.normalization
        if call.bias is None or not isinstance(normalization, Softmax):
            return call, state
        if not self._is_known:
            if not has_values(state) or in_transform("Vmap"):
                return call, state
            if any_coarse(state):
                self._peak = torch.where(coarse_rows(state), state, 0.0).detach()
            self._is_known = True
        if self._peak is None:
            return call, state
        # The weights of a softmax with a sink follow from its row state as those of a plain one.
        lowered = replace(call, bias=ShiftedBias(call.bias, call.score, self._peak), normalization=Softmax())
        if self._state is None:
            self._state = row_state(lowered)
            if isinstance(normalization, SoftmaxWithSink):
                self._state = torch.logaddexp(self._state, normalization.sink_of_rows(state) - self._peak)
        return lowered, self._state


@dataclass(frozen=True, slots=True, eq=False)
class ShiftedBias(BlockBias):
    """A bias b that gives (s + b) - m for the scores s + b, with s + b rounded as in the kernels."""

    bias: Bias
    score: Score
    peak: Tensor
    """m (B, H, T)."""
    reads_vectors = True

    def learned(self) -> tuple[Tensor, ...]:
        return self.bias.learned()

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        added = self.bias.block(rows, columns, query=query, key=key, sizes=sizes)
        return self._lowered(added, query, key, take_rows(self.peak, rows)[..., None])

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        added = self.bias.pairs(rows, columns, query=query, key=key, sizes=sizes)
        return self._lowered(added, query, key, self.peak[..., rows].movedim(-1, 0)[..., None, None])

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        owners = batches if self.peak.shape[1] == 1 else heads  # as in `Call.select`
        peak = self.peak[batches, heads].unsqueeze(1)
        return ShiftedBias(self.bias.select(batches, heads), self.score.select(owners), peak)

    def _lowered(self, added: Tensor, query: Tensor, key: Tensor, peak: Tensor) -> Tensor:
        # The caller adds s with its gradient.
        with torch.no_grad():
            scores = self.score.block(query, key)
        added, peak = added.to(scores.dtype), peak.to(scores.dtype)
        # A compact kernel has scores of -inf, and -inf - -inf is NaN.
        return torch.where(scores.isfinite(), scores + added - peak - scores, added - peak)


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""How far the sum of the checked row may be from 1; beyond it a kernel's log-sum-exp is not used."""
NOTHING_HELD = Fresh()


class Reading(NamedTuple):
    """A call and the state of its rows, both of shifted rows where the bias is far from 0."""

    call: Call
    state: Tensor
    """The normalizer of each row (B, H, T), such as the log-sum-exp; -inf for a row without a key."""


class GrowingKeys:
    """The keys of the last step of a generation; the keys of each earlier step are their beginning."""

    def __init__(self, tensor: Tensor, fresh: Fresh) -> None:
        self.tensor = tensor
        self.fresh = fresh


class Factors:
    """A call and its row state, each given or computed at the first read, and the tensors that they are made of."""

    __slots__ = (
        "__weakref__", "_at_first", "_make", "_of_kernel", "_row_shift", "_state", "_within", "even", "form", "fresh",
        "keys", "notes", "sizes",
    )  # fmt: skip
    form: Call
    """The call, not checked: for its shapes, dtypes and devices."""

    def __init__(
        self,
        make: Call | Callable[[], Call],
        state: Tensor | None,
        *,
        sizes: Sizes,
        fresh: Fresh,
        sources: Fresh | None = None,
        keys: Fresh | None = None,
        within: Callable[[], AbstractContextManager[object]] = torch.enable_grad,
        of_kernel: str | None = None,
        even: Tensor | None = None,
        notes: list[str] | None = None,
    ) -> None:
        """Hold a call; `make` may make it of the tensors in `sources`, at the first read.

        `state` is None for one that a pass over the scores computes at the first read. `keys` holds the keys apart if
        those of a later step of a generation may take their place. `within` is the context of computations at a read:
        under `enable_grad` a map takes a graph when it is read. `of_kernel` names the operator that gave the state,
        which is verified at the first read, and computed anew if it is wrong; `notes` takes the words about that.
        `even` are the rows that the model spread evenly because its mask left them no key.
        """
        self._make: Callable[[], Call] | None = None
        if isinstance(make, Call):
            self.form = make
        else:
            self._make = make
        self._state, self.fresh, self._within = state, fresh, within
        self._at_first = fresh if sources is None else fresh.joined(sources)
        self._of_kernel, self.even, self.notes = of_kernel, even, notes
        self.sizes = sizes
        self.keys = None if keys is None else GrowingKeys(self.form.key, keys)
        self._row_shift: RowShift | None = None

    @classmethod
    def given(cls, call: Call, state: Tensor | None, lse: Tensor | None = None) -> "Factors":
        """A given call, the row state of its kernel, and the log-sum-exp of others that this state may be."""
        fresh = Fresh(queries=call.query, keys=call.key, log_sum_exp=lse)
        return cls(call, state, sizes=call.sizes, fresh=fresh)

    def __reduce__(self) -> tuple[object, ...]:
        """A copy (`copy`, `pickle`) is read at once, because others hold the tensors."""
        call = self.call
        return Factors.given, (call, self.known_state_of(call))

    def __getattr__(self, name: str) -> Call:
        if name != "form":
            raise AttributeError(name)
        return self.call

    @property
    def call(self) -> Call:
        (self._at_first if self.keys is None else self._held()).check()
        if self._make is None:
            self.form.require_same("a map", self._state)
        else:
            with self._within():
                self.form, self._make = self._make(), None
            # The computed call has tensors of its own, out of the reach of others.
            self._at_first = self.fresh
        call = self.form
        if self.keys is not None and self.keys.tensor is not call.key:
            return replace(call, key=self.keys.tensor[:, :, : self.sizes.keys])
        return call

    def read(self) -> Reading:
        call = self.call
        state = self.state_of(call)
        if call.bias is None:
            return Reading(call, state)
        if self._row_shift is None:
            self._row_shift = RowShift()
        with self._within():
            return Reading(*self._row_shift.applied(call, state))

    def state_of(self, call: Call) -> Tensor:
        """The row state of the checked call; if no kernel gave an exact one, one pass over the scores computes it."""
        state = self._state if self._of_kernel is None else self.known_state_of(call)
        if state is None or (self._within is torch.enable_grad and not state.requires_grad and _takes_graph(call)):
            # The first read may need no gradient, and a later one may.
            with self._within():
                self._state = state = row_state(call)
        return state

    def known_state_of(self, call: Call) -> Tensor | None:
        if self._of_kernel is not None and self._state is not None:
            self._verify(call, self._state)
        return self._state

    def verify(self) -> None:
        if self._of_kernel is not None and not self.is_stale:
            self.known_state_of(self.call)

    def _verify(self, call: Call, state: Tensor) -> None:
        operator, self._of_kernel = self._of_kernel, None
        with undisturbed():
            miss = row_sum_error(call, state)
        if not miss <= TOLERANCE.get(call.query.dtype, 1e-3):
            self._state = None
            if self.notes is not None:
                said = f"{operator} gave a log-sum-exp with which a row sums to 1 {miss:+.1e}: computed anew"
                self.notes.append(said)
        elif not BACKENDS["fused"].has_exact_state(call):
            self._state = None

    @property
    def is_stale(self) -> bool:
        return self._held().changed() is not None

    def _held(self) -> Fresh:
        return self._at_first if self.keys is None else self._at_first.joined(self.keys.fresh)

    def share_keys(self, later: "Factors") -> None:
        """Read the keys from those of a later step, which begin with these, and drop our own; so does that step."""
        keys = self.keys
        assert keys is not None, "a step holds its keys apart"
        assert later.keys is not None, "and so does the next one"
        keys.tensor, keys.fresh = later.keys.tensor, later.keys.fresh
        later.keys = keys
        for one in (self, later):
            one.form = replace(one.form, key=one.form.key.new_empty(0))

    def tensors(self) -> list[Tensor]:
        found = [self.form.query, self.form.key] if self._make is None else []
        found += [] if self._state is None else [self._state]
        others = self._held().tensors() + ([] if self.keys is None else [self.keys.tensor])
        return found + [one for one in others if not any(one is other for other in found)]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Factors":
        call = self.call
        call, state = tensors_mapped((call, self.known_state_of(call)), change)
        if call.snapshot is not None:
            from regard.kernels.snapshot import with_new_snapshot

            call = with_new_snapshot(call)
        return Factors.given(call, state)


def _takes_graph(call: Call) -> bool:
    if not is_recorded():
        return False
    for name, tensor in (("queries", call.query), ("keys", call.key)):
        if tensor.requires_grad and tensor.grad_fn is None and viewed(tensor) is not None:
            raise GradientError(
                f"the {name} {tuple(tensor.shape)} of this map took no gradient when the call ran, and take one "
                "now: call requires_grad_() before, or read the map under torch.no_grad()"
            )
    return needs_gradient(tensors_of_call(call))


def needs_gradient(tensors: Sequence[Tensor]) -> bool:
    return True in [one.requires_grad for one in tensors]


def tensors_of_call(call: Call) -> list[Tensor]:
    return tensors_of_tree(call.query, call.key, call.score, call.normalization, call.mask, call.bias)
