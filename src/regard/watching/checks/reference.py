"""A second implementation of a model: its maps beside those of the model, up to the first call that departs."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RegardError
from regard.maps.sources.call import CallSource
from regard.tensors.tile_sizes import fitting, ranges
from regard.tensors.undisturbed import evaluated
from regard.watching.checks.arguments import FIXED
from regard.watching.checks.audited_call import AuditedCall, UserTold, run_of
from regard.watching.checks.departures import TOLERANCE, Departure, PairedCalls, departure, turns
from regard.watching.checks.differences import largest_difference
from regard.watching.checks.finding import AuditQuestion, Checked, FaultyWeight, Finding
from regard.watching.checks.made_up import made_up
from regard.watching.checks.runs import Output, output_of, tensors_of
from regard.watching.checks.subject import Subject
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS
from regard.watching.watch import watch

QUESTION = "like the reference"
COARSE = 5e-2
"""The rounding of maps in dtypes of 16 bits."""


@dataclass(frozen=True, slots=True)
class Runnable:
    model: nn.Module
    run: Callable[[nn.Module], Any]

    def in_double(self) -> "Runnable":
        return replace(self, model=copy.deepcopy(self.model).double())


def on_batch(model: nn.Module, batch: Any) -> Runnable:
    return Runnable(model, lambda model: output_of(model, batch))


def on_rows(subject: Subject, rows: list[Mapping[str, Tensor]]) -> Runnable:
    """The model on made-up sequences, which a subject hands over by its own names."""

    def run(model: nn.Module) -> Any:
        other = copy.copy(subject)
        other.model = model
        return [{name: one.values for name, one in row.items()} for row in other.run(rows).outputs]

    return Runnable(subject.model, run)


def like(subject: Subject, reference: nn.Module) -> tuple[Runnable, Runnable]:
    """A model and its reference on the same made-up sequences, whose inputs are paired in their order."""
    rows: list[Mapping[str, Tensor]] = [subject.rows.long, subject.rows.other]
    own = [name for name in rows[0] if name not in FIXED]
    if (inputs := made_up(reference)) is None:
        batch = {name: torch.stack([row[name] for row in rows]) for name in own}
        return on_rows(subject, rows), on_batch(reference, batch)
    other = Subject(reference, inputs)
    names = dict(zip(own, [name for name in other.rows.long if name not in FIXED], strict=False))
    names |= {name: name for name in rows[0] if name in FIXED and name in other.rows.long}
    return on_rows(subject, rows), on_rows(other, [{of: row[name] for name, of in names.items()} for row in rows])


def compared(model: Runnable, reference: Runnable) -> Checked:
    """Compare a model with its reference; a departure counts if it stays in float64."""
    found = _compared(model, reference)
    dtypes = {p.dtype for one in (model, reference) for p in one.model.parameters()}
    if not found.errors or dtypes == {torch.float64}:
        return found
    try:
        again = _compared(model.in_double(), reference.in_double())
    except Exception:
        return found  # A model without float64 gives no second opinion.
    return found if again.errors else again


@torch.no_grad()
def _compared(model: Runnable, reference: Runnable) -> Checked:
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


def _seen(of: Runnable, what: str) -> tuple[list[AuditedCall], Any]:
    torch.manual_seed(0)
    with evaluated(of.model), watch(of.model, values=True) as seen:
        try:
            output = of.run(of.model)
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
    """The largest difference of the first outputs of one shape, over the largest value; 0.0 without any."""
    mine, theirs = ([tensor for _, tensor in tensors_of(one)] for one in (output, expected))
    for one, other in zip(mine, theirs, strict=False):
        if one.shape == other.shape and one.numel():
            return largest_difference([{"": Output(one, None)}], [{"": Output(other, None)}])
    return 0.0
