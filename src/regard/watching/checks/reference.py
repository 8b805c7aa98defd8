"""A second implementation of a model: its maps beside those of the model, and the first call that departs from it: by
heads in another order, another scale, another mask, other positions or other values.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from regard.errors import ArgumentError
from regard.maps.sources.call import CallSource
from regard.tensors.tile_sizes import fitting, ranges
from regard.tensors.undisturbed import evaluated
from regard.watching.checks.arguments import FIXED
from regard.watching.checks.audited_call import AuditedCall, UserTold, run_of
from regard.watching.checks.breach import breach
from regard.watching.checks.finding import AuditQuestion, Checked, FaultyWeight, Finding, Reason
from regard.watching.checks.made_up import made_up
from regard.watching.checks.runs import output_of
from regard.watching.checks.subject import Subject
from regard.watching.interference import largest_difference
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS
from regard.watching.watch import watch

MOST_ROWS = 64
"""The most rows of each head by which the kind of a departure is told."""
TOLERANCE, COARSE = 1e-3, 5e-2
"""The total variation of two rows that is still rounding, and that in dtypes of 16 bits."""
EXPLAINED = 0.02
"""The share of a departure that an explanation may leave."""
SHIFTS = (1, -1, 2, -2)


class Given(NamedTuple):
    model: nn.Module
    batch: Any


class PairedCalls(NamedTuple):
    """A call of a model, and that of its reference."""

    own: AuditedCall
    other: AuditedCall

    @property
    def heads(self) -> tuple[int, int]:
        """(B, H), where at least one of the two keeps heads in a dimension of their own."""
        *batch, last = max((call.weights.leading for call in self), key=len) or (1,)
        return (math.prod(batch), last) if batch else (1, last)

    @property
    def tolerance(self) -> float:
        dtypes = {call.call.factors.form.query.dtype for call in self if call.call.factors is not None}
        return TOLERANCE if dtypes <= {torch.float32, torch.float64} else COARSE

    def blocks(self, rows: range) -> tuple[Tensor, Tensor]:
        """The weights of some rows in both, (B, H, rows, S)."""
        own, other = (call.block(rows).reshape(*self.heads, len(rows), -1) for call in self)
        return own, other.to(own.device)


class SomeRows(NamedTuple):
    """Some rows of two maps of one shape, in float64."""

    places: list[int]
    """n of them, rising."""
    own: Tensor
    """(B, H, n, S)."""
    other: Tensor
    apart: float
    """The total variation of the two that is to be explained, that of the worst row."""

    def leaves(self, explained: Tensor, of: Tensor | None = None) -> bool:
        """True if rows are those of this map, or `of`, but for rounding."""
        left = ((self.own if of is None else of) - explained).abs().sum(-1).amax() / 2
        return float(left) <= max(TOLERANCE, EXPLAINED * self.apart)


def like(subject: Subject, reference: nn.Module) -> tuple[Given, Given]:
    """A model and its reference on the same made-up sequences, whose inputs are paired in their order."""
    rows: list[Mapping[str, Tensor]] = [subject.rows.long, subject.rows.other]
    own = [name for name in rows[0] if name not in FIXED]
    if (inputs := made_up(reference)) is None:
        batch: Any = {name: torch.stack([row[name] for row in rows]) for name in own}
    else:
        other = Subject(reference, inputs, UserTold())
        names = dict(zip(own, [name for name in other.rows.long if name not in FIXED], strict=False))
        names |= {name: name for name in rows[0] if name in FIXED and name in other.rows.long}
        batch = other.together([{of: row[name] for name, of in names.items()} for row in rows], "right")[0]
        batch = other.given(batch)
    return Given(subject.model, subject.given(subject.together(rows, "right")[0])), Given(reference, batch)


def compared(model: Given, reference: Given) -> Checked:
    """Compare a model with its reference; a departure counts if it stays in float64."""
    both = (model, reference)
    found = _compared(*both)
    if found.errors and {p.dtype for one in both for p in one.model.parameters()} != {torch.float64}:
        with suppress(Exception):  # A model without float64 gives no second opinion.
            again = _compared(*(Given(copy.deepcopy(one.model).double(), one.batch) for one in both))
            return found if again.errors else again
    return found


@torch.no_grad()
def _compared(model: Given, reference: Given) -> Checked:
    (mine, output), (theirs, expected) = _seen(model, "the model"), _seen(reference, "the reference")
    asked, found = [], None
    for own, other in zip(mine, theirs, strict=False):
        asked.append(own.name)
        if (found := _departure(PairedCalls(own, other), len(asked) - 1)) is not None:
            break
    findings = [] if found is None else [found]
    if len(mine) != len(theirs):
        findings.append(Finding(
            "other calls", "info", f"the model made {len(mine)} attention calls, and the reference {len(theirs)}: they "
            "were compared in their order, as far as both go",
        ))  # fmt: skip
    elif found is None and not (apart := largest_difference(output, expected)) <= TOLERANCE:
        findings.append(Finding(
            "another output", "error", f"all {len(mine)} maps are those of the reference, and the output differs by "
            f"{apart:.1e} of its largest value", numbers={"difference": apart},
            cause="values, output projections, norms or layers beside attention differ",
        ))  # fmt: skip
    left = tuple((call.name, "the calls before it depart") for call in mine if call.name not in asked)
    question = AuditQuestion("like the reference", tuple(dict.fromkeys(asked)), left)
    return Checked(type(model.model).__name__, len({*asked}), tuple(findings), (question,))


def _seen(of: Given, what: str) -> tuple[list[AuditedCall], Any]:
    torch.manual_seed(0)
    with evaluated(of.model), watch(of.model, values=True) as seen:
        try:
            output = output_of(of.model, of.batch)
        except Exception as error:
            said = f"{type(of.model).__name__}, does not run on the inputs: {type(error).__name__}: {error}"
            raise ArgumentError(f"{what}, {said}") from error
    return [call for call in run_of(seen.record, UserTold()).calls if call.is_attention], output


def _departure(pair: PairedCalls, before: int) -> Finding | None:
    """The finding of a call behind others that agree; None if it agrees too."""
    mine, theirs = (call.weights for call in pair)
    if mine.shape[-2:] != theirs.shape[-2:] or math.prod(mine.leading) != math.prod(theirs.leading):
        says = f"map is {tuple(mine.shape)}, and that {tuple(theirs.shape)}"
        return _placed(pair, before, _other("another map", says))
    apart, counted = _apart_by_row(pair)
    most = float(apart.max()) if apart.numel() else 0.0
    if most <= pair.tolerance:
        return None if (found := other_values(pair)) is None else _placed(pair, before, found)
    sequence, head, query = (int(n) for n in torch.unravel_index(apart.argmax(), apart.shape))
    found = _told_apart(pair, counted.any(0).any(0), query, most)
    share = float((apart > pair.tolerance).sum()) / max(1, int(counted.sum()))
    first, second = (block[sequence, head, 0].double() for block in pair.blocks(range(query, query + 1)))
    key = int((first - second).abs().nan_to_num(torch.inf).argmax())
    numbers = {"total variation": most, "rows": share, **found.numbers}
    its = f"(the reference {float(second[key]):.2g})"
    example = FaultyWeight(sequence, head, query, key, float(first[key]), its)
    return replace(_placed(pair, before, found), numbers=numbers, example=example)


def _apart_by_row(pair: PairedCalls) -> tuple[Tensor, Tensor]:
    """The total variation of each row, 0 where it does not count, and the rows that count, (B, H, T)."""
    shape = (*pair.heads, pair.own.sizes.queries)
    steps = ranges(shape[2], fitting(CHUNK_ELEMENTS, math.prod(pair.heads) * pair.own.sizes.keys))
    blocks = (pair.blocks(rows) for rows in steps)
    apart = torch.cat([(own.double() - other.double()).abs().sum(-1) / 2 for own, other in blocks], -1)
    counted = torch.ones(shape, dtype=torch.bool, device=apart.device)
    for call in pair:
        real = call.real_queries[:, None] & call.live
        real = real.expand(call.sizes.flat_batch, call.sizes.heads, -1).reshape(shape)
        counted = counted & real.to(counted.device)
    return apart.masked_fill(~counted, 0.0).nan_to_num(torch.inf), counted


def _placed(pair: PairedCalls, before: int, found: Finding) -> Finding:
    """The finding, whose words go on after "its", at the call of the model."""
    own, other = pair
    agree = f"; {before} call{'s' * (before > 1)} before it agree{'s' * (before == 1)}" if before else ""
    cause = found.cause
    if not cause and found.reason == "another map":
        cause = "look at the embeddings, the positions and the projections"
        cause = "the inputs of this layer differ: look at what lies between it and the call before" if before else cause
    says = f"it is the first call to depart from the reference ({other.name or 'the model'}): its {found.says}{agree}"
    return replace(found, says=says, path=own.name, call=own.call.index, cause=cause, observed=own.call)


def _other(reason: Reason, says: str, cause: str = "", **numbers: float) -> Finding:
    return Finding(reason, "error", says, numbers=numbers, cause=cause)


def _told_apart(pair: PairedCalls, live: Tensor, worst: int, apart: float) -> Finding:
    """How a call departs from that of a reference: by its `live` queries, bool (T,), and the row of the largest
    difference, whose total variation is `apart`."""
    most = fitting(CHUNK_ELEMENTS, math.prod(pair.heads) * pair.own.sizes.keys, MOST_ROWS)
    alive = live.nonzero()[:, 0].tolist()
    places = sorted({*alive[:: -max(1, -(-len(alive) // most))], worst})
    own, other = zip(*(pair.blocks(range(n, n + 1)) for n in places), strict=True)
    rows = SomeRows(places, torch.cat(own, 2).double(), torch.cat(other, 2).double(), apart)
    found = other_heads(rows) or other_scale(rows, pair) or other_mask(pair) or other_vectors(pair)
    found = found or other_places(rows, pair)
    return found or _other("another map", "weights are others, and no scale, order, mask or shift explains them")


def other_heads(rows: SomeRows) -> Finding | None:
    """Heads in another order: each is one of the reference, in another place."""
    heads = rows.own.shape[1]
    of = [int((rows.own[:, h, None] - rows.other).abs().sum(-1).amax((0, 2)).argmin()) for h in range(heads)]
    if of == list(range(heads)) or not rows.leaves(rows.other[:, of]):
        return None
    return _other(
        "another order of heads", f"heads are those {_listed(of)} of the reference",
        "heads are split or joined along another axis, or the weights of a projection are in another order",
    )  # fmt: skip


USUAL = (8, 16, 32, 64, 80, 96, 128, 256)
"""The dimensions of a head where the watch has no vectors."""


def other_scale(rows: SomeRows, pair: PairedCalls) -> Finding | None:
    """Scores that are a multiple of the reference's: the temperature by least squares, and its softmax."""
    both = (rows.own > 0) & (rows.other > 0)
    few = both.sum(-1, keepdim=True).clamp(min=1)
    logs = [torch.where(both, one.clamp(min=torch.finfo(one.dtype).tiny).log(), 0.0) for one in rows[1:3]]
    mine, theirs = (torch.where(both, one - one.sum(-1, keepdim=True) / few, 0.0) for one in logs)
    times = float((mine * theirs).sum() / theirs.square().sum().clamp(min=1e-30))
    scores = rows.other.clamp(min=torch.finfo(torch.float64).tiny).log() * times
    again = scores.masked_fill(rows.other <= 0, -torch.inf).softmax(-1)
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
    return _other("another scale", said, causes[0] if causes else "", times=times)


