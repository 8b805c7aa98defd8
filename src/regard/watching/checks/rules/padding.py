"""Padding and documents: no real token gives weight to padding or to another document, and every real key is seen."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.breach import Pairs, breach
from regard.watching.checks.finding import Finding, Severity
from regard.watching.checks.rules.base import NotAsked, need

TRUE = "True means attend for F.scaled_dot_product_attention, and leave out for nn.MultiheadAttention"


def padding_rule(call: AuditedCall) -> Iterator[Finding]:
    """Does weight rest on padding?"""
    # (The values of padding, which are 0 in a convolution of a sound model, are not kept.)
    need(call.mixes_positions and call.call.kind != "convolution", "it is no attention over positions")
    if call.keep is None:
        raise NotAsked("no argument tells the padding of its keys: audit(padding=...)")
    keep = call.keep.values
    need(not bool(keep.all()), f"{call.keep.source} names no padding")
    found = breach(call, lambda rows: ~keep[:, None].expand(-1, len(rows), -1), of="of padding")
    severity: Severity = "error" if call.keep.is_sure else "warning"
    if (twins := _same_keys_of_other_padding(call, keep)) is not None:
        yield Finding(
            "padding", "error",
            f"sequences {twins[0]} and {twins[1]} have the same keys, and other padding by {call.keep.source}",
            cause="one of the states and their mask was made longer by repeat, the other by repeat_interleave",
            remedy="repeat both in the same order",
        )  # fmt: skip
        return
    if found is not None:
        yield found.finding(
            call, "padding", f"of real tokens is on padding, by {call.keep.source}", severity=severity,
            cause=cause_of(call, keep),
            remedy=f"hand it the padding mask, the right way up ({TRUE})",
        )  # fmt: skip
        return
    lost = unseen_keys(call, keep)
    if lost is not None:
        sequence, key, count = lost
        yield Finding(
            "padding", severity,
            f"{count} real tokens are hidden from every row, by {call.keep.source}, such as key {key} of sequence "
            f"{sequence}; the mask that arrived is {call.facts.mask}",
            numbers={"keys": count}, cause=cause_of(call, keep),
            remedy=f"hide the padding alone ({TRUE})",
        )  # fmt: skip


def _same_keys_of_other_padding(call: AuditedCall, keep: Tensor) -> tuple[int, int] | None:
    """Two sequences of a batch with one memory and two masks of padding; None without such ones."""
    factors = call.call.factors
    if not call.crosses or factors is None or len(factors.call.key) != len(keep):
        return None
    keys = factors.call.key.flatten(1)
    alike = (keys[:, None, :MOST_COMPARED] == keys[None, :, :MOST_COMPARED]).all(-1)
    differ = (keep[:, None] != keep[None]).any(-1)
    pairs = (alike & differ).nonzero().tolist()
    return next(((one, other) for one, other in pairs if torch.equal(keys[one], keys[other])), None)


MOST_COMPARED = 64
"""The elements of a sequence's keys that are compared first."""


def unseen_keys(call: AuditedCall, keep: Tensor) -> tuple[int, int, int] | None:
    """The first real key that no row sees (sequence, key), and how many there are; None without one, or where keys are
    hidden for other reasons: those behind a causal query, outside of windows, or not chosen."""
    mask = call.facts.mask
    if not call.is_exact or mask.is_unknown or call.call.chooser is not None:
        return None
    reaches_all = call.crosses or call.offset == 0 or (call.offset is not None and mask.pattern in ("none", "causal"))
    if not reaches_all or mask.pattern in ("no key at all", "inverted", "causal from the first key"):
        return None
    lost = keep & ~call.seen_keys
    if not bool(lost.any()):
        return None
    sequence, key = (int(n) for n in lost.nonzero()[0])
    return sequence, key, int(lost.sum())


def cause_of(call: AuditedCall, keep: Tensor) -> str:
    """The slip of the hand that gives the mask that arrived, if one of the known ones does."""
    for says, gives in _slips(call, keep):
        if _agrees(call, gives):
            return says
    if added := call.facts.mask.added:
        return f"{added}, which hides nothing"
    return ""


def _slips(call: AuditedCall, keep: Tensor) -> Iterator[tuple[str, Pairs]]:
    batch, keys = keep.shape
    queries = call.sizes.queries

    def of_keys(real: Tensor) -> Pairs:
        return lambda rows: real[:, None].expand(-1, len(rows), -1)

    if queries == keys and bool((call.live_rows == keep).all()):
        said = "the padding mask hides queries in place of keys: it is turned"
        yield said, lambda rows: keep[:, rows.start : rows.stop, None]
    if not call.facts.mask.added:
        yield "no padding mask arrived", of_keys(torch.ones_like(keep))
    yield "the padding mask is upside down", of_keys(~keep)
    if batch == queries != 1:
        yield (
            "a mask (B, S) was read as (T, S): the batch has as many sequences as queries",
            lambda rows: keep[None, rows.start : rows.stop].expand(batch, -1, -1),
        )
    if batch > 1 and not call.facts.mask.added:
        yield "the mask of the first sequence reached all of them", of_keys(keep[:1].expand_as(keep))
        yield "each sequence got the mask of the one before it", of_keys(keep.roll(1, 0))
        yield "each sequence got the mask of the one after it", of_keys(keep.roll(-1, 0))
        yield "the masks are in the opposite order of the sequences", of_keys(keep.flip(0))
    yield "the mask is on the other side", of_keys(keep.flip(-1))
    yield "the mask is shifted by one", of_keys(keep.roll(1, -1))
    yield "the mask is shifted by one", of_keys(keep.roll(-1, -1))


def _agrees(call: AuditedCall, gives: Pairs) -> bool:
    """True if the rows of real tokens that see a key see those of a slip, and no others but later ones."""
    is_causal = call.offset is not None and not call.facts.mask.ahead
    for rows in call.chunks():
        counted = call.counted[:, rows.start : rows.stop, None]
        if is_causal:
            counted = counted & (call.back(rows, call.offset or 0) >= 0)
        differs = (call.sees(rows).any(1) ^ gives(rows)) & counted
        if bool(differs.any()):
            return False
    return True


def documents_rule(call: AuditedCall) -> Iterator[Finding]:
    """Does weight rest on another document of the same row?"""
    need(call.mixes_positions, "it is no attention over positions")
    if call.documents is None:
        raise NotAsked("no argument tells of more than one document: audit(documents=...)")
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
