"""How one map departs from another: heads in another order, another scale, another mask, other positions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.tensors.tile_sizes import fitting
from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.breach import breach
from regard.watching.checks.finding import Reason
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS

MOST_ROWS = 64
"""The most rows of each head by which the kind of a departure is told."""
TOLERANCE = 1e-3
"""The total variation of two rows that is still rounding,"""
EXPLAINED = 0.02
"""and the share of a departure that an explanation may leave."""
SHIFTS = (1, -1, 2, -2)


class Departure(NamedTuple):
    reason: Reason
    says: str
    """Goes on after "its"."""
    cause: str = ""
    numbers: dict[str, float] = {}  # noqa: RUF012 (never changed)


class PairedCalls(NamedTuple):
    """A call of a model, and that of its reference with a map of the same shape."""

    own: AuditedCall
    other: AuditedCall

    @property
    def heads(self) -> tuple[int, int]:
        """(B, H), where at least one of the two keeps heads in a dimension of their own."""
        *batch, last = max((call.weights.leading for call in self), key=len) or (1,)
        return (math.prod(batch), last) if batch else (1, last)

    def blocks(self, rows: range) -> tuple[Tensor, Tensor]:
        """The weights of some rows in both, (B, H, rows, S)."""
        own, other = (call.block(rows).reshape(*self.heads, len(rows), -1) for call in self)
        return own, other.to(own.device)


class SomeRows(NamedTuple):
    """Some rows of two maps of one shape, in float64."""

    places: Tensor
    """(n,), rising."""
    own: Tensor
    """(B, H, n, S)."""
    other: Tensor
    apart: float
    """The total variation of the two that is to be explained, that of the worst row."""

    def leaves(self, explained: Tensor, of: Tensor | None = None) -> bool:
        """True if rows are those of this map, or `of`, but for rounding."""
        left = ((self.own if of is None else of) - explained).abs().sum(-1).amax() / 2
        return float(left) <= max(TOLERANCE, EXPLAINED * self.apart)


def departure(pair: PairedCalls, live: Tensor, worst: int, apart: float) -> Departure:
    """How a call departs from that of a reference: by its `live` queries, bool (T,), and the row of the largest
    difference, whose total variation is `apart`."""
    most = fitting(CHUNK_ELEMENTS, math.prod(pair.heads) * pair.own.sizes.keys, MOST_ROWS)
    alive = live.nonzero()[:, 0].tolist()
    places = sorted({*alive[:: -max(1, -(-len(alive) // most))], worst})
    own, other = zip(*(pair.blocks(range(n, n + 1)) for n in places), strict=True)
    rows = SomeRows(torch.tensor(places), torch.cat(own, 2).double(), torch.cat(other, 2).double(), apart)
    found = (
        other_heads(rows)
        or other_scale(rows, pair)
        or other_mask(pair)
        or other_vectors(pair)
        or other_places(rows, pair)
    )
    return found or Departure("another map", "weights are others, and no scale, order, mask or shift explains them")


def other_heads(rows: SomeRows) -> Departure | None:
    """Heads in another order: each is one of the reference, in another place."""
    heads = rows.own.shape[1]
    of = torch.stack(
        [(rows.own[:, h, None] - rows.other).abs().sum(-1).amax((0, 2)).argmin() for h in range(heads)]
    ).tolist()
    if of == list(range(heads)) or not rows.leaves(rows.other[:, of]):
        return None
    return Departure(
        "another order of heads", f"heads are those {_listed(of)} of the reference",
        "heads are split or joined along another axis, or the weights of a projection are in another order",
    )  # fmt: skip


USUAL = (8, 16, 32, 64, 80, 96, 128, 256)
"""The dimensions of a head where the watch has no vectors."""


def other_scale(rows: SomeRows, pair: PairedCalls) -> Departure | None:
    """Scores that are a multiple of the reference's: the temperature by least squares, and its softmax."""
    both = (rows.own > 0) & (rows.other > 0)
    few = both.sum(-1, keepdim=True).clamp(min=1)
    logs = [torch.where(both, one.clamp(min=torch.finfo(one.dtype).tiny).log(), 0.0) for one in rows[1:3]]
    mine, theirs = (torch.where(both, one - one.sum(-1, keepdim=True) / few, 0.0) for one in logs)
    times = float((mine * theirs).sum() / theirs.square().sum().clamp(min=1e-30))
    scores = torch.where(rows.other > 0, rows.other.clamp(min=torch.finfo(torch.float64).tiny).log(), -torch.inf)
    again = (scores * times).masked_fill(rows.other <= 0, -torch.inf).softmax(-1)
    share = rows.own / rows.own.sum(-1, keepdim=True).clamp(min=1e-30)
    if abs(times - 1) < TOLERANCE or not rows.leaves(again.nan_to_num(0.0), of=share):
        return None
    dims = [call.call.factors.call.query.shape[-1] for call in pair if call.call.factors is not None] or USUAL
    causes = [
        f"1/sqrt({dim}) is {what}"
        for dim in dict.fromkeys(dims)
        for what, gives in (
            ("missing, or applied twice in the reference", math.sqrt(dim)),
            ("applied twice, or missing in the reference", dim**-0.5),
            ("applied twice, and missing in the reference", 1 / dim),
        )
        if abs(times / gives - 1) < 1e-2
    ]
    said = f"scores are {times:.4g} times the reference's"
    return Departure("another scale", said, causes[0] if causes else "", {"times": times})


