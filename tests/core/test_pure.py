"""Backward and maps evaluate masks, biases and scores again: with the values of the call, or with an error.

Each case makes a call, then changes something that it was made of. Then its gradients and its weights are those of the
call, as computed at once by a call that nothing changes, or an OverwrittenError names the change.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.call.masks import basic
from regard.call.masks.base import Mask
from regard.call.scores.base import Score
from regard.call.shapes import MOST_COPIED
from regard.errors import OverwrittenError
from regard.kernels.snapshot import MOST_ELEMENTS
from regard.maps.sources.call import source_of_call
from regard.tensors.fingerprint import FEW, SAMPLE
from tests import ROOT

LENGTH = 33


@dataclass
class Changed:
    options: dict[str, Any]
    change: Callable[[], object]
    is_right: bool
    """Whether the results must be those of the call; else an error will do."""


def vectors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, LENGTH, 8, generator=generator, requires_grad=True) for _ in range(3)]


class OwnScore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(8) + 0.1)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ self.matrix @ key.mT


@dataclass(frozen=True, eq=False)
class OwnMask(Mask):
    widths: list[int]

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query - key < self.widths[0]) & (query >= key)


@dataclass(frozen=True, eq=False)
class OwnDeclared(Score):
    scales: list[float]

    def block(self, query: Tensor, key: Tensor) -> Tensor:
        return self.scales[0] * query @ key.mT


def cases() -> Iterator[tuple[str, Callable[[], Changed]]]:
    def loop_variable() -> Changed:
        width = 20

        def change() -> None:
            nonlocal width
            width = 1

        return Changed({"mask": regard.predicate(lambda b, h, i, j: (i - j < width) & (i >= j))}, change, True)

    yield "a loop variable", loop_variable

    def masked(mask: Callable[[Tensor], Any]) -> Callable[[Tensor], dict[str, Any]]:
        return lambda tensor: {"mask": mask(tensor)}

    keep, dense = torch.rand(2, LENGTH) < 0.5, torch.rand(2, 1, LENGTH, LENGTH) < 0.5
    large, bias = torch.randn(2, 2, LENGTH, 256)[..., :LENGTH], torch.randn(2, 2, LENGTH, LENGTH)
    ids, numbers = torch.arange(LENGTH).expand(2, -1) // 7, torch.tensor([0.5, 0.1])
    written: dict[str, tuple[Callable[[Tensor], Any], Tensor, Callable[[Tensor], object]]] = {
        "lengths": (masked(regard.lengths), torch.tensor([3, 20]), lambda n: n.add_(1)),
        "offsets": (masked(regard.causal), torch.tensor([0, 4]), lambda n: n.add_(5)),
        "documents": (masked(regard.documents), ids, lambda t: t.zero_()),
        "padding": (masked(regard.padding), keep, lambda t: t.logical_not_()),
        "blocks": (masked(lambda t: regard.blocks(t, 7)), torch.rand(5, 5) < 0.5, lambda t: t.logical_not_()),
        "a bool tensor": (masked(lambda t: t), dense, lambda t: t.data.logical_not_()),
        "one of several": (masked(lambda t: ~basic.as_mask(t) | regard.causal()), dense, lambda t: t.logical_not_()),
        "a frozen bias": (lambda t: {"bias": t}, bias, lambda t: t.data.mul_(2)),
        "a large frozen bias": (lambda t: {"bias": t}, large, lambda t: t.mul_(2)),
        "slopes": (lambda t: {"bias": regard.ALiBi(t)}, numbers, lambda t: t.data.mul_(2)),
        "sinks": (lambda t: {"normalization": regard.SoftmaxWithSink(t)}, numbers, lambda t: t.data.mul_(20)),
    }

    def made(kind: Callable[[Tensor], Any], tensor: Tensor, change: Callable[[Tensor], object]) -> Changed:
        own = tensor.clone()
        return Changed(kind(own), lambda: change(own), True)

    yield from ((name, partial(made, *row)) for name, row in written.items())

    def own_score() -> Changed:
        score = OwnScore()
        return Changed({"score": score}, lambda: score.load_state_dict({"matrix": torch.ones(8, 8)}), False)

    yield "a module's state", own_score

    def own_mask() -> Changed:
        widths = [20]
        return Changed({"mask": OwnMask(widths)}, lambda: widths.__setitem__(0, 1), False)

    yield "a mask of one's own", own_mask

    def own_declared() -> Changed:
        scales = [1.0]
        return Changed({"score": OwnDeclared(scales)}, lambda: scales.__setitem__(0, 3.0), False)

    yield "a score of one's own", own_declared

    def queries() -> Changed:
        return Changed({}, lambda: None, True)

    yield "nothing", queries


CASES = dict(cases())


def outcome(case: Changed, inputs: list[Tensor], *, changes: bool, twice: bool = False, **more: Any) -> Any:
    torch.manual_seed(3)
    output, weights = regard.attention(*inputs, **case.options, **more, return_weights=True)
    read = weights.dense().detach() if not changes else None
    if changes:
        case.change()
        with suppress(OverwrittenError):
            read = weights.dense().detach()
    try:
        found = torch.autograd.grad(output.square().sum(), inputs, create_graph=twice)
        if twice:
            found = torch.autograd.grad(torch.stack([g.square().sum() for g in found]).sum(), inputs)
    except RuntimeError as error:  # OverwrittenError is one.
        if not (isinstance(error, OverwrittenError) or "modified by an inplace operation" in str(error)):
            raise
        found = None
    return read, found


@pytest.mark.parametrize(("twice", "backend"), [(False, None), (True, "tiled"), (False, "reference")])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_call_or_an_error(name: str, backend: Any, twice: bool) -> None:
    inputs, case = vectors(), CASES[name]
    torch.manual_seed(4)
    right = outcome(case_of(case), inputs, changes=False, twice=twice, backend="reference")
    changed = case_of(case)
    found = outcome(changed, inputs, changes=True, twice=twice, backend=backend)
    for seen, expected in zip(found, right, strict=True):
        if seen is None:
            assert not changed.is_right
        else:
            torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-4)


def case_of(build: Callable[[], Changed]) -> Changed:
    torch.manual_seed(5)
    return build()


@pytest.mark.parametrize("backend", [None, "tiled", "reference"])
def test_a_score_that_draws_random_numbers_is_refused(backend: Any) -> None:
    inputs = vectors()
    drawn = lambda q, k: q @ k.mT + torch.rand(q.shape[-2], k.shape[-2])  # noqa: E731
    output, weights = regard.attention(*inputs, score=drawn, backend=backend, return_weights=True)
    with pytest.raises(OverwrittenError, match="answers otherwise than when it ran: a row has the normalizer"):
        weights.dense()
    if backend != "reference":  # It keeps all that it drew.
        with pytest.raises(OverwrittenError, match="its backward pass needs the same"):
            output.sum().backward()


@pytest.fixture
def many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of a few pairs stand for those of many, which no call copies or renders."""
    for module in ("call.masks.basic", "call.shapes", "kernels.snapshot"):
        monkeypatch.setattr(f"regard.{module}.MOST_COPIED", 0)


