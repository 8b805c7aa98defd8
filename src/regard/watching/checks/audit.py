"""The audit of a watch: the faults of each call."""

import math
from collections.abc import Iterator
from dataclasses import replace
from string import digits

import torch
from torch import Tensor

from regard.errors import RegardError, ShapeError
from regard.watching.checks.chosen_keys import KeyChoice
from regard.watching.checks.facts import Facts, facts_of
from regard.watching.checks.finding import Finding, Severity, by_module
from regard.watching.checks.roles import is_causal
from regard.watching.observed import Observed, Record

LEAST = 1e-6
"""A share of weight below this is rounding."""
NUMBERS = str.maketrans("", "", digits)
"""Deletes the index of a layer from a path: the modules of a stack differ in it alone."""
SINK = 0.2
"""A weight on the first key above this is a sink's."""
TURNED = ("causal", "causal from the first key", "causal from a position", "window", "inverted")
"""Patterns with a meaning only if query and key are of one sequence."""
TRUE = "True means attend for F.scaled_dot_product_attention, and leave out for nn.MultiheadAttention"


def audit(record: Record, *, causal: bool | None = None, keep: Tensor | None = None) -> list[Finding]:
    """Find the faults of the calls a watch has seen, see `Seen.audit`; raises ShapeError for `keep` other than bool (B,
    S)."""
    if keep is not None and (keep.dtype != torch.bool or keep.dim() != 2):
        raise ShapeError(f"padding= takes a bool tensor (B, S), True = a real token; got {keep.dtype} {keep.shape}")
    found: list[Finding] = []
    known: list[tuple[Observed, Facts]] = []
    for call in (call for call in record.calls if call.kind not in ("compression", "attention over depth")):
        crosses = call.crosses is True
        try:
            facts = facts_of(call, _fitting(call, keep), crosses=crosses)
        except RegardError as error:
            found.append(Finding("not seen", "info", str(error), call.name, call.index))
            continue
        known.append((call, facts))
        wanted = is_causal(record.modules, call.name, call.crosses) if causal is None else causal and not crosses
        faults = _of_call(call, facts, crosses=crosses, should_be_causal=wanted, keep=_fitting(call, keep))
        found += [replace(fault, path=call.name, call=call.index) for fault in faults]
    if keep is None:
        found += _unlike_their_like(known)
    return by_module(found)


def _of_call(
    call: Observed, facts: Facts, *, crosses: bool, should_be_causal: bool, keep: Tensor | None
) -> Iterator[Finding]:
    assert call.map is not None
    mask, (queries, keys) = facts.mask, call.map.shape[-2:]
    if facts.fault:
        yield Finding("recurrence", "error", facts.fault)
        return
    if any(share is not None and math.isnan(share) for share in (facts.later, facts.padding, facts.first)):
        yield Finding(
            "not finite", "error", "its weights are not numbers: look at the inputs and at rows without a key",
        )  # fmt: skip
        return
    if crosses or queries > keys:
        if queries > 1 and mask.pattern in TURNED:
            yield Finding(
                "causal cross-attention", "error",
                f"the keys are of another sequence, and the mask that arrived is {mask}: each query should see every "
                "real key; look for an is_causal that is True by default",
                numbers={"queries": queries, "keys": keys},
            )  # fmt: skip
    elif mask.pattern == "inverted":
        yield Finding(
            "inverted mask", "error",
            f"each query sees only what comes after it: the causal mask is upside down ({TRUE})",
            numbers={} if facts.later is None else {"share": facts.later},
        )  # fmt: skip
    elif mask.pattern == "causal from the first key" and queries > 1 and not _is_empty_beyond(call, queries):
        yield Finding(
            "causal from the first key", "error",
            f"{queries} queries and {keys} keys, and the causal mask aligns the first with the first: no query "
            f"sees the last {keys - queries} keys. is_causal does that; after a cache, align the last with the "
            "last",
            numbers={"queries": queries, "keys": keys},
        )  # fmt: skip
    elif should_be_causal and facts.later is not None and facts.later > LEAST:
        yield _future(facts, facts.later)
    if keep is not None and facts.padding is not None and facts.padding > LEAST:
        yield Finding(
            "padding", "error",
            f"{facts.padding:.1%} of the weight is on padding, and the mask that arrived is {mask}: hand it the "
            f"padding mask, the right way up ({TRUE})",
            numbers={"share": facts.padding},
        )  # fmt: skip
    if facts.choice is not None and facts.choice.without_first > 0:
        yield _first_dropped(facts.choice)
    if facts.no_key and mask.pattern != "inverted":
        yield _no_key(call, facts, keep)


