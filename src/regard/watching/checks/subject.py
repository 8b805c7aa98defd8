"""The subject of a check: a model, and rows it can read, alone and together, padded and packed.

A row is one sequence, without a dimension for the batch and without padding; `run` pads rows, calls the model, and says
where each row is.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.watching.checks.arguments import DOCUMENTS_TOLD, HUGE, Arguments, is_square, separate_blocks
from regard.watching.checks.audited_call import UserTold
from regard.watching.checks.made_up import MadeUp, eager_attention, longest, special_tokens
from regard.watching.checks.roles import is_huggingface_model
from regard.watching.checks.runs import (
    PackedRow,
    Sample,
    Samples,
    Side,
    SubjectRun,
    UnsupportedError,
    output_of,
    padded,
)
from regard.watching.checks.told import ENDS, documents_among
from regard.watching.interference import ROWS, Place, Places, results_of

IGNORED = -100
"""The label of positions without a loss."""


class Subject:
    """A model and a batch for it. If it should be `causal`, no output may depend on later positions of the sequence
    `ahead`: the target of a pair, ids before other numbers."""

    keeps_state = False
    """True if a call changes the results of the next one: each run is that of a copy."""
    sides: tuple[Side, ...]
    """Where it can pad."""

    def __init__(self, model: nn.Module, batch: Any, user: UserTold) -> None:
        self.model, self.made_up = model, batch if isinstance(batch, MadeUp) else None
        if self.made_up is not None:
            batch, user = self.made_up.batch, replace(user, keep=self.made_up.padding)
        positioned = None if self.made_up is None else self.made_up.positioned
        self._read(Arguments(model, batch, user, positioned, ()))
        for name in list(self.arguments.group_of) if self.made_up is None else ():
            before = self.arguments
            # (Features may stand before positions: (B, C, T).)
            if before.tensors[name].dim() == 3 and before.is_content(name) and not self._runs_shorter(name):
                self._read(Arguments(model, batch, user, positioned, (*before.turned, name)))
                if not self._runs_shorter(name):
                    self._read(before)
        self.causal = self.arguments.causality if user.causal is None else user.causal
        if self.causal is None and self.made_up is not None:
            self.causal = bool(self.made_up.causal)
        self.told_causal = user.causal or (not is_huggingface_model(model) and self.causal) or None
        if self.made_up is not None:
            self.sides = self.made_up.sides(causal=bool(self.causal))

    def _read(self, told: Arguments) -> None:
        self.arguments, self.ahead, self.tells, self.shared = told, told.ahead, told.tells, told.shared
        of = told.group_of
        rows = [
            {
                name: one[number][told.keeps[of[name]][number]] if name in of else one[number]
                for name, one in told.tensors.items()
                if name not in self.tells
            }
            for number in range(len(next(iter(told.tensors.values()))))
        ]
        long = max(rows, key=self._size)
        same = [row for row in rows if row is not long and self._lengths_of(row) == self._lengths_of(long)]
        turned = {n: one.flip(0) if n in of and told.is_content(n) else one for n, one in long.items()}
        shorter = [row for row in rows if self._size(row) < self._size(long)]
        short: Sample | None = min(shorter, key=self._size, default=None)
        if short is None and "position_ids" not in long:
            short = self._shortened(long)
        self.rows = Samples(long, same[0] if same else turned, None if told.squares else short)
        part = next((row for keep in told.keeps.values() for row in keep if not bool(row.all())), None)
        self.own_side: Side = "left" if part is not None and bool(part[-1]) and not bool(part[0]) else "right"
        self.sides = () if self.rows.short is None else (self.own_side,)

    def _runs_shorter(self, name: str) -> bool:
        """True if the model also runs without the last position of a sequence, which proves the axis of positions."""
        row, of = self.rows.long, self.arguments.group_of[name]
        with suppress(Exception):
            return all(self.run([one]) for one in (row, self.cut(row, slice(len(row[name]) - 1), of)))
        return False

    def _shortened(self, row: Sample) -> Sample | None:
        sequences = {one.of for one in self.tells.values()}
        lengths = {len(row[of]) for of in sequences}
        if len(lengths) != 1 or max(lengths) < 6:
            return None
        for of in sequences:
            row = self.cut(row, slice(max(lengths) * 2 // 3), of)
        return row

    def _size(self, row: Sample) -> int:
        return sum(self._lengths_of(row))

    def _lengths_of(self, row: Sample) -> list[int]:
        return [len(row[of]) for of in self.arguments.groups]

    @property
    def sequences(self) -> tuple[str, ...]:
        return tuple(sorted(self.arguments.groups, key=lambda name: name != self.ahead))

    def inputs_of(self, sequence: str) -> tuple[str, ...]:
        return tuple(name for name, of in self.arguments.group_of.items() if of == sequence)

    @property
    def contents(self) -> tuple[str, ...]:
        """The inputs of `ahead` whose values are no positions, kinds, documents or labels."""
        names = () if self.ahead is None else self.arguments.groups[self.ahead]
        return tuple(name for name in names if self.arguments.is_content(name))

    # -- other rows --------------------------------------------------------------------------------------

    def cut(self, row: Sample, at: slice, sequence: str | None = None) -> Sample:
        """Some positions of a sequence, `ahead` by default, in each of its inputs."""
        of = sequence or self.ahead or ""
        size = len(row[of])
        length = len(range(*at.indices(size)))
        return {
            **row, **{n: row[n][at] for n in self.inputs_of(of) if n in row},
            **{n: one[..., at, at] for n, one in self._squares(row, size).items()},
            **{n: row[n].new_tensor([0, length]) for n in ENDS if n in row},
        }  # fmt: skip

    def _squares(self, row: Sample, size: int) -> dict[str, Tensor]:
        """The masks of pairs, of a row and of all rows, with so many positions."""
        found = {n: row[n] for n in self.arguments.squares}
        found |= {n: one for n, one in self.shared.items() if isinstance(one, Tensor) and is_square(one[None])}
        return {n: one for n, one in found.items() if one.shape[-1] == size}

    def changed(self, row: Sample, at: slice, names: Sequence[str] | None = None) -> Sample:
        """The row with other contents at some positions, of the inputs of `ahead` by default."""
        names = self.contents if names is None else names
        return {**row, **{name: self._others(name, row[name], at) for name in names if name in row}}

    def _others(self, name: str, values: Tensor, at: slice) -> Tensor:
        """Other values at some positions: of integers those that occur in the rows, without marks such as images'."""
        own, found = values[at], values.clone()
        if values.is_floating_point():
            noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(1)).to(own)
            usual = values[values.isfinite() & (values.abs() < HUGE)]
            found[at] = own + noise * (float(usual.std()) + 1 if len(usual) > 1 else 1)
        elif values.dtype != torch.bool and len(pool := self._pool(name)) > 1:
            step = 1 + torch.arange(own.numel(), device=own.device).view(own.shape) % (len(pool) - 1)
            found[at] = torch.where(
                torch.isin(own, pool), pool[(torch.searchsorted(pool, own) + step) % len(pool)], own
            )
        return found

    def _pool(self, name: str) -> Tensor:
        config = getattr(self.model, "config", None)
        marks = special_tokens(config) if getattr(config, "model_type", None) is not None else set()
        found = torch.cat([one[name].flatten() for one in self.rows if one is not None]).unique()
        return found[~torch.isin(found, found.new_tensor(sorted({*marks, IGNORED})))]

    def made(self, length: int) -> Sample:
        """A row whose sequence `ahead` has another length."""
        if self.ahead is None or self.arguments.squares or self.is_packed:
            raise UnsupportedError("its inputs have one length")
        length = min(length, longest(self.model))
        row, generator = dict(self.rows.long), torch.Generator().manual_seed(length)
        for name in self.inputs_of(self.ahead):
            one = row[name]
            if name == "position_ids":
                row[name] = one.min() + torch.arange(length, device=one.device)
            elif not one.is_floating_point() and one.dim() == 1 and len(pool := self._pool(name)) > 2:
                row[name] = pool[torch.randint(len(pool), (length,), generator=generator).to(pool.device)]
            else:
                row[name] = one[torch.arange(length, device=one.device) % len(one)]
        return row

    def packed(self) -> PackedRow | None:
        is_given, row = self.made_up is None, self.rows.long
        if self.made_up is not None:
            row = (self.made_up.packed(self.rows) if self.causal else None) or row
        if self.ahead is None or (told := self._documents(row)) is None:
            return None
        documents, source, begins = told
        starts = [0, *(1 + (documents.diff() != 0).nonzero()[:, 0]).tolist(), len(documents)]
        spans = [slice(*pair) for pair in itertools.pairwise(starts)]
        if len(spans) < 2 or len(spans) > len(documents) // 2:
            return None
        return PackedRow({**row, **self._ends()}, spans, source, is_given, has_own_positions=begins)

    @property
    def is_packed(self) -> bool:
        return self.ahead is not None and self._documents(self.rows.long) is not None

    def _ends(self) -> dict[str, Tensor]:
        return {name: self.shared[name] for name in ENDS if isinstance(self.shared.get(name), Tensor)}

    def _documents(self, row: Sample) -> tuple[Tensor, str, bool] | None:
        assert self.ahead is not None
        if DOCUMENTS_TOLD in row:
            return row[DOCUMENTS_TOLD], "documents=", False
        given = {name: row[name][None] for name in self.inputs_of(self.ahead)} | self._ends()
        real = torch.ones(1, length := len(row[self.ahead]), dtype=torch.bool, device=row[self.ahead].device)
        if (found := documents_among(given, real)) is not None:
            return found[1][0], found[0], found[0] in (*ENDS, "position_ids")
        for name, mask in self._squares(row, length).items():
            if (blocks := separate_blocks(mask)) is not None:
                return blocks, name, False
        return None

    # -- runs --------------------------------------------------------------------------------------------

    def run(self, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0, width: int = 0) -> SubjectRun:
        """Run a batch; rows that are shorter than the longest, or than `width`, are padded on a side, with other values
        by `filler`."""
        batch, keeps = self.together(rows, side, filler, width)
        results = {name: one.clone() for name, one in results_of(self.called(batch)).items()}  # (It may reuse them.)
        return SubjectRun(results, self.places(len(rows), keeps, side))

    def places(self, rows: int, keeps: Mapping[str, Tensor], side: Side) -> list[Places]:
        """Those of each row; without a place of the row as a whole where its padding stands on the other side than the
        caller's, where a pooled result may be that of the first token, or in a pair of transformers, whose states may
        be of other lengths."""
        is_pooled = side == self.own_side and (len(keeps) == 1 or not is_huggingface_model(self.model))
        is_pooled = is_pooled or all(bool(keep.all()) for keep in keeps.values())
        whole = {ROWS: torch.zeros(1, dtype=torch.long)} if is_pooled else {}
        at = [{**whole, **{of: keep[row].nonzero()[:, 0] for of, keep in keeps.items()}} for row in range(rows)]
        return [{of: Place(row, index) for of, index in one.items()} for row, one in enumerate(at)]

    def together(
        self, rows: Sequence[Sample], side: Side, filler: int = 0, width: int = 0
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The arguments of a batch, and the real positions of each sequence, bool (B, L)."""
        of, wide = self.arguments.group_of, {self.ahead: width}
        keeps = {}
        for name in self.sequences:
            real = [row[name].new_ones(len(row[name]), dtype=torch.bool) for row in rows]
            keeps[name] = padded(real, side, 0, wide.get(name, 0))
        batch: dict[str, Any] = {}
        for name in rows[0]:
            own = [row[name] for row in rows]
            if name in self.shared:
                batch[name] = own[0]
            elif name in of:
                batch[name] = padded(own, side, self._filler(name, filler), wide.get(of[name], 0))
            else:
                batch[name] = torch.stack(own)
        for name, tells in self.tells.items():
            if self.made_up is None or tells.meaning is None or not bool(keeps[tells.of].all()):
                batch[name] = tells.given(keeps[tells.of])
        return batch, keeps

    def _filler(self, name: str, number: int) -> Tensor | float:
        if name in self.arguments.labels:
            return IGNORED
        is_filled = number and not self.arguments.is_by_token and self.arguments.is_content(name)
        return self.rows.long[name][number] if is_filled else self.arguments.padding_value(name)

    def given(self, batch: Mapping[str, Any], **more: Any) -> Any:
        """The arguments of a call: by name, or in the order of the caller's; without those that are `more`."""
        known = {n: one for n, one in {**self.shared, **batch}.items() if n != DOCUMENTS_TOLD}
        order = self.arguments.named
        known = {name: known[name] for name in dict.fromkeys((*order, *known)) if name in known}
        if self.made_up is not None:
            known |= self.made_up.settings
        known = {name: one for name, one in known.items() if name not in more}
        known |= {n: known[n].mT.contiguous() for n in self.arguments.turned if n in known}
        return known if self.arguments.by_name else [known[name] for name in order]

    def called(self, batch: Mapping[str, Any], **more: Any) -> Any:
        return output_of(self.model, self.given(batch, **more), **more)

    def keep(self, rows: Sequence[Sample]) -> Tensor | None:
        """The real positions of such a batch, bool (B, S), that no argument of the model tells; None without any."""
        if not self.arguments.is_told or self.ahead is None:
            return None
        keep = self.together(rows, self.own_side)[1][self.ahead]
        return None if bool(keep.all()) else keep

    def eager(self) -> AbstractContextManager[object]:
        if is_huggingface_model(self.model):
            return eager_attention(self.model)
        return sdpa_kernel([SDPBackend.MATH])

    def fresh(self) -> Self:
        return self.copied() if self.keeps_state else self

    def copied(self) -> Self:
        return self._of(copy.deepcopy(self.model))

    def in_double(self) -> Self:
        own: Any = copy.deepcopy(self.model).double()
        if hasattr(own, "set_experts_implementation"):
            own.set_experts_implementation("eager")
        return self._of(own)

    def _of(self, model: nn.Module) -> Self:
        other = copy.copy(self)
        other.model = model
        return other
