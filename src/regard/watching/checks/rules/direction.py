"""Direction: a causal model looks ahead within images and prefixes alone, and an encoder looks both ways."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall, NotAsked, need, need_one_sequence
from regard.watching.checks.breach import breach, hidden_pairs
from regard.watching.checks.finding import Finding, Reason, Severity
from regard.watching.checks.roles import around
from regard.watching.checks.rules.layers import layer_kind, window_of
from regard.watching.checks.rules.padding import TRUE

TURNED = ("causal", "causal from the first key", "causal from a position", "window", "inverted", "documents, causal")
"""Patterns that show each query nothing after its own position, or nothing before."""


def future_rule(call: AuditedCall) -> Iterator[Finding]:
    need_one_sequence(call, has_own_keys=True)
    mask, role, kinds = call.facts.mask, call.role, of_one_kind(call)
    offset = mask.offset if call.offset is None and mask.tells_positions else call.offset
    if mask.pattern == "inverted":
        yield Finding(
            "inverted mask", "error", "each query sees only what comes after it: the causal mask is upside down",
            numbers={} if call.facts.later is None else {"share": call.facts.later},
            cause="the mask is transposed, or its flags are inverted", remedy=f"transpose or invert it ({TRUE})",
        )  # fmt: skip
        return
    slip = _slip(call)
    if slip is None:
        need(role.direction == "causal" or call.prefix is not None, role.why)
        need(offset is not None, "the positions of its queries are not known")
    assert offset is not None
    if not mask.ahead and offset == mask.offset:
        return

    def later_keys(rows: range) -> Tensor:
        later = (call.back(rows, offset) < 0)[None]
        return later if kinds is None else later & ~same_block(kinds, rows)

    found = breach(call, later_keys, of="of a later position")
    if found is None:
        return
    reason: Reason = "future"
    severity: Severity = "error" if role.is_sure else "warning"
    if slip is not None:
        severity = "error" if mask.is_off_by_one or role.direction == "causal" else "warning"
        says, cause, remedy = slip
    elif call.prefix is not None:
        more = (mask.size or 0) - int(call.prefix.values.sum(-1).max())
        reason, severity, says = "prefix", "error", f" behind the prefix, by {call.prefix.source}"
        cause = "the prefix is off by one" if more == 1 else ""
        remedy = "show each query the keys of the prefix (key < length), and those up to its own"
    elif mask.pattern in ("prefix", "causal, with blocks of both directions") and two_way_blocks(call) is None:
        severity, says = "info", f", in a model that should be causal ({role.why})"
        cause, remedy = "right for a prefix or an image, and wrong otherwise", ""
    else:
        says, remedy = f", in a model that should be causal ({role.why})", "hand the kernel a causal mask"
        cause = _cause(call)
    yield found.finding(call, reason, f"is on later positions{says}", severity=severity, cause=cause, remedy=remedy)


def _slip(call: AuditedCall) -> tuple[str, str, str] | None:
    """The words, the cause and the remedy of a mask that no model has on purpose; None for any other mask."""
    mask, queries = call.facts.mask, call.sizes.queries
    if call.offset != 0 or call.role.direction == "both" or mask.pattern != "window to both sides":
        return None
    if mask.is_off_by_one:
        return (
            ": each query sees the next one, and none after it",
            "the causal mask is off by one (a diagonal of 1 in tril, or of 2 in triu)",
            "keep the keys up to the query's own: tril(0), or hide triu(1)",
        )
    # (No row lacks a later key, and some lack earlier ones.)
    is_half = mask.ahead == queries - 1 and 1 < (mask.size or 0) - mask.ahead < queries
    if not is_half:
        return None
    return (
        ": each query sees all of them, and few before it",
        "a window (query - key < size) without the causal half (query >= key)",
        "hide the later keys",
    )


def _cause(call: AuditedCall) -> str:
    mask = call.facts.mask
    if mask.added:
        return f"{mask.added}, which hides nothing"
    took_its_place = ", and the padding mask took its place" if mask.padding else ""
    return f"no causal mask arrived{took_its_place}" if mask.pattern == "none" else ""


def both_sides_rule(call: AuditedCall) -> Iterator[Finding]:
    need(call.sizes.queries > 1, "it has one query")
    need(call.role.direction == "both", "it is no encoder, as far as is known")
    need(call.offset is not None, "the positions of its queries are not known")
    mask = call.facts.mask
    # (A window of 1 is each token by itself.)
    if mask.pattern in TURNED and mask.pattern != "inverted" and mask.size != 1:
        cause, remedy = _causal_by(call)
        yield Finding(
            "causal encoder", "error" if call.role.is_sure else "warning",
            f"a causal mask arrived in an encoder ({call.role.why}): no query sees what comes later, and the mask "
            f"is {mask}",
            cause=cause, remedy=remedy,
        )  # fmt: skip


def cross_attention_rule(call: AuditedCall) -> Iterator[Finding]:
    mask, queries, keys = call.facts.mask, call.sizes.queries, call.sizes.keys
    need(not call.call.is_over_queries, "its softmax ran over the queries")
    need(call.crosses or (call.is_attention and queries > keys), "it attends to its own sequence")
    if queries > 1 and mask.pattern in TURNED:
        cause, remedy = _causal_by(call)
        yield Finding(
            "causal cross-attention", "error",
            f"the keys are of another sequence, and the mask that arrived is {mask}",
            numbers={"queries": queries, "keys": keys}, cause=cause,
            remedy=f"each query should see every real key: {remedy}",
        )  # fmt: skip


def _causal_by(call: AuditedCall) -> tuple[str, str]:
    if hasattr(call.module, "is_causal"):
        return (
            "an is_causal that is True by default, or a mask made for a decoder",
            "set is_causal = False on the module",
        )
    return "a mask made for a decoder was handed to it", "hand it no causal mask"


def images_and_prefixes_rule(call: AuditedCall) -> Iterator[Finding]:
    need(call.is_attention, "it is no attention over positions")
    told, found, window = call.types or call.prefix, two_way_blocks(call), window_of(call)
    if found is None:
        raise NotAsked("no token_type_ids were given, or they are no part of a mask, as far as is known")
    kind, of = found

    def within(rows: range) -> Tensor:
        near = call.back(rows, 0) < window.size if window is not None and window.size else True
        return same_block(of, rows) & call.real_keys[:, None] & near

    hidden = hidden_pairs(call, within)
    if hidden is None:
        return
    by = "all of an input without token_type_ids" if told is None else f"by {told.source}"
    what = "the prefix" if kind == "prefix" else "one image"
    yield hidden.finding(
        call, kind, f"pairs of tokens of {what} ({by}) are hidden",
        cause="a plain causal mask hides what comes later in the block",
        remedy="let the tokens of a block see each other in both directions, beside the causal mask",
    )  # fmt: skip


def same_block(of: Tensor, rows: range) -> Tensor:
    """The pairs of one block, bool (B, rows, S), by the number of its block for each key, -1 outside."""
    own = of[:, rows.start : rows.stop, None]
    return (own >= 0) & (own == of[:, None])


def two_way_blocks(call: AuditedCall) -> tuple[Reason, Tensor] | None:
    """The kind of the blocks that see both ways, and the number of its block for each key (B, S), -1 outside; None if
    the kinds of tokens are no part of the mask, as far as is known."""
    if call.types is None:
        # (A model that reads them as the prefix takes all of an input without for it, in evaluation.)
        is_all = call.prefix is None and _has_prefix(call) and call.offset == 0 and call.call.is_evaluated
        prefix = call.real_keys if is_all else None if call.prefix is None else call.prefix.values
        return None if prefix is None else ("prefix", torch.where(prefix, 0, -1))
    types = call.types.values
    if call.types.source.startswith("mm_"):
        # (Gemma 4 shows pictures both ways in the layers with windows alone.)
        is_asked = getattr(call.config, "use_bidirectional_attention", None) == "vision"
        is_shown = is_asked and layer_kind(call) in ("sliding_attention", None)
        return ("image tokens", _runs((types == 1) | (types == 2))) if is_shown else None
    if _has_prefix(call) or (call.config is None and _is_prefix(call, types)):
        return "prefix", torch.where(types == 0, 0, -1)
    return ("image tokens", _runs(types == 1)) if _marks_pictures(call, types == 1) else None


def of_one_kind(call: AuditedCall) -> Tensor | None:
    """A number for each key (B, S), -1 for words: keys of one number may see each other both ways, as far as is known;
    None without kinds of tokens."""
    if (blocks := two_way_blocks(call)) is not None:
        return blocks[1]
    is_of_mask = call.types is not None and call.config is not None and not call.are_types_embedded
    return torch.where(call.types.values > 0, 0, -1) if call.types is not None and is_of_mask else None


def _runs(of: Tensor) -> Tensor:
    """The numbers of the runs of True in each row, -1 outside."""
    begins = of & ~torch.nn.functional.pad(of, (1, 0))[:, :-1]
    return (begins.long().cumsum(-1) - 1).masked_fill(~of, -1)


def _marks_pictures(call: AuditedCall, marked: Tensor) -> bool:
    """True for marks of all places of one token, in which pictures stand, and of no others."""
    ids = call.ids(call.part, call.sizes.keys)
    if ids is None or call.are_types_embedded or not bool(marked.any()):
        return False
    return torch.equal(marked, ids.values == ids.values[marked][0])


def _has_prefix(call: AuditedCall) -> bool:
    """True for the text part of a model around it, whose config turns causality off: it sees its prefix both ways."""
    turned_off = getattr(call.config, "use_bidirectional_attention", None) is True
    configs = [getattr(module, "config", call.config) for module in around(call.modules, call.name)]
    return turned_off and any(one is not call.config for one in configs)


def _is_prefix(call: AuditedCall, types: Tensor) -> bool:
    """True for zeros before ones in a causal model without a table of kinds: they are there for a mask alone."""
    rise = types.unique().tolist() == [0, 1] and not bool((types.diff(dim=-1) < 0).any())
    return rise and not call.are_types_embedded and (not call.facts.mask.ahead or call.facts.mask.pattern == "prefix")
