"""`regard.on_attention`: a function that is called after each attention call, and may say which keys or tokens stay."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, FunctionError
from regard.inspection.capture.module_names import Names, chooser
from regard.inspection.watch import refuse_compiled
from regard.maps.attention_map import AttentionMap

if TYPE_CHECKING:
    from regard.inspection.door.door import Door

INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True, eq=False)
class KeepKeys:
    """The keys that stay in the layer's cache; all others are dropped, with their values, before the next layer runs.

    The attention call itself has seen all keys. From the next step on the layer sees those that stay, and the new ones.

    Args:
        indices: which keys stay, as integers in [0, S), S being the keys of the map: (B, K) for all heads, or
            (B, G, K) for each of the G key heads. Their order does not matter, and none may come twice.

    >>> KeepKeys(torch.tensor([[0, 1, 5]]))
    KeepKeys((1, 3))
    """

    indices: Tensor

    def checked(self, name: str, weights: AttentionMap, batch: int, key_heads: int) -> Tensor:
        """The indices (B, G, K), in the order of the keys.

        Raises:
            FunctionError: they are of another shape or dtype, or out of range, or one comes twice.
        """
        leads = {2: (batch,), 3: (batch, key_heads)}
        shapes = f"({batch}, K) or ({batch}, {key_heads}, K), K in [1, {weights.shape[-1]}]"
        found = _checked(self, name, weights.shape[-1], leads, shapes)
        return found if found.dim() == 3 else found[:, None].expand(batch, key_heads, -1)

    def __repr__(self) -> str:
        """The shape."""
        return f"KeepKeys({tuple(self.indices.shape)})"


@dataclass(frozen=True, slots=True, eq=False)
class KeepTokens:
    """The tokens that go on to the next layer; all others end with this one, whose output is cut to those that stay.

    What the layers that follow are given for each token is cut too: rotary angles, positions and masks. The model's
    output has the tokens that went through all layers.

    Args:
        indices: which tokens stay, as integers in [0, T), T being the queries of the map, (B, K). Their order does not
            matter, and none may come twice.

    >>> KeepTokens(torch.tensor([[0, 1, 5]]))
    KeepTokens((1, 3))
    """

    indices: Tensor

    def checked(self, name: str, weights: AttentionMap, batch: int) -> Tensor:
        """The indices (B, K), in the order of the tokens.

        Raises:
            FunctionError: they are of another shape or dtype, or out of range, or one comes twice.
        """
        shapes = f"({batch}, K), K in [1, {weights.shape[-2]}]"
        return _checked(self, name, weights.shape[-2], {2: (batch,)}, shapes)

    def __repr__(self) -> str:
        """The shape."""
        return f"KeepTokens({tuple(self.indices.shape)})"


OnAttention = Callable[[str, AttentionMap, Tensor | None, Tensor | None, Tensor | None], KeepKeys | KeepTokens | None]
"""The type of a function at the door: (name, weights, query, key, value) -> what stays; None means everything."""


def on_attention(model: nn.Module, function: OnAttention, names: Names = None) -> "Door":
    """Call a function after each attention call of a model, before the next layer runs; it may say what stays.

        with regard.on_attention(model, function):
            model.generate(ids)

    `function(name, weights, query, key, value)` gets the path of the module that attended, its exact lazy map, and the
    tensors of the call: query (batch..., H, T, D), key (batch..., G, S, D) and value (batch..., G, S, E). Where a
    model writes its attention out, query and key are None, and value may be. The function runs without gradients. The
    map can be read until the function returns; to keep maps, use `regard.watch`. The function hands back

    - None: everything stays. The outputs of the model are then the same bits as without the door.
    - `KeepKeys(indices)`: these keys stay in the layer's cache (H2O, TOVA, SnapKV, PyramidKV). The cache has to be a
      `DynamicCache` of transformers, and keys stay where they are in the text: new tokens get the positions that
      follow those of all tokens that the cache has seen.
    - `KeepTokens(indices)`: these tokens go on to the next layer (FastV, EViT). The layer is the innermost module
      around the call that stands in an `nn.ModuleList` or `nn.Sequential`.

    Args:
        model: any module that `regard.watch` can watch. It is not changed.
        function: what is called. `regard.selection` has the scores of papers.
        names: which modules, as for `regard.watch`; None means all.

    Raises:
        ArgumentError: the model is compiled, no module has one of the names, or `function` cannot be called.
        FunctionError: while the model runs: the function raised, or handed back what cannot be used. The cache that the
            model was given has the keys then that it had before the model was called.
        NotSeenError: at the end of the `with` block: the model ran, and no attention call was seen.

    >>> def show(name, weights, query, key, value):
    ...     print(name, weights.shape, weights.received()[0, 0])
    >>> class Block(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> with on_attention(nn.Sequential(Block()), show) as door:
    ...     output = door.model(torch.zeros(1, 1, 2, 4))
    0 torch.Size([1, 1, 2, 2]) tensor([1.5000, 0.5000])
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"on_attention() takes a torch.nn.Module, got {type(model).__name__}")
    if not callable(function):
        raise ArgumentError(f"on_attention() takes a function, got {type(function).__name__}")
    modules = dict(model.named_modules())
    refuse_compiled(modules)
    chooser(names, modules)
    # The door is loaded when it is asked for: `import regard` stays light.
    from regard.inspection.door.door import Door

    return Door(model, function, names)


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
