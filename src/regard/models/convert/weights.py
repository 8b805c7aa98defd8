"""Tensors with another library's names get ours: every tensor is moved, or explicitly dropped."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.errors import RunFolderError

M = TypeVar("M", bound=nn.Module)
HEAD = "lm_head.weight"
"""The matrix of the output layer in most families."""
SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""The names of an embedding that both sides of a translator share."""


class Weights:
    """The tensors of another library, to be moved to their names in our model.

    >>> weights = Weights({"fc.weight": torch.ones(1, 2), "fc.bias": torch.zeros(1)}, Path("folder"))
    >>> weights.move("fc", "up")
    >>> sorted(weights.ours)
    ['up.bias', 'up.weight']
    """

    def __init__(self, theirs: dict[str, Tensor], source: Path) -> None:
        self.source = source
        self.ours: dict[str, Tensor] = {}
        self._theirs = dict(theirs)

    def __contains__(self, name: str) -> bool:
        return name in self._theirs

    def has(self, pattern: str) -> bool:
        """Whether there is a tensor with a name of this pattern."""
        return any(fnmatchcase(name, pattern) for name in self._theirs)

    def strip_prefix(self, prefix: str) -> None:
        """Remove the base model's prefix from the names. Some folders hold the base model alone, without the prefix."""
        self._theirs = {name.removeprefix(prefix): tensor for name, tensor in self._theirs.items()}

    def differ(self, one: str, other: str) -> bool:
        """Whether both tensors exist and differ."""
        return one in self and other in self and not torch.equal(self._theirs[one], self._theirs[other])

    def rename(self, ending: str, new: str) -> None:
        """Give all names with this ending a new ending."""
        self._theirs = {
            name.removesuffix(ending) + new if name.endswith(ending) else name: tensor
            for name, tensor in self._theirs.items()
        }

    def take(self, name: str) -> Tensor:
        """Remove one tensor and return it.

        Raises:
            RunFolderError: there is no tensor of that name.
        """
        if name not in self._theirs:
            raise RunFolderError(f"{self.source} has no tensor {name}: cut short, or not the model of its config.json")
        return self._theirs.pop(name)

    def take_any(self, *names: str) -> Tensor:
        """The first of several names that exists; tied tensors are stored under any one of these names.

        The other names are dropped if their tensors are equal to it.

        Raises:
            RunFolderError: none of the names exists.
        """
        found = self.take(next((name for name in names if name in self), names[0]))
        for name in names:
            if name in self and torch.equal(self._theirs[name], found):
                del self._theirs[name]
        return found

    def move(self, theirs: str, ours: str) -> None:
        """Move the weight and, if there is one, the bias of a module."""
        self.ours[f"{ours}.weight"] = self.take(f"{theirs}.weight")
        if f"{theirs}.bias" in self:
            self.ours[f"{ours}.bias"] = self.take(f"{theirs}.bias")

    def join(self, theirs: Iterable[str], weight: str, bias: str) -> None:
        """Join several modules with the same input into one: their rows are concatenated."""
        theirs = list(theirs)
        self.ours[weight] = torch.cat([self.take(f"{name}.weight") for name in theirs])
        if f"{theirs[0]}.bias" in self:
            self.ours[bias] = torch.cat([self.take(f"{name}.bias") for name in theirs])

    def attention(self, theirs: str, ours: str, names: tuple[str, str, str, str]) -> None:
        """Move a multi-head attention; `names` are those of its query, key, value and output projections."""
        *projections, output = names
        self.join((f"{theirs}.{name}" for name in projections), f"{ours}.in_weights.0", f"{ours}.in_bias")
        self.move(f"{theirs}.{output}", f"{ours}.out")

    def tables(self, ours: str, *theirs: str, tied: bool, head: str = HEAD) -> bool:
        """Move the matrix of an embedding, stored under any of their names, and that of the output layer.

        The output layer has a matrix of its own where the configuration says so, and where a file has another one
        although the configuration says that the two are tied, as transformers reads it. Returns whether they are tied.

        Raises:
            RunFolderError: a matrix is in no file, or that of the output layer is not, and the two are not tied.
        """
        self.ours[f"{ours}.weight"] = self.take_any(*theirs, *[head] * tied)
        is_shared = tied and head not in self
        self.ours["output.weight"] = self.ours[f"{ours}.weight"] if is_shared else self.take(head)
        return is_shared

    def drop(self, *patterns: str) -> None:
        """Drop tensors that our model neither has nor needs: positions that are computed, other heads."""
        for name in [name for name in self._theirs if any(fnmatchcase(name, pattern) for pattern in patterns)]:
            del self._theirs[name]

    def build(self, make: Callable[[], M]) -> M:
        """Make the model and copy the moved tensors into it, in the model's dtype.

        The model is first made on the `meta` device, without memory, to compare the sizes of a configuration with the
        tensors of the file before any allocation.

        Raises:
            RunFolderError: a tensor is left over, absent or of another shape; the message names the first.
        """
        with torch.device("meta"):
            self._check(make())
        model = make()
        model.load_state_dict(self.ours)
        return model

    def _check(self, model: nn.Module) -> None:
        if self._theirs:
            left = min(self._theirs)
            raise RunFolderError(f"{self.source} has a tensor that its config.json does not account for: {left}")
        wanted = model.state_dict()
        for name in [*wanted, *self.ours]:
            want, have = (tuple(part[name].shape) if name in part else "absent" for part in (wanted, self.ours))
            if want != have:
                raise RunFolderError(
                    f"{self.source} does not fit its config.json: {name} is {have}, and should be {want}"
                )
        names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(parameter), name)
            if first != name and not torch.equal(self.ours[first], self.ours[name]):
                raise RunFolderError(
                    f"{self.source} has two matrices where the model has one, as {first} and as {name}"
                )
