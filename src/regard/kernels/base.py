"""The frozen call, and the interface of all backends."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from regard.call.biases.base import Bias
from regard.call.masks.base import And, Mask
from regard.call.masks.basic import Causal, Lengths
from regard.call.masks.selection import SelectedMask
from regard.call.normalizations import Normalization, Softmax
from regard.call.scores.base import ScaledDot, Score
from regard.call.shapes import Rows, Sizes, repeated, take
from regard.errors import BackendError, OverwrittenError, ShapeError
from regard.tensors.guards import State, has_values, is_transformed
from regard.tensors.tensor_tree import UNSAVED

if TYPE_CHECKING:
    from regard.tensors.fingerprint import Fingerprints

BackendName = Literal["fused", "tiled", "reference"]
BACKWARD = "its backward pass"
OWN_TENSORS = frozenset({Causal, Lengths})
"""Masks that own their tensors when bound, of whatever size."""
NARROW = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes whose scores are float32. (Asking torch takes as long as a small operator.)"""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The parts of a call that others may change: large tensors, functions, foreign classes."""

    fingerprints: "Fingerprints"
    has_code: bool
    """Whether there are functions or classes of the caller. They may depend on more, such as random numbers."""

    def require_unchanged(self, reader: str) -> None:
        changed = self.fingerprints.changed()
        if changed is not None:
            raise OverwrittenError(
                f"{changed} has changed since the attention call, and {reader} reads it again: use it before the "
                "change, or hand the call a copy (a clone(), a function with values of its own)"
            )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call:
    """One attention call, checked and canonical: the input of every backend, and the content of an `AttentionMap`.

    `score.prepare` has already been applied to `query` (B, H, T, D) and `key` (B, G, S, D); `mask` and `bias`
    are bound.
    """

    query: Tensor
    key: Tensor
    score: Score
    normalization: Normalization
    mask: Mask | None
    bias: Bias | None
    dropout: float
    sizes: Sizes
    snapshot: Snapshot | None = field(default=None, metadata=UNSAVED)
    """The parts of it that others may change; None if there are none, or if nothing reads them again."""

    @property
    def group(self) -> int:
        """H / G: the query heads of a key/value head."""
        return self.sizes.heads // self.sizes.kv_heads

    @property
    def compute_dtype(self) -> torch.dtype:
        """At least float32: the dtype of scores, weights and row states."""
        dtype = self.query.dtype
        return torch.float32 if dtype in NARROW else torch.promote_types(dtype, torch.float32)

    def scores(self, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """The masked and biased scores (B, H, t, s) of some rows and columns; -inf for excluded pairs."""
        query, key = take(self.query, rows), take(self.key, columns)
        dtype = self.compute_dtype
        if query.dtype != dtype or key.dtype != dtype:  # (A no-op `to` takes microseconds.)
            query, key = query.to(dtype), key.to(dtype)
        return self.scores_of(query, repeated(key, self.sizes.heads), rows, columns)

    def scores_of(self, query: Tensor, key: Tensor, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """The same scores, from the vectors (B, H, t, D) and (B, H, s, D) of those rows and columns."""
        scores = self.score.block(query, key)
        # Change tensors in place only if unshared: a custom function may return a tensor it holds, and autograd may
        # have saved a recorded tensor.
        is_ours = self.score.is_declared and not scores.requires_grad
        if self.bias is not None:
            bias = self.bias.block(rows, columns, query=query, key=key, sizes=self.sizes).to(scores.dtype)
            scores = scores.add_(bias) if is_ours and not bias.requires_grad else scores + bias
            is_ours = is_ours and not bias.requires_grad
        return self.masked_(scores, rows, columns) if is_ours else self.masked(scores, rows, columns)

    def masked(self, scores: Tensor, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """The scores of some rows and columns, with -inf for pairs excluded by the mask."""
        if self.mask is None or _is_covered(self.mask, rows, columns):
            return scores
        return scores.masked_fill(~self.allowed(self.mask, rows, columns), -torch.inf)

    def masked_(self, scores: Tensor, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        if self.mask is None or _is_covered(self.mask, rows, columns):
            return scores
        return scores.masked_fill_(~self.allowed(self.mask, rows, columns), -torch.inf)

    def few_scores(self, rows: Rows, columns: range | None = None) -> Tensor:
        """The scores (B, H, t, s) of a few queries with some keys, by default all. Heads that share a key are rows of
        one product, so keys are not repeated."""
        sizes, dtype, columns = self.sizes, self.compute_dtype, range(self.sizes.keys) if columns is None else columns
        scale = self.score.dot_scale(self.query.shape[-1])
        if scale is None:
            return self.scores(rows, columns)
        query, key = take(self.query, rows).to(dtype), take(self.key, columns).to(dtype)
        groups = query.reshape(len(query), sizes.kv_heads, self.group * query.shape[-2], query.shape[-1])
        scores = (groups * scale @ key.mT).reshape(*query.shape[:-1], len(columns))
        if self.bias is not None:
            scores = scores + self.bias.block(rows, columns, query=query, key=key, sizes=sizes).to(scores.dtype)
        return self.masked(scores, rows, columns)

    def expanded(self) -> "Call":
        """The call in its compute dtype, with key heads repeated for every query head."""
        dtype, sizes = self.compute_dtype, self.sizes
        if self.query.dtype == self.key.dtype == dtype and sizes.kv_heads == sizes.heads:
            return self
        query, key = self.query.to(dtype), repeated(self.key.to(dtype), sizes.heads)
        return replace(self, query=query, key=key, sizes=replace(sizes, kv_heads=sizes.heads))

    def pair_scores(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The scores (B, H, N) of the N pairs (rows[n], columns[n])."""
        query = self.query[:, :, rows].to(self.compute_dtype).movedim(2, 0)
        key = self.key[:, :, columns].to(self.compute_dtype).movedim(2, 0).repeat_interleave(self.group, dim=2)
        query, key = query[..., None, :], key[..., None, :]
        scores = self.score.block(query, key)
        if self.bias is not None:
            bias = self.bias.pairs(rows, columns, query=query, key=key, sizes=self.sizes)
            scores = scores + bias.to(scores.dtype)
        scores = scores[..., 0, 0].movedim(0, -1)
        if self.mask is not None:
            batch = torch.arange(self.sizes.flat_batch, device=scores.device)[:, None, None]
            head = torch.arange(self.sizes.heads, device=scores.device)[:, None]
            scores = scores.masked_fill(~self.mask.allowed(batch, head, rows, columns), -torch.inf)
        return scores

    def for_values(self, value: Tensor, leading: tuple[int, ...]) -> tuple["Call", Tensor]:
        """The call without dropout in its compute dtype, and x (S, N) or (batch..., H or G, S, N) as its values."""
        sizes, tail = self.sizes, value.shape[-2:]
        # As in the call itself, a batch dimension of the values may be 1.
        is_own = sizes.has_heads and tuple(leading) == (*sizes.batch, sizes.heads)
        is_grouped = is_own and value.dim() == len(leading) + 2 and value.shape[-3] == sizes.kv_heads
        heads = sizes.kv_heads if value.dim() == 2 or is_grouped else sizes.heads
        target = (sizes.flat_batch, heads) if value.dim() == 2 else (*leading[:-1], heads) if is_own else leading
        try:
            value = value.expand(*target, *tail).reshape(sizes.flat_batch, heads, *tail)
        except RuntimeError as error:
            raise ShapeError(f"values of shape {tuple(value.shape)} do not broadcast to {(*leading, *tail)}") from error
        if heads != sizes.kv_heads:
            return replace(self.expanded(), dropout=0.0), value.to(self.compute_dtype)
        query, key = self.query.to(self.compute_dtype), self.key.to(self.compute_dtype)
        return replace(self, query=query, key=key, dropout=0.0), value.to(self.compute_dtype)

    def allowed(self, mask: Mask, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """The boolean block of a bound mask for some rows and columns."""
        return mask.block(rows, columns, sizes=self.sizes, device=self.query.device)

    def select(self, flat_heads: Tensor) -> "Call":
        """The call on some (batch, head) pairs, as flat indices b * H + h. Each becomes a sequence of one head."""
        batches, heads = flat_heads // self.sizes.heads, flat_heads % self.sizes.heads
        # With one head the parameters belong to sequences: an earlier selection has turned its heads into sequences.
        owners = batches if self.sizes.heads == 1 else heads
        return replace(
            self,
            query=self.query[batches, heads].unsqueeze(1),
            key=self.key[batches, heads // self.group].unsqueeze(1),
            score=self.score.select(owners),
            normalization=self.normalization.select(owners),
            mask=None if self.mask is None else SelectedMask(self.mask, batches, heads),
            bias=None if self.bias is None else self.bias.select(batches, heads),
            sizes=replace(self.sizes, batch=(len(flat_heads),), heads=1, kv_heads=1, has_heads=False),
        )

    @property
    def holds_own_parts(self) -> bool:
        """Whether it holds nothing that others may change but its queries and keys."""
        is_dot = self.bias is None and type(self.score) is ScaledDot and type(self.normalization) is Softmax
        masks = () if self.mask is None else self.mask.masks if type(self.mask) is And else (self.mask,)
        return is_dot and OWN_TENSORS.issuperset(map(type, masks))

    def require_same(self, reader: str, state: Tensor | None) -> None:
        """Check the parts of others before they are read again: their tensors, and two rows where they have code."""
        if self.snapshot is None:
            return
        self.snapshot.require_unchanged(reader)
        if self.snapshot.has_code and state is not None and has_values(state) and not is_transformed():
            rows = torch.tensor(sorted({self.sizes.queries // 2, self.sizes.queries - 1}), device=state.device)
            with torch.no_grad():
                weights, anew = self.normalization.base.normalize(self.few_scores(rows))
                if self.normalization.has_base:
                    anew = self.normalization.finish(weights, anew)[1]
            require_same_rows(anew, state[..., rows], reader)

    def guard(self, *results: Tensor | None) -> None:
        """Check the tensors of the parts of others before the backward pass of these results."""
        snapshot = self.snapshot
        for result in results if snapshot is not None and not is_transformed() else ():
            if snapshot is not None and result is not None and result.requires_grad:
                result.register_hook(lambda grad: snapshot.require_unchanged(BACKWARD))

    def learned(self) -> tuple[Tensor, ...]:
        """The tensors besides query, key and value with a gradient: those of the score, then those of the bias."""
        bias = () if self.bias is None else self.bias.learned()
        return tuple(t for t in (*self.score.learned(), *bias) if t.requires_grad)


def row_sum_error(call: Call, lse: Tensor) -> float:
    r"""The largest $|\ln \sum_j \exp(s_{ij} - \mathrm{lse}_i)|$ of the last query, over sequences and heads. It uses
    few operations, because it runs for every watched call."""
    found, given = call.few_scores(range(call.sizes.queries - 1, call.sizes.queries)).logsumexp(-1), lse[..., -1:]
    if call.mask is not None or call.bias is not None:
        dead = (found == -torch.inf) & (given == -torch.inf)
        found, given = found.masked_fill(dead, 0.0), given.masked_fill(dead, 0.0)
    return float((found - given).abs().max().item())


def require_same_rows(anew: Tensor, state: Tensor, reader: str) -> None:
    anew, state = anew.detach(), state.detach().to(anew.dtype)
    rounding = torch.finfo(anew.dtype).eps ** 0.5
    if torch.allclose(anew, state, rtol=rounding, atol=rounding, equal_nan=True):
        return
    place = (anew - state).nan_to_num(nan=torch.inf).abs().argmax()
    raise OverwrittenError(
        f"a mask, a bias or a score of the attention call answers otherwise than when it ran: a row has the "
        f"normalizer {anew.flatten()[place]:.6g} in place of {state.flatten()[place]:.6g}, and {reader} needs the "
        "same: give the function its own values, and no random numbers"
    )


def _is_covered(mask: Mask, rows: range | Tensor, columns: range | Tensor) -> bool:
    return isinstance(rows, range) and isinstance(columns, range) and mask.covers(rows, columns)


class Backend(ABC):
    """An implementation of attention. A backend runs a call exactly, or gives the reason for a refusal."""

    name: ClassVar[str]

    @abstractmethod
    def why_not(self, call: Call, state: State) -> str | None:
        """The reason why this backend cannot run the call in this state; None if it can."""

    @abstractmethod
    def run(self, call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
        """The output (B, H, T, E) for value (B, G, S, E), and the normalization's row state (B, H, T)."""

    def unnamed(self) -> "Backend":
        """This backend for a caller without a choice; it may leave parts to others."""
        return self

    def has_exact_state(self, call: Call) -> bool:
        """Whether the row state of `run` is exact to the call's compute dtype; a map holds only such states."""
        return True

    def require(self, call: Call, state: State, others: str) -> None:
        """Raise an error if this backend, chosen by name, cannot run the call.

        Raises:
            BackendError: the backend cannot run the call; the message gives the reason and `others`.
        """
        if reason := self.why_not(call, state):
            raise BackendError(f"backend {self.name!r} cannot run this call: {reason}; {others}")
