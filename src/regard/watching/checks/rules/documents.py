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
        if not call.mixes_positions:
            return "it is no attention over positions"
        return "" if call.documents is not None else "no argument tells of more than one document: audit(documents=...)"

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        assert call.documents is not None
        of = call.documents.values

        def others(rows: range) -> torch.Tensor:
            return (of[:, rows.start : rows.stop, None] != of[:, None]) & call.real_keys[:, None]

        found = breach(call, others, of="of another document")
        if found is not None:
            cause, remedy = _cause(call)
            yield found.finding(
                call, "documents", f"is on other documents of the same row, which {call.documents.source} tell apart",
                cause=cause, remedy=remedy,
            )  # fmt: skip


def _cause(call: AuditedCall) -> tuple[str, str]:
    if not call.is_attention:
        kind = call.call.kind
        return (
            f"the {kind} goes on from one document to the next: nothing begins it anew",
            "tell the kernel of the documents (seq_idx, cu_seqlens), or run each document by itself",
        )
    assert call.documents is not None
    has_mask = any("mask" in name for frame in call.call.arguments for name in frame.tensors)
    has_no_cache = any(frame.flags.get("use_cache") is False for frame in call.call.arguments)
    by_positions = call.documents.source.startswith("the restarts")
    if by_positions and not has_mask and call.config is not None:
        return (
            "its mask is made without position_ids"
            if has_no_cache
            else "with a cache, positions that begin anew reach no mask",
            "a mask of the documents (B, 1, T, S)" if has_no_cache else "use_cache=False",
        )
    return (
        "a mask of ones, or none, makes one document of all that are packed in a row",
        "leave out attention_mask beside position_ids that begin anew, or hand it a mask of the documents "
        "(regard.documents)",
    )
