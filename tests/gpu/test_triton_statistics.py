"""The Triton kernel for statistics, run by Triton's interpreter on the CPU: `make interpret`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.maps.loop import triton_plan, triton_statistics
from regard.maps.statistics import tiles
from tests.gpu.planted import planted
from tests.maps.dense_maps import bins

pytest.importorskip("triton", reason="Triton comes with the builds of torch for CUDA: make interpret")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off: make interpret", allow_module_level=True)

USUAL = ("received", "entropy", "top_keys", "pooled_sum", "pooled_max")
QUERIES, KEYS = 41, 37
MASKS: dict[str, Any] = {
    "none": None,
    "causal": regard.causal(),
    "causal from the first key": regard.causal(0),
    "no key at first": regard.causal(-20),
    "offsets": regard.causal(torch.tensor([3, -4])),
    "window": regard.window(9),
    "window on both sides": regard.window(7, side="both"),
    "lengths": regard.lengths(torch.tensor([0, 33])),
    "lengths per query": regard.lengths(torch.arange(2 * QUERIES).reshape(2, QUERIES) % KEYS, per_query=True),
    "padding": regard.padding(torch.arange(2 * KEYS).reshape(2, KEYS) % 3 > 0),
    "prefix": regard.prefix(20),
    "documents": regard.documents(
        torch.arange(QUERIES).expand(2, -1) // 12, key_ids=torch.arange(KEYS).expand(2, -1) // 12
    ),
    "several": regard.causal() & regard.lengths(torch.tensor([36, 20])) & regard.window(15),
}
Calls = list[bool]


@pytest.fixture(scope="module", autouse=True)
def answered() -> Iterator[Calls]:
    """Whether the kernel has answered, each time that it was asked. Small blocks make many of few keys."""
    found: Calls = []
    real = triton_statistics.in_kernels

    def watched(*asked: Any) -> Any:
        answers = real(*asked)
        found.append(answers is not None)
        return answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "in_kernels", watched)
        patch.setattr(triton_plan, "row_tile", lambda *asked: triton_plan.Tile(16, 16, 4))
        patch.setattr(triton_plan, "column_tile", lambda *asked: triton_plan.Tile(16, 16, 4))
        patch.setattr(triton_plan, "RANK_TILE", triton_plan.Tile(64, 32, 4))
        yield found


def made(mask: Any, dtype: torch.dtype, **options: Any) -> tuple[regard.AttentionMap, Tensor]:
    """A map of grouped heads, and its dense weights from the same numbers in float64."""
    q, k = torch.randn(2, 4, QUERIES, 11).to(dtype), torch.randn(2, 2, KEYS, 11).to(dtype)
    with torch.no_grad():
        weights = regard.attention(q, k, k, mask=mask, return_weights=True, **options).weights
        exact = regard.attention(
            *(t.double() for t in (q, k, k)), mask=mask, backend="reference", return_weights=True, **options
        ).weights
    return weights, exact.dense()


def check(weights: Any, dense: Tensor, *, k: int = 5, rows: int = 5, columns: int = 4) -> None:
    """Every statistic against float64: to 1e-6, and sums to 1e-6 of the largest sum."""
    with torch.no_grad():
        found: Any = weights.summary(*USUAL, k=k, rows=rows, columns=columns)
    positive = torch.where(dense > 0, dense, 1.0)
    expected = {
        "received": dense.sum(-2),
        "entropy": -(dense * positive.log()).sum(-1),
        "pooled_sum": bins(dense, rows, columns, Tensor.sum),
        "pooled_max": bins(dense, rows, columns, Tensor.amax),
    }
    for name, theirs in expected.items():
        error = float((found[name].double() - theirs).abs().max())
        assert error <= 1e-6 * max(1.0, float(theirs.max())), (name, error)
    values, indices = found["top_keys"]
    assert indices.max() < dense.shape[-1]
    torch.testing.assert_close(values.double(), dense.topk(k).values, rtol=0, atol=1e-6)
    assert ((indices == -1) == (values == 0)).all()
    there = torch.where(indices >= 0, dense.gather(-1, indices.clamp_min(0)), 0.0)
    torch.testing.assert_close(values.double(), there, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_in_float32(name: str, answered: Calls) -> None:
    answered.clear()
    check(*made(MASKS[name], torch.float32))
    assert answered == [True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "lengths"])
def test_half_precision(name: str, dtype: torch.dtype, answered: Calls) -> None:
    answered.clear()
    check(*made(MASKS[name], dtype))
    assert answered == [True]


def test_a_row_state_that_is_known_and_one_with_a_sink(answered: Calls) -> None:
    for options in ({"normalization": regard.SoftmaxWithSink(0.3)}, {}):
        weights, dense = made(regard.causal(), torch.bfloat16, **options)
        assert weights.entropy().shape == dense.shape[:-1]  # it leaves the row state known
        answered.clear()
        check(weights, dense)
        assert answered == [True]


def test_keys_in_parts(answered: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a few queries of many keys, whose row state is known."""
    monkeypatch.setattr(triton_plan, "parts_of", lambda programs, keys: 2)
    for mask in ("none", "several", "no key at first"):
        weights, dense = made(MASKS[mask], torch.float32)
        answered.clear()
        check(weights, dense)
        assert answered == [True]
    check_ties()


