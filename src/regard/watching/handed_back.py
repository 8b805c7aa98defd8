"""Results of the function of `regard.on_attention`: the keys kept in a cache, or the tokens passed on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import FunctionError
from regard.maps.attention_map import AttentionMap

INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True, eq=False)
class KeepKeys:
    """The keys kept in the layer's cache; all others are dropped, with their values, before the next layer runs.

    The attention call itself has used all keys. From the next step on the layer has the kept and the new ones.

    Args:
        indices: the kept keys, as integers in [0, S), S being the keys of the map: (B, K) for all heads, or (B, G, K)
            for each of the G key heads, in any order, without repetition.

    >>> KeepKeys(torch.tensor([[0, 1, 5]]))
    KeepKeys((1, 3))
    """

    indices: Tensor

    def checked(self, name: str, weights: AttentionMap, batch: int, key_heads: int) -> Tensor:
        """The indices (B, G, K), in the order of the keys; raises FunctionError for other shapes or dtypes, indices out
        of range, or repetition."""
        leads = {2: (batch,), 3: (batch, key_heads)}
        shapes = f"({batch}, K) or ({batch}, {key_heads}, K), K in [1, {weights.shape[-1]}]"
        found = _checked(self, name, weights.shape[-1], leads, shapes)
        return found if found.dim() == 3 else found[:, None].expand(batch, key_heads, -1)

    def __repr__(self) -> str:
        return f"KeepKeys({tuple(self.indices.shape)})"


@dataclass(frozen=True, slots=True, eq=False)
class KeepTokens:
    """The tokens passed to the next layer; all others end with this one, whose output is pruned.

    Arguments of the following layers with a token axis are pruned too: rotary angles, positions, masks. The model's
    output has the tokens of the last layer.

    Args:
        indices: the kept tokens, as integers in [0, T), T being the queries of the map, (B, K), in any order, without
            repetition.

    >>> KeepTokens(torch.tensor([[0, 1, 5]]))
    KeepTokens((1, 3))
    """

    indices: Tensor

    def checked(self, name: str, weights: AttentionMap, batch: int) -> Tensor:
        """The indices (B, K), in the order of the tokens; raises FunctionError like those of keys."""
        shapes = f"({batch}, K), K in [1, {weights.shape[-2]}]"
        return _checked(self, name, weights.shape[-2], {2: (batch,)}, shapes)

    def __repr__(self) -> str:
        return f"KeepTokens({tuple(self.indices.shape)})"


OnAttention = Callable[[str, AttentionMap, Tensor | None, Tensor | None, Tensor | None], KeepKeys | KeepTokens | None]
"""The type of such a function: (name, weights, query, key, value) -> the keys or tokens to keep; None keeps all."""


def _checked(
    handed: KeepKeys | KeepTokens, name: str, size: int, leads: dict[int, tuple[int, ...]], shapes: str
) -> Tensor:
    indices, kind = handed.indices, type(handed).__name__
    if not isinstance(indices, Tensor) or indices.dtype not in INTEGERS:
        what = str(indices.dtype) if isinstance(indices, Tensor) else type(indices).__name__
        raise FunctionError(f"{name!r}: {kind} takes indices as a tensor of int64, got {what}")
    shape = tuple(indices.shape)
    if shape[:-1] != leads.get(len(shape)) or not 1 <= shape[-1] <= size:
        raise FunctionError(f"{name!r}: {kind} takes indices {shapes} here, got {shape}")
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= size:
        raise FunctionError(f"{name!r}: {kind} takes indices in [0, {size}), got {low if low < 0 else high}")
    ordered = indices.long().sort(-1).values
    again = ordered[..., 1:] == ordered[..., :-1]
    if bool(again.any()):
        raise FunctionError(f"{name!r}: {kind} got index {int(ordered[..., 1:][again][0])} twice in one row")
    return ordered