def other_mask(pair: PairedCalls) -> Finding | None:
    own, other = pair
    for one, beside, of in ((own, other, "which the reference hides"), (other, own, "which it hides")):
        if not beside.is_exact and beside.facts.mask.pattern == one.facts.mask.pattern:
            continue  # (A weight of 0 may be that of a low score.)
        found = breach(one, lambda rows, beside=beside: ~beside.sees(rows).any(1))  # type: ignore[misc]
        if found is not None:
            whose = "weight" if one is own else "reference's weight"
            masks = f"mask is {own.facts.mask}, and the reference's {other.facts.mask}"
            says = f"{masks}: {found.amount:.1%} of the {whose} is on keys {of}"
            return _other("another mask", says, share=found.amount)
    return None


def other_vectors(pair: PairedCalls) -> Finding | None:
    calls = [call.call.factors.call for call in pair if call.call.factors is not None]
    if len(calls) < 2 or len({(call.query.shape, call.key.shape[2:]) for call in calls}) > 1:
        return None
    queries = [call.query.double() for call in calls]
    keys = [call.key.repeat_interleave(call.group, 1).double() for call in calls]
    if is_near(*queries):
        heads = range(keys[0].shape[1])
        of = [next((g for g in heads if is_near(keys[0][:, h], keys[1][:, g])), -1) for h in heads]
        if of != list(heads) and min(of) >= 0:
            says = f"queries are the reference's, and its heads have the keys of heads {_listed(of)}"
            return _other(
                "another order of heads", says,
                "key heads are repeated in another order: repeat_interleave in place of repeat, or the reverse",
            )  # fmt: skip
    turned = [one for vectors in (queries, keys) if (one := turns(*vectors)) is not None]
    if len(turned) < 2:
        if not all(is_near(*(torch.linalg.vector_norm(one, dim=-1) for one in pair)) for pair in (queries, keys)):
            return None
        return _other(
            "other positions", "vectors have the norms of the reference's, and other directions",
            "rotary positions turn other pairs of dimensions: halves in place of neighbours, or the reverse",
        )  # fmt: skip
    numbers, said = dict[str, float](), list[str]()
    for name, (first, growth) in zip(("queries", "keys"), turned, strict=True):
        numbers |= {f"turn of {name}": first, f"turn of {name} for each position": growth}
        if max(first, growth) > TURN:
            by = f"{growth:.3g} rad more from each position to the next" if growth > TURN else f"{first:.3g} rad"
            said.append(f"the {name} by {by}")
    grows = max(one.growth for one in turned) > TURN
    how = "applied twice, not at all, or with another base" if grows else "counted from another one, for one of the two"
    says = f"vectors are the reference's, turned: {' and '.join(said)}"
    return _other("other positions", says, f"rotary positions are {how}", **numbers)


