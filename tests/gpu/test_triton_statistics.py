"""The Triton kernel for statistics, run by Triton's interpreter on the CPU: `make interpret`."""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.maps.loop import triton_plan, triton_statistics
from tests.gpu.checked_statistics import KEYS, MASKS, QUERIES, USUAL, check, made, small_blocks
from tests.gpu.planted import planted
from tests.maps.dense_maps import answers_of

pytest.importorskip("triton", reason="Triton comes with the builds of torch for CUDA: make interpret")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off: make interpret", allow_module_level=True)

# The interpreter's numpy warns of what a card does without a word: 2^x out of range, a row without numbers.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Calls = list[bool]


@pytest.fixture(scope="module", autouse=True)
def answered() -> Iterator[Calls]:
    """Whether the kernel has answered, each time that it was asked. Small blocks make many of few keys."""
    with answers_of(triton_statistics.TritonRows) as found, small_blocks():
        yield found


@pytest.fixture(autouse=True)
def _plans_of_one_test() -> None:
    """A plan is kept for the tiles and parts that were there when it was made."""
    triton_plan.plan_of.cache_clear()


SINKS: dict[str, Any] = {
    "a number": 0.3, "above all": 90.0, "below all": -200.0, "one": torch.tensor([0.5]),
    "of heads": torch.tensor([1.0, -2.0, 0.0, 6.0]), "in halves": torch.tensor([1.0, -2.0, 0.0, 6.0]).bfloat16(),
}  # fmt: skip


def test_a_row_state_that_is_known(answered: Calls) -> None:
    weights, dense = made(regard.causal(), torch.bfloat16)
    assert weights.entropy().shape == dense.shape[:-1]  # it leaves the row state known
    answered.clear()
    check(weights, dense)
    assert answered == [True]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name: str, parts: int, answered: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink is one more term of the row's sum; the log-sum-exp of the call is not asked for."""
    monkeypatch.setattr(triton_plan, "parts_of", lambda programs, length: parts)
    options: dict[str, Any] = {"normalization": regard.SoftmaxWithSink(SINKS[name])}
    for mask in ("causal", "no key at first"):
        weights, dense = made(MASKS[mask], torch.bfloat16, **options)
        source: Any = weights.source
        factors = source.factors
        factors._state = None
        answered.clear()
        check(weights, dense)
        torch.testing.assert_close(weights.received().double(), dense.sum(-2), rtol=0, atol=1e-5)
        assert answered == [True, True]
        assert factors.known_state_of(factors.form) is None
        check(weights[1, 2:3], dense[1, 2:3])


@pytest.mark.parametrize("k", [4, 8, 20, KEYS])
def test_a_ranking_in_one_pass_and_in_several(k: int, answered: Calls) -> None:
    answered.clear()
    check(*made(MASKS["several"], torch.float32), k=k)
    assert answered == [True]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_values_that_are_not_finite_pass_into_the_answers(side: int, bad: float, answered: Calls) -> None:
    """As into the weights themselves, where the mask allows: those that it hides stay 0."""
    vectors = torch.randn(2, 1, 1, 20, 4)
    vectors[side, 0, 0, 7, 0] = bad
    with torch.no_grad():
        weights = regard.map_of(*vectors, mask=regard.causal())
        dense = weights.dense()
        answered.clear()
        found: Any = weights.summary(
            "received", "entropy", "top_keys", "pooled_max", "distance", k=3, rows=4, columns=4
        )
        assert answered == [True]

    def same(ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, equal_nan=True)

    same(found["received"], dense.sum(-2))
    same(found["pooled_max"], dense.unflatten(-1, (4, 5)).unflatten(-3, (4, 5)).amax((-1, -3)))
    same(found["distance"], (dense * (torch.arange(20)[:, None] - torch.arange(20)).clamp_min(0)).sum(-1))
    values, indices = found["top_keys"]
    same(
        values,
        dense.topk(3).values.where(~dense.isnan().all(-1, keepdim=True), torch.nan)
        if bad == bad
        else torch.where(dense.isnan().any(-1, keepdim=True), torch.nan, dense.topk(3).values),
    )
    assert ((indices == -1) == (values == 0)).all()
    assert bool((found["entropy"].isnan() >= dense.isnan().any(-1)).all())


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
    for mask, reason in ((regard.call.masks.strided(3), "not one range"), (regard.causal(), None)):
        with torch.no_grad():
            weights = regard.attention(q, q, q, mask=mask, return_weights=True).weights
        assert asked(weights, *USUAL) == [reason is None]
        said = str(regard.explain(q, q, q, mask=mask))
        assert "together: by kernels of our own (Triton)" in said or reason is not None
        assert reason is None or reason in said
    assert asked(weights, *USUAL, "top_p_count") == [False]
    assert asked(weights.average(), *USUAL) == [False]
    assert "the kernels have no torch.float64" in str(regard.explain(*[q.double()] * 3))
    assert "3 queries are fewer" in str(regard.explain(q[:, :, :3], q, q))
    assert "the kernels have no" in str(regard.explain(q, q, q, bias=torch.zeros(20, 20)))
    assert "by kernels of our own" in str(regard.explain(q, q, q, bias=regard.ALiBi(2)))
    assert "no scale of -1" in str(regard.explain(q, q, q, score=regard.ScaledDot(-1.0)))
    leaf = q.clone().requires_grad_()
    assert asked(regard.attention(leaf, q, q, return_weights=True).weights, *USUAL) == [False]