def other_mask(pair: PairedCalls) -> Departure | None:
    own, other = pair
    for one, beside, says in ((own, other, "which the reference hides"), (other, own, "which it hides")):
        if not beside.is_exact and beside.facts.mask.pattern == one.facts.mask.pattern:
            continue  # (A weight of 0 may be that of a low score.)
        found = breach(one, lambda rows, beside=beside: ~beside.sees(rows).any(1))  # type: ignore[misc]
        if found is not None:
            whose = "weight" if one is own else "reference's weight"
            return Departure(
                "another mask",
                f"mask is {own.facts.mask}, and the reference's {other.facts.mask}: {found.amount:.1%} of the {whose} "
                f"is on keys {says}", "", {"share": found.amount},
            )  # fmt: skip
    return None


def other_vectors(pair: PairedCalls) -> Departure | None:
    calls = [call.call.factors.call for call in pair if call.call.factors is not None]
    if len(calls) < 2 or calls[0].query.shape != calls[1].query.shape:
        return None
    if calls[0].key.shape[2:] != calls[1].key.shape[2:]:
        return None
    queries = [call.query.double() for call in calls]
    keys = [call.key.repeat_interleave(call.group, 1).double() for call in calls]
    if is_near(*queries):
        heads = range(keys[0].shape[1])
        of = [next((g for g in heads if is_near(keys[0][:, h], keys[1][:, g])), -1) for h in heads]
        if of != list(heads) and min(of) >= 0:
            says = f"queries are the reference's, and its heads have the keys of heads {_listed(of)}"
            return Departure(
                "another order of heads", says,
                "key heads are repeated in another order: repeat_interleave in place of repeat, or the reverse",
            )  # fmt: skip
    turned = [one for vectors in (queries, keys) if (one := turns(*vectors)) is not None]
    if len(turned) < 2:
        if not all(is_near(*(torch.linalg.vector_norm(one, dim=-1) for one in pair)) for pair in (queries, keys)):
            return None
        return Departure(
            "other positions", "vectors have the norms of the reference's, and other directions",
            "rotary positions turn other pairs of dimensions: halves in place of neighbours, or the reverse",
        )  # fmt: skip
    numbers, said = dict[str, float](), list[str]()
    for name, angles in zip(("queries", "keys"), turned, strict=True):
        # (A turn is the same at each position, or grows from one to the next.)
        fixed, rate = angles.of(0), angles.of(1)
        numbers |= {f"turn of {name}": fixed, f"turn of {name} for each position": rate}
        if max(rate, fixed) > TURN:
            by = f"{rate:.3g} rad more from each position to the next" if rate > TURN else f"{fixed:.3g} rad"
            said.append(f"the {name} by {by}")
    grows = max(angles.of(1) for angles in turned) > TURN
    how = "applied twice, not at all, or with another base" if grows else "counted from another one, for one of the two"
    says = f"vectors are the reference's, turned: {' and '.join(said)}"
    return Departure("other positions", says, f"rotary positions are {how}", numbers)


