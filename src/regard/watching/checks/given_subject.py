"""Any module with a batch of one's own as the subject of a check.

The batch is a mapping of arguments by name, a tuple of arguments, or one tensor. Its tensors (B, ...) are cut into
sequences. A mask of padding is known by the published name of its argument, because values do not tell which of
True and False is padding; without one nothing is padded. A mask (T, T) for all sequences is known by its shape.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.errors import ArgumentError
from regard.watching.cache_argument import cache_name
from regard.watching.checks.subject import (
    Outputs,
    Sample,
    Samples,
    Side,
    Subject,
    by_row,
    output_of,
    read_in_steps,
    tensors_of,
)
from regard.watching.checks.told import IDS, MASKS


class GivenSubject(Subject):
    """A module and a batch for it. If it should be `causal`, no output may depend on later positions of the last input
    with positions."""

    def __init__(self, model: nn.Module, batch: Any, *, causal: bool | None) -> None:
        self.model, self.causal, self.told_causal = model, causal, causal or None
        self._by_name = isinstance(batch, Mapping)
        given = batch if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else (batch,)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        named = dict(given) if isinstance(given, Mapping) else {str(n): one for n, one in enumerate(given)}
        named = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in named.items()}
        self._shared = _shared(named)
        tensors = {name: one for name, one in named.items() if name not in self._shared}
        sizes = {len(one) for one in tensors.values()}
        if len(sizes) != 1 or not min(sizes):
            raise ArgumentError(
                f"a batch needs tensors (B, ...) with one B of at least 1, got {_shapes(named)}: masks (T, T) are "
                "passed on as they are if B is not T"
            )
        self._masks = {name: MASKS[name] for name, one in tensors.items() if name in MASKS and one.dim() == 2}
        self._inputs = [name for name, one in tensors.items() if name not in self._masks and one.dim() > 1]
        self._mask_of = {name: self._mask_for(name, tensors) for name in (*self._masks, *self._inputs)}
        # (A bool tensor of a name that is not known may be a mask.)
        self.ahead = next((name for name in reversed(self._inputs) if tensors[name].dtype != torch.bool), None)
        rows = [{name: one[number] for name, one in tensors.items()} for number in range(sizes.pop())]
        *rest, whole = sorted(rows, key=self._number_of_real)
        shortest = next((row for row in rest if self._is_padded(row)), None)
        alike = next((row for row in rest if not self._is_padded(row)), None)
        turned = {name: one.flip(0) if name in self._inputs else one for name, one in whole.items()}
        self.rows = Samples(whole, turned if alike is None else alike, shortest)
        self.sides: tuple[Side, ...] = () if shortest is None else (self._side(shortest),)
        self.counts_columns = "position_ids" not in named

    def run(self, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0) -> list[Outputs]:
        # A row alone is cropped to its own length, and needs no mask.
        rows = [self._filled(row, filler) if len(rows) > 1 else self._cropped(row) for row in rows]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        keeps = {name: torch.stack([self._real(row, name) for row in rows]) for name in reversed(self._inputs)}
        return by_row(dict(tensors_of(self._called(batch))), keeps or {"": torch.ones(len(rows), 0, dtype=torch.bool)})

    def _called(self, batch: Mapping[str, Any]) -> Any:
        given = {**self._shared, **batch}
        return output_of(self.model, given if self._by_name else [given[str(number)] for number in range(len(given))])

    def steps(self, row: Sample, chunk: int) -> Outputs:
        """By the names of transformers: `forward` takes a cache and `use_cache`, and its output has the cache."""
        takes = inspect.signature(self.model.forward).parameters
        name, ids = cache_name(takes), self._inputs[0] if self._inputs else ""
        if name is None or "use_cache" not in takes or self.causal is False or IDS.get(ids) != "own":
            return super().steps(row, chunk)
        row = self._cropped(row)
        length = len(row[ids])

        def step(start: int, stop: int, past: Any) -> Any:
            # (A mask is of all keys so far, and all else of the new positions.)
            cut = {n: one[(0 if n in self._masks else start) : stop] for n, one in row.items() if len(one) == length}
            given = {**{n: one[None] for n, one in {**row, **cut}.items()}, "use_cache": True}
            return self._called(given if past is None else {**given, name: past})

        keep = torch.ones(1, length, dtype=torch.bool, device=row[ids].device)
        return by_row(read_in_steps(length, chunk, step), {ids: keep})[0]

    def shifted(self, row: Sample, by: int) -> Outputs:
        if "position_ids" not in row:
            return super().shifted(row, by)
        return self.run([{**row, "position_ids": row["position_ids"] + by}])[0]

    def eager(self) -> AbstractContextManager[object]:
        return sdpa_kernel([SDPBackend.MATH])

    def _side(self, row: Sample) -> Side:
        """Where a row is padded."""
        sides = [real for real in self._masks_of(row) if not bool(real.all())]
        return "left" if bool(sides[0][-1]) and not bool(sides[0][0]) else "right"

    def _masks_of(self, row: Sample) -> list[Tensor]:
        return [meaning.real(row[name]) for name, meaning in self._masks.items()]

    def _number_of_real(self, row: Sample) -> int:
        return sum(int(real.sum()) for real in self._masks_of(row))

    def _is_padded(self, row: Sample) -> bool:
        return not all(bool(real.all()) for real in self._masks_of(row))

    def _mask_for(self, name: str, tensors: Mapping[str, Tensor]) -> str | None:
        """The mask of padding of an argument: itself, one of its length and its part of a pair, or of its length."""
        same = [mask for mask in self._masks if tensors[mask].shape[1] == tensors[name].shape[1]]
        of = IDS.get(name, "own")
        return min(same, key=lambda mask: (mask != name, self._masks[mask].part != of), default=None)

    def _real(self, row: Sample, name: str) -> Tensor:
        """The real positions of an argument of a row."""
        mask = self._mask_of[name]
        if mask is None:
            return torch.ones(len(row[name]), dtype=torch.bool, device=row[name].device)
        return self._masks[mask].real(row[mask])

    def _cropped(self, row: Sample) -> Sample:
        return {name: one[self._real(row, name)] if name in self._mask_of else one for name, one in row.items()}

    def _filled(self, row: Sample, filler: int) -> Sample:
        """The row with other values in its padding."""
        out = dict(row)
        for name in self._inputs if filler else ():
            real, donor = self._real(row, name), self.rows.long[name].roll(filler, 0)
            out[name] = torch.where(real.view(-1, *(1,) * (row[name].dim() - 1)), row[name], donor)
        return out


def _shared(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without a batch: all but tensors, and masks (T, T) for all sequences; raises ArgumentError where B
    is T."""
    shared = {name: one for name, one in named.items() if not isinstance(one, Tensor) or not one.dim()}
    squares = {name: one for name, one in named.items() if name not in shared and _may_be_mask(name, one)}
    sizes = {len(one) for name, one in named.items() if name not in shared and name not in squares}
    if sizes and (unclear := {name: one for name, one in squares.items() if len(one) in sizes}):
        raise ArgumentError(
            f"{_shapes(unclear)} may be a mask (T, T) for all sequences, or have a row for each: give a batch of "
            "another number of sequences"
        )
    return {**shared, **squares} if sizes else shared


def _may_be_mask(name: str, one: Tensor) -> bool:
    """True for a square tensor that is neither a mask of padding nor ids."""
    is_square = one.dim() == 2 and one.shape[0] == one.shape[1] and name not in MASKS
    is_of_ids = not one.is_floating_point() and bool((one > 1).any())
    return is_square and not is_of_ids


def _shapes(named: Mapping[str, Any]) -> str:
    shown = {n: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for n, v in named.items()}
    return ", ".join(f"{name}: {shape}" for name, shape in shown.items()) or "nothing"
