"""Direction: a causal model looks ahead within images and prefixes alone, and an encoder looks both ways."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.breach import LEAST, breach, hidden_pairs
from regard.watching.checks.finding import Finding, Reason, Severity
from regard.watching.checks.roles import around
from regard.watching.checks.rules.base import NotAsked, need, need_attention, need_one_sequence, rule
from regard.watching.checks.rules.padding import TRUE
from regard.watching.checks.rules.window import layer_kind, window_of

TURNED = ("causal", "causal from the first key", "causal from a position", "window", "inverted", "documents, causal")
"""Patterns that show each query nothing after its own position, or nothing before."""


@rule("future")
def future_rule(call: AuditedCall) -> Iterator[Finding]:
    """Does a query of a causal model see what comes later?"""
    need_one_sequence(call, has_own_keys=True)
    mask, offset = call.facts.mask, call.offset
    if offset is None and call.facts.mask.tells_positions:
        offset = mask.offset
    if not (mask.pattern == "inverted" or _is_off_by_one(call) or _is_without_its_causal_half(call)):
        need(call.role.direction == "causal" or call.prefix is not None, call.role.why)
        need(offset is not None, "the positions of its queries are not known")
    if mask.pattern == "inverted":
        later = call.facts.later
        yield Finding(
            "inverted mask", "error", "each query sees only what comes after it: the causal mask is upside down",
            numbers={} if later is None else {"share": later}, cause="the mask is turned, or its flags are",
            remedy=f"turn it ({TRUE})",
        )  # fmt: skip
        return
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


@rule("both sides")
def both_sides_rule(call: AuditedCall) -> Iterator[Finding]:
    """Does an encoder see both sides?"""
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
            cause=cause, remedy=remedy or "hand it no causal mask",
        )  # fmt: skip


@rule("cross-attention")
def cross_attention_rule(call: AuditedCall) -> Iterator[Finding]:
    """Does each query see every real key of another sequence?"""
    mask, (queries, keys) = call.facts.mask, call.weights.shape[-2:]
    need(not call.call.is_over_queries, "its softmax ran over the queries")
    need(call.crosses or (call.is_attention and queries > keys), "it attends to its own sequence")
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


IMAGES: Reason = "image tokens"
PREFIX: Reason = "prefix"


@rule("images and prefixes")
def images_and_prefixes_rule(call: AuditedCall) -> Iterator[Finding]:
    """Do the tokens of an image, or of a prefix, see each other both ways?"""
    need_attention(call)
    told, found = call.types or call.prefix, two_way_blocks(call)
    need(told is not None or found is not None, "no token_type_ids were given")
    if found is None:
        raise NotAsked("its token_type_ids are no part of a mask, as far as is known")
    kind, of = found
    window = window_of(call)

    def within(rows: range) -> Tensor:
        near = call.back(rows, 0) < window.size if window is not None and window.size else True
        return same_block(of, rows) & call.real_keys[:, None] & near

    hidden = hidden_pairs(call, within)
    if hidden is None:
        return
    by = "all of an input without token_type_ids" if told is None else f"by {told.source}"
    what = "tokens of one image" if kind == IMAGES else "tokens of the prefix"
    yield hidden.finding(
        call, kind, f"pairs of {what} ({by}) are hidden",
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
    if call.types is None and call.prefix is not None:
        return PREFIX, torch.where(call.prefix.values, 0, -1)
    if call.types is None:
        every = torch.zeros(call.sizes.flat_batch, call.sizes.keys, dtype=torch.long, device=call.device)
        return (PREFIX, every) if _is_all_prefix(call) else None
    types, config = call.types.values, call.config
    if call.types.source.startswith("mm_"):
        # (Gemma 4 shows pictures both ways in the layers with windows alone.)
        is_asked = getattr(config, "use_bidirectional_attention", None) == "vision" and layer_kind(call) in SHOWN_IN
        return (IMAGES, _runs((types == 1) | (types == 2))) if is_asked else None
    if _marks_pictures(call, types):
        return IMAGES, _runs(types == 1)
    if _has_prefix(call) or (config is None and _is_prefix(call, types)):
        return PREFIX, torch.where(types == 0, 0, -1)
    return None


SHOWN_IN = ("sliding_attention", None)
"""The kinds of layers that show pictures both ways, where a config asks for it; None in a config without kinds."""


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


def _marks_pictures(call: AuditedCall, types: Tensor) -> bool:
    """True for kinds that are 1 at the tokens in whose places pictures stand, and at no others."""
    outer = _outermost_config(call)
    token = next((n for name in PICTURES if isinstance(n := getattr(outer, name, None), int)), None)
    ids = call.ids(call.part, call.sizes.keys)
    if token is None or ids is None or call.are_types_embedded:
        return False
    return bool((types == 1).any()) and torch.equal(types == 1, ids.values == token) and not _has_prefix(call)


PICTURES = ("image_token_id", "image_token_index")


def _has_prefix(call: AuditedCall) -> bool:
    """True for the text part of a model around it, whose config turns causality off: it sees its prefix both ways."""
    outer = _outermost_config(call)
    turned_off = getattr(call.config, "use_bidirectional_attention", None) is True
    return turned_off and outer is not call.config and hasattr(call.config, "vocab_size")


def _is_all_prefix(call: AuditedCall) -> bool:
    """True for a pass in evaluation without kinds of tokens, in a model that reads them as the prefix."""
    is_whole = call.offset == 0 and not call.crosses and call.sizes.queries > 1
    return _has_prefix(call) and is_whole and call.call.is_evaluated


def _outermost_config(call: AuditedCall) -> Any:
    configs = [getattr(module, "config", None) for module in around(call.modules, call.name)]
    return next((one for one in reversed(configs) if getattr(one, "model_type", None) is not None), None)


def _is_prefix(call: AuditedCall, types: Tensor) -> bool:
    """True for zeros before ones in a causal model without a table of kinds: they are there for a mask alone."""
    if not bool(((types == 0) | (types == 1)).all()) or bool((types.diff(dim=-1) < 0).any()):
        return False
    if not bool((types == 0).any() & (types == 1).any()):
        return False
    return not call.are_types_embedded and (not call.facts.mask.ahead or call.facts.mask.pattern == "prefix")
