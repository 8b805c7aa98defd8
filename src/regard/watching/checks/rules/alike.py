"""Layers of one stack: one that differs from all the others is named with theirs."""

from collections.abc import Callable, Iterator, Sequence
from string import digits

import torch
from torch import Tensor

from regard.call.biases.base import DenseBias
from regard.watching.checks.audited_call import AuditedCall, need
from regard.watching.checks.finding import Finding
from regard.watching.checks.rules.window import window_of
from regard.watching.kept.mask_reading import HIDDEN

NUMBERS = str.maketrans("", "", digits)
"""Deletes the index of a layer from a path: the modules of a stack differ in it alone."""
FEWEST = 3
"""The fewest layers of a stack that can outvote one."""
VOTED = ("none", "causal", "window", "window to both sides", "prefix", "documents", "documents, causal")


def like_the_others_rule(calls: Sequence[AuditedCall]) -> Callable[[AuditedCall], Iterator[Finding]]:
    stacks: dict[tuple[object, ...], list[AuditedCall]] = {}
    steps: dict[tuple[object, ...], list[AuditedCall]] = {}
    for call in calls:
        key = call.name.translate(NUMBERS), call.call.index, call.crosses, call.sizes.flat_batch
        stacks.setdefault((*key, call.weights.shape), []).append(call)
        if call.is_later_step and call.step is not None:
            steps.setdefault((*key, call.sizes.queries), []).append(call)
    found = [one for stack in stacks.values() if len(stack) > 1 for one in _of_stack(stack)]
    found += [one for step in steps.values() for one in _of_caches(step)]
    beside = {call for group in (*stacks.values(), *steps.values()) if len(group) > 1 for call in group}

    def of(call: AuditedCall) -> Iterator[Finding]:
        need(call in beside, "it is alone in its stack")
        yield from (one for at, one in found if at is call)

    return of


FindingOfCall = tuple[AuditedCall, Finding]


def _of_stack(stack: list[AuditedCall]) -> Iterator[FindingOfCall]:
    yield from _padding(stack)
    if len(stack) >= FEWEST:
        yield from _pattern(stack)
        yield from _bias(stack)


def _of_caches(step: list[AuditedCall]) -> Iterator[FindingOfCall]:
    parents = [_parents(call) for call in step]
    for call, own in zip(step, parents, strict=True):
        others = [one for one in parents if one.shape == own.shape and not bool((own & one).any(1).all())]
        if others and (2 * len(others) > len(step) or (2 * len(others) == len(step) and bool(own.diagonal().all()))):
            rows, theirs = (one.int().argmax(1).tolist() for one in (own, others[0]))
            yield call, Finding(
                "cache", "error",
                f"the rows of its cache are those of sequences {rows} of the step before, and {theirs} in "
                f"{len(others)} layer{'s' if len(others) > 1 else ''} beside it",
                cause="the caches of the layers were reordered in unlike ways, as by a beam search that forgot one",
                remedy="reorder the keys and values of every layer",
            )  # fmt: skip
    if len(step) < FEWEST or any(window_of(call) is not None for call in step):
        return
    for call in step:
        beside = {one.sizes.keys for one in step if one is not call}
        before = {one.before.sizes.keys for one in step if one.before is not None}
        if len(beside) == len(before) == 1 and call.sizes.keys < (keys := min(beside)):
            yield call, Finding(
                "earlier keys lost", "warning",
                f"its cache has {call.sizes.keys} keys, and those of the {len(step) - 1} layers beside it {keys}: all "
                "had as many in the step before",
                numbers={"keys": float(keys - call.sizes.keys)}, cause="keys of its cache were cut off, or not added",
                remedy="hand the kernel all keys of the cache",
            )  # fmt: skip


def _parents(call: AuditedCall) -> Tensor:
    """The possible rows in the step before of each row of the batch, bool (B, C)."""
    assert call.step is not None
    own = torch.eye(call.sizes.flat_batch, dtype=torch.bool, device=call.device)
    return own if call.step.origins is None else call.step.origins.to(call.device)


def _padding(stack: list[AuditedCall]) -> Iterator[FindingOfCall]:
    layers = [call for call in stack if not call.facts.mask.is_unknown and call.keep is None]
    if not layers:
        return
    seen = torch.broadcast_tensors(*(call.seen_keys for call in layers))
    padding = torch.stack([~one for one in seen]).sum(0) * 2 > len(layers)
    for call, keys in zip(layers, seen, strict=True):
        if bool((keys & padding).any()):
            count = int((keys & padding).sum())
            says = f"it sees {count} keys that most layers beside it hide from every query"
            remedy = "hand it the same padding mask"
            yield call, Finding("padding", "warning", says, numbers={"keys": count}, remedy=remedy)


def _pattern(stack: list[AuditedCall]) -> Iterator[FindingOfCall]:
    """One layer with another pattern than all the others. (Of a config that says windows, the config decides.)"""
    if any(window_of(call) is not None for call in stack):
        return
    kinds = [(call.facts.mask.pattern, call.facts.mask.size) for call in stack]
    for n, call in enumerate(stack):
        others = {kind for m, kind in enumerate(kinds) if m != n}
        if len(others) != 1 or kinds[n] in others or kinds[n][0] not in VOTED:
            continue
        (pattern, _), own = others.pop(), call.facts.mask
        theirs = stack[n - 1].facts.mask
        looks_ahead, is_free = bool(own.ahead) and not theirs.ahead, call.role.direction == "unknown"
        # (Of weights, an allowed pair may have the weight 0; they never look ahead by chance.)
        if pattern not in VOTED or not (call.is_exact or looks_ahead):
            continue
        says = f"its mask is {own}, where that of all {len(stack) - 1} layers beside it is {theirs}"
        remedy = "hand it the mask of the others, if it is not meant to differ"
        if looks_ahead and is_free:
            yield call, Finding("future", "warning", f"it alone looks ahead: {says}", remedy=remedy)
        elif "window" in (pattern, own.pattern):
            yield call, Finding("window", "warning", f"it alone has another window: {says}", remedy=remedy)
        elif theirs.ahead and is_free:
            yield call, Finding("causal encoder", "warning", f"it alone is causal: {says}", remedy=remedy)


def _bias(stack: list[AuditedCall]) -> Iterator[FindingOfCall]:
    """Layers without a bias beside others with one. (A bias that is made once is handed from layer to layer.)"""
    has = [_has_bias(call) for call in stack]
    with_one = sum(one is True for one in has)
    for call, own in zip(stack, has, strict=True):
        if own is False and with_one:
            yield call, Finding(
                "bias", "warning",
                f"it adds no bias to its scores, where {with_one} of the {len(stack) - 1} layers beside it add one",
                cause="a relative bias is made in one layer, and was not handed on",
                remedy="hand it the bias of the others",
            )  # fmt: skip


def _has_bias(call: AuditedCall) -> bool | None:
    factors = call.call.factors
    if factors is None:
        return None
    bias = factors.call.bias
    if not isinstance(bias, DenseBias):
        return bias is not None
    tensor = bias.tensor.detach()
    return bool(((tensor != 0) & (tensor > HIDDEN)).any())
