"""Rebuild rows of a call's output from the weights its map will give: the proof that the map is that of the call."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from regard.call.normalizations import Softmax
from regard.call.shapes import repeated, take
from regard.kernels.base import Call
from regard.maps.sources.factors import TOLERANCE, Factors
from regard.tensors.guards import can_look, has_values
from regard.tensors.tile_sizes import fitting, ranges
from regard.tensors.undisturbed import undisturbed
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS


class Rebuilt(NamedTuple):
    rebuilt: Tensor
    output: Tensor
    values: Tensor
    """The values of the call; their size is the unit of a difference."""
    scores: Tensor | None = None
    """The scores that the rows were rebuilt from, where the rounding of a kernel's scores moves them."""

    def error(self) -> float:
        miss = float((self.rebuilt - self.output.to(self.rebuilt.dtype)).abs().max())
        return miss / max(float(self.values.abs().max()), 1e-30)


class Rebuilding(ABC):
    output: Tensor

    @property
    def queries(self) -> int:
        """T."""
        return self.output.shape[-2]

    def some(self, rows: range) -> Rebuilt:
        """A few rows (..., t, E), of calls with scores from these, normalised anew."""
        whole = self.whole()
        rebuilt, output = (one[..., rows.start : rows.stop, :] for one in (whole.rebuilt, whole.output))
        return Rebuilt(rebuilt, output, whole.values)

    @abstractmethod
    def whole(self) -> Rebuilt:
        """All rows, from the weights as the map reads them."""

    def rounding(self, rows: range) -> Tensor | float:
        """How far the rounding of a kernel's scores can move these rows, in units of the values: about eps |score|."""
        return 0.0


@dataclass(frozen=True, slots=True, eq=False)
class CallRebuilding(Rebuilding):
    call: Call
    """Of the model's own tensors."""
    value: Tensor
    """(B, G or H, S, E)."""
    output: Tensor
    factors: Factors

    def some(self, rows: range) -> Rebuilt:
        mask, columns = self.call.mask, range(self.call.sizes.keys)
        if mask is not None and isinstance(rows, range):
            columns = mask.key_range(rows, self.call.sizes) or columns
        value, normalization = self.value.to(self.call.compute_dtype), self.call.normalization
        scores = self.call.few_scores(rows, columns)
        if type(normalization) is Softmax:
            # The row state that `normalize` computes beside the weights would double the cost.
            weights = torch.softmax(scores, -1).nan_to_num()
        else:
            weights = normalization.finish(*normalization.base.normalize(scores))[0]
        # Heads that share values are rows of one product, so values are not repeated.
        groups = weights.reshape(len(value), value.shape[1], -1, len(columns))
        rebuilt = (groups @ take(value, columns)).reshape(*weights.shape[:-1], -1)
        return Rebuilt(rebuilt, take(self.output, rows), value, scores)

    def whole(self) -> Rebuilt:
        return Rebuilt(weighted(*self.factors.read(), self.value), self.output, self.value)

    def rounding(self, rows: range) -> Tensor:
        return rounding_of(self.call.few_scores(rows), self.output.dtype)


@dataclass(slots=True, eq=False)
class RowProof:
    """The rebuilt rows of one call; on a GPU they are compared when the map is read, because reading would wait for the
    kernel."""

    rows: tuple[Tensor, Tensor] | None
    """The rows of the map and those of the model; None once they are compared."""
    rounding: Tensor | float
    unit: Tensor
    """The largest |value|."""
    tolerance: float
    found: Tensor | None = None

    def compared(self) -> Tensor:
        """The largest difference, its limit, and the two elements that differ most: the map's and the model's."""
        if self.rows is not None:
            rebuilt, output = self.rows
            with undisturbed():
                # An output that is not finite proves nothing: a row without keys is NaN in some kernels, and 0 in a
                # map.
                miss = (rebuilt - output).abs().masked_fill(~output.isfinite(), 0.0).nan_to_num(torch.inf)
                limit, at = (self.tolerance + self.rounding) * self.unit, miss.argmax()
                # (An index in brackets would be waited for.)
                measured = (miss.max(), limit.to(miss.dtype), rebuilt.take(at), output.take(at))
                self.rows, self.found = None, torch.stack(measured)
        assert self.found is not None
        return self.found

    def fault(self) -> str | None:
        miss, limit, rebuilt, given = self.compared().tolist()
        if not miss > limit:  # (On a GPU, values that are not finite have no limit, and prove nothing.)
            return None
        return (
            f"rebuilt wrongly: the output of the call has an element {given:.6g} where the weights of the map give "
            f"{rebuilt:.6g} (allowed difference {limit:.1g}), so this map is not that of the call"
        )


def prove(rebuilding: Rebuilding, choose: Random) -> RowProof | None:
    """Rebuild one row of an output: the first, the last, or any; None if it fits, as far as is known now."""
    with undisturbed():
        last = rebuilding.queries - 1
        row = choose.choice((0, last, choose.randint(0, last), choose.randint(0, last)))
        rows = range(row, row + 1)
        return _proof(rebuilding, rebuilding.some(rows), rows)


def prove_all(rebuilding: Rebuilding) -> tuple[float, RowProof | None]:
    with undisturbed():
        whole = rebuilding.whole()
        if not whole.output.numel():
            return 0.0, None
        proof = _proof(rebuilding, whole, range(rebuilding.queries))
        if proof is not None:
            proof.compared()
        return whole.error(), proof


def _proof(rebuilding: Rebuilding, found: Rebuilt, rows: range) -> RowProof | None:
    output, tolerance = found.output, TOLERANCE.get(found.output.dtype, 1e-3)
    if not has_values(output) or not output.numel():
        return None
    output = output.to(found.rebuilt.dtype, copy=not can_look(output))
    if can_look(output):
        miss = (found.rebuilt - output).abs()
        if float(miss.max()) <= tolerance * float(output.abs().max()):
            return None
    rounding = rebuilding.rounding(rows) if found.scores is None else rounding_of(found.scores, found.output.dtype)
    unit = torch.linalg.vector_norm(found.values, torch.inf)
    if can_look(unit) and not bool(unit.isfinite()):
        # Values that are not finite, as after rows without keys in another layer, are no unit of the others.
        unit = torch.linalg.vector_norm(found.values.nan_to_num(0.0, 0.0, 0.0), torch.inf)
    proof = RowProof((found.rebuilt, output), rounding, unit, tolerance)
    return None if can_look(output) and proof.fault() is None else proof


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


def rounding_of(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """How far rounding in a dtype moves weights of these scores: 2 eps |score|."""
    peak = torch.linalg.vector_norm(scores.nan_to_num(posinf=0.0, neginf=0.0), torch.inf)
    return peak * (2 * torch.finfo(dtype).eps)
