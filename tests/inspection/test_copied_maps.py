"""Copies of watched maps: by `copy`, by `pickle`, and into another process."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from tests.inspection.test_watch import Attend, Two, x
from tests.modules import watching


class WrittenOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (3, -1)).transpose(1, 2)
        return (q @ q.mT).softmax(-1) @ q


class Ours(nn.Module):
    def forward(self, x: Tensor) -> Any:
        q = x.unflatten(-1, (3, -1)).transpose(1, 2)
        return regard.attention(q, q, q, mask=regard.causal())


def through_torch_save(one: AttentionMap) -> Any:
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a call": Attend,
    "a module of torch": lambda: nn.TransformerEncoderLayer(15, 3, 8, batch_first=True).eval(),
    "written out": WrittenOut,
    "ours": Ours,
}
WAYS: dict[str, Callable[[AttentionMap], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_is_the_same_map_and_nobody_elses(name: str, way: str) -> None:
    model, inputs = MODELS[name](), x()
    with torch.no_grad(), regard.watch(model) as seen:
        model(inputs)
        model(inputs[:, :4])
    originals: list[Any] = [*seen.maps, seen.maps[0].average(-3), seen.maps[0][0, 1:].detach()]
    copies = [WAYS[way](one) for one in originals]
    read = [(one.dense(), one.entropy()) for one in originals]
    # The model, or its owner, writes to what it has handed over.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for one, copied, (weights, entropy) in zip(originals, copies, read, strict=True):
        assert repr(copied).partition("; holds")[0] == repr(one).partition("; holds")[0]
        torch.testing.assert_close(copied.dense(), weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(copied.entropy(), entropy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["a call", "written out"])
def test_a_copy_has_the_gradient_that_came(name: str) -> None:
    model, inputs = MODELS[name](), x().requires_grad_()
    with regard.watch(model, values=True, gradients=True) as seen:
        output = model(inputs)
    before = copy.deepcopy(seen.maps[0])
    output.square().sum().backward()
    one = seen.maps[0]
    copied = pickle.loads(pickle.dumps(one))
    torch.testing.assert_close(copied.gradient().dense(), one.gradient().dense())
    torch.testing.assert_close(copied.attribution().dense(), one.attribution().dense())
    if name == "a call":
        torch.testing.assert_close(copied.value_norms().dense(), one.value_norms().dense())
    # A copy that was made earlier was left behind by the backward pass.
    with pytest.raises(ArgumentError, match=r"not kept|does not keep"):
        before.gradient()


def test_the_watch_itself_is_bound_to_its_model() -> None:
    seen = watching(Two())(x())
    for refused in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ArgumentError, match=r"copy.deepcopy\(dict"):
            refused(seen)
    assert list(copy.deepcopy(dict(seen.items()))) == list(seen)
