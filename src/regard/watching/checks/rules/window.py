"""Windows: a layer sees as many keys as its config says, in the layers in which it says so."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall, NotAsked, need, need_one_sequence
from regard.watching.checks.breach import breach, hidden_pairs
from regard.watching.checks.finding import Finding
from regard.watching.checks.roles import around


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
    given: dict[str, Any] = {"window": float(size or 0), "seen": float(width), "cause": _cause(width, size)}
    found = None if size is None else breach(call, beyond, of="beyond the window")
    if found is not None:
        given["remedy"] = "hand this layer the mask of its window"
        yield found.finding(call, "window", f"is beyond the window, where {said}", **given)
    elif call.documents is None and call.call.chooser is None and (hidden := hidden_pairs(call, within)) is not None:
        given["remedy"] = "hand this layer the mask that its config says"
        yield hidden.finding(call, "window", f"pairs within the window are hidden, where {said}", **given)


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
