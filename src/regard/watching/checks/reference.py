"""A second implementation of a model: its maps beside those of the model, up to the first call that departs."""

import copy
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RegardError
from regard.maps.sources.call import CallSource
from regard.tensors.tile_sizes import fitting, ranges
from regard.tensors.undisturbed import evaluated
from regard.watching.checks.arguments import FIXED
from regard.watching.checks.audited_call import AuditedCall, UserTold, run_of
from regard.watching.checks.departures import TOLERANCE, Departure, PairedCalls, departure, turns
from regard.watching.checks.finding import AuditQuestion, Checked, FaultyWeight, Finding
from regard.watching.checks.made_up import made_up
from regard.watching.checks.runs import output_of
from regard.watching.checks.subject import Subject
from regard.watching.interference import results_of, shares
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS
from regard.watching.watch import watch

QUESTION = "like the reference"
COARSE = 5e-2
"""The rounding of maps in dtypes of 16 bits."""


class Given(NamedTuple):
    model: nn.Module
    batch: Any

    def in_double(self) -> "Given":
        return Given(copy.deepcopy(self.model).double(), self.batch)


def like(subject: Subject, reference: nn.Module) -> tuple[Given, Given]:
    """A model and its reference on the same made-up sequences, whose inputs are paired in their order."""
    rows: list[Mapping[str, Tensor]] = [subject.rows.long, subject.rows.other]
    own = [name for name in rows[0] if name not in FIXED]
    if (inputs := made_up(reference)) is None:
        batch: Any = {name: torch.stack([row[name] for row in rows]) for name in own}
    else:
        other = Subject(reference, inputs)
        names = dict(zip(own, [name for name in other.rows.long if name not in FIXED], strict=False))
        names |= {name: name for name in rows[0] if name in FIXED and name in other.rows.long}
        batch = other.together([{of: row[name] for name, of in names.items()} for row in rows], "right")[0]
        batch = other.given(batch)
    return Given(subject.model, subject.given(subject.together(rows, "right")[0])), Given(reference, batch)


def compared(model: Given, reference: Given) -> Checked:
    """Compare a model with its reference; a departure counts if it stays in float64."""
    found = _compared(model, reference)
    dtypes = {p.dtype for one in (model, reference) for p in one.model.parameters()}
    if found.errors and dtypes != {torch.float64}:
        with suppress(Exception):  # A model without float64 gives no second opinion.
            again = _compared(model.in_double(), reference.in_double())
            return found if again.errors else again
    return found


@torch.no_grad()
def _compared(model: Given, reference: Given) -> Checked:
    (mine, output), (theirs, expected) = _seen(model, "the model"), _seen(reference, "the reference")
    asked, found = [], None
    for own, other in zip(mine, theirs, strict=False):
        asked.append(own.name)
        if (found := _departure(PairedCalls(own, other), asked)) is not None:
            break
    findings = [] if found is None else [found]
    if len(mine) != len(theirs):
        findings.append(Finding(
            "other calls", "info", f"the model made {len(mine)} attention calls, and the reference {len(theirs)}: they "
            "were compared in their order, as far as both go",
        ))  # fmt: skip
    elif found is None and not (apart := _apart(output, expected)) <= TOLERANCE:
        findings.append(Finding(
            "another output", "error", f"all {len(mine)} maps are those of the reference, and the output differs by "
            f"{apart:.1e} of its largest value", numbers={"difference": apart},
            cause="values, output projections, norms or layers beside attention differ",
        ))  # fmt: skip
    left = tuple((call.name, "the calls before it depart") for call in mine if call.name not in asked)
    question = AuditQuestion(QUESTION, tuple(dict.fromkeys(asked)), left)
    return Checked(type(model.model).__name__, len({*asked}), tuple(findings), (question,))


def _seen(of: Given, what: str) -> tuple[list[AuditedCall], Any]:
    torch.manual_seed(0)
    with evaluated(of.model), watch(of.model, values=True) as seen:
        try:
            output = output_of(of.model, of.batch)
        except RegardError:
            raise
        except Exception as error:
            name = type(of.model).__name__
            raise ArgumentError(
                f"{what}, {name}, does not run on the inputs: {type(error).__name__}: {error}"
            ) from error
    return [call for call in run_of(seen.record, UserTold()).calls if call.is_attention], output


