"""Packed sequences give what each gives alone."""

from typing import Any, cast

import pytest
import torch

import regard
from regard.errors import ShapeError


@pytest.mark.parametrize("backend", ["fused", "tiled", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_do_not_see_one_another(backend: str, causal: bool) -> None:
    sequences = [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 1, 150, 200, 7)]
    packed = regard.pack(sequences)
    mask = packed.mask & regard.causal(0) if causal else packed.mask
    x = packed.values
    output, weights = regard.attention(x, x, x, mask=mask, backend=backend, return_weights=True)
    alone = [regard.attention(s, s, s, mask=regard.causal(0) if causal else None) for s in sequences]
    for one, other in zip(packed.unpack(output), alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert (weights[4:154, :4] == 0).all()
    ours = torch.autograd.grad(output.square().sum(), sequences)
    theirs = torch.autograd.grad([o.square().sum() for o in alone], sequences)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_positions_begin_anew() -> None:
    packed = regard.pack([torch.zeros(2, 1), torch.zeros(3, 1)])
    assert packed.positions.tolist() == [0, 1, 0, 1, 2]
    assert packed.offsets.tolist() == [0, 2, 5]
    assert [len(part) for part in packed.unpack(torch.zeros(4, 5), dim=1)] == [4, 4]


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ShapeError, match="at least one sequence"):
        regard.pack([])
    with pytest.raises(ShapeError, match=r"\(2, 1\), \(2, 3\)"):
        regard.pack([torch.zeros(2, 1), torch.zeros(2, 3)])
    with pytest.raises(ShapeError, match=r"hold the 2 packed tokens, got \(3, 1\)"):
        regard.pack([torch.zeros(2, 1)]).unpack(torch.zeros(3, 1))


def test_wrong_patterns_are_named() -> None:
    for make, message in (
        (lambda: regard.window(0), "at least 1"),
        (lambda: regard.window(4, side="both"), "odd for 'both'; got 4"),
        (lambda: regard.window(4, side=cast(Any, "up")), "one of left, right, both; got 'up'"),
        (lambda: regard.call.masks.strided(0), "at least 1, got 0"),
        (lambda: regard.documents(), "either ids or offsets"),
        (lambda: regard.documents(offsets=torch.tensor([1, 2])), r"rise from 0 .* got \[1, 2\]"),
        (lambda: regard.blocks(torch.ones(2, 2), 4), "bool pattern"),
    ):
        with pytest.raises(regard.RegardError, match=message):
            make()
    x = torch.ones(1, 2, 9, 4)
    with pytest.raises(ShapeError, match="does not cover"):
        regard.attention(x, x, x, mask=regard.blocks(torch.ones(2, 2, dtype=torch.bool), 4))


def test_drawings() -> None:
    assert repr(regard.window(2)).splitlines()[:3] == ["window of 2", "#...........", "##.........."]
    assert repr(regard.lengths(torch.tensor([1, 2]))) == "lengths"