@pytest.mark.usefixtures("many_pairs")
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("backend", [None, "fused", "tiled", "reference"])
@pytest.mark.parametrize("name", ["a loop variable", "padding", "blocks", "a bool tensor", "one of several", "nothing"])
def test_masks_of_many_pairs_are_those_of_the_call_or_an_error(name: str, backend: Any, twice: bool) -> None:
    if backend == "fused" and twice:
        return  # It has no second derivatives.
    inputs = vectors()
    right = outcome(case_of(CASES[name]), inputs, changes=False, twice=twice, backend="reference")
    found = outcome(case_of(CASES[name]), inputs, changes=True, twice=twice, backend=backend)
    assert name == "nothing" or found[0] is None
    for seen, expected in zip(found, right, strict=True):
        if seen is not None:
            torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("many_pairs")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["fused", "fused, by blocks", "tiled"])
def test_a_predicate_that_answers_otherwise_is_refused_by_the_log_sum_exp(
    backend: Any, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _, by_blocks = backend.partition(", ")
    if by_blocks:
        monkeypatch.setattr("regard.kernels.fused_plan.BLOCK_ROWS", (8, 8))
    hidden = [0.5]  # An iterator holds it, where nothing can look.
    flaws = iter(lambda: hidden[0], None)
    mask = regard.predicate(lambda b, h, i, j: (i * 7 + j) % 11 > 10 * next(flaws))
    mask = mask & regard.causal() if causal else mask
    inputs = vectors()
    output, weights = regard.attention(*inputs, mask=mask, backend=backend, return_weights=True)
    before = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
    assert all(grad.isfinite().all() for grad in before)
    hidden[0] = 0.05
    with pytest.raises(OverwrittenError, match="a row has the normalizer"):
        weights.dense()
    if backend == "fused" and not by_blocks:  # It keeps the mask.
        after = torch.autograd.grad(output.sum(), inputs)
        assert all(map(torch.equal, before, after))
        return
    with pytest.raises(OverwrittenError, match="its backward pass needs the same"):
        output.sum().backward()


def test_a_map_evaluates_a_small_predicate_no_more() -> None:
    calls = []

    def counting(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        calls.append(i.shape)
        return i >= j

    output, weights = regard.attention(*vectors(), mask=regard.predicate(counting), return_weights=True)
    weights.dense()
    output.sum().backward()
    assert len(calls) == 1


def test_plain_calls_hold_nothing() -> None:
    inputs = vectors()
    for mask in (None, regard.causal(), regard.causal() & regard.lengths(torch.tensor([3, 20])), regard.window(4)):
        weights = regard.attention(*inputs, mask=mask, return_weights=True).weights
        assert source_of_call(weights.source, "").call.snapshot is None


def test_the_page_has_the_limits() -> None:
    page = " ".join((ROOT / "docs" / "design" / "attention-call.md").read_text().split())
    assert f"masks of up to 2^{MOST_COPIED.bit_length() - 1} elements" in page
    assert f"biases and normalizations of up to 2^{MOST_ELEMENTS.bit_length() - 1} elements" in page
    assert f"the elements up to 2^{FEW.bit_length() - 1}, else 2^{SAMPLE.bit_length() - 1} of them" in page