def test_chosen_heads_and_layouts_that_are_not_contiguous(answered: Calls) -> None:
    weights, dense = made(MASKS["lengths"], torch.float32)
    answered.clear()
    check(weights[1, 2:3], dense[1, 2:3])
    q, k = torch.randn(2, QUERIES, 3, 11).mT.contiguous().mT.transpose(1, 2), torch.randn(2, KEYS, 3, 11)
    with torch.no_grad():
        weights = regard.map_of(q, k.transpose(1, 2), mask=regard.causal())
        dense = regard.map_of(q.double(), k.transpose(1, 2).double(), mask=regard.causal()).dense()
        answered.clear()
        check(weights, dense, k=KEYS, rows=QUERIES, columns=KEYS)
    assert answered == [True]


def check_ties() -> None:
    """Of equal weights the first keys are named, also if they lie in several blocks."""
    q = torch.zeros(1, 1, 40, 4)
    with torch.no_grad():
        weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
        found: Any = weights.summary("top_keys", "entropy", k=5)
        indices = found["top_keys"].indices
    row = torch.arange(40)[:, None].expand(40, 5)
    assert torch.equal(indices[0, 0], torch.where(torch.arange(5) <= row, torch.arange(5), -1))
    k = torch.zeros(1, 1, 40, 1)
    k[..., [3, 20, 38], :] = 2.0
    q = torch.ones(1, 1, 16, 1)
    with torch.no_grad():
        found = regard.attention(q, k, k, return_weights=True).weights.summary("top_keys", "entropy", k=4)
        indices = found["top_keys"].indices
    assert indices[0, 0, 0].tolist() == [3, 20, 38, 0]


def test_ties(answered: Calls) -> None:
    answered.clear()
    check_ties()
    assert answered == [True, True]


def test_what_goes_by_tiles_and_explain_says_so(answered: Calls) -> None:
    def asked(weights: regard.AttentionMap, *names: str) -> Calls:
        answered.clear()
        weights.summary(*names)
        return answered.copy()

    q = torch.randn(1, 2, 20, 4)
    for mask, reason in ((regard.strided(3), "not one range"), (regard.causal(), None)):
        with torch.no_grad():
            weights = regard.attention(q, q, q, mask=mask, return_weights=True).weights
        assert asked(weights, *USUAL) == [reason is None]
        said = str(regard.explain(q, q, q, mask=mask))
        assert "statistics of its weights: by kernels of our own (Triton)" in said or reason is not None
        assert reason is None or reason in said
    assert asked(weights, *USUAL, "top_p_count") == [False]
    assert asked(weights.average(), *USUAL) == [False]
    assert "the kernels have no torch.float64" in str(regard.explain(*[q.double()] * 3))
    assert "3 queries are fewer" in str(regard.explain(q[:, :, :3], q, q))
    assert "the kernel has no bias" in str(regard.explain(q, q, q, bias=torch.zeros(20, 20)))
    leaf = q.clone().requires_grad_()
    assert asked(regard.attention(leaf, q, q, return_weights=True).weights, *USUAL) == [False]
    bad = q.clone()
    bad[0, 0, 7, 0] = torch.nan
    with torch.no_grad():
        assert asked(regard.attention(bad, q, q, return_weights=True).weights, *USUAL) == [False]


FAULTS = {
    "a mask dropped in the last block": (
        "        logs = tl.where(seen,",
        "        seen = seen | ((start + COLUMNS >= high) & (columns[None, :] < keys))\n        logs = tl.where(seen,",
    ),
    "the last block is left out": ("    high = tl.max(end, 0)", "    high = tl.max(end, 0) - COLUMNS"),
    "top-k that loses a tie": ("waiting == found[:, None]", "(waiting >> key_bits) == (found >> key_bits)[:, None]"),
    "a wrong column in the last block": (
        "received + flat_head * keys + columns,",
        "received + flat_head * keys + tl.where((start + COLUMNS >= high) & (columns > start), columns - 1, columns),",
    ),
    "a row of the picture is lost": (
        "tl.atomic_add(sums + of_picture + column, by_row, mask=live)",
        "tl.atomic_add(sums + of_picture + column, by_row, mask=live & (rows > block * ROWS))",
    ),
    "a part is read twice": (
        "    high = tl.minimum(high, low + length)",
        "    high = tl.minimum(high, low + 2 * length)",
    ),
    "the key head of another group": ("(head // group) * key_head", "(head % group) * key_head"),
}


@pytest.mark.filterwarnings("ignore")  # of numbers that a broken program has left unset
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.maps.loop import triton_rows

    broken = planted(triton_rows, *FAULTS[name], tmp_path)
    monkeypatch.setattr(triton_rows, "read_rows", broken.read_rows)
    with pytest.raises(AssertionError):  # noqa: PT012, any of the checks may see it
        check(*made(MASKS["several"], torch.float32))
        check_ties()
        monkeypatch.setattr(triton_plan, "parts_of", lambda programs, keys: 2)
        check(*made(MASKS["none"], torch.float32))
