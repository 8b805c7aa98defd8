"""Padding and documents: no real token gives weight to padding or to another document, and every real key is seen."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall, NotAsked, need
from regard.watching.checks.breach import Pairs, breach
from regard.watching.checks.finding import Finding, Severity

TRUE = "True means attend for F.scaled_dot_product_attention, and leave out for nn.MultiheadAttention"


def padding_rule(call: AuditedCall) -> Iterator[Finding]:
    # (The values of padding, which are 0 in a convolution of a sound model, are not kept.)
    need(call.mixes_positions and call.call.kind != "convolution", "it is no attention over positions")
    if call.keep is None:
        raise NotAsked("no argument tells the padding of its keys: audit(padding=...)")
    keep, by = call.keep.values, f"by {call.keep.source}"
    need(not bool(keep.all()), f"{call.keep.source} names no padding")
    severity: Severity = "error" if call.keep.is_sure else "warning"
    if (twins := _same_keys_of_other_padding(call, keep)) is not None:
        yield Finding(
            "padding", "error", f"sequences {twins[0]} and {twins[1]} have the same keys, and other padding {by}",
            cause="one of the states and their mask was made longer by repeat, the other by repeat_interleave",
            remedy="repeat both in the same order",
        )  # fmt: skip
    elif (found := breach(call, lambda rows: ~keep[:, None].expand(-1, len(rows), -1), of="of padding")) is not None:
        remedy = f"hand it the padding mask, the right way up ({TRUE})"
        said = f"of real tokens is on padding, {by}"
        yield found.finding(call, "padding", said, severity=severity, cause=_slip(call, keep), remedy=remedy)
    elif len(lost := _unseen_keys(call, keep)):
        sequence, key = (int(n) for n in lost[0])
        yield Finding(
            "padding", severity, f"{len(lost)} real tokens are hidden from every row, {by}, such as key {key} of "
            f"sequence {sequence}; the mask that arrived is {call.facts.mask}",
            numbers={"keys": len(lost)}, cause=_slip(call, keep), remedy=f"hide the padding alone ({TRUE})",
        )  # fmt: skip


def _same_keys_of_other_padding(call: AuditedCall, keep: Tensor) -> tuple[int, int] | None:
    """Two sequences of a batch with one memory and two masks of padding; None without such ones."""
    factors = call.call.factors
    if not call.crosses or factors is None or len(factors.call.key) != len(keep):
        return None
    keys = factors.call.key.flatten(1)
    pairs = (keep[:, None] != keep[None]).any(-1).nonzero().tolist()
    return next(((one, other) for one, other in pairs if torch.equal(keys[one], keys[other])), None)


def _unseen_keys(call: AuditedCall, keep: Tensor) -> Tensor:
    """The real keys (sequence, key) that no row sees; none where keys are hidden for other reasons: those behind a
    causal query, outside of windows, or not chosen."""
    mask, is_chosen = call.facts.mask, call.call.chooser is not None
    reaches_all = call.crosses or call.offset == 0 or (call.offset is not None and mask.pattern in ("none", "causal"))
    is_free = mask.is_unknown or mask.pattern in ("no key at all", "inverted", "causal from the first key")
    is_asked = call.is_exact and reaches_all and not is_free and not is_chosen
    return (keep & ~call.seen_keys & is_asked).nonzero()


def _slip(call: AuditedCall, keep: Tensor) -> str:
    """The slip of the hand that gives the mask that arrived, if one of the known ones does."""
    added = call.facts.mask.added
    return next(
        (says for says, gives in _slips(call, keep) if _agrees(call, gives)), added and f"{added}, which hides nothing"
    )


def _slips(call: AuditedCall, keep: Tensor) -> Iterator[tuple[str, Pairs]]:
    batch, keys = keep.shape
    queries = call.sizes.queries
    if queries == keys and bool((call.live_rows == keep).all()):
        said = "the padding mask hides queries in place of keys: it is transposed"
        yield said, lambda rows: keep[:, rows.start : rows.stop, None]
    if batch == queries != 1:
        said = "a mask (B, S) was read as (T, S): the batch has as many sequences as queries"
        yield said, lambda rows: keep[None, rows.start : rows.stop].expand(batch, -1, -1)
    of_keys = {"the padding mask is upside down": ~keep}
    if not call.facts.mask.added:
        of_keys |= {
            "no padding mask arrived": torch.ones_like(keep),
            "the mask of the first sequence reached all of them": keep[:1].expand_as(keep),
            "each sequence got the mask of the one before it": keep.roll(1, 0),
            "each sequence got the mask of the one after it": keep.roll(-1, 0),
            "the masks are in the opposite order of the sequences": keep.flip(0),
        }
    of_keys |= {
        "the mask is on the other side": keep.flip(-1),
        "the mask is shifted by one": keep.roll(1, -1),
        "the mask is shifted back by one": keep.roll(-1, -1),
    }
    yield from ((said, partial(_of_keys, real)) for said, real in of_keys.items())


def _of_keys(real: Tensor, rows: range) -> Tensor:
    return real[:, None].expand(-1, len(rows), -1)


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
    need(call.mixes_positions, "it is no attention over positions")
    if call.documents is None:
        raise NotAsked("no argument tells of more than one document: audit(documents=...)")
    of, source = call.documents.values, call.documents.source

    def others(rows: range) -> Tensor:
        return (of[:, rows.start : rows.stop, None] != of[:, None]) & call.real_keys[:, None]

    if (found := breach(call, others, of="of another document")) is not None:
        cause, remedy = _cause(call, source)
        said = f"is on other documents of the same row, which {source} tell apart"
        yield found.finding(call, "documents", said, cause=cause, remedy=remedy)


def _cause(call: AuditedCall, source: str) -> tuple[str, str]:
    if not call.is_attention:
        return (
            f"the {call.call.kind} goes on from one document to the next: nothing begins it anew",
            "tell the kernel of the documents (seq_idx, cu_seqlens), or run each document by itself",
        )
    has_mask = any("mask" in name for frame in call.call.arguments for name in frame.tensors)
    if has_mask or call.config is None or not source.startswith("the restarts"):
        return (
            "a mask of ones, or none, makes one document of all that are packed in a row",
            "leave out attention_mask beside position_ids that begin anew, or hand it a mask of the documents "
            "(regard.documents)",
        )
    return "positions that begin anew reach no mask, as with a cache", "use_cache=False, or a mask of the documents"
