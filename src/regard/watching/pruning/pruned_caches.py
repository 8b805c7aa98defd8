"""The caches of a transformers model: one layer is pruned to some keys, or restored; positions and masks then follow.

Kept keys have their old positions, because transformers applies positions before it caches keys. It counts those of new
tokens by the length of the cache. So an open hook passes the positions after the last ones; and a mask has a column for
each key of a layer.

Source: transformers 5.23, cache_utils.py.
"""

import inspect
import sys
import weakref
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import FunctionError
from regard.watching.cache_argument import cache_in, cache_name
from regard.watching.readers.functions import Args, Kwargs


@dataclass(slots=True, eq=False)
class LayerCache:
    """The cache of a layer whose attention runs now, and its content before."""

    cache: Any
    number: int
    """The index of the layer in the cache."""
    is_cross: bool
    """True for attention to an encoder, whose keys do not grow."""
    padding: Tensor | None
    """The real tokens, bool (B, columns of all tokens), if there is padding."""
    before: tuple[Tensor, Tensor] | None
    """Keys and values before the call; None if there were none, or while they are not needed."""
    length: int

    @property
    def layer(self) -> Any:
        return self.cache.layers[self.number]

    def refuse_unprunable(self, name: str, keys: int) -> None:
        """Raise FunctionError for a cache that cannot be pruned, or without the keys of this call."""
        utils: Any = sys.modules["transformers.cache_utils"]
        if self.is_cross:
            raise FunctionError(
                f"{name!r} attends to an encoder, whose mask belongs to all of its keys: KeepKeys cuts the cache of "
                "self-attention alone"
            )
        if not hasattr(utils.Cache, "get_query_offset"):
            raise FunctionError(
                "KeepKeys needs a transformers whose caches say where queries stand (Cache.get_query_offset), which "
                f"{sys.modules['transformers'].__version__} does not have: it is tested with 5.23"
            )
        kind = type(self.layer) if len(self.cache.layers) > self.number else None
        if kind is not utils.DynamicLayer or getattr(self.cache, "offloading", False):
            what = "an offloaded cache" if kind is utils.DynamicLayer else getattr(kind, "__name__", "no layer")
            raise FunctionError(
                f"{name!r} has {what} as its cache, which cannot be cut: KeepKeys needs a DynamicCache whose layer is "
                "a DynamicLayer (no sliding window, not static, not quantised, not offloaded)"
            )
        held = self.layer.keys.shape[-2] if self.layer.is_initialized else 0
        if held != keys or held == self.length:
            raise FunctionError(
                f"{name!r} attends to {keys} keys, and its cache holds {held}, {held - self.length} of them new: "
                "KeepKeys cuts a cache that holds the keys of the call"
            )

    def prune(self, name: str, indices: Tensor) -> None:
        """Keep the keys and values (B, G, K) of the layer, and drop the others; raises FunctionError if a kept key is
        padding."""
        keys, values = self.layer.keys, self.layer.values
        at = indices.to(keys.device)[..., None]
        self._refuse_padding(name, indices, keys.shape[-2])
        kept = tuple(t.gather(2, at.expand(-1, -1, -1, t.shape[-1])) for t in (keys, values))
        # Both are made before either is set, so the layer is never half pruned.
        self.layer.keys, self.layer.values = kept

    def _refuse_padding(self, name: str, indices: Tensor, keys: int) -> None:
        if self.padding is None:
            return
        real = self._real_keys(self.padding, keys).to(indices.device)
        found = real[:, None].expand(*indices.shape[:2], keys).gather(2, indices)
        if not bool(found.all()):
            least = int(real.sum(-1).min())
            raise FunctionError(
                f"{name!r}: KeepKeys would keep keys of padding, which no later mask could hide: keep at most {least} "
                "keys here, the real ones of the shortest sequence"
            )

    def _real_keys(self, padding: Tensor, keys: int) -> Tensor:
        """The real tokens among the layer's keys, (B, S). After an earlier pruning, all the rest are real."""
        if keys == padding.shape[1]:
            return padding
        new = padding[:, padding.shape[1] - (keys - self.length) :]
        return torch.cat([new.new_ones(len(new), self.length), new], dim=1)

    def put_back(self) -> None:
        """Restore the layer's cache of before the call."""
        if self.number >= len(self.cache.layers):
            return
        layer = self.layer
        if self.before is not None:
            layer.keys, layer.values = self.before
        elif not self.length:
            layer.reset()
        elif layer.keys.shape[-2] > self.length:
            layer.keys, layer.values = (t[..., : self.length, :] for t in (layer.keys, layer.values))


