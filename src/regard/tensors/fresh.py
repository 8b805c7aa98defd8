"""The tensors that a map holds, and whether any of them has been written to since."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.errors import OverwrittenError
from regard.tensors.guards import is_compiling, is_inference
from regard.tensors.memory import is_part
from regard.tensors.torch_private import DisableTorchFunction, counted_version, version_counter, viewed

if TYPE_CHECKING:
    from regard.tensors.fingerprint import Fingerprint


class Fresh:
    """Named tensors as they were: by version, or by fingerprint where a write may leave the version as it is."""

    __slots__ = ("_held",)

    def __init__(self, **named: Tensor | None) -> None:
        self._held: list[tuple[str, Tensor, int | Fingerprint | None]] = []
        for name, tensor in named.items():
            if tensor is not None:
                self.add(name.replace("_", " "), tensor)

    def add(self, name: str, tensor: Tensor, owner: Tensor | None = None) -> Tensor:
        """Hold a tensor whose memory is that of an owner, by default itself: others may write to it."""
        # While compiling there are no versions.
        mark = None if is_compiling() else _mark(tensor, tensor if owner is None else owner)
        self._held.append((name, tensor, mark))
        return tensor

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """Hold a tensor without its graph: a buffer or a view of far larger memory as a copy, others as they are."""
        if may_be_overwritten(tensor) or holds_much_more(tensor):
            return self.own(name, copied(tensor))
        return self.add(name, tensor.detach(), tensor)

    def own(self, name: str, tensor: Tensor) -> Tensor:
        self._held.append((name, tensor, None))
        return tensor

    def joined(self, *others: "Fresh") -> "Fresh":
        made = Fresh()
        made._held = [one for each in (self, *others) for one in each._held]  # noqa: SLF001  (its own)
        return made

    def tensors(self) -> list[Tensor]:
        return [tensor for _, tensor, _ in self._held]

    def changed(self) -> str | None:
        """The first tensor that has been written to since, in words; None if none has. It synchronizes once, at most,
        on each device."""
        names: list[str] = []
        taken: list[tuple[Fingerprint, Tensor]] = []
        for name, tensor, mark in self._held:
            if mark is None:
                continue
            if not isinstance(mark, int):
                names.append(name)
                taken.append((mark, tensor))
            elif version_counter(tensor) != mark:
                return f"the {name} {tuple(tensor.shape)}"
        if taken:
            from regard.tensors.fingerprint import first_changed

            place = first_changed(taken)
            if place is not None:
                return f"the {names[place]} {tuple(taken[place][1].shape)}"
        return None

    def check(self) -> None:
        changed = self.changed() if self._held else None
        if changed is not None:
            raise OverwrittenError(
                f"{changed} have been written to since its call, and a map holds them, not a copy: read the map "
                "before, hand the call a clone(), or use regard.watch(..., copy=True)"
            )

    def __reduce__(self) -> tuple[object, ...]:
        """A copy (`copy`, `pickle`) has memory of its own; an overwritten tensor is refused."""
        self.check()
        return _copied, tuple((name, tensor) for name, tensor, _ in self._held)


def _copied(*held: tuple[str, Tensor]) -> Fresh:
    made = Fresh()
    for name, tensor in held:
        made.own(name, tensor)
    return made


def _mark(tensor: Tensor, owner: Tensor) -> "int | Fingerprint":
    """The version of a tensor. It does not show the writes of torch's fused optimizers, of FSDP and of adapters that
    merge themselves to parameters, those to an inference tensor, and whether a write to a cache with room for more
    keys was to these: such tensors leave a fingerprint."""
    version = counted_version(tensor)
    if version is None or (version and is_part(tensor)) or is_of_parameter(owner):
        from regard.tensors.fingerprint import Fingerprint

        with DisableTorchFunction():
            return Fingerprint(tensor)
    return version


def is_of_parameter(tensor: Tensor) -> bool:
    base = viewed(tensor)
    base = tensor if base is None else base
    return isinstance(base, nn.Parameter) or (base.requires_grad and base.is_leaf)


def copied(tensor: Tensor) -> Tensor:
    """An ordinary copy, also of an inference tensor (without a version to compare). It keeps the tensor's memory order,
    the fastest to copy."""
    if not is_inference():
        return tensor.detach().clone()
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def may_be_overwritten(tensor: Tensor) -> bool:
    """Whether a tensor may be a buffer, such as a static cache: it was written in place before, and may be again. An
    inference tensor always counts, because it has no version."""
    return tensor.is_inference() or version_counter(tensor) > 0


def holds_much_more(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size()
