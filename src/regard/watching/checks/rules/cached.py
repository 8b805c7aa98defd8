"""Steps with a cache: a query sees its own key, the newest, and all before it; its position follows that of the step
before."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall, need, need_one_sequence
from regard.watching.checks.breach import hidden_pairs
from regard.watching.checks.finding import Finding
from regard.watching.checks.rules.layers import window_of
from regard.watching.checks.told import ENDS, handed

OLDEST = "a cache that is cut back keeps its oldest keys, or the kernel got it before the new keys were added"
NEWEST = "add the new keys first, and cut with keys[..., -window:, :]"


def own_keys_rule(call: AuditedCall) -> Iterator[Finding]:
    need_one_sequence(call, has_own_keys=True)
    need(call.is_exact, "its mask is read from weights, where an allowed key may have none")
    if call.facts.mask.pattern == "inverted" or call.call.chooser is not None:
        return
    queries, keys = call.sizes.queries, call.sizes.keys
    new = f"{queries} quer{'y' if queries == 1 else 'ies'}"
    numbers = {"queries": float(queries), "keys": float(keys)}
    has_oldest = _has_oldest_keys(call)
    if (has_oldest and queries == keys and call.facts.mask.pattern == "causal") or _is_from_first(call):
        yield Finding(
            "causal from the first key", "error",
            f"the {new} follow a cache, and the kernel got the {keys} oldest keys of it" if has_oldest else
            f"{new} and {keys} keys, and the causal mask aligns the first with the first: no query sees the last "
            f"{keys - queries} keys",
            numbers=numbers, cause="is_causal, or a triangle, aligned the first query with the first key",
            remedy="align the last query with the last key: a mask of tril(keys - queries), or none for a single query",
        )  # fmt: skip
    elif has_oldest and queries < keys:
        yield Finding(
            "itself hidden", "error",
            f"its {keys} keys are the first of those that its call before had: none is of its {new}",
            numbers=numbers, cause=OLDEST, remedy=NEWEST,
        )  # fmt: skip
    elif free := _seen_free_places(call):
        yield Finding(
            "itself hidden", "error",
            f"its last {free} keys are zeros, and its queries see them: free places of a buffer, where the newest "
            "keys should be",
            numbers={"keys": float(free)},
            cause="the new keys were written at another place, or the mask reaches beyond them",
            remedy="write them behind those of the cache, and hide the places that are still free",
        )  # fmt: skip
    else:
        is_told = call.offset is not None and _is_causal(call)
        yield from (list(_own(call, call.offset or 0)) if is_told else []) or _own_of_last(call)


def _own_of_last(call: AuditedCall) -> Iterator[Finding]:
    """A last query that does not see its own key, under a causal mask whose other queries do: no padding does that."""
    seen = call.facts.seen
    own = torch.arange(call.sizes.queries, device=call.device) + call.facts.mask.offset
    short = seen.live & (seen.last < own)
    batch = call.sizes.flat_batch
    count = int(short.any(-1).unflatten(0, seen.shape).any(1).expand(batch).sum())
    is_last_alone = seen.all(seen.last <= own) and not bool(short[:, :-1].any())
    if call.facts.mask.pattern == "dense of no known kind" and count and is_last_alone:
        yield Finding(
            "itself hidden", "warning", f"the last query of {count} of {batch} sequences does not see its own key",
            numbers={"rows": float(count), "of": float(batch)},
            cause="a token added at the end has no column of its own in the mask, or the mask is shifted",
            remedy="let each query see itself",
        )  # fmt: skip


def _own(call: AuditedCall, offset: int) -> Iterator[Finding]:
    keep = call.keep.values if call.keep is not None else call.seen_keys
    is_step = call.is_later_step

    def own(rows: range) -> Tensor:
        pairs = (call.back(rows, offset) == 0)[None]
        return pairs if is_step and call.keep is None else pairs & keep[:, None]

    hidden = hidden_pairs(call, own)
    if hidden is not None:
        strict = "a strict triangle hides the diagonal (tril(-1), or hiding triu(0))"
        yield hidden.finding(
            call, "itself hidden", "queries do not see their own key, the newest", rows=hidden.amount,
            cause="the mask is one step behind the cache" if is_step else strict,
            remedy="keep the keys up to the query's own: tril(0), or hide triu(1)",
        )  # fmt: skip
        return
    known = None if not is_step or call.facts.mask.is_unknown else _seen_before(call)
    hidden = None if known is None else hidden_pairs(call, lambda rows: known[:, None].expand(-1, len(rows), -1))
    if hidden is not None:
        yield hidden.finding(
            call, "earlier keys lost", "pairs are hidden that the calls before with the same cache saw",
            cause="the mask was not extended with the cache, or not made for all of it",
            remedy="make the mask over all keys of the cache",
        )  # fmt: skip


def _is_from_first(call: AuditedCall) -> bool:
    """True for a causal mask that begins at the first key, with later keys that are no free places of a buffer."""
    queries, seen, factors = call.sizes.queries, call.facts.seen, call.call.factors
    is_free = factors is not None and not bool(factors.call.key[..., queries:, :].any())
    if queries == call.sizes.keys or is_free:
        return False
    if queries > 1:
        return call.facts.mask.pattern == "causal from the first key"
    return call.is_later_step and seen.all((seen.first == 0) & (seen.last == 0)) and bool(seen.live.any())


def _is_causal(call: AuditedCall) -> bool:
    """True for a call whose rows should see themselves: by its role, its cache, or a strict triangle, of which each row
    sees all keys up to the one before its own."""
    seen = call.facts.seen
    place = torch.arange(call.sizes.queries, device=call.device) + (call.offset or 0) - 1
    is_strict = len(place) > 2 and bool(seen.live.any()) and seen.all((seen.last == place) | (place < 0))
    return call.role.direction == "causal" or call.is_later_step or is_strict


def _seen_before(call: AuditedCall) -> Tensor | None:
    """The keys (B or 1, S) that the call before with the same cache saw; None where a window may hide old ones."""
    before, step, keys, said = call.before, call.step, call.sizes.keys, window_of(call)
    if before is None or step is None or step.start or step.origins is not None or (said is not None and said.size):
        return None
    own, known = call.seen_keys, before.seen_keys
    # Without a config, a window tells itself by nothing but the oldest keys, which it hides.
    first = own.long().argmax(-1, keepdim=True)
    is_window = call.config is None and bool((own | (torch.arange(keys, device=call.device) < first)).all())
    return None if is_window else torch.nn.functional.pad(known, (0, keys - known.shape[1]))


def _seen_free_places(call: AuditedCall) -> int:
    """How many of the last keys of a later call are zeros that its last query sees."""
    factors, queries, keys = call.call.factors, call.sizes.queries, call.sizes.keys
    if factors is None or call.earlier is None or call.earlier.sizes.queries < 2 or queries >= keys:
        return 0
    is_zero = (factors.call.key == 0).all(-1).flatten(0, -2).all(0)
    free = int(is_zero.flip(0).long().cumprod(0).sum())
    is_seen = 0 < free < keys and bool(call.sees(range(queries - 1, queries))[..., -free:].any())
    return free if is_seen else 0


def _has_oldest_keys(call: AuditedCall) -> bool:
    """True if the keys of a call are the first ones of the call before, and its queries are others, in a module whose
    first call was causal: no key is of its queries."""
    first, earlier, factors = call, call.earlier, call.call.factors
    while first.earlier is not None:
        first = first.earlier
    is_own = first.sizes.queries == first.sizes.keys > 1 and not first.facts.mask.ahead and first.is_exact
    if not is_own or factors is None or earlier is None or earlier.call.factors is None:
        return False
    own, other = factors.call, earlier.call.factors.call
    is_again = torch.equal(own.query, other.query[..., : call.sizes.queries, :])
    return torch.equal(own.key, other.key[..., : call.sizes.keys, :]) and not is_again


def positions_rule(call: AuditedCall) -> Iterator[Finding]:
    need_one_sequence(call)
    need(call.positions is not None, "its positions are in no table and no argument")
    if call.is_later_step:
        yield from _of_step(call)
        return
    has_padding = call.offset == 0 and call.keep is not None and bool((~call.keep.values[:, 0]).any())
    has_documents = call.position_table is not None and call.documents is not None
    need(has_padding or has_documents, "it is no step with a cache, and has no padding on the left")
    if has_padding and call.position_table is not None:
        yield from _counted_padding(call)
    if has_documents:
        yield from _over_documents(call)


def _of_step(call: AuditedCall) -> Iterator[Finding]:
    step, last, now = call.step, call.before, call.positions
    before = None if last is None else last.positions
    if now is None or before is None or last is None or step is None or last.step is None or step.origins is not None:
        return
    if now.source.partition(" of ")[0] != before.source.partition(" of ")[0]:
        return
    # (Where a cache was cut back, a step begins earlier than the last one ended.)
    gone = step.first - last.step.first - last.sizes.queries
    # (Padding at the end of a prompt may count, or not; before its first real token a sequence has no position.)
    expected, was_real = _of_first_real(before.values.flip(-1), last.real_queries.flip(-1))
    got, is_real = _of_first_real(now.values, call.real_queries)
    expected, counted = expected + 1 + gone, before.values[:, -1] + 1 + gone
    wrong = (expected != got) & (counted != got) & was_real & is_real
    if bool(wrong.any()):
        row = int(wrong.long().argmax())
        here, there = int(got[row]), int(expected[row])
        # (They go on after the last token, and the keys do not.)
        is_cut = gone < 0 and here == there - gone
        cause = "positions begin anew at each step" if not here else "positions are not advanced with the cache"
        yield Finding(
            "positions", "error",
            f"its first new token has position {here} in sequence {row}, by {now.source}, and follows "
            + (f"the oldest {there} keys" if is_cut else f"position {there - 1}"),
            numbers={"position": float(here), "expected": float(there)},
            cause=OLDEST if is_cut else cause,
            remedy=NEWEST if is_cut else "add the length of the cache to the positions of new tokens",
        )  # fmt: skip


def _of_first_real(positions: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The position of the first real token of each sequence, and whether there is one."""
    real = real.expand_as(positions)
    return positions.gather(1, real.long().argmax(-1, keepdim=True))[:, 0], real.any(-1)


