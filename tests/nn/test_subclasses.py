"""A subclass of a module with a method of its own is honoured in every call, also in those after the first."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.nn import FeedForward, KeyValue, MultiHeadAttention
from regard.nn.compat import MultiheadAttention


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
def test_attention_with_a_method_of_its_own(kind: type[MultiHeadAttention], grad: bool) -> None:
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    plain = MultiHeadAttention(16, 4, bias=False).eval()
    own = kind(16, 4, bias=False).eval()
    own.load_state_dict(plain.state_dict())
    with torch.set_grad_enabled(grad):
        for mask in (None, regard.lengths(torch.tensor([5, 3]))):
            for _ in range(3):
                expected = plain(x, y, mask=mask)
                assert not torch.allclose(own(x, y, mask=mask), expected)
                if kind is TurnsHeads:
                    assert not torch.allclose(own(x, mask=mask), plain(x, mask=mask))


@pytest.mark.parametrize("grad", [False, True])
def test_layers_of_another_class_inside(grad: bool) -> None:
    x = torch.randn(2, 5, 16)
    ours, drop_in, network = MultiHeadAttention(16, 4), MultiheadAttention(16, 4, batch_first=True), FeedForward(16, 32)
    with torch.set_grad_enabled(grad):
        before = ours.eval()(x), drop_in.eval()(x, x, x)[0], network.eval()(x)
        for module, name in ((ours, "out"), (drop_in, "out_proj"), (network, "down")):
            layer: Any = getattr(module, name)
            layer.__class__ = Doubled
        for _ in range(3):
            after = ours(x), drop_in(x, x, x)[0], network(x)
            for one, other in zip(before, after, strict=True):
                torch.testing.assert_close(other, 2 * one)
