"""The small integer arguments of the calls of modules, and the cache among them: ids, masks of padding, positions,
lengths of packed sequences.

They are what a caller told the model of its sequences, by names: an audit compares them with the masks at the kernels.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.tensors.fresh import Fresh
from regard.tensors.torch_private import DisableTorchFunction

FLAGS = ("is_causal", "use_cache")
"""Arguments of a caller that say how a model attends."""
MOST_ELEMENTS = 1 << 22
"""The largest argument that is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleArguments:
    module: nn.Module
    tensors: Mapping[str, Tensor]
    flags: Mapping[str, bool]
    """Those of `FLAGS` that were given."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptArguments:
    """The small integer arguments of one call of a module, by reference; a buffer is copied."""

    path: str
    tensors: Mapping[str, tuple[Tensor, Fresh]]
    flags: Mapping[str, bool]

    @classmethod
    def of(cls, path: str, given: ModuleArguments) -> "KeptArguments":
        return cls(path, {name: kept(tensor) for name, tensor in given.tensors.items()}, given.flags)

    def read(self, name: str) -> Tensor | None:
        held = self.tensors.get(name)
        return None if held is None or held[1].changed() is not None else held[0]


def small_arguments(module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> ModuleArguments | None:
    """The integer and bool tensors among the arguments of a call, and float masks (B, L), by name, and its flags; None
    without any."""
    found = {name: one for name, one in (kwargs or {}).items() if isinstance(one, Tensor)}
    flags = {name: one for name in FLAGS if isinstance(one := (kwargs or {}).get(name), bool)}
    if any(isinstance(one, Tensor) for one in args):
        named = zip(positional_names(module), args, strict=False)
        found |= {name: one for name, one in named if isinstance(one, Tensor)}
    if found:
        with DisableTorchFunction():
            found = {name: one for name, one in found.items() if is_small(name, one)}
    return ModuleArguments(module, found, flags) if found or flags else None


def is_small(name: str, tensor: Tensor) -> bool:
    """True for an integer or bool tensor of few dimensions or (B, 1, 1, L), and for a float mask (B, L) by its name."""
    is_deep = tensor.dim() > 3 and tensor.shape[1:-1] != (1, 1)
    if tensor.is_nested or is_deep or not 0 < tensor.numel() <= MOST_ELEMENTS:
        return False
    return not (tensor.is_floating_point() or tensor.is_complex()) or (tensor.dim() == 2 and "mask" in name)


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """The arguments of `forward` that may be given in their order; none where they are not known.

    >>> wrapped = nn.Linear(2, 2)
    >>> wrapped.forward = lambda input: input  # as accelerate does: it takes no module
    >>> positional_names(nn.Linear(2, 2)), positional_names(wrapped)
    (('input',), ('input',))
    """
    own = module.__dict__.get("forward")
    return _names(getattr(type(module), "forward", None))[1:] if own is None else _names(own)


@lru_cache(maxsize=1024)
def _names(forward: Callable[..., Any] | None) -> tuple[str, ...]:
    try:
        parameters = [] if forward is None else list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return ()
    return tuple(one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD))


def kept(tensor: Tensor) -> tuple[Tensor, Fresh]:
    fresh = Fresh()
    with torch.no_grad():
        return fresh.keep("argument", tensor), fresh


def running_arguments(frames: Iterable[Any]) -> Iterator[ModuleArguments]:
    return (frame.arguments for frame in frames if frame.arguments is not None)


CACHE_NAMES = ("cache", "past_key_values")
"""From transformers 5.24 on, and before."""


def cache_name(names: Container[str]) -> str | None:
    """The name of the cache among those of a model's arguments; None if it takes none.

    >>> cache_name({"input_ids", "past_key_values"}), cache_name({"input_ids", "cache"})
    ('past_key_values', 'cache')
    """
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among named arguments, or in a model's output; None if there is none.

    >>> cache_in({"past_key_values": "ours"}), cache_in({"cache": "ours"}), cache_in({"input_ids": 1})
    ('ours', 'ours', None)
    """
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
