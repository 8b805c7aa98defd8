"""Rounding or fault: the difference of two runs of a model.

A difference that shrinks with the precision is rounding (even a mixture of experts may choose another expert by it); a
persistent one is a fault. So a large difference is measured again in float64.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from regard.watching.checks.subject import Outputs, Subject

LARGE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""From where on a difference is measured again, relative to the largest output; 1e-2 in other dtypes."""
STAYS = 1e-6
"""The least fault in float64; many models still compute parts in float32 there."""
DifferenceMeasure = Callable[[Subject], float]


def largest_difference(one: Sequence[Outputs], other: Sequence[Outputs], before: int | None = None) -> float:
    """The largest difference of the outputs of rows in two runs, over the largest |output|; NaN if either has NaN.
    Outputs of unlike shapes are not compared, and only positions `before` one, if given."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        for name in mine.keys() & theirs.keys():
            a, b = (side[name].values.detach().cpu().double() for side in (mine, theirs))
            if before is not None:
                a, b = a[:before], b[:before]
            if a.shape != b.shape or not a.numel():
                continue
            if bool(a.isnan().any() or b.isnan().any()):
                return torch.nan
            # Where both are the same infinity, as logits a model rules out are, they do not differ.
            differ = (a - b).masked_fill(a == b, 0.0).abs().max()
            worst = max(worst, float(differ) / max(float(b[b.isfinite()].abs().max()), 1e-12))
    return worst


def worst_of(found: Iterable[float]) -> float:
    """The largest of some differences; NaN if one of them is.

    >>> worst_of([0.0, 0.5]), worst_of([0.0, math.nan])
    (0.5, nan)
    """
    return float(torch.tensor([0.0, *found], dtype=torch.float64).max())


class Judge:
    """Decides between rounding and fault; makes at most one copy of the model, in float64."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._double: Subject | None = None

    def beyond_rounding(self, measure: DifferenceMeasure, least: float | None = None) -> dict[str, float] | None:
        """The measured difference, if it stays in float64, or None. NaN is always beyond rounding."""
        dtype = next((p.dtype for p in self.subject.model.parameters()), torch.float32)
        found = measure(self.subject)
        if found <= (LARGE.get(dtype, 1e-2) if least is None else least):
            return None
        if math.isnan(found) or dtype == torch.float64:
            return {"difference": found}
        try:
            if self._double is None:
                self._double = self.subject.in_double()
            again = measure(self._double)
        except Exception:
            # A model without float64 gives no second opinion: only a large difference counts then.
            return {"difference": found} if found > 1e-2 else None
        return {"difference": found, "in float64": again} if not again <= STAYS else None
