"""What functions, modules and other objects hold is found, and each kind of change is seen; nothing else is one."""

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.tensors.captures import Captures, leaves
from regard.tensors.fingerprint import FEW, Fingerprint, first_changed

WIDTH = 3
SETTINGS = types.ModuleType("settings")
SETTINGS.__dict__["width"] = 3


class Net(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("document", torch.zeros(4))
        self.other = nn.Linear(2, 2)
        self.calls, self.width = 0, 4

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        self.calls += 1
        return query @ self.matrix @ key.mT

    def mask(self, i: Tensor, j: Tensor) -> Tensor:
        return self.helper(i) == self.document[j]

    def helper(self, i: Tensor) -> Tensor:
        return self.document[i] * self.scale


@dataclass
class Scaled:
    by: float
    parts: dict[str, list[Tensor]]

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        return self.by * query @ key.mT


def step(parameters: list[Tensor], **options: Any) -> None:
    for each in parameters:
        each.grad = torch.ones_like(each)
    torch.optim.AdamW(parameters, lr=0.1, **options).step()


def changes() -> dict[str, tuple[Any, Callable[[], object], str]]:
    """By name: an object, a change of something that it holds, and the words for it."""
    net, large, array = Net(), torch.zeros(FEW + 1), torch.zeros(4).numpy()
    found: dict[str, tuple[Any, Callable[[], object], str]] = {}

    def loop() -> None:
        width = 1

        def change() -> None:
            nonlocal width
            width = 5

        found["a loop variable"] = (
            lambda i, j: i - j < width,
            change,
            "the value `width` (1 when the call ran, 5 now)",
        )

    loop()
    found |= {
        "fused": (net, lambda: step([net.matrix], fused=True), "the parameter `matrix` (3, 3)"),
        "not fused": (net.forward, lambda: step([net.matrix], fused=False), "the parameter `matrix` (3, 3)"),
        "data": (net.mask, lambda: net.document.data.add_(1), "the tensor `document` (4,)"),
        "of a method's method": (
            lambda i: net.mask(i, i),
            lambda: net.document.add_(1),
            "the tensor `net.document` (4,)",
        ),
        "another tensor": (net.mask, lambda: setattr(net, "document", torch.ones(4)), "the tensor `document` (4,)"),
        "an attribute of the class": (
            net.mask,
            lambda: setattr(net, "scale", 3.0),
            "`scale` (2.0 when the call ran, 3.0",
        ),
        "freed memory": (
            net,
            lambda: net.other.weight.untyped_storage().resize_(0),
            "the parameter `other.weight` (2, 2)",
        ),
        "meta": (net, lambda: net.other.to("meta"), "the parameter `other.weight` (2, 2)"),
        "a large tensor": (lambda i: large[i], lambda: large.add_(1), f"the tensor `large` ({FEW + 1},)"),
        "one element of it": (lambda i: large[i], lambda: large[5].add_(1), f"the tensor `large` ({FEW + 1},)"),
        "an array": (lambda i: array[i], lambda: array.fill(1), "the array `array` (4,)"),
        "a global": (lambda i: i < WIDTH, lambda: globals().__setitem__("WIDTH", 4), "the value `WIDTH` (3 when"),
        "of a module of Python": (
            lambda i: i < SETTINGS.width,
            lambda: setattr(SETTINGS, "width", 4),
            "`SETTINGS.width`",
        ),
    }
    lists = [torch.zeros(2)]
    scaled, given = Scaled(1.0, {"a": lists}), torch.zeros(2)
    found |= {
        "a dataclass": (scaled, lambda: setattr(scaled, "by", 2.0), "the value `by` (1.0 when the call ran, 2.0 now)"),
        "a tensor in containers": (
            partial(scaled),
            lambda: lists[0].data.add_(1),
            "the tensor `[0].parts['a'][0]` (2,)",
        ),
        "a longer list": (scaled, lambda: lists.append(lists[0]), "the length of `parts['a']`"),
        "a default": ((lambda i, n=given: i < n), lambda: given.add_(1), "the tensor `n` (2,)"),
        "a partial": (partial(torch.add, other=given), lambda: given.zero_().add_(1), "the tensor `[2]['other']` (2,)"),
        "a nested function": ((lambda i: [given[k] for k in i]), lambda: given.add_(1), "the tensor `given` (2,)"),
        "a dtype": (
            lambda i: i < given,
            lambda: setattr(given, "data", given.data.double()),
            "the tensor `given` (2,)",
        ),
    }
    return found


@pytest.mark.parametrize("name", changes())
def test_a_change_is_seen_and_named(name: str) -> None:
    held, change, words = changes()[name]
    captures = Captures(held)
    assert captures
    assert captures.changed() is None
    change()
    globals()["WIDTH"], seen = 3, captures.changed()
    SETTINGS.__dict__["width"] = 3
    assert words in (seen or "nothing")


def same() -> dict[str, tuple[Any, Callable[[], object]]]:
    net, large, seen, cache = Net(), torch.zeros(FEW + 1), [0], torch.zeros(2, FEW)
    part, not_a_number = cache[:1], torch.tensor(torch.nan)
    return {
        "an attribute that the code does not read": (net.mask, lambda: step([net.matrix])),
        "training or not": (net, net.eval),
        "a counter of its own": (net, lambda: net(torch.ones(1, 3), torch.ones(1, 3))),
        "a list that it only writes": (lambda i: (seen.append(0), i)[1], lambda: seen.append(1)),
        "the same elements again": (net, lambda: net.document.zero_()),
        "the rest of a cache": (lambda i: part[i], lambda: cache[1].add_(1)),
        "not a number": (lambda i: not_a_number, lambda: None),
        "read alone": (lambda i: large[i], lambda: large.sum()),
        "an object that holds itself": (seen_by_itself(), lambda: None),
    }


def seen_by_itself() -> object:
    held: dict[str, object] = {"one": 1}
    held["itself"] = held
    return held


@pytest.mark.parametrize("name", same())
def test_nothing_else_is_a_change(name: str) -> None:
    held, change = same()[name]
    captures = Captures(held)
    change()
    assert captures.changed() is None


def test_plain_functions_hold_nothing() -> None:
    assert not Captures(torch.add)
    assert not Captures(lambda b, h, i, j: i >= j)
    assert list(leaves([("", held) for held in (torch.Generator(), int, torch, torch.relu)])) == []
    assert {held for _, held in leaves([("", torch.nn.functional.softmax)])} == {
        None,
        3,
    }  # its defaults, not torch's globals


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
        captures = Captures(lambda i: held[i])
        held.add_(1)
    assert captures.changed() == "the tensor `held` (3,)"


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