def _over_documents(call: AuditedCall) -> Iterator[Finding]:
    assert call.positions is not None
    assert call.documents is not None
    begins = (call.documents.values.diff(dim=-1) != 0) & call.real_keys[:, 1:] & call.real_keys[:, :-1]
    if bool(begins.any()) and bool((call.positions.values.diff(dim=-1)[begins] == 1).all()):
        row, key = (int(n) for n in begins.nonzero()[0])
        # (With their ends, sequences of a batch are packed, which should be as alone.)
        is_of_ends = call.documents.source.startswith(ENDS)
        yield Finding(
            "positions", "warning" if is_of_ends else "info",
            f"positions go on from one document to the next, which {call.documents.source} tell apart: the first token "
            f"of a document, key {key + 1} of sequence {row}, has position {int(call.positions.values[row, key + 1])}",
            numbers={"documents": float(begins.sum())},
            cause="a document then has other positions than alone", remedy="count the positions of each document anew",
        )  # fmt: skip


def _counted_padding(call: AuditedCall) -> Iterator[Finding]:
    """Positions by a table that count padding on the left: a sequence then has other positions than alone."""
    assert call.positions is not None
    at, is_real = _of_first_real(call.positions.values, call.real_keys)
    first, base = call.real_keys.long().argmax(-1), call.positions.values.min()
    if bool((is_real & (at - base == first) & (first > 0)).any()):
        row = int((first > 0).long().argmax())
        is_handed = any(not one.frame.path for one in handed(call.call, ("position_ids",), call.sizes.queries))
        yield Finding(
            "positions", "warning" if is_handed and call.role.direction == "causal" else "info",
            f"padding on the left counts as positions: the first token of sequence {row} has position {int(at[row])}, "
            f"and alone {int(base)}",
            numbers={"position": float(at[row])}, remedy="hand over position_ids that count from the first real token",
        )  # fmt: skip
