"""The elements of a tensor as they were, or a sample of them: whether they have changed."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from regard.tensors.guards import PLAIN, has_values, is_compiling, is_transformed
from regard.tensors.memory import is_part
from regard.tensors.torch_private import DisableTorchFunction, counted_version

FEW = 1 << 14
"""The most elements of a tensor that is copied; of a larger one a sample is."""
SAMPLE = 1 << 12
"""The elements of a sample, at most."""


class Fingerprint:
    """A tensor, with its elements where they are few, else a sample of them.

    A version counter alone would not do: torch's fused optimizers, writes through `.data` and writes through numpy
    count no version, FSDP resizes the memory to 0, and hooks put a tensor of device "meta" in its place.
    """

    __slots__ = ("_form", "_kept", "_tensor", "_version", "is_exact")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = counted_version(tensor)
        self._form = _form(tensor)
        self.is_exact = tensor.numel() <= FEW
        self._kept = None if self._form[-1] is None or is_transformed() else _taken(tensor)

    def differs(self, now: Any) -> bool | Tensor:
        if not isinstance(now, Tensor) or _form(now) != self._form:
            return True
        is_same = now is self._tensor
        if self._kept is None:  # It could not be read.
            return not is_same or counted_version(now) != self._version
        # A new version of a large tensor is a write, unless it was to other parts of the same memory.
        if not self.is_exact and not (is_same and (counted_version(now) == self._version or is_part(now))):
            return True
        found = _taken(now).ne(self._kept).any()
        return bool(found) if found.is_cpu else found


def first_changed(pairs: Sequence[tuple[Fingerprint, Any]]) -> int | None:
    """The first of the fingerprints whose tensor has changed; one synchronization for each device, at most."""
    waiting: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with torch.no_grad(), DisableTorchFunction():
        for place, (then, now) in enumerate(pairs):
            differs = then.differs(now)
            if isinstance(differs, Tensor):
                waiting.setdefault(differs.device, []).append((place, differs))
            elif differs:
                return place
        for some in waiting.values():
            found = torch.stack([differs for _, differs in some]).tolist()
            if True in found:
                return some[found.index(True)][0]
    return None


class Fingerprints:
    __slots__ = ("_named", "_then")

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._then: dict[str, Fingerprint] = {}
        if not is_compiling():
            with DisableTorchFunction():
                self._then = {name: Fingerprint(tensor) for name, tensor in _tensors(named)}

    def changed(self) -> str | None:
        if not self._then:
            return None
        now = dict(_tensors(self._named))
        place = first_changed([(then, now.get(name)) for name, then in self._then.items()])
        if place is None:
            return None
        name = [*self._then][place]
        tensor = now.get(name)
        if tensor is None:
            return f"the parameter `{name}`"
        return f"the {'parameter' if isinstance(tensor, nn.Parameter) else 'tensor'} `{name}` {tuple(tensor.shape)}"


def _tensors(named: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, held in named.items():
        if isinstance(held, Tensor):
            yield name, held
        elif isinstance(held, nn.Module):
            for tensors in (held.named_parameters(), held.named_buffers()):
                yield from ((f"{name}.{inner}", tensor) for inner, tensor in tensors)
        elif isinstance(held, FunctionType):
            for inner, cell in zip(held.__code__.co_freevars, held.__closure__ or (), strict=True):
                with suppress(ValueError):  # the cell is empty
                    if isinstance(tensor := cell.cell_contents, Tensor):
                        yield f"{name}.{inner}", tensor


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Everything of a tensor that can be asked without its elements; last the size of its memory, None without any."""
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not is_transformed()
    is_readable = is_plain and has_values(tensor)
    memory = tensor.untyped_storage().nbytes() if is_readable else None
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, memory


def _taken(tensor: Tensor) -> Tensor:
    """A copy of the elements, or of a sample at even strides along each dimension; as bytes, since NaN is not NaN."""
    tensor = tensor.detach()
    if tensor.numel() > FEW:
        room, steps = SAMPLE, [1] * tensor.dim()
        for left, dim in enumerate(sorted(range(tensor.dim()), key=lambda d: tensor.shape[d])):
            kept = min(tensor.shape[dim], max(1, round(room ** (1 / (tensor.dim() - left)))))
            steps[dim], room = -(-tensor.shape[dim] // kept), max(1, room // kept)
        tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def fingerprint(model: nn.Module) -> str:
    """Thirty-two hexadecimal digits, different for different weights.

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
    (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
