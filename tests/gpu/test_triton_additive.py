"""The Triton kernels for additive scores, run by Triton's interpreter on the CPU: `make interpret`."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.call.scores import additive
from tests.gpu.planted import planted

pytest.importorskip("triton", reason="Triton comes with the builds of torch for CUDA: make interpret")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off: make interpret", allow_module_level=True)

MASKS: dict[str, Any] = {
    "none": None,
    "causal": regard.causal(),
    "lengths": regard.lengths(torch.tensor([0, 15])),
    "strided": regard.call.masks.strided(3),
}


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for name in ("scores_by_kernel", "pulled_by_kernel"):
        real = getattr(additive, name)

        def watched(*given: Any, _name: str = name, _real: Any = real, **options: Any) -> Any:
            found.append(_name)
            return _real(*given, **options)

        monkeypatch.setattr(additive, name, watched)
    return found


def attend(*tensors: Tensor, mask: Any, backend: Any) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    query, key, value, vector, query_weight, key_weight = leaves
    score = regard.Additive(vector, query_weight, key_weight)
    output, weights = regard.attention(query, key, value, score=score, mask=mask, backend=backend, return_weights=True)
    loss = output.square().sum() + (weights @ value).sum()
    gradients = torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        return output, regard.attention(query, key, value, score=score, mask=mask, backend=backend), *gradients


def numbers(hidden: int = 37) -> tuple[Tensor, ...]:
    shapes = (2, 2, 21, 5), (2, 1, 19, 6), (2, 1, 19, 3), (hidden,), (hidden, 5), (hidden, 6)
    return tuple(torch.randn(shape) for shape in shapes)


def check(mask: Any = None, hidden: int = 37) -> None:
    tensors = numbers(hidden)
    found = attend(*tensors, mask=mask, backend="tiled")
    expected = attend(*(t.double() for t in tensors), mask=mask, backend="reference")
    for one, other in zip(found, expected, strict=True):
        error = float((one.detach().double() - other.detach()).abs().max())
        assert error <= 5e-6 * max(1.0, float(other.detach().abs().max())), error


@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_gradients_are_those_of_the_formula(name: str, ran: list[str]) -> None:
    check(MASKS[name])
    assert {"scores_by_kernel", "pulled_by_kernel"} <= set(ran)


def test_widths_of_one_block_and_a_module(ran: list[str]) -> None:
    check(hidden=1)
    ran.clear()
    module = regard.nn.AdditiveAttention(8, 6, 16)
    same = regard.nn.AdditiveAttention(8, 6, 16).double()
    same.load_state_dict(module.state_dict())
    q, k = torch.randn(2, 5, 8), torch.randn(2, 7, 6)
    torch.testing.assert_close(module(q, k, k).double(), same(q.double(), k.double(), k.double()), rtol=0, atol=1e-6)
    assert ran


def test_float64_goes_by_tiles(ran: list[str]) -> None:
    attend(*(t.double() for t in numbers()), mask=None, backend="tiled")
    assert ran == []


FAULTS = {
    "the last units are dropped": (
        "for start in range(0, hidden, UNITS):",
        "for start in range(0, hidden - UNITS + 1, UNITS):",
    ),
    "a wrong column in the last block": (
        "(cell * queries + rows)[:, None] * keys + columns[None, :], total",
        "(cell * queries + rows)[:, None] * keys + tl.where(columns == 17, 18, columns)[None, :], total",
    ),
    "the slope of the tanh is left out": ("(1.0 - h * h), 1)", "(1.0 - 0.0 * h), 1)"),
    "the last key has no gradient": (
        "mask=live[:, None] & (columns < length)[None, :]",
        "mask=live[:, None] & (columns < length - 1)[None, :]",
    ),
}


@pytest.mark.filterwarnings("ignore")  # of numbers that a broken program has left unset
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.call.scores import triton_additive

    broken = planted(triton_additive, *FAULTS[name], tmp_path)
    for program in ("add_scores", "pull_rows"):
        monkeypatch.setattr(triton_additive, program, getattr(broken, program))
    with pytest.raises(AssertionError):
        check()
