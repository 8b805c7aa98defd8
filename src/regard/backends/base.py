"""The frozen call, and the two methods that every backend answers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import BackendError, ShapeError
from regard.mechanisms.biases.base import Bias
from regard.mechanisms.masks.base import Mask, render
from regard.mechanisms.masks.selection import SelectedMask
from regard.mechanisms.normalizations import Normalization
from regard.mechanisms.scores.base import Score
from regard.mechanisms.shapes import Sizes, take


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call:
    """One attention call, checked and canonical: what every backend gets and an `AttentionMap` keeps.

    `query` (B, H, T, D) and `key` (B, G, S, D) have been through `score.prepare`; `mask` and `bias`
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

    @property
    def group(self) -> int:
        """H / G: how many query heads share a key/value head."""
        return self.sizes.heads // self.sizes.kv_heads

    @property
    def compute_dtype(self) -> torch.dtype:
        """At least float32: the dtype of scores, weights and row states."""
        return torch.promote_types(self.query.dtype, torch.float32)

    def scores(self, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """The masked and biased scores (B, H, t, s) of some rows and columns; -inf where excluded."""
        query = take(self.query, rows).to(self.compute_dtype)
        key = take(self.key, columns).to(self.compute_dtype)
        return self.scores_of(query, key.repeat_interleave(self.group, dim=1) if self.group > 1 else key, rows, columns)

    def scores_of(self, query: Tensor, key: Tensor, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """The same for the vectors (B, H, t, D) and (B, H, s, D) of those rows and columns."""
        scores = self.score.block(query, key)
        # What a function of the caller's hands out may be its own, and what autograd has seen it may have saved.
        is_ours = self.score.is_declared and not scores.requires_grad
        if self.bias is not None:
            bias = self.bias.block(rows, columns, query=query, key=key, sizes=self.sizes).to(scores.dtype)
            scores = scores.add_(bias) if is_ours and not bias.requires_grad else scores + bias
            is_ours = is_ours and not bias.requires_grad
        return self.masked_(scores, rows, columns) if is_ours else self.masked(scores, rows, columns)

    def masked(self, scores: Tensor, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """The scores of some rows and columns, -inf where the mask excludes."""
        if self.mask is None or _is_covered(self.mask, rows, columns):
            return scores
        return scores.masked_fill(~self.allowed(self.mask, rows, columns), -torch.inf)

    def masked_(self, scores: Tensor, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """The same, in place."""
        if self.mask is None or _is_covered(self.mask, rows, columns):
            return scores
        return scores.masked_fill_(~self.allowed(self.mask, rows, columns), -torch.inf)

    def expanded(self) -> "Call":
        """The call in its compute dtype, with key heads repeated for every query head."""
        return replace(
            self,
            query=self.query.to(self.compute_dtype),
            key=self.key.to(self.compute_dtype).repeat_interleave(self.group, dim=1),
            sizes=replace(self.sizes, kv_heads=self.sizes.heads),
        )

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
        """The call without dropout, in the map's dtype, and x (S, N) or (batch..., H or G, S, N) as its values.

        Raises:
            ShapeError: the values' leading dimensions do not fit.
        """
        sizes, tail = self.sizes, value.shape[-2:]
        groups = (*leading[:-1], sizes.kv_heads) if sizes.has_heads else leading
        heads = sizes.kv_heads if value.dim() == 2 or tuple(value.shape[:-2]) == groups else sizes.heads
        target = (*leading[:-1], heads) if sizes.has_heads else leading
        try:
            value = value.expand(*target, *tail).reshape(sizes.flat_batch, heads, *tail)
        except RuntimeError as error:
            raise ShapeError(f"values of shape {tuple(value.shape)} do not broadcast to {(*leading, *tail)}") from error
        if heads != sizes.kv_heads:
            return replace(self.expanded(), dropout=0.0), value.to(self.compute_dtype)
        query, key = self.query.to(self.compute_dtype), self.key.to(self.compute_dtype)
        return replace(self, query=query, key=key, dropout=0.0), value.to(self.compute_dtype)

    def allowed(self, mask: Mask, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """A bound mask rendered for some rows and columns."""
        return render(mask, rows, columns, sizes=self.sizes, device=self.query.device)

    def select(self, cells: Tensor) -> "Call":
        """The call on some (batch, head) pairs, flat indices b * H + h: each becomes a batch row of one head."""
        batches, heads = cells // self.sizes.heads, cells % self.sizes.heads
        # After a choice of heads these are batch rows.
        owners = batches if self.sizes.heads == 1 else heads
        return replace(
            self,
            query=self.query[batches, heads].unsqueeze(1),
            key=self.key[batches, heads // self.group].unsqueeze(1),
            score=self.score.select(owners),
            normalization=self.normalization.select(owners),
            mask=None if self.mask is None else SelectedMask(self.mask, batches, heads),
            bias=None if self.bias is None else self.bias.select(batches, heads),
            sizes=replace(self.sizes, batch=(len(cells),), heads=1, kv_heads=1, has_heads=False),
        )

    def learned(self) -> tuple[Tensor, ...]:
        """What takes a gradient besides query, key and value: the score's tensors, then the bias's."""
        bias = () if self.bias is None else self.bias.learned()
        return tuple(t for t in (*self.score.learned(), *bias) if t.requires_grad)


def _is_covered(mask: Mask, rows: range | Tensor, columns: range | Tensor) -> bool:
    return isinstance(rows, range) and isinstance(columns, range) and mask.covers(rows, columns)


class Backend(ABC):
    """One way to compute attention. It runs a call exactly, or says in a sentence why it cannot."""

    name: ClassVar[str]
    only_by_name: ClassVar[str | None] = None
    """Why `backend=None` never takes it, nor reads a map by it, where that is so."""

    @abstractmethod
    def why_not(self, call: Call) -> str | None:
        """None if this backend runs the call; otherwise what stands against it."""

    @abstractmethod
    def run(self, call: Call, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output (B, H, T, E) for value (B, G, S, E), and the normalization's row state (B, H, T).

        None stands for a state that the kernel does not return: it is computed where it is needed.
        """

    def remark(self, call: Call) -> str | None:
        """What `explain` adds where this backend runs the call."""
        return None

    def require(self, call: Call, others: str) -> None:
        """Raise if this backend, which the caller named, cannot run the call.

        Raises:
            BackendError: with the reason and what would run.
        """
        if reason := self.why_not(call):
            raise BackendError(f"backend {self.name!r} cannot run this call: {reason}; {others}")
