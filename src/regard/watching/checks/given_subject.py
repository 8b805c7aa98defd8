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
    read_in_steps,
    tensors_of,
)
from regard.watching.checks.told import IDS

KEEPS = ("attention_mask", "padding_mask", "keep")
"""Masks (B, L) with True or 1 for real tokens,"""
DROPS = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask")
"""and with True for padding, as in torch's modules."""


class GivenSubject(Subject):
    """A module and a batch for it. If it should be `causal`, no output may depend on later positions of the last input
    with positions."""

    def __init__(self, model: nn.Module, batch: Any, *, causal: bool | None) -> None:
        self.model, self.causal = model, causal
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
        self._masks = {name: one for name, one in tensors.items() if name in (*KEEPS, *DROPS) and one.dim() == 2}
        self._inputs = [name for name, one in tensors.items() if name not in self._masks and one.dim() > 1]
        self.ahead = self._inputs[-1] if self._inputs else None
        rows = [{name: one[number] for name, one in tensors.items()} for number in range(sizes.pop())]
        whole = max(rows, key=lambda row: int(self._real(row).sum()))
        rest = [row for row in rows if row is not whole]
        shortest = min(rest, key=lambda row: int(self._real(row).sum()), default=None)
        is_short = shortest is not None and not bool(self._real(shortest).all())
        alike = next((row for row in rest if bool(self._real(row).all())), None)
        turned = {name: one.flip(0) if name in self._inputs else one for name, one in whole.items()}
        self.rows = Samples(whole, turned if alike is None else alike, shortest if is_short else None)
        self.sides: tuple[Side, ...] = (self._side(shortest),) if is_short and shortest is not None else ()
        self.counts_columns = "position_ids" not in named

    def run(self, rows: Sequence[Sample], *, side: Side = "right", filler: int = 0) -> list[Outputs]:
        rows = [self._filled(row, filler) for row in rows]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        # A row alone is cropped to its own length, and needs no mask.
        if len(rows) == 1 and self._masks:
            real = self._real(rows[0])
            batch = {name: one[:, real] if one.shape[1:2] == real.shape else one for name, one in batch.items()}
        output = self._called(batch)
        real = torch.stack([self._real(row) for row in rows]) if len(rows) > 1 else self._real(rows[0])[None]
        real = real[:, real[0]] if len(rows) == 1 and self._masks else real
        keeps = {}
        for name in reversed(self._inputs):
            width = batch[name].shape[1]
            ones = torch.ones(len(rows), width, dtype=torch.bool, device=batch[name].device)
            keeps[name] = real if real.shape[1] == width and self._masks else ones
        if not keeps:
            keeps = {"": torch.ones(len(rows), 0, dtype=torch.bool)}
        return by_row(dict(tensors_of(output)), keeps)

    def _called(self, batch: Mapping[str, Any]) -> Any:
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        arguments = {
            name: one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one
            for name, one in {**self._shared, **batch}.items()
        }
        if self._by_name:
            return self.model(**arguments)
        return self.model(*(arguments[str(number)] for number in range(len(arguments))))

    def keep(self, rows: Sequence[Sample], side: Side) -> Tensor | None:
        return torch.stack([self._real(row) for row in rows]) if self._masks and len(rows) > 1 else None

    def steps(self, row: Sample, chunk: int) -> Outputs | None:
        """By the names of transformers: `forward` takes a cache and `use_cache`, and its output has the cache."""
        takes = inspect.signature(self.model.forward).parameters
        name, ids = cache_name(takes), self._inputs[0] if self._inputs else ""
        if name is None or "use_cache" not in takes or self.causal is False or IDS.get(ids) != "own":
            return None
        real = self._real(row)
        row = {n: one[real] if one.shape[:1] == real.shape else one for n, one in row.items()}
        length = len(row[ids])

        def step(start: int, stop: int, past: Any) -> Any:
            # (A mask is of all keys so far, and all else of the new positions.)
            cut = {n: one[(0 if n in self._masks else start) : stop] for n, one in row.items() if len(one) == length}
            given = {**{n: one[None] for n, one in {**row, **cut}.items()}, "use_cache": True}
            return self._called(given if past is None else {**given, name: past})

        whole = read_in_steps(length, chunk, step)
        if whole is None:
            return None
        return by_row(whole, {ids: torch.ones(1, length, dtype=torch.bool, device=row[ids].device)})[0]

    def shifted(self, row: Sample, by: int) -> Outputs | None:
        if "position_ids" not in row:
            return None
        return self.run([{**row, "position_ids": row["position_ids"] + by}])[0]

    def eager(self) -> AbstractContextManager[object] | None:
        return sdpa_kernel([SDPBackend.MATH])

    def _side(self, row: Sample) -> Side:
        """Where a row is padded."""
        real = self._real(row)
        return "left" if bool(real[-1]) and not bool(real[0]) else "right"

    def _real(self, row: Sample) -> Tensor:
        for name in self._masks:
            mask = row[name]
            if name in KEEPS:
                return mask.bool()
            return ~mask if mask.dtype == torch.bool else mask == 0
        return torch.ones(0, dtype=torch.bool)

    def _filled(self, row: Sample, filler: int) -> Sample:
        real = self._real(row)
        if not filler or not len(real) or bool(real.all()):
            return row
        out = dict(row)
        for name in self._inputs:
            if len(row[name]) == len(real):
                donor = self.rows.long[name].roll(filler, 0)
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
    is_square = one.dim() == 2 and one.shape[0] == one.shape[1] and name not in (*KEEPS, *DROPS)
    is_of_ids = not one.is_floating_point() and bool((one > 1).any())
    return is_square and not is_of_ids


def _shapes(named: Mapping[str, Any]) -> str:
    shown = {n: tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for n, v in named.items()}
    return ", ".join(f"{name}: {shape}" for name, shape in shown.items()) or "nothing"