def _departure(pair: PairedCalls, asked: list[str]) -> Finding | None:
    mine, theirs = (call.weights for call in pair)
    if mine.shape[-2:] != theirs.shape[-2:] or math.prod(mine.leading) != math.prod(theirs.leading):
        told = Departure("another map", f"map is {tuple(mine.shape)}, and that {tuple(theirs.shape)}")
        return _finding(pair, asked, told)
    apart, counted, tolerance = _apart_by_row(pair)
    most = float(apart.max()) if apart.numel() else 0.0
    if most <= tolerance:
        return _of_values(pair, asked, tolerance)
    at = [int(n) for n in torch.unravel_index(apart.argmax(), apart.shape)]
    told = departure(pair, counted.any(0).any(0), at[2], most)
    numbers = {"total variation": most, "rows": float((apart > tolerance).sum()) / max(1, int(counted.sum()))}
    first, second = (block[at[0], at[1], 0].double() for block in pair.blocks(range(at[2], at[2] + 1)))
    key = int((first - second).abs().nan_to_num(torch.inf).argmax())
    example = FaultyWeight(at[0], at[1], at[2], key, float(first[key]), f"(the reference {float(second[key]):.2g})")
    return replace(_finding(pair, asked, told), numbers={**numbers, **told.numbers}, example=example)


def _apart_by_row(pair: PairedCalls) -> tuple[Tensor, Tensor, float]:
    """The total variation of each row, 0 where it does not count, and the rows that count, (B, H, T); and rounding."""
    shape = (*pair.heads, pair.own.sizes.queries)
    steps = ranges(shape[2], fitting(CHUNK_ELEMENTS, math.prod(pair.heads) * pair.own.sizes.keys))
    blocks = (pair.blocks(rows) for rows in steps)
    apart = torch.cat([(own.double() - other.double()).abs().sum(-1) / 2 for own, other in blocks], -1)
    counted = torch.ones(shape, dtype=torch.bool, device=apart.device)
    for call in pair:
        real = call.real_queries[:, None] & call.live
        real = real.expand(call.sizes.flat_batch, call.sizes.heads, -1).reshape(shape)
        counted = counted & real.to(counted.device)
    dtypes = {call.call.factors.form.query.dtype for call in pair if call.call.factors is not None}
    tolerance = TOLERANCE if dtypes <= {torch.float32, torch.float64} else COARSE
    return apart.masked_fill(~counted, 0.0).nan_to_num(torch.inf), counted, tolerance


def _of_values(pair: PairedCalls, asked: list[str], tolerance: float) -> Finding | None:
    sources = [call.weights.source for call in pair]
    values = [one.value for one in sources if isinstance(one, CallSource) and one.value is not None]
    if len(values) < 2 or values[0].shape != values[1].shape:
        return None
    mine, theirs = (one.double() for one in values)
    apart = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    if apart <= tolerance:
        return None
    turned = turns(mine.unflatten(0, pair.heads), theirs.unflatten(0, pair.heads))
    cause = "" if turned is None else "rotary positions reach the values, or reach them in another way"
    said = f"values differ by {apart:.1e} of the largest, under the same map"
    return _finding(pair, asked, Departure("other values", said, cause, {"difference": apart}))


def _finding(pair: PairedCalls, asked: list[str], told: Departure) -> Finding:
    own, other = pair
    count = len(asked) - 1
    agree = f"{count} calls before it agree" if count > 1 else "1 call before it agrees"
    cause = told.cause
    if not cause and told.reason == "another map":
        cause = "look at the embeddings, the positions and the projections"
        cause = "the inputs of this layer differ: look at what lies between it and the call before" if count else cause
    says = f"it is the first call to depart from the reference ({other.name or 'the model'}): its {told.says}"
    return Finding(
        told.reason, "error", f"{says}; {agree}" if count else says, own.name, own.call.index, told.numbers, cause,
        observed=own.call,
    )  # fmt: skip


def _apart(output: Any, expected: Any) -> float:
    """The largest difference of the first results of one shape, over the largest value; 0.0 without any."""
    for one, other in zip(results_of(output).values(), results_of(expected).values(), strict=False):
        if one.shape == other.shape and one.numel():
            return float(shares(one.double(), other.double(), other).max())
    return 0.0
