"""The cache of one layer of a transformers model while the layer runs: it is pruned to some keys, or restored.

Kept keys have their old positions, because transformers applies positions before it caches keys. Counts by the length
of the cache (the positions of new tokens, the columns of masks) are corrected by
`regard.watching.pruning.pruned_caches`.

Source: transformers 5.23, cache_utils.py.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import FunctionError


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

    def forget(self) -> None:
        """Let go of the keys and values from before the call."""
        self.before = None

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
