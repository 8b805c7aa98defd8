"""A subclass of a module with a method of its own is honoured in every call, also in those after the first."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.nn import FeedForward, KeyValue, MultiHeadAttention


class Projects(MultiHeadAttention):
    def project(self, key: Tensor, value: Tensor | None = None) -> KeyValue:
        projected = super().project(key, value)
        return KeyValue.of(projected.key, 2 * projected.value)


class Attends(MultiHeadAttention):
    def attend(self, *arguments: Any, **options: Any) -> Any:
        attended = super().attend(*arguments, **options)
        return attended if options["return_weights"] else 2 * attended


class TurnsHeads(MultiHeadAttention):
    def project_heads(self, x: Tensor, *parts: int) -> list[Tensor]:
        return [2 * heads for heads in super().project_heads(x, *parts)]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [Projects, Attends, TurnsHeads])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_attention_with_a_method_of_its_own(kind: type[MultiHeadAttention], grad: bool, training: bool) -> None:
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    plain = MultiHeadAttention(16, 4, bias=False).train(training)
    own = kind(16, 4, bias=False).train(training)
    own.load_state_dict(plain.state_dict())
    with torch.set_grad_enabled(grad):
        for mask in (None, regard.lengths(torch.tensor([5, 3]))):
            first = own(x, y, mask=mask)
            for _ in range(3):
                expected = plain(x, y, mask=mask)
                torch.testing.assert_close(own(x, y, mask=mask), first)
                if kind is TurnsHeads:  # Queries and keys too are twice as large.
                    assert not torch.allclose(own(x, mask=mask), plain(x, mask=mask))
                    assert not torch.allclose(first, expected)
                else:
                    torch.testing.assert_close(first, 2 * expected)


@pytest.mark.parametrize("length", [1, 5, 40])
def test_heads_of_two_numbers_that_are_turned_are_read_at_their_strides(length: int) -> None:
    """The result of `Rotary(2)` lies in memory as an image whose channels come last."""
    made, x = MultiHeadAttention(8, 4, rotary=regard.Rotary(2)).double(), torch.randn(2, length, 8).double()
    q, k = (regard.Rotary(2).rotate(heads.contiguous()) for heads in made.project_heads(x, 0, 1))
    (v,) = made.project_heads(x, 2)
    right = made.out(((q @ k.mT / 2**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)).detach()
    for training in (True, False):
        made.train(training)
        torch.testing.assert_close(made(x).detach(), right)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(made(x), right)
                torch.testing.assert_close(made.float()(x.float()).double(), right, rtol=1e-4, atol=1e-5)
                made.double()


@pytest.mark.parametrize("grad", [False, True])
def test_layers_of_another_class_inside(grad: bool) -> None:
    x = torch.randn(2, 5, 16)
    ours, network = MultiHeadAttention(16, 4), FeedForward(16, 32)
    with torch.set_grad_enabled(grad):
        before = ours.eval()(x), network.eval()(x)
        for module, name in ((ours, "out"), (network, "down")):
            layer: Any = getattr(module, name)
            layer.__class__ = Doubled
        for _ in range(3):
            after = ours(x), network(x)
            for one, other in zip(before, after, strict=True):
                torch.testing.assert_close(other, 2 * one)