def other_values(pair: PairedCalls) -> Finding | None:
    sources = [call.weights.source for call in pair]
    values = [one.value for one in sources if isinstance(one, CallSource) and one.value is not None]
    if len(values) < 2 or values[0].shape != values[1].shape:
        return None
    mine, theirs = (one.double() for one in values)
    apart = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    if apart <= pair.tolerance:
        return None
    turned = turns(mine.unflatten(0, pair.heads), theirs.unflatten(0, pair.heads))
    cause = "" if turned is None else "rotary positions reach the values, or reach them in another way"
    says = f"values differ by {apart:.1e} of the largest, under the same map"
    return _other("other values", says, cause, difference=apart)


TURN = 1e-3
"""An angle below this is rounding."""


class Turns(NamedTuple):
    """Angles in rad, the largest of all pairs."""

    first: float
    """That of the first position."""
    growth: float
    """That from each position to the next."""


def turns(own: Tensor, other: Tensor) -> Turns | None:
    """The turns that make the vectors (B, H, T, D) of others, by the two layouts of rotary positions; None if none do.

    >>> x = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    >>> turns(torch.stack([-x[..., 1], x[..., 0], -x[..., 3], x[..., 2]], -1).double(), x.double())
    Turns(first=1.57..., growth=0.0)
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
            steps = angles[1:] * angles[:-1].conj()
            is_steady = len(steps) < 2 or float((steps - steps[:1]).abs().max()) < TURN * 10
            if is_steady and is_near(torch.view_as_real(theirs * angles), torch.view_as_real(mine)):
                return Turns(*(float(one[:1].angle().abs().sum(0).max()) for one in (angles, steps)))
    return None


NEAR = 1e-4


def is_near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().amax() <= NEAR * other.abs().amax().clamp(min=1e-30))


def _pairs(vectors: Tensor, *, halves: bool) -> Tensor:
    first, second = vectors.chunk(2, -1) if halves else (vectors[..., ::2], vectors[..., 1::2])
    return torch.complex(first, second)


def other_places(rows: SomeRows, pair: PairedCalls) -> Finding | None:
    keys = rows.own.shape[-1]
    for by in SHIFTS:
        for queries, columns, what in ((by, by, "positions are"), (0, by, "keys are"), (by, 0, "queries are")):
            moved = [(n, place + queries) for n, place in enumerate(rows.places)]
            inside = [(n, place) for n, place in moved if place in range(pair.own.sizes.queries)]
            common = range(max(0, -columns), min(keys, keys - columns))
            if len(inside) < 2 or len(common) < 2:
                continue
            mine = rows.own[:, :, [n for n, _ in inside], common.start : common.stop]
            theirs = torch.cat([pair.blocks(range(place, place + 1))[1] for _, place in inside], 2).double()
            theirs = theirs[..., common.start + columns : common.stop + columns]
            counted = torch.minimum(*(one.sum(-1, keepdim=True) for one in (mine, theirs))) > LEAST_SHARE
            mine, theirs = (normalize(one, 1, -1, LEAST_SHARE) * counted for one in (mine, theirs))
            if bool(counted.all((0, 1, 3)).sum() > len(inside) // 2) and rows.leaves(theirs, of=mine):
                cause = "a token more at the beginning, or a shift in one of the two"
                return _other("other positions", f"{what} those of the reference, shifted by {by}", cause, by=by)
    return None


LEAST_SHARE = 0.01
"""The least weight of a row on the common keys, for it to count."""


def _listed(of: Sequence[int], most: int = 8) -> str:
    return f"[{', '.join(map(str, of[:most]))}{', ...' if len(of) > most else ''}]"