def _future(facts: Facts, later: float) -> Finding:
    """A causal model with visible later positions; prefixes and blocks are bidirectional by design."""
    meant = facts.mask.pattern in ("prefix", "causal, with blocks of both directions")
    says = (
        f"{later:.1%} of the weight is on later positions, in a model that should be causal; the mask that arrived is "
        f"{facts.mask}"
    )
    advice = "right for a prefix or an image, and wrong otherwise" if meant else "hand the kernel a causal mask"
    severity: Severity = "info" if meant else "error"
    return Finding("future", severity, f"{says}: {advice}", numbers={"share": later})


def _first_dropped(choice: KeyChoice) -> Finding:
    """An indexer that leaves out the first key, on which softmax attention often rests (a sink)."""
    weight = "" if choice.first is None else f", where all causal keys would give it {choice.first:.1%} of the weight"
    is_sink = choice.first is not None and choice.first > SINK
    advice = "keep the first key in every choice" if is_sink else "right if it is no sink"
    numbers = {"rows": choice.without_first} | ({} if choice.first is None else {"weight": choice.first})
    return Finding(
        "first key dropped", "warning" if is_sink else "info",
        f"{choice.without_first:.1%} of the rows that choose leave out the first key{weight}: {advice}",
        numbers=numbers,
    )  # fmt: skip


def _no_key(call: Observed, facts: Facts, keep: Tensor | None) -> Finding:
    assert call.map is not None
    seen, (queries, keys) = facts.seen, call.map.shape[-2:]
    dead = (~seen.live).unflatten(0, seen.shape).any(1)
    real = torch.ones_like(dead)
    position = torch.arange(queries, device=dead.device) + facts.mask.offset
    if keep is not None and queries == keys:
        real = keep.to(dead.device)
    elif int(position[0]) >= 0 and int(position[-1]) < keys:
        real = seen.keys.unflatten(0, seen.shape).any(1)[:, position]
    count = int((dead & real).sum()) if queries == keys or keep is None else 0
    numbers = {"rows": float(facts.no_key), "of": float(facts.rows)}
    if not count:
        return Finding(
            "no key", "info",
            f"{facts.no_key} of {facts.rows} rows have no key, all of them of padding: their weights are 0 here, and "
            "their output means nothing",
            numbers=numbers,
        )  # fmt: skip
    return Finding(
        "no key", "warning" if keep is None else "error",
        f"{facts.no_key} of {facts.rows} rows have no key, rows of real tokens among them, and the mask that arrived "
        f"is {facts.mask}: their output is 0, NaN or an even mean, as the kernel likes; let each see itself",
        numbers=numbers,
    )  # fmt: skip


def _unlike_their_like(known: list[tuple[Observed, Facts]]) -> Iterator[Finding]:
    """Layers of one stack with visible keys that other layers mask as padding."""
    stacks: dict[tuple[object, ...], list[tuple[Observed, Facts]]] = {}
    for call, facts in known:
        assert call.map is not None
        stack = (call.name.translate(NUMBERS), call.index, call.map.shape)
        stacks.setdefault(stack, []).append((call, facts))
    for alike in stacks.values():
        layers = [(call, facts) for call, facts in alike if not facts.mask.is_unknown]
        if not layers:
            continue
        seen = [facts.seen.keys.unflatten(0, facts.seen.shape).any(1) for _, facts in layers]
        if len({one.shape for one in seen}) > 1:
            seen = list(torch.broadcast_tensors(*seen))
        padding = torch.stack([~one for one in seen]).sum(0) * 2 > len(layers)
        for (call, _), keys in zip(layers, seen, strict=True):
            if bool((keys & padding).any()):
                count = int((keys & padding).sum())
                yield Finding(
                    "padding", "warning",
                    f"it sees {count} keys that most layers beside it hide from every query: hand it the same padding "
                    "mask",
                    call.name, call.index, {"keys": count},
                )  # fmt: skip


def _fitting(call: Observed, keep: Tensor | None) -> Tensor | None:
    if keep is None or call.map is None:
        return None
    sizes = call.sizes
    return keep if keep.shape == (sizes.flat_batch, sizes.keys) else None


def _is_empty_beyond(call: Observed, place: int) -> bool:
    return call.factors is not None and not bool(call.factors.call.key[..., place:, :].any())
