"""Packed documents: no token gives weight to another document."""

from collections.abc import Iterator
from typing import ClassVar

import torch

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.breach import breach
from regard.watching.checks.finding import Finding
from regard.watching.checks.rules.base import CallRule


class DocumentsRule(CallRule):
    """Does weight rest on another document of the same row?"""

    name: ClassVar = "documents"

    def why_not(self, call: AuditedCall) -> str:
        if reason := super().why_not(call):
            return reason
        return "" if call.documents is not None else "no argument tells of more than one document: audit(documents=...)"

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        assert call.documents is not None
        of = call.documents.values

        def others(rows: range) -> torch.Tensor:
            return (of[:, rows.start : rows.stop, None] != of[:, None]) & call.real_keys[:, None]

        found = breach(call, others, of="of another document")
        if found is not None:
            yield found.finding(
                call, "documents", f"is on other documents of the same row, which {call.documents.source} tell apart",
                cause="a mask of ones, or none, makes one document of all that are packed in a row",
                remedy="pack without attention_mask and with position_ids that begin anew, or hand it a mask of the "
                "documents (regard.documents)",
            )  # fmt: skip
