"""Direction: a causal model does not look ahead, and an encoder looks both ways."""

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.breach import LEAST, breach
from regard.watching.checks.finding import Finding, Severity
from regard.watching.checks.rules.base import CallRule
from regard.watching.checks.rules.padding import TRUE
from regard.watching.checks.rules.token_kinds import of_one_kind, same_block, two_way_blocks

TURNED = ("causal", "causal from the first key", "causal from a position", "window", "inverted", "documents, causal")
"""Patterns that show each query nothing after its own position, or nothing before."""


class FutureRule(CallRule):
    """Does a query of a causal model see what comes later?"""

    name: ClassVar = "future"

    def why_not(self, call: AuditedCall) -> str:
        if not call.is_attention or call.crosses or call.sizes.queries > call.sizes.keys:
            return "it is no attention over the positions of one sequence"
        mask = call.facts.mask
        if mask.pattern == "inverted" or _is_off_by_one(call) or _is_without_its_causal_half(call):
            return ""
        if call.role.direction != "causal" and call.prefix is None:
            return call.role.why
        return "" if _offset(call) is not None else "the positions of its queries are not known"

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        mask = call.facts.mask
        if mask.pattern == "inverted":
            later = call.facts.later
            yield Finding(
                "inverted mask", "error", "each query sees only what comes after it: the causal mask is upside down",
                numbers={} if later is None else {"share": later}, cause="the mask is turned, or its flags are",
                remedy=f"turn it ({TRUE})",
            )  # fmt: skip
            return
        offset = _offset(call)
        assert offset is not None
        if call.facts.later is not None and call.facts.later <= LEAST and offset == mask.offset:
            return
        kinds = of_one_kind(call)

        def later_keys(rows: range) -> Tensor:
            later = (call.back(rows, offset) < 0)[None]
            if kinds is not None:
                later = later & ~same_block(kinds, rows)
            return later

        found = breach(call, later_keys, of="of a later position")
        if found is None:
            return
        if _is_off_by_one(call) and call.role.direction != "both":
            yield found.finding(
                call, "future", "is on later positions: each query sees the next one, and none after it",
                cause="the causal mask is off by one (a diagonal of 1 in tril, or of 2 in triu)",
                remedy="keep the keys up to the query's own: tril(0), or hide triu(1)",
            )  # fmt: skip
            return
        if _is_without_its_causal_half(call):
            yield found.finding(
                call, "future", "is on later positions: each query sees all of them, and few before it",
                severity="error" if call.role.direction == "causal" else "warning",
                cause="a window (query - key < size) without the causal half (query >= key)",
                remedy="hide the later keys",
            )  # fmt: skip
            return
        if call.prefix is not None:
            more = (mask.size or 0) - int(call.prefix.values.sum(-1).max())
            yield found.finding(
                call, "prefix", f"is on later positions behind the prefix, by {call.prefix.source}",
                cause="the prefix is off by one" if more == 1 else "",
                remedy="show each query the keys of the prefix (key < length), and those up to its own",
            )  # fmt: skip
            return
        meant = mask.pattern in ("prefix", "causal, with blocks of both directions") and two_way_blocks(call) is None
        severity: Severity = "info" if meant else "error" if call.role.is_sure else "warning"
        yield found.finding(
            call, "future", f"is on later positions, in a model that should be causal ({call.role.why})",
            severity=severity,
            cause="right for a prefix or an image, and wrong otherwise" if meant else _cause(call),
            remedy="" if meant else "hand the kernel a causal mask",
        )  # fmt: skip


def _offset(call: AuditedCall) -> int | None:
    """The position of the first query: as the calls tell, or else the mask."""
    mask = call.facts.mask
    return call.offset if call.offset is not None else mask.offset if mask.tells_positions else None


def _is_off_by_one(call: AuditedCall) -> bool:
    """True if each row sees all keys up to the next one, and none after it."""
    return call.facts.mask.is_off_by_one and call.offset == 0 and call.sizes.queries >= 3


def _is_without_its_causal_half(call: AuditedCall) -> bool:
    """True for a window that ends behind each query alone: no row lacks a later key, and some lack earlier ones."""
    mask, queries = call.facts.mask, call.sizes.queries
    if mask.pattern != "window to both sides" or mask.size is None or call.offset != 0:
        return False
    return mask.ahead == queries - 1 and 1 < mask.size - mask.ahead < queries and call.role.direction != "both"


def _cause(call: AuditedCall) -> str:
    mask = call.facts.mask
    if mask.added:
        return f"{mask.added}, which hides nothing"
    if mask.pattern == "none":
        hidden = ", and the padding mask took its place" if mask.padding else ""
        return f"no causal mask arrived{hidden}"
    return "a window to both sides arrived" if mask.pattern == "window to both sides" else ""


class EncoderRule(CallRule):
    """Does an encoder see both sides?"""

    name: ClassVar = "both sides"

    def why_not(self, call: AuditedCall) -> str:
        if call.sizes.queries < 2:
            return "it has one query"
        if call.role.direction != "both":
            return "it is no encoder, as far as is known"
        return "" if call.offset is not None else "the positions of its queries are not known"

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        mask = call.facts.mask
        # (A window of 1 is each token by itself.)
        if mask.pattern in TURNED and mask.pattern != "inverted" and mask.size != 1:
            cause, remedy = _causal_by(call)
            yield Finding(
                "causal encoder", "error" if call.role.is_sure else "warning",
                f"a causal mask arrived in an encoder ({call.role.why}): no query sees what comes later, and the mask "
                f"is {mask}",
                cause=cause, remedy=remedy or "hand it no causal mask",
            )  # fmt: skip


class CrossAttentionRule(CallRule):
    """Does each query see every real key of another sequence?"""

    name: ClassVar = "cross-attention"

    def why_not(self, call: AuditedCall) -> str:
        is_other = call.crosses or (call.is_attention and call.sizes.queries > call.sizes.keys)
        if call.call.is_over_queries:
            return "its softmax ran over the queries"
        return "" if is_other else "it attends to its own sequence"

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        mask, (queries, keys) = call.facts.mask, call.weights.shape[-2:]
        if queries > 1 and mask.pattern in TURNED:
            cause, remedy = _causal_by(call)
            yield Finding(
                "causal cross-attention", "error",
                f"the keys are of another sequence, and the mask that arrived is {mask}",
                numbers={"queries": queries, "keys": keys}, cause=cause,
                remedy=f"each query should see every real key{remedy and ': '}{remedy}",
            )  # fmt: skip


def _causal_by(call: AuditedCall) -> tuple[str, str]:
    if hasattr(call.module, "is_causal"):
        return (
            "an is_causal that is True by default, or a mask made for a decoder",
            "set is_causal = False on the module",
        )
    return "a mask made for a decoder was handed to it", ""
