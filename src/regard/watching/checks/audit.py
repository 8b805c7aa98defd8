"""The audit of a watch: every rule is asked of every call."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from regard.watching.checks.audited_call import AuditedCall, AuditedRun, NotAsked, UserTold, run_of
from regard.watching.checks.finding import AuditQuestion, Checked, Finding, by_module
from regard.watching.checks.roles import UNKNOWN
from regard.watching.checks.rules import cached, direction, kernel, layers, padding
from regard.watching.observed import Record
from regard.watching.readers.product_calls import OVER_ANOTHER_AXIS
from regard.watching.report import IN_A_THREAD, count, in_threads, missed_by, mixers_in

Rule = Callable[[AuditedCall], Iterator[Finding]]
"""Yields findings without their path and index, or raises `NotAsked`."""
RULES: Mapping[str, Rule] = {
    "future": direction.future_rule,
    "both sides": direction.both_sides_rule,
    "cross-attention": direction.cross_attention_rule,
    "padding": padding.padding_rule,
    "documents": padding.documents_rule,
    "images and prefixes": direction.images_and_prefixes_rule,
    "window": layers.window_rule,
    "own and earlier keys": cached.own_keys_rule,
    "positions": cached.positions_rule,
    "rows without a key": kernel.rows_without_a_key_rule,
    "softmax": kernel.softmax_rule,
    "hiding": kernel.hiding_rule,
    "sink": kernel.sink_rule,
    "scale": kernel.scale_rule,
    "choice of keys": kernel.choice_of_keys_rule,
}
"""By the question's name; in the order in which they are asked of the calls whose weights are numbers."""


@torch.no_grad()
def audit(record: Record, told: UserTold) -> Checked:
    """Find the faults of the calls that a watch has seen, see `Seen.audit`."""
    run = run_of(record, told)
    found = list(_not_seen(record, run))
    whole = [call for call in run.calls if kernel.is_finite(call)]
    asked = [
        _answers_to("numbers", kernel.numbers_rule, run.calls),
        *(_answers_to(name, rule, whole) for name, rule in RULES.items()),
    ]
    stacked = [call for call in whole if call.is_attention]
    asked.append(_answers_to("like the others", layers.like_the_others_rule(stacked), stacked))
    found += [finding for _, findings in asked for finding in findings]
    questions = [question for question, _ in asked if question.asked or question.not_asked]
    names = {call.name for call in run.calls}
    unknown = tuple(_unknown(record, run, questions))
    sorted_out = tuple(by_module(_without_echoes(found)))
    return Checked(type(record.modules[""]).__name__, len(names), sorted_out, tuple(questions), unknown=unknown)


def _answers_to(name: str, rule: Rule, calls: Iterable[AuditedCall]) -> tuple[AuditQuestion, list[Finding]]:
    answers: list[tuple[str, str | None]] = []
    found: list[Finding] = []
    for call in calls:
        try:
            found += [replace(one, path=call.name, call=call.call.index, observed=call.call) for one in rule(call)]
            answers.append((call.name, None))
        except NotAsked as why:
            answers.append((call.name, str(why)))
    return AuditQuestion.of(name, answers), found


NOTHING_SEEN = "no attention was seen: run the watched model itself, uncompiled and in this thread"
CAUSAL_UNKNOWN = "whether it is causal is not known: tell causal="


def _unknown(record: Record, run: AuditedRun, questions: Sequence[AuditQuestion]) -> Iterator[str]:
    """The gaps of the audit: a run without a call of attention, modules out of sight, an unknown direction."""
    if not run.calls:
        yield NOTHING_SEEN
    if missed := missed_by(record):
        yield f"{count(len(missed), 'part')} of it was not seen ({missed[0][0] or 'the model itself'}): see .infos"
    reasons = {reason for one in questions if one.name == "future" for _, reason in one.not_asked}
    if UNKNOWN.why in reasons:
        yield CAUSAL_UNKNOWN


def _not_seen(record: Record, run: AuditedRun) -> Iterator[Finding]:
    """Calls and modules without facts, and the faults that this shows: a softmax over another axis than the keys."""
    for call, reason in run.unread:
        yield Finding("not seen", "info", call.notes[0] if call.map is None else reason, call.name, call.index)
    for path, reason in record.unreadable:
        if reason.startswith(OVER_ANOTHER_AXIS):
            yield Finding(
                "softmax over the wrong axis", "error", reason, path,
                cause="it is the axis of heads, or of the sequences of a batch",
                remedy="softmax(dim=-1) over scores (..., queries, keys)",
            )  # fmt: skip
        else:
            yield Finding("not seen", "info", reason, path)
    for path in in_threads(record):
        yield Finding("not seen", "info", IN_A_THREAD, path)
    for path, how in mixers_in(record).items():
        yield Finding("not seen", "info", f"it mixes positions, and no map shows how: {how}", path)


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    errors = {(one.path, one.call, one.reason) for one in findings if one.severity == "error"}
    errors |= {(path, call, "no key") for path, call, reason in errors if reason in EXPLAINS}
    return [one for one in findings if one.severity == "error" or (one.path, one.call, one.reason) not in errors]


EXPLAINS = ("padding", "causal from the first key")
"""Errors that explain rows without a key."""
