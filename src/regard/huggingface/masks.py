"""The masks of transformers as predicates, and the tensor subclass that carries them through a model.

transformers builds masks from functions of (batch, head, query, key) on absolute positions: `and_masks` of a few known
functions. These become masks of this package with known key ranges. Any other function is called unchanged.

Source: transformers 5.23, masking_utils.py.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.call.masks.base import And, Mask
from regard.call.masks.basic import causal, padding, predicate
from regard.call.masks.patterns import Window
from regard.call.shapes import Sizes
from regard.tensors.torch_private import make_wrapper, no_torch_function, tree_map

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class LazyMask(Tensor):
    """A mask (B, 1, T, S) without memory: a model passes it on, and attention reads the predicate.

    Any other operation sees its dense tensor: bools, True = keep, or with a floating `dtype` an additive mask of 0 and
    the lowest value of the dtype.
    """

    allowed: Mask | None
    """None allows everything."""

    # The result of an operation is an ordinary tensor.
    __torch_function__ = no_torch_function

    def __new__(
        cls,
        allowed: Mask | None,
        shape: tuple[int, int, int, int],
        device: torch.device,
        dtype: torch.dtype = torch.bool,
    ) -> "LazyMask":
        made: LazyMask = make_wrapper(cls, shape, dtype=dtype, device=device)
        made.allowed = allowed
        return made

    def __init__(self, *given: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(lambda x: x.rendered() if isinstance(x, LazyMask) else x, (args, kwargs or {}))
        return func(*args, **kwargs)

    def rendered(self) -> Tensor:
        batch, _, queries, keys = self.shape
        keep = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        if self.allowed is not None:
            sizes = Sizes((batch,), 1, 1, queries, keys, True)
            keep = self.allowed.dense(sizes, self.device).expand(self.shape).clone()
        if self.dtype == torch.bool:
            return keep
        return torch.zeros_like(keep, dtype=self.dtype).masked_fill(~keep, torch.finfo(self.dtype).min)

    def of_tokens(self, indices: Tensor) -> Tensor:
        """The mask of a token subset (B, K): queries and keys at once if there are as many of both."""
        batch, _, queries, keys = self.shape
        inner, count = self.allowed, indices.shape[1]
        shape = (max(batch, len(indices)), 1, count, count if keys == queries else keys)
        if inner is None:
            return LazyMask(None, shape, self.device, self.dtype)
        bound = inner.bind(Sizes((batch,), 1, 1, queries, keys, True), self.device)
        places = indices.to(self.device)

        def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            at = row if len(places) > 1 else torch.zeros_like(row)
            return bound.allowed(row, head, places[at, query], places[at, key] if keys == queries else key)

        return LazyMask(predicate(allowed), shape, self.device, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, {'everything' if self.allowed is None else self.allowed})"


def lazy_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    is_added: bool = False,
    dtype: torch.dtype = torch.float32,
    cache_position: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """A mask function of transformers, with its argument names.

    `is_added` selects an additive mask of `dtype` over bools. Older releases (5.2) pass the positions of the queries,
    `cache_position` (T,), in place of `q_length`, `q_offset` and `device`.
    """
    places: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset, "device": device}
    if cache_position is not None:
        places = {"cache_position": cache_position}
        q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
    if mask_function is None or use_vmap:
        # A function without support for tensors of positions: transformers builds its T x S mask.
        masking = sys.modules["transformers.masking_utils"]
        given = {} if mask_function is None else {"mask_function": mask_function}
        dense = partial(masking.eager_mask, dtype=dtype) if is_added else masking.sdpa_mask
        return dense(
            batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset, attention_mask=attention_mask,
            use_vmap=use_vmap, **{**settings, **places, **given, "allow_is_causal_skip": False,
                                  "allow_is_bidirectional_skip": False},
        )  # fmt: skip
    start = int(q_offset)
    masks = [_ours(part, start, kv_offset, kv_length) for part in _parts(mask_function)]
    if attention_mask is not None:
        keep = torch.nn.functional.pad(attention_mask.bool(), (0, kv_length + kv_offset - attention_mask.shape[-1]))
        keep = keep[:, kv_offset:]
        masks.append(None if bool(keep.all()) else padding(keep))
    known = [mask for mask in masks if mask is not None]
    allowed = None if not known else known[0] if len(known) == 1 else And(tuple(known))
    kind = dtype if is_added else torch.bool
    return LazyMask(allowed, (batch_size, 1, q_length, kv_length), torch.device(device), kind)


def _parts(function: MaskFunction) -> Sequence[MaskFunction]:
    functions = _closed_over(function, "and_masks").get("mask_functions")
    return (function,) if functions is None else [part for inner in functions for part in _parts(inner)]


def _ours(function: MaskFunction, start: int, kv_offset: int, keys: int) -> Mask | None:
    """The mask of one function, with queries from `start` and keys from `kv_offset`; None if it allows everything."""
    offset = start - kv_offset
    match _name(function):
        case "causal_mask_function":
            return causal(offset)
        case "bidirectional_mask_function":
            return None
    if size := _closed_over(function, "sliding_window_overlay").get("sliding_window"):
        # The function limits the past only, and no key lies `keys` or more after a query.
        return Window(size - 1, keys, offset)
    if size := _closed_over(function, "sliding_window_bidirectional_overlay").get("sliding_window"):
        return Window(size, size, offset)

    def asked(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return function(batch, head, query + start, key + kv_offset)

    return predicate(asked)


def _name(function: Any) -> str:
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return ""
    return function.__qualname__


def _closed_over(function: Any, maker: str) -> dict[str, Any]:
    if not _name(function).startswith(f"{maker}.<locals>."):
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)
