"""The pairing of features for rotation."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


class Layout(ABC):
    """The pairing of the rotated dimensions."""

    @abstractmethod
    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        """The first and the second coordinates of the R / 2 planes, each of shape (..., P) with P = R / 2."""

    @abstractmethod
    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        """Undo `split`."""


@dataclass(frozen=True, slots=True)
class Half(Layout):
    """Pairs dimension i with dimension i + R/2: Llama, GPT-NeoX, Mistral, Qwen and most of Hugging Face's models.

    >>> Half().split(torch.arange(4.0))
    (tensor([0., 1.]), tensor([2., 3.]))
    """

    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, dim=-1)
        return first, second

    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        return torch.cat([first, second], dim=-1)


@dataclass(frozen=True, slots=True)
class Interleaved(Layout):
    """Pairs dimension 2i with dimension 2i + 1: RoFormer itself, GPT-J, and Llama's own checkpoints from Meta.

    >>> Interleaved().split(torch.arange(4.0))
    (tensor([0., 2.]), tensor([1., 3.]))
    """

    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        return x[..., ::2], x[..., 1::2]

    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        return torch.stack([first, second], dim=-1).flatten(-2)
