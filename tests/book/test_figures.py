"""The figures of the chapters, compared with the formulas of the tutorials that they stand for, written out here."""

import pytest
import torch
from torch import Tensor

from tests.book.chapters import names_of

pytestmark = pytest.mark.usefixtures("as_installed")


def close(found: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.detach().double(), expected.detach().double(), rtol=1e-4, atol=atol)


def test_the_kernel_regression_is_d2ls() -> None:
    """d2l 1.0.3, section 11.2: `nadaraya_watson`, with its Gaussian of width sigma and keys down, queries across."""
    names = names_of("01-a-soft-look-up")
    x_train, y_train, x_val = names["keys"], names["values"], names["queries"]
    dists = x_train.reshape((-1, 1)) - x_val.reshape((1, -1))
    k = torch.exp(-(dists**2) / (2 * 0.5**2))
    attention_w = k / k.sum(0)
    close(names["weights"], attention_w.T)
    close(names["predicted"], y_train @ attention_w)
    assert torch.equal(names["truth"](x_val), 2 * torch.sin(x_val) + x_val**0.8)
