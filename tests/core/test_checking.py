"""`regard.call.checks.checking()`: off by default, and one clear error for each wrong value."""

import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ArgumentError, NonFiniteError, ShapeError


def spoiled(place: tuple[int, ...], value: float, shape: tuple[int, ...] = (2, 3, 5, 4)) -> torch.Tensor:
    tensor = torch.zeros(shape)
    tensor[place] = value
    return tensor


GOOD = torch.zeros(2, 3, 5, 4)
NAN, INF = float("nan"), float("inf")
WRONG: dict[str, tuple[dict[str, Any], type[regard.RegardError], str]] = {
    "query": ({"query": spoiled((1, 2, 4, 3), NAN)}, NonFiniteError, "query[1, 2, 4, 3] is nan"),
    "key": ({"key": spoiled((0, 1, 0, 0), INF)}, NonFiniteError, "key[0, 1, 0, 0] is inf"),
    "value": ({"value": spoiled((1, 0, 2, 1), -INF)}, NonFiniteError, "value[1, 0, 2, 1] is -inf"),
    "too long": ({"mask": regard.lengths(torch.tensor([5, 6]))}, ArgumentError, "lengths[1] is 6, outside 0..5"),
    "negative": ({"mask": regard.lengths(torch.tensor([-1, 5]))}, ArgumentError, "lengths[0] is -1, outside 0..5"),
    "inside a combination": (
        {"mask": regard.causal() & ~(regard.window(2) | regard.lengths(torch.tensor([0, 9])))},
        ArgumentError,
        "lengths[1] is 9",
    ),
    "per query": (
        {"mask": regard.lengths(torch.tensor([[5] * 5, [5, 5, 5, 7, 5]]))},
        ArgumentError,
        "lengths[1, 3] is 7, outside 0..5",
    ),
    "offset": ({"mask": regard.causal(torch.tensor([0.5, 1.0]))}, ShapeError, "causal's offset must be integers"),
    "documents": ({"mask": regard.documents(torch.zeros(5))}, ShapeError, "document ids must be integers"),
    "bias": ({"bias": spoiled((3, 1), NAN, (5, 5))}, NonFiniteError, "bias[3, 1] is nan"),
    "infinite bias": ({"bias": spoiled((3, 1), INF, (5, 5))}, NonFiniteError, "only -inf may stand in a bias"),
    "slopes": (
        {"bias": regard.ALiBi(torch.tensor([1.0, NAN, 1.0]))},
        NonFiniteError,
        "ALiBi.slopes of bias=[1] is nan",
    ),
    "width": (
        {"score": regard.call.scores.Gaussian(torch.tensor([1.0, 0.0, 1.0]))},
        ArgumentError,
        "width of score=[1] is 0",
    ),
    "inner score": (
        {"score": regard.SoftCapped(regard.Additive(spoiled((2,), NAN, (4,))), 2.0)},
        NonFiniteError,
        "Additive.vector of score=[2] is nan",
    ),
    "sink": ({"normalization": regard.SoftmaxWithSink(NAN)}, NonFiniteError, "SoftmaxWithSink.sink"),
}


def attend(options: dict[str, Any]) -> Tensor:
    tensors: dict[str, Any] = {"query": GOOD, "key": GOOD, "value": GOOD} | options
    return regard.attention(**tensors)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named(name: str) -> None:
    options, error, message = WRONG[name]
    with regard.call.checks.checking(), pytest.raises(error, match=re.escape(message)):
        attend(options)


@pytest.mark.parametrize("name", [n for n in WRONG if n not in ("documents", "offset", "width")])
def test_values_are_not_looked_at_unless_asked(name: str) -> None:
    attend(WRONG[name][0])
    with regard.call.checks.checking(), regard.call.checks.checking(enabled=False):
        attend(WRONG[name][0])


def test_what_is_right_passes() -> None:
    mask = (regard.lengths(torch.tensor([0, 5])) | regard.window(2)) & regard.causal(torch.tensor([0, 1]))
    bias = torch.zeros(5, 5).index_fill(1, torch.tensor([2]), -INF)
    with regard.call.checks.checking():
        attend({"mask": mask, "bias": bias, "score": regard.call.scores.Gaussian(torch.ones(3))})
        attend({"mask": torch.ones(5, 5, dtype=torch.bool), "score": lambda q, k: q @ k.mT})


def test_it_ends_with_its_block_also_after_an_error() -> None:
    with pytest.raises(NonFiniteError), regard.call.checks.checking():
        attend(WRONG["value"][0])
    assert not attend(WRONG["value"][0]).isfinite().all()


def test_it_holds_for_the_thread_that_entered_it() -> None:
    found = []
    with regard.call.checks.checking():
        thread = threading.Thread(target=lambda: found.append(attend(WRONG["query"][0])))
        thread.start()
        thread.join()
    assert len(found) == 1