TURN = 1e-3
"""An angle below this is rounding."""


class Turns(NamedTuple):
    angles: Tensor
    """(T, pairs), complex, of the size 1."""

    def of(self, order: int) -> float:
        """The largest angle of the first positions (0), or of the growth from position to position (1)."""
        angles = self.angles if not order else self.angles[1:] * self.angles[:-1].conj()
        return float(angles[0].angle().abs().max()) if len(angles) else 0.0


def turns(own: Tensor, other: Tensor) -> Turns | None:
    """The turns that make the vectors (B, H, T, D) of others, by the two layouts of rotary positions; None if none do.

    >>> x = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    >>> found = turns(torch.stack([-x[..., 1], x[..., 0], -x[..., 3], x[..., 2]], -1), x)
    >>> round(found.of(0), 3), round(found.of(1), 3)
    (1.571, 0.0)
    """
    same = ((own - other).abs() <= NEAR * other.abs().amax()).flatten(0, 2).all(0)
    width = own.shape[-1] - int(same.flip(0).long().cumprod(0).sum())
    # A partial rotation leaves the last dimensions as they are.
    for dims in dict.fromkeys((width + width % 2, own.shape[-1] - own.shape[-1] % 2)):
        for halves in (True, False):
            if not dims:
                continue
            mine, theirs = (_pairs(one[..., :dims], halves=halves) for one in (own, other))
            ratio = (mine * theirs.conj()).sum((0, 1))
            angles = ratio / ratio.abs().clamp(min=1e-30)
            if is_near(torch.view_as_real(theirs * angles), torch.view_as_real(mine)) and _is_steady(angles):
                return Turns(angles)
    return None


NEAR = 1e-4


def is_near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().amax() <= NEAR * other.abs().amax().clamp(min=1e-30))


def _is_steady(angles: Tensor) -> bool:
    """True if the angles grow by the same amount from each position to the next."""
    steps = angles[1:] * angles[:-1].conj()
    return len(steps) < 2 or float((steps - steps[:1]).abs().max()) < TURN * 10


def _pairs(vectors: Tensor, *, halves: bool) -> Tensor:
    first, second = vectors.chunk(2, -1) if halves else (vectors[..., ::2], vectors[..., 1::2])
    return torch.complex(first, second)


def other_places(rows: SomeRows, pair: PairedCalls) -> Departure | None:
    keys = rows.own.shape[-1]
    for by in SHIFTS:
        for queries, columns, what in ((by, by, "positions are"), (0, by, "keys are"), (by, 0, "queries are")):
            inside = [(n, int(place) + queries) for n, place in enumerate(rows.places)]
            inside = [(n, place) for n, place in inside if place in range(pair.own.sizes.queries)]
            common = range(max(0, -columns), min(keys, keys - columns))
            if len(inside) < 2 or len(common) < 2:
                continue
            mine = rows.own[:, :, [n for n, _ in inside], common.start : common.stop]
            theirs = torch.cat([pair.blocks(range(place, place + 1))[1] for _, place in inside], 2).double()
            theirs = theirs[..., common.start + columns : common.stop + columns]
            sums = [one.sum(-1, keepdim=True) for one in (mine, theirs)]
            counted = (sums[0] > LEAST_SHARE) & (sums[1] > LEAST_SHARE)
            mine, theirs = (torch.where(counted, one / total.clamp(min=LEAST_SHARE), 0.0)
                            for one, total in zip((mine, theirs), sums, strict=True))  # fmt: skip
            if bool(counted.all((0, 1, 3)).sum() > len(inside) // 2) and rows.leaves(theirs, of=mine):
                return Departure("other positions", f"{what} those of the reference, shifted by {by}",
                                 "a token more at the beginning, or a shift in one of the two", {"by": by})  # fmt: skip
    return None


LEAST_SHARE = 0.01
"""The least weight of a row on the common keys, for it to count."""


def _listed(of: Sequence[int], most: int = 8) -> str:
    return f"[{', '.join(map(str, of[:most]))}{', ...' if len(of) > most else ''}]"
