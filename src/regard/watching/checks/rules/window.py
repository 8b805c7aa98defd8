"""Windows: a layer sees as many keys as its config says, in the layers in which it says so."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.breach import breach, hidden_pairs
from regard.watching.checks.finding import Finding
from regard.watching.checks.roles import around
from regard.watching.checks.rules.base import NotAsked, need, need_one_sequence


class SaidWindow(NamedTuple):
    size: int | None
    """The keys that a query sees, its own included; None for all."""
    words: str
    """The words of the config."""
    is_chunk: bool = False
    """True for chunks of so many tokens, counted from the first real one, that see nothing of the chunks before."""


def window_rule(call: AuditedCall) -> Iterator[Finding]:
    """Does a layer see the window that its config says?"""
    need_one_sequence(call)
    said, offset = window_of(call), call.offset
    if said is None:
        raise NotAsked("no config says a window")
    if offset is None:
        raise NotAsked("the positions of its queries are not known")
    is_causal = call.role.direction == "causal"
    need(is_causal, "the window of a model that sees both sides has no common convention")
    size = said.size
    passes = size is None or offset + call.sizes.queries > size
    need(passes, f"no row has more than {size} keys before it")
    most = call.sizes.keys + 1 if size is None else size
    first = call.real_keys.long().argmax(-1)[:, None, None]

    def beyond(rows: range) -> Tensor:
        away = call.back(rows, offset)[None]
        return away > _in_chunk(call, rows, offset, first, most) if said.is_chunk else away >= most

    def within(rows: range) -> Tensor:
        return (call.back(rows, offset) >= 0)[None] & ~beyond(rows) & call.real_keys[:, None]

    arrived = f"{said.words}: each query sees {_reach_of(said)}"
    found, width = None if size is None else breach(call, beyond, of="beyond the window"), _widest(call)
    given: dict[str, Any] = {"window": float(size or 0), "seen": float(width), "cause": _cause(width, size)}
    if found is not None:
        remedy = "hand this layer the mask of its window"
        yield found.finding(call, "window", f"is beyond the window, where {arrived}", remedy=remedy, **given)
        return
    is_free = call.documents is None and call.call.chooser is None
    if is_free and (hidden := hidden_pairs(call, within)) is not None:
        remedy = "hand this layer the mask that its config says"
        yield hidden.finding(
            call, "window", f"pairs within the window are hidden, where {arrived}", remedy=remedy, **given
        )


def _in_chunk(call: AuditedCall, rows: range, offset: int, first: Tensor, size: int) -> Tensor:
    """How many earlier keys of its own chunk each query has, (B, rows, 1)."""
    places = torch.arange(rows.start, rows.stop, device=call.device)[:, None] + offset
    return (places - first) % size


def _reach_of(said: SaidWindow) -> str:
    if said.size is None:
        return "all earlier keys"
    return f"the keys of its chunk of {said.size}" if said.is_chunk else f"{said.size} keys, its own included"


def _widest(call: AuditedCall) -> int:
    seen = call.facts.seen
    return int((seen.last - seen.first + 1).masked_fill(~seen.live, 0).max())


def _cause(width: int, size: int | None) -> str:
    if size is None:
        return f"a window of {width} reached a layer of full attention"
    if abs(width - size) == 1:
        return f"the window is off by one: {width} keys"
    return f"rows see up to {width} keys" if width < size else "the window did not reach this layer"


def window_of(call: AuditedCall) -> SaidWindow | None:
    """What the config says of a layer; None if it says nothing of windows."""
    config, layer, kind = call.config, _layer(call), layer_kind(call)
    if config is None or layer is None:
        return None
    chunk, size = (_said(config, name, layer) for name in ("attention_chunk_size", "sliding_window"))
    if kind == "chunked_attention" and _is_size(chunk):
        return SaidWindow(chunk, f"the config says attention_chunk_size={chunk} for layer {layer}", is_chunk=True)
    if kind == "sliding_attention" and _is_size(size):
        return SaidWindow(size, f"the config says sliding_window={size} for layer {layer}")
    if kind is not None:
        parts = [name for name, of in (("chunked_attention", chunk), ("sliding_attention", size)) if _is_size(of)]
        is_full = kind == "full_attention" and any(name in config.layer_types for name in parts)
        return SaidWindow(None, f"the config says full_attention for layer {layer}") if is_full else None
    kinds, wide = getattr(config, "attention_layers", None), getattr(config, "window_size", None)
    if isinstance(kinds, list | tuple) and layer < len(kinds) and _is_size(wide):
        said = f"the config says {kinds[layer]} attention for layer {layer}, with window_size={wide}"
        return SaidWindow(wide if kinds[layer] == "local" else None, said)
    is_of_all = not hasattr(config, "layer_types") and getattr(config, "use_sliding_window", True)
    return SaidWindow(size, f"the config says sliding_window={size}") if _is_size(size) and is_of_all else None


def _said(config: Any, name: str, layer: int) -> Any:
    """A setting of a layer: of configs whose layers differ, that of its own config."""
    own = getattr(config, "per_layer_config", None)
    return getattr(own[layer] if own is not None and layer in range(len(own)) else config, name, None)


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def layer_kind(call: AuditedCall) -> str | None:
    """The kind of a layer by its config; None without one."""
    kinds, layer = getattr(call.config, "layer_types", None), _layer(call)
    is_known = isinstance(kinds, list | tuple) and layer is not None and layer < len(kinds)
    return kinds[layer] if is_known else None  # type: ignore[index]


def _layer(call: AuditedCall) -> int | None:
    said = (getattr(one, name, None) for one in around(call.modules, call.name) for name in ("layer_idx", "layer_id"))
    return next((number for number in said if isinstance(number, int)), None)
