"""Layers: each sees the window that its config says, and the same keys as the others of its stack."""

from collections.abc import Callable, Iterator, Sequence
from string import digits
from typing import NamedTuple

import torch
from torch import Tensor

from regard.call.biases.base import DenseBias
from regard.watching.checks.audited_call import AuditedCall, NotAsked, need, need_one_sequence
from regard.watching.checks.breach import breach, hidden_pairs
from regard.watching.checks.finding import Finding
from regard.watching.checks.roles import around
from regard.watching.kept.mask_reading import HIDDEN

NUMBERS = str.maketrans("", "", digits)
"""Deletes the index of a layer from a path: the modules of a stack differ in it alone."""
FEWEST = 3
"""The fewest layers of a stack that can outvote one."""
VOTED = ("none", "causal", "window", "window to both sides", "prefix", "documents", "documents, causal")


class SaidWindow(NamedTuple):
    size: int | None
    """The keys that a query sees, its own included; None for all."""
    words: str
    """The words of the config."""
    is_chunk: bool = False
    """True for chunks of so many tokens, counted from the first real one, that see nothing of the chunks before."""

    def __str__(self) -> str:
        some = f"the keys of its chunk of {self.size}" if self.is_chunk else f"{self.size} keys, its own included"
        return f"{self.words}: each query sees {'all earlier keys' if self.size is None else some}"


def window_rule(call: AuditedCall) -> Iterator[Finding]:
    need_one_sequence(call)
    said, offset, seen = window_of(call), call.offset, call.facts.seen
    if said is None:
        raise NotAsked("no config says a window")
    if offset is None:
        raise NotAsked("the positions of its queries are not known")
    is_causal = call.role.direction == "causal"
    need(is_causal, "the window of a model that sees both sides has no common convention")
    size = said.size
    need(size is None or offset + call.sizes.queries > size, f"no row has more than {size} keys before it")
    most = call.sizes.keys + 1 if size is None else size
    first = call.real_keys.long().argmax(-1)[:, None, None]

    def beyond(rows: range) -> Tensor:
        place = torch.arange(rows.start, rows.stop, device=call.device)[:, None] + offset
        # (Of its own chunk, a query has as many earlier keys.)
        return call.back(rows, offset)[None] > ((place - first) % most if said.is_chunk else most - 1)

    def within(rows: range) -> Tensor:
        return (call.back(rows, offset) >= 0)[None] & ~beyond(rows) & call.real_keys[:, None]

    width = int((seen.last - seen.first + 1).masked_fill(~seen.live, 0).max())
    found, says = None if size is None else breach(call, beyond, of="beyond the window"), "is beyond the window"
    if found is None and call.documents is None and call.call.chooser is None:
        found, says = hidden_pairs(call, within), "pairs within the window are hidden"
    if found is not None:
        yield found.finding(
            call, "window", f"{says}, where {said}", cause=_cause(width, size),
            remedy="hand this layer the mask that its config says", window=float(size or 0), seen=float(width),
        )  # fmt: skip


def _cause(width: int, size: int | None) -> str:
    if size is None:
        return f"a window of {width} reached a layer of full attention"
    if abs(width - size) == 1:
        return f"the window is off by one: {width} keys"
    return f"rows see up to {width} keys" if width < size else "the window did not reach this layer"


def window_of(call: AuditedCall) -> SaidWindow | None:
    """The config's window of a layer; None if the config names none."""
    config, layer, kind = call.config, _layer(call), layer_kind(call)
    if config is None or layer is None:
        return None
    # (Of configs whose layers differ, each has one of its own.)
    each = getattr(config, "per_layer_config", None) or ()
    own = each[layer] if layer < len(each) else config
    names = {"chunked_attention": "attention_chunk_size", "sliding_attention": "sliding_window"}
    sizes = {of: size for of, name in names.items() if type(size := getattr(own, name, None)) is int and size > 0}
    if kind in sizes:
        words = f"the config says {names[kind]}={sizes[kind]} for layer {layer}"
        return SaidWindow(sizes[kind], words, is_chunk=kind == "chunked_attention")
    if kind is not None:
        is_full = kind == "full_attention" and any(of in config.layer_types for of in sizes)
        return SaidWindow(None, f"the config says full_attention for layer {layer}") if is_full else None
    kinds, wide = getattr(config, "attention_layers", None), getattr(config, "window_size", None)
    if isinstance(kinds, list | tuple) and layer < len(kinds) and type(wide) is int:
        said = f"the config says {kinds[layer]} attention for layer {layer}, with window_size={wide}"
        return SaidWindow(wide if kinds[layer] == "local" else None, said)
    size = sizes.get("sliding_attention")
    is_of_all = not hasattr(config, "layer_types") and getattr(config, "use_sliding_window", True)
    return SaidWindow(size, f"the config says sliding_window={size}") if size and is_of_all else None


def layer_kind(call: AuditedCall) -> str | None:
    """The kind of a layer by its config; None without one."""
    kinds, layer = getattr(call.config, "layer_types", None), _layer(call)
    is_known = isinstance(kinds, list | tuple) and layer is not None and layer < len(kinds)
    return kinds[layer] if is_known else None  # type: ignore[index]


def _layer(call: AuditedCall) -> int | None:
    said = (getattr(one, name, None) for one in around(call.modules, call.name) for name in ("layer_idx", "layer_id"))
    return next((number for number in said if isinstance(number, int)), None)


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
