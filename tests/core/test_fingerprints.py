"""Each kind of change of a tensor or of a module's tensors is seen and named; nothing else is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.tensors.fingerprint import FEW, Fingerprint, Fingerprints, first_changed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("document", torch.zeros(4))
        self.other = nn.Linear(2, 2)


def step(parameters: list[Tensor], **options: Any) -> None:
    for each in parameters:
        each.grad = torch.ones_like(each)
    torch.optim.AdamW(parameters, lr=0.1, **options).step()


NET: dict[str, tuple[Callable[[Any], object], str]] = {
    "fused": (lambda net: step([net.matrix], fused=True), "the parameter `score.matrix` (3, 3)"),
    "not fused": (lambda net: step([net.matrix], fused=False), "the parameter `score.matrix` (3, 3)"),
    "data": (lambda net: net.document.data.add_(1), "the tensor `score.document` (4,)"),
    "another tensor": (lambda net: setattr(net, "document", torch.ones(4)), "the tensor `score.document` (4,)"),
    "no tensor": (lambda net: delattr(net, "matrix"), "the parameter `score.matrix`"),
    "freed memory": (
        lambda net: net.other.weight.untyped_storage().resize_(0),
        "the parameter `score.other.weight` (2, 2)",
    ),
    "meta": (lambda net: net.other.to("meta"), "the parameter `score.other.weight` (2, 2)"),
}
LARGE = f"the tensor `bias` ({FEW + 1},)"
TENSOR: dict[str, tuple[int, Callable[[Tensor], object], str]] = {
    "a large tensor": (FEW + 1, lambda t: t.add_(1), LARGE),
    "one element of it": (FEW + 1, lambda t: t[5].add_(1), LARGE),
    "numpy": (4, lambda t: t.numpy().fill(1), "the tensor `bias` (4,)"),
    "of a closure": (4, lambda t: t.data.add_(1), "the tensor `score.held` (4,)"),
    "a dtype": (4, lambda t: setattr(t, "data", t.data.double()), "the tensor `bias` (4,)"),
}


@pytest.mark.parametrize("name", [*NET, *TENSOR])
def test_a_change_is_seen_and_named(name: str) -> None:
    held: Any
    change: Any
    held, (change, words) = (Net(), NET[name]) if name in NET else (torch.zeros(TENSOR[name][0]), TENSOR[name][1:])
    given = {"score": (lambda i: held[i])} if name == "of a closure" else {"score" if name in NET else "bias": held}
    fingerprints = Fingerprints(given)
    assert fingerprints.changed() is None
    change(held)
    assert fingerprints.changed() == words


def test_nothing_else_is_a_change() -> None:
    net, large, cache = Net(), torch.zeros(FEW + 1), torch.zeros(2, FEW)
    not_a_number = torch.tensor(torch.nan)
    fingerprints = Fingerprints({"net": net, "large": large, "part": cache[:1], "nan": not_a_number, "code": min})
    net.eval()
    net.document.zero_()
    cache[1].add_(1)
    large.sum()
    assert fingerprints.changed() is None


def test_each_fingerprint_is_compared() -> None:
    tensors = [torch.zeros(3), torch.zeros(3, dtype=torch.bool), torch.zeros((), dtype=torch.complex64), torch.zeros(0)]
    pairs = [(Fingerprint(tensor), tensor) for tensor in tensors]
    assert first_changed(pairs) is None
    tensors[2].data.add_(1)
    assert first_changed(pairs) == 2
    tensors[1].data[2] = True
    assert first_changed(pairs) == 1


def test_inference_tensors_have_fingerprints() -> None:
    with torch.inference_mode():
        held = torch.zeros(3)
        fingerprints = Fingerprints({"held": held})
        held.add_(1)
    assert fingerprints.changed() == "the tensor `held` (3,)"


@pytest.mark.parametrize("shape", [(FEW * 2,), (3, FEW), (200, 200), (2, 3, 5, 7, 11, 13), (1, 1, 1, FEW * 2)])
def test_a_sample_reaches_every_part(shape: tuple[int, ...]) -> None:
    large = torch.zeros(shape)
    fingerprint = Fingerprint(large)
    for dim, size in enumerate(shape):
        half = large.data.narrow(dim, size // 2, size - size // 2)
        half += 1
        assert first_changed([(fingerprint, large)]) == 0
        half -= 1
        assert first_changed([(fingerprint, large)]) is None