FAULTS = {
    "a mask dropped": ("rows", "(places[None, :] < end[:, None])", "(places[None, :] < keys)", "several"),
    "the last block is left out": ("rows", "(seeing, end, 0), 0)", "(seeing, end, 0), 0) - 16", "several"),
    "a lane forgets its largest": ("rows", "total * shrink + mass", "total + mass", "several"),
    "equal groups in the wrong order": ("rows", "is_larger = value > best[i]", "is_larger = value >= best[i]", "none"),
    "a later pass begins anew": ("rows", "(found < last_value) |", "(found < last_value + 9.0) |", "none"),
    "a sink is forgotten": ("rows", " + tl.exp2(sink - peak))", ")", "none"),
    "a part is read twice": ("rows", "tl.minimum(high, low + length)", "tl.minimum(high, low + 2 * length)", "none"),
    "the key head of another group": (
        "rows",
        "(head // group).to(tl.int64) * key_head\n    of_columns",
        "(head % group).to(tl.int64) * key_head\n    of_columns",
        "none",
    ),
    "a query of a bin is lost": ("columns", "bins), high)", "bins) - 1, high)", "none"),
    "hidden keys are summed": ("columns", "tl.where(kept, total, 0.0)", "total", "padding"),
    "queries that are not side by side": ("columns", "count == all_high - all_low", "count >= 0", "lengths in turns"),
    "top-k that loses a tie": (
        "rows", "waiting == found[:, None]", "(waiting >> KEY_BITS) == (found >> KEY_BITS)[:, None]", "none",
    ),
}  # fmt: skip
PROGRAMS = {"rows": ("read_rows", "join_parts", "rank_groups"), "columns": ("read_columns", "pool_keys")}


@pytest.mark.filterwarnings("ignore")  # of numbers that a broken program has left unset
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, old, new, mask = FAULTS[name]
    module = import_module(f"regard.maps.loop.triton_{where}")
    broken = planted(module, old, new, tmp_path)
    for program in PROGRAMS[where]:
        monkeypatch.setattr(module, program, vars(broken)[program])
    triton_plan.plan_of.cache_clear()
    try:
        with pytest.raises(AssertionError):  # noqa: PT012, any of the checks may see it
            check(*made(MASKS[mask], torch.float32), k=12, rows=1)
            check_ties()
            check(*made(None, torch.float32, normalization=regard.SoftmaxWithSink(1.0)))
            monkeypatch.setattr(triton_plan, "parts_of", lambda programs, length: 2)
            triton_plan.plan_of.cache_clear()
            check(*made(MASKS["none"], torch.float32))
    finally:
        triton_plan.plan_of.cache_clear()
