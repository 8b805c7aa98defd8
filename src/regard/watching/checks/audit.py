"""The audit of a watch: every rule is asked of every call."""

import torch

from regard.errors import ShapeError
from regard.watching.checks.audited_call import AuditedRun, UserTold, run_of
from regard.watching.checks.checked import AuditQuestion, Checked
from regard.watching.checks.finding import Finding, by_module
from regard.watching.checks.rules import FIRST, RULES
from regard.watching.checks.rules.rows import is_finite
from regard.watching.checks.unread import of_unread
from regard.watching.observed import Record


@torch.no_grad()
def audit(record: Record, told: UserTold) -> Checked:
    """Find the faults of the calls that a watch has seen, see `Seen.audit`.

    Raises:
        ShapeError: `padding` is no bool tensor (B, S), or `documents` no integer tensor (B, S).
    """
    keep, documents = told.keep, told.documents
    if keep is not None and (keep.dtype != torch.bool or keep.dim() != 2):
        raise ShapeError(f"padding= takes a bool tensor (B, S), True = a real token; got {keep.dtype} {keep.shape}")
    if documents is not None and (documents.is_floating_point() or documents.dim() != 2):
        raise ShapeError(
            f"documents= takes an integer tensor (B, S), the document of each token; got {documents.dtype} "
            f"{documents.shape}"
        )
    run = run_of(record, told)
    found = [Finding("not seen", "info", reason, call.name, call.index) for call, reason in run.unread]
    found += of_unread(record)
    questions: list[AuditQuestion] = []
    for rule in (FIRST, *RULES):
        question, findings = rule.ask(
            run if rule is FIRST else AuditedRun([one for one in run.calls if is_finite(one)])
        )
        questions.append(question)
        found += findings
    model = type(record.modules[""]).__name__
    layers = len({call.name for call in run.calls})
    return Checked(model, layers, tuple(by_module(without_echoes(found))), tuple(questions))


def without_echoes(findings: list[Finding]) -> list[Finding]:
    """The findings without warnings that repeat an error of the same call, or an explanation of the same rows."""
    errors = {(one.path, one.call, one.reason) for one in findings if one.severity == "error"}
    explained = {(one.path, one.call) for one in findings if one.severity == "error" and one.reason in EXPLAINS}

    def is_echo(one: Finding) -> bool:
        place = (one.path, one.call)
        return (*place, one.reason) in errors or (one.reason == "no key" and place in explained)

    return [one for one in findings if one.severity == "error" or not is_echo(one)]


EXPLAINS = ("padding", "causal from the first key")
"""Errors that explain rows without a key."""
