"""Which features of a head form a pair that rotates."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


class Layout(ABC):
    """How the rotated dimensions pair up."""

    @abstractmethod
    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        """The first and second coordinates of the R / 2 planes, each (..., P) for P = R / 2."""

    @abstractmethod
    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        """The inverse of `split`."""


@dataclass(frozen=True, slots=True)
class Half(Layout):
    """Dimension i with dimension i + R/2: Llama, GPT-NeoX, Mistral, Qwen and most of Hugging Face's models.

    >>> Half().split(torch.arange(4.0))
    (tensor([0., 1.]), tensor([2., 3.]))
    """

    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        """The two halves."""
        first, second = x.chunk(2, dim=-1)
        return first, second

    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        """One after the other."""
        return torch.cat([first, second], dim=-1)


@dataclass(frozen=True, slots=True)
class Interleaved(Layout):
    """Dimension 2i with dimension 2i + 1: RoFormer itself, GPT-J, and Llama's own checkpoints from Meta.

    >>> Interleaved().split(torch.arange(4.0))
    (tensor([0., 2.]), tensor([1., 3.]))
    """

    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        """The even and the odd."""
        return x[..., ::2], x[..., 1::2]

    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        """In turn."""
        return torch.stack([first, second], dim=-1).flatten(-2)
