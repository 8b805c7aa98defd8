"""Prune tokens after a layer: its output, and the arguments of the following layers with a part for each token."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.errors import FunctionError
from regard.watching.pruning.pruned_caches import arguments_of
from regard.watching.readers.functions import Args, Kwargs

LAYERS = (nn.ModuleList, nn.Sequential)
"""The containers of consecutive layers."""

TOKEN_AXES: dict[str, tuple[int, ...]] = {
    "position_embeddings": (1,),
    "position_ids": (-1,),
    "cache_position": (-1,),
    "padding_mask": (-1,),
    "src_key_padding_mask": (-1,),
}
"""The token axes in the arguments of layers, by the names that their libraries published; others are refused."""

MASKS = frozenset({"attention_mask", "mask", "src_mask", "attn_mask", "causal_mask"})
"""The names of masks (..., T, S), or (B, S)."""


@runtime_checkable
class LazyTokens(Protocol):
    """A tensor without memory that can be rebuilt for a subset of its tokens."""

    def of_tokens(self, indices: Tensor) -> Tensor:
        """The same for the tokens (B, K)."""


class PrunedTokens:
    """The kept tokens (B, K) of the model's T, while the rest of its layers run."""

    def __init__(self, layers: Sequence[nn.Module], names: dict[int, str], count: int) -> None:
        self._names = names
        self._tokens = count
        self._kept: Tensor | None = None
        self.planned: tuple[nn.Module, Tensor] | None = None
        """The running layer, and the tokens (B, K) to which its output is pruned."""
        self._hooks: list[RemovableHandle] = [
            layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in layers
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def leave(self, layer: nn.Module, output: Any) -> Any:
        """The output of a layer, pruned if planned, or None; raises FunctionError if it is not (B, T, C)."""
        if self.planned is None or self.planned[0] is not layer:
            return None
        indices, self.planned = self.planned[1], None
        hidden = output[0] if isinstance(output, tuple) else output
        before = self._tokens if self._kept is None else self._kept.shape[1]
        if not isinstance(hidden, Tensor) or hidden.is_nested or hidden.shape[:-1] != (len(indices), before):
            what = tuple(hidden.shape) if isinstance(hidden, Tensor) and not hidden.is_nested else type(hidden).__name__
            raise FunctionError(
                f"KeepTokens cuts the output of layer {self._names[id(layer)]!r}, which should be "
                f"({len(indices)}, {before}, C) and is {what}"
            )
        self._kept = indices if self._kept is None else self._kept.gather(1, indices.to(self._kept.device))
        cut = of_tokens(hidden, indices, 1)
        return (cut, *output[1:]) if isinstance(output, tuple) else cut

    def _enter(self, layer: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Prune a layer's arguments with a token axis, if its input was pruned."""
        hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if self._kept is None or hidden is None or hidden.shape[1:2] != self._kept.shape[1:]:
            return None
        name = self._names[id(layer)]
        by_name = arguments_of(layer, args, kwargs)

        def changed(key: str, value: Any) -> Any:
            return value if value is hidden else self._pruned(name, key, value)

        positional = list(by_name)[: len(args)]
        cut = [changed(key, value) for key, value in zip(positional, args, strict=True)]
        return tuple(cut), {key: changed(key, value) for key, value in kwargs.items()}

    def _pruned(self, layer: str, key: str, value: Any) -> Any:
        assert self._kept is not None
        if isinstance(value, tuple | list):
            return type(value)(self._pruned(layer, key, part) for part in value)
        if isinstance(value, Tensor):
            if key in MASKS:
                return self._mask(value)
            axes = TOKEN_AXES.get(key, ())
            if not axes and self._tokens in value.shape[1:]:
                raise FunctionError(
                    f"KeepTokens: the layer {layer!r} is given {key!r} {tuple(value.shape)}, which may have a part for "
                    f"each of the {self._tokens} tokens that the model was given: it is not known how to cut it"
                )
            for axis in axes:
                value = of_tokens(value, self._kept, axis) if value.shape[axis] == self._tokens else value
            return value
        if key in MASKS and value is not None and not isinstance(value, bool):
            raise FunctionError(
                f"KeepTokens: the layer {layer!r} is given a mask of the kind {type(value).__name__}, which is not cut"
            )
        return value

    def _mask(self, mask: Tensor) -> Tensor:
        """A mask (..., T, S) or (B, S), pruned on each axis with all tokens."""
        assert self._kept is not None
        if isinstance(mask, LazyTokens):
            return mask.of_tokens(self._kept)
        if mask.shape == (len(self._kept), self._tokens) and len(self._kept) == self._tokens:
            raise FunctionError(
                f"KeepTokens: a mask {tuple(mask.shape)} may be (B, S) or (T, S), and is cut otherwise in each: give "
                "another number of sequences"
            )
        axes = (-1,) if mask.dim() == 2 and mask.shape[0] != mask.shape[1] else (-1, -2)
        for axis in axes:
            if mask.shape[axis] == self._tokens:
                mask = of_tokens(mask, self._kept, axis)
        return mask


def of_tokens(tensor: Tensor, indices: Tensor, axis: int) -> Tensor:
    """The parts of a tensor (B or 1, ...) for tokens (B, K) along an axis; without a batch axis, if one row.

    >>> import torch
    >>> of_tokens(torch.arange(6).view(2, 3), torch.tensor([[0, 2], [1, 2]]), 1)
    tensor([[0, 2],
            [4, 5]])
    """
    axis = axis % tensor.dim()
    indices = indices.to(tensor.device)
    if len(indices) == 1 or axis == 0 or bool((indices == indices[:1]).all()):
        return tensor.index_select(axis, indices[0])
    shape = [1] * tensor.dim()
    shape[0], shape[axis] = indices.shape
    wanted = [max(one, size) if n == 0 else size for n, (one, size) in enumerate(zip(shape, tensor.shape, strict=True))]
    wanted[axis] = indices.shape[1]
    whole = list(wanted)
    whole[axis] = tensor.shape[axis]
    return tensor.expand(whole).gather(axis, indices.view(shape).expand(wanted))


def layer_of(path: str, modules: dict[str, nn.Module]) -> tuple[nn.Module, nn.Module] | None:
    """The layer around a module, and the list with that layer, or None.

    >>> modules = dict(nn.Sequential(nn.ModuleDict({"attention": nn.Linear(1, 1)})).named_modules())
    >>> layer, layers = layer_of("0.attention", modules)
    >>> layer is modules["0"], layers is modules[""]
    (True, True)
    """
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        around = modules[".".join(parts[: end - 1])]
        if isinstance(around, LAYERS):
            return modules[".".join(parts[:end])], around
    return None
