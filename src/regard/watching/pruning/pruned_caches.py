"""Positions and masks of a transformers model after pruning of its cache.

Without position arguments transformers counts positions by the length of the cache. So an open hook passes the
positions after the last ones; and a mask has a column for each key of a layer.
"""

import inspect
import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import FunctionError
from regard.watching.readers.functions import Args, Kwargs


class PrunedCaches:
    """Counts and positions of the pruned caches."""

    def __init__(self) -> None:
        self._dropped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """How many keys of each layer of a cache were dropped."""
        self._last: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        """The positions (B, 1) of the tokens each cache has seen last."""
        self._uneven: weakref.WeakSet[Any] = weakref.WeakSet()

    def dropped(self, layer: Any) -> int:
        """How many keys of a layer of a cache were dropped."""
        return self._dropped.get(layer, 0)

    def drop(self, layer: Any, count: int) -> None:
        """Count keys dropped from a layer; a negative number takes them back."""
        self._dropped[layer] = self.dropped(layer) + count

    def mark(self, cache: Any) -> None:
        """Note that the layers of a cache may differ in length."""
        self._uneven.add(cache)

    def is_uneven(self, cache: Any) -> bool:
        """True if the layers of a cache may differ in length."""
        return cache in self._uneven or self.is_pruned(cache)

    def seen(self, cache: Any) -> int:
        layers = cache.layers
        return int(cache.get_seq_length()) + (self.dropped(layers[0]) if layers else 0)

    def is_pruned(self, cache: Any) -> bool:
        """True if keys of this cache were dropped."""
        return any(self.dropped(layer) for layer in cache.layers)

    def prepare(self, given: dict[str, Any], tokens: int, device: torch.device) -> None:
        """Correct `position_ids` and a mask (B, columns) of padding beside a cache; raises FunctionError if tokens
        repeat."""
        cache = given["past_key_values"]
        positions = given.get("position_ids")
        if not self.is_pruned(cache):
            # transformers counts right here. Given positions are stored, because padding shifts each sequence.
            self._remember(cache, positions)
            return
        seen, last = self.seen(cache), self._last.get(cache)
        if positions is None:
            start = torch.full((1, 1), seen) if last is None else last + 1
            given["position_ids"] = positions = start.to(device) + torch.arange(tokens, device=device)
        elif last is not None and positions.dim() == 2 and len(last) in (1, len(positions)):
            again = last.to(positions.device) + 1 - positions[:, :1]
            if bool((again > 0).any()):
                raise FunctionError(
                    f"{int(again.max())} tokens came again that the cache has seen: keys were dropped from it, so that "
                    "its length does not tell how many. Pass the new tokens alone, to generate() with an "
                    "attention_mask that has a column for every token"
                )
        self._remember(cache, positions)
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            new = mask[:, mask.shape[1] - tokens :]
            held = new.new_ones(len(new), int(cache.get_seq_length()))
            given["attention_mask"] = None if bool(new.all()) else torch.cat([held, new], dim=1)

    def last(self, cache: Any) -> Tensor | None:
        """The positions (B, 1) of the last cached tokens; None if unknown."""
        return self._last.get(cache)

    def put_back(self, cache: Any, last: Tensor | None) -> None:
        """Remember these as the last positions."""
        self._remember(cache, last)

    def _remember(self, cache: Any, positions: Tensor | None) -> None:
        if positions is not None and positions.dim() == 2:
            self._last[cache] = positions[:, -1:].detach()
        else:
            self._last.pop(cache, None)


def mask_of_layer(mask: Any, held: int, tokens: int, name: str) -> Any:
    """The mask of a layer with another number of keys than the mask's layer: all its old keys are visible, and of the
    new ones those in the mask. Raises FunctionError for block masks with several queries."""
    if mask is None or mask.shape[-1] == held + tokens:
        return mask
    if tokens == 1:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise FunctionError(
            f"{name!r} holds {held} keys and other layers another number, for which a {type(mask).__name__} cannot be "
            "made: run the tokens one by one, or use attn_implementation='sdpa'"
        )
    new = mask[..., mask.shape[-1] - tokens :]
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


def parts_with_positions(model: nn.Module) -> list[nn.Module]:
    """The innermost parts of a transformers model given a cache and positions."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    wanted = {"past_key_values", "position_ids"}
    parts = [
        part
        for part in model.modules()
        if isinstance(part, library.PreTrainedModel) and wanted <= inspect.signature(part.forward).parameters.keys()
    ]
    return [part for part in parts if not any(other is not part and other in parts for other in part.modules())]