def layer_cache(module: nn.Module, arguments: dict[str, Any], padding: Tensor | None) -> LayerCache | None:
    """The cache of an attention module called with these arguments, or None."""
    library: Any = sys.modules.get("transformers.cache_utils")
    if library is None:
        return None
    cache = next((value for value in arguments.values() if isinstance(value, library.Cache)), None)
    number: Any = getattr(module, "layer_idx", None)
    if cache is None or number is None:
        return None
    is_cross = any(arguments.get(name) is not None for name in ("key_value_states", "encoder_hidden_states"))
    if isinstance(cache, library.EncoderDecoderCache):
        cache = cache.cross_attention_cache if is_cross else cache.self_attention_cache
    layer: Any = cache.layers[number] if len(cache.layers) > number else None
    if layer is not None and not hasattr(layer, "keys"):  # the state of a recurrence
        return None
    is_full = layer is not None and layer.is_initialized and isinstance(layer.keys, Tensor) and layer.keys.dim() == 4
    before = (layer.keys, layer.values) if is_full else None
    length = 0 if before is None else before[0].shape[-2]
    return LayerCache(cache, number, is_cross, padding, before if length else None, length)


class PrunedCaches:
    """Counts and positions of the pruned caches."""

    def __init__(self) -> None:
        self._dropped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """How many keys of each layer of a cache were dropped."""
        self._last: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        """The positions (B, 1) of the tokens each cache has seen last."""
        self.uneven: weakref.WeakSet[Any] = weakref.WeakSet()
        """The caches with layers that may differ in length, as their tokens were pruned."""

    def drop(self, layer: Any, count: int) -> None:
        """Count keys dropped from a layer; a negative number takes them back."""
        self._dropped[layer] = self._dropped.get(layer, 0) + count

    def is_uneven(self, cache: Any) -> bool:
        """True if the layers of a cache may differ in length."""
        return cache in self.uneven or self.is_pruned(cache)

    def seen(self, cache: Any) -> int:
        layers = cache.layers
        return int(cache.get_seq_length()) + (self._dropped.get(layers[0], 0) if layers else 0)

    def is_pruned(self, cache: Any) -> bool:
        """True if keys of this cache were dropped."""
        return any(self._dropped.get(layer) for layer in cache.layers)

    def prepare(self, given: dict[str, Any], count: int, device: torch.device) -> None:
        """Correct `position_ids` and a mask (B, columns) of padding beside a cache; raises FunctionError if tokens
        repeat."""
        cache = cache_in(given)
        positions = given.get("position_ids")
        if not self.is_pruned(cache):
            # transformers counts right here. Given positions are stored, because padding shifts each sequence.
            self.remember(cache, positions)
            return
        seen, last = self.seen(cache), self._last.get(cache)
        if positions is None:
            start = torch.full((1, 1), seen) if last is None else last + 1
            given["position_ids"] = positions = start.to(device) + torch.arange(count, device=device)
        elif last is not None and positions.dim() == 2 and len(last) in (1, len(positions)):
            again = last.to(positions.device) + 1 - positions[:, :1]
            if bool((again > 0).any()):
                raise FunctionError(
                    f"{int(again.max())} tokens came again that the cache has seen: keys were dropped from it, so that "
                    "its length does not tell how many. Pass the new tokens alone, to generate() with an "
                    "attention_mask that has a column for every token"
                )
        self.remember(cache, positions)
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            new = mask[:, mask.shape[1] - count :]
            held = new.new_ones(len(new), int(cache.get_seq_length()))
            given["attention_mask"] = None if bool(new.all()) else torch.cat([held, new], dim=1)

    def last(self, cache: Any) -> Tensor | None:
        """The positions (B, 1) of the last cached tokens; None if unknown."""
        return self._last.get(cache)

    def remember(self, cache: Any, positions: Tensor | None) -> None:
        """Store the last of these positions of tokens."""
        if positions is not None and positions.dim() == 2:
            self._last[cache] = positions[:, -1:].detach()
        else:
            self._last.pop(cache, None)


def mask_of_layer(mask: Any, held: int, count: int, name: str) -> Any:
    """The mask of a layer with another number of keys than the mask's layer: all its old keys are visible, and of the
    new ones those in the mask. Raises FunctionError for block masks with several queries."""
    if mask is None or mask.shape[-1] == held + count:
        return mask
    if count == 1:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise FunctionError(
            f"{name!r} holds {held} keys and other layers another number, for which a {type(mask).__name__} cannot be "
            "made: run the tokens one by one, or use attn_implementation='sdpa'"
        )
    new = mask[..., mask.shape[-1] - count :]
    every = new.new_ones if new.dtype == torch.bool else new.new_zeros
    return torch.cat([every(*new.shape[:-1], held), new], dim=-1)


def arguments_of(module: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments of a module's forward by name, without defaults; those of `**kwargs` by their own names."""
    signature = inspect.signature(module.forward)
    bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def _takes_positions(names: Container[str]) -> bool:
    return cache_name(names) is not None and "position_ids" in names


def parts_with_positions(model: nn.Module) -> list[nn.Module]:
    """The innermost parts of a transformers model given a cache and positions."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    parts = [
        part
        for part in model.modules()
        if isinstance(part, library.PreTrainedModel) and _takes_positions(inspect.signature(part.forward).parameters)
    ]
    return [part for part in parts if not any(other is not part and other in parts for other in part.modules())]
