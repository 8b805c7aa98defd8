"""Every statistic of every kind of call against the dense map in float64."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.call.normalizations import Normalization
from regard.errors import ArgumentError, ShapeError
from regard.kernels import row_state
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.summary import SummarySource
from regard.maps.statistics.definitions import TopKeys
from regard.watching.facts import facts_of
from tests import by_day
from tests.maps.dense_maps import NORMALIZATIONS, TOLERANCE, check


def long_case(
    mask: regard.Mask | None, length: int = 150, keys: int = 170, dtype: torch.dtype = torch.float32, sharp: float = 1.0
) -> tuple[regard.AttentionMap, Tensor]:
    q, k = sharp * torch.randn(2, 4, length, 8, dtype=torch.float64), torch.randn(2, 2, keys, 8, dtype=torch.float64)
    q, k = q.to(dtype), k.to(dtype)
    lazy = regard.attention(q, k, k, mask=mask, return_weights=True).weights
    dense = regard.attention(*[t.double() for t in (q, k, k)], mask=mask, backend="reference", return_weights=True)
    return lazy, dense.weights.dense()


LONG_MASKS = [
    None,
    regard.causal(),
    regard.causal(0),
    regard.causal(-40),
    regard.causal() & regard.lengths(torch.tensor([100, 170])),
    regard.lengths(torch.tensor([0, 90])),
    regard.window(9),
    regard.window(9) & regard.padding(torch.arange(170) < torch.tensor([[160], [120]])),
    regard.documents(torch.arange(150) // 40, key_ids=torch.arange(170) // 40),
    regard.blocks(torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) < 0.4, 16),
    regard.causal() & regard.call.masks.strided(3),
    ~regard.causal(3) | regard.lengths(torch.tensor([3, 5])),
]


@pytest.mark.parametrize("mask", LONG_MASKS, ids=str)
@pytest.mark.parametrize("dtype", by_day([torch.float64], [torch.float64, torch.float32]), ids=str)
def test_maps_of_many_tiles(monkeypatch: pytest.MonkeyPatch, mask: regard.Mask | None, dtype: torch.dtype) -> None:
    """Tiles that end within bins, flat_heads apart from one another, and kernels' blocks."""
    monkeypatch.setattr("regard.maps.statistics.tiles.TILE_ELEMENTS", 23 * 170)
    monkeypatch.setattr("regard.kernels.fused_plan.BLOCK_ELEMENTS", 170 * 32)
    weights, dense = long_case(mask, dtype=dtype)
    check(weights, dense, tolerance=TOLERANCE[dtype], k=5, rows=11, columns=13, p=0.8)
    check(weights, dense, tolerance=TOLERANCE[dtype], k=2, rows=150, columns=99, p=0.3)


def test_equal_weights_and_the_first_of_equals() -> None:
    q = torch.zeros(1, 4, 2)
    weights = regard.attention(q, q, q, mask=regard.lengths(torch.tensor([3])), return_weights=True).weights
    assert weights.top_keys(1).indices[..., 0].tolist() == [[0, 0, 0, 0]]
    assert weights.top_p_count(0.5).tolist() == [[2, 2, 2, 2]]


def test_the_share_of_long_rows_is_found_among_the_largest_or_by_sorting_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regard.maps.statistics.definitions.SORTED", 3)
    weights, dense = long_case(regard.causal(), dtype=torch.float64, sharp=3.0)
    check(weights, dense, tolerance=1e-12, k=2, rows=3, columns=3, p=0.6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normalization", [regard.Softmax(), regard.SoftmaxWithSink(0.3)], ids=str)
@pytest.mark.parametrize("sharp", [1.0, 4.0])
def test_weights_of_half_precision_are_no_worse_than_those_of_float32(
    dtype: torch.dtype, normalization: Normalization, sharp: float
) -> None:
    """The kernel's own log-sum-exp of half-precision inputs errs by 7e-5, and every weight of a row with it."""
    q, k = (sharp * torch.randn(2, 4, 200, 64)).to(dtype), torch.randn(2, 2, 200, 64).to(dtype)

    def map_of(*tensors: Tensor) -> regard.AttentionMap:
        options: dict[str, Any] = {"mask": regard.causal(), "normalization": normalization}
        output, weights = regard.attention(*tensors, **options, return_weights=True)
        assert torch.equal(output, regard.attention(*tensors, **options))  # The output stays the kernel's.
        return weights

    weights, exact = map_of(q, k, k), map_of(q.double(), k.double(), k.double()).dense()
    whole = exact.sum(-1)
    assert torch.equal(weights.dense(), map_of(q.float(), k.float(), k.float()).dense())
    assert (weights.dense().double() - exact).abs().max() < 2e-6 * sharp
    assert (weights.dense().double().sum(-1) - whole).abs().max() < 2e-6
    assert (weights.entropy().double() - -(exact * exact.clamp_min(1e-300).log()).sum(-1)).abs().max() < 1e-5 * sharp


@pytest.mark.parametrize("attend", [regard.attention, torch.nn.functional.scaled_dot_product_attention])
def test_a_watch_of_half_precision_computes_the_state_when_a_map_is_read(
    attend: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q, q, q)

    asked = []
    real = row_state
    monkeypatch.setattr("regard.maps.sources.factors.row_state", lambda call: asked.append(call) or real(call))
    q = torch.randn(1, 2, 60, 8, dtype=torch.bfloat16)
    model = Model()
    with torch.no_grad(), regard.watch(model) as seen:
        model(q)
    assert "1 map" in str(seen.report)
    seen[""] @ q.float()
    assert not asked
    weights = seen[""].dense()
    seen[""].entropy(), seen[""].received(), seen[""][0, 0, 3]
    assert len(asked) == 1
    exact = (q.double() @ q.double().mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(weights.double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_that_was_read_without_gradients_has_them_later(dtype: torch.dtype) -> None:
    q, k = (torch.randn(1, 2, 7, 4).to(dtype) for _ in range(2))
    found: list[Tensor] = []
    for first_without in (True, False):
        x = q.clone().requires_grad_()
        weights = regard.attention(x, k, k, return_weights=True).weights
        if first_without:
            with torch.inference_mode():
                weights.entropy(), weights.top_keys(1).values[..., 0]
        weights.top_keys(1).values[..., 0].sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert found[0].abs().max() > 0
    assert torch.equal(*found)
    exact = q.double().requires_grad_()
    (exact @ k.double().mT / 2).softmax(-1).amax(-1).sum().backward()
    torch.testing.assert_close(found[0].double(), exact.grad, rtol=0, atol=1e-6 if dtype == torch.float32 else 5e-3)


def test_a_map_made_without_gradients_has_none() -> None:
    """Scores with a graph and a row state without one would give wrong gradients in silence."""
    q, k = torch.randn(1, 2, 7, 4, requires_grad=True), torch.randn(1, 2, 7, 4)
    bias, sink = torch.randn(7, 7, requires_grad=True), torch.randn(2, requires_grad=True)
    learned = regard.Additive(*(torch.randn(*s, requires_grad=True) for s in ((3,), (3, 4), (3, 4))))
    options: tuple[dict[str, Any], ...] = (
        {}, {"bias": bias}, {"score": learned}, {"normalization": regard.SoftmaxWithSink(sink)}
    )  # fmt: skip
    for kind in options:
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                maps = [regard.attention(q, k, k, **kind, return_weights=True).weights, regard.map_of(q, k, **kind)]
            for weights in maps:
                assert not weights.dense().requires_grad
                assert not weights.entropy().requires_grad


@pytest.mark.parametrize("dtype", by_day([torch.float32], [torch.float32, torch.float64]), ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS.values(), ids=NORMALIZATIONS)
def test_of_equal_keys_a_share_takes_as_many_as_it_says(normalization: Normalization, dtype: torch.dtype) -> None:
    """Rounding of sums does not decide between one equal key and the next."""
    shares = [Fraction(n, d) for d in (2, 5, 10, 100) for n in range(1, d)] + [Fraction(1, 10**9), Fraction(1)]
    for keys in (1, 3, 10, 63, 64, 65, 100, 1000):
        q, k = torch.ones(2, 1, dtype=dtype), torch.ones(keys, 1, dtype=dtype)
        weights = regard.attention(q, k, k, normalization=normalization, return_weights=True).weights
        for share in shares:
            assert weights.top_p_count(float(share)).tolist() == [math.ceil(share * keys)] * 2, (keys, share)


@pytest.mark.parametrize("seed", range(21))
def test_the_share_of_a_row_takes_the_fewest_keys_that_hold_it(seed: int) -> None:
    """Against float64 sums of the weights that the map reads, at shares near 0 and 1 too: no row differs."""
    generator = torch.Generator().manual_seed(seed)
    dtype = (torch.float32, torch.float64, torch.bfloat16)[seed % 3]
    normalization = list(NORMALIZATIONS.values())[seed % len(NORMALIZATIONS)]
    keys, sharp = (3, 17, 65, 200, 1000)[seed % 5], (1.0, 20.0)[seed % 2]
    q, k = (torch.randn(2, n, 8, generator=generator, dtype=torch.float64) for n in (60, keys))
    q, k = (sharp * q).to(dtype), k[:, torch.randint(0, keys, (keys,), generator=generator)].to(dtype)
    mask = torch.rand(60, keys, generator=generator) < 0.4
    weights = regard.attention(q, k, k, mask=mask, normalization=normalization, return_weights=True).weights
    dense = weights.dense().double()
    held = dense.sort(-1, descending=True).values.cumsum(-1)
    for share in (1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9):
        enough = held >= share * held[..., -1:] * (1 - 1e-12)
        expected = torch.where(held[..., -1] > 0, enough.int().argmax(-1) + 1, 0)
        assert torch.equal(weights.top_p_count(share), expected)
        with torch.no_grad():
            summary = weights.summary("top_p_count", p=share)["top_p_count"]
            assert isinstance(summary, Tensor)
            assert torch.equal(summary, expected)
    assert torch.equal(weights.top_p_count(1.0), (dense > 0).sum(-1))


def test_one_pass_serves_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.maps.sources.call import CallSource

    asked = []
    real = CallSource.part
    monkeypatch.setattr(
        CallSource, "part", lambda self, flat_heads, *o: asked.append(flat_heads) or real(self, flat_heads, *o)
    )
    q = torch.randn(2, 3, 10, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    summary = weights.summary(k=2, rows=4, columns=4)
    assert list(summary) == ["received", "entropy", "top_keys", "pooled"]
    assert len(asked) == 1
    # Of a softmax of dot products these are calls of the kernel alone.
    weights.summary("received", "entropy", "participation_ratio")
    assert len(asked) == 1
    summary = weights.summary("pooled_sum", "pooled_mean", "pooled_max", "top_key", "top_weight", rows=2, columns=2)
    assert len(asked) == 2
    torch.testing.assert_close(summary["pooled_sum"], 25 * summary["pooled_mean"])


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda w: w.received("max"), ArgumentError, "'sum' or 'mean', got 'max'"),
        (lambda w: w.top_keys(0), ArgumentError, r"k in \[1, 7\], the number of keys; got 0"),
        (lambda w: w.top_keys(8), ArgumentError, "got 8"),
        (lambda w: w.top_keys(1.5), ArgumentError, r"k in \[1, 7\], .* got 1.5"),
        (lambda w: w.top_keys("3"), ArgumentError, "got '3'"),
        (lambda w: w.top_keys(True), ArgumentError, "got True"),
        (lambda w: w.summary("top_keys", k=None) and w.summary("top_keys", k=8), ArgumentError, "got 8"),
        (lambda w: w.top_p_count("most"), ArgumentError, r"p in \(0, 1\], got 'most'"),
        (lambda w: w.pooled(3, 1.5), ArgumentError, "bin of keys, a whole number, got 1.5"),
        (lambda w: w.pooled(None, 3), ArgumentError, "bin of queries, a whole number, got None"),
        (lambda w: w.average(weights=[1.0, -1.0, 2.0, -2.0]), ArgumentError, "by their sum, which is 0.0"),
        (lambda w: w.average(weights=[1.0, math.nan, 2.0, 0.0]), ArgumentError, "by their sum, which is nan"),
        (lambda w: w.top_p_count(0.0), ArgumentError, r"p in \(0, 1\], got 0.0"),
        (lambda w: w.top_p_count(float("nan")), ArgumentError, "got nan"),
        (lambda w: w.pooled(0, 3), ArgumentError, "at least 1 bin of queries, a whole number, got 0"),
        (lambda w: w.pooled(3, 3, "min"), ArgumentError, "'mean', 'sum' or 'max', got 'min'"),
        (lambda w: w.mT @ torch.ones(7, 2), ShapeError, r"x of shape \(..., 5, N\) .* got \(7, 2\)"),
        (lambda w: w @ torch.ones(5, 1), ShapeError, r"x of shape \(..., 7, N\) for a map .* got \(5, 1\)"),
        (lambda w: w @ torch.ones(3, 4, 7, 1), ShapeError, "do not broadcast"),
        (lambda w: w.mT @ torch.ones(3, 5, 2), ShapeError, "do not broadcast"),
        (lambda w: w.summary("entropie"), ArgumentError, "knows received, entropy.*; got 'entropie'"),
        (lambda w: w.average(-2), ArgumentError, "got dim -2"),
        (lambda w: w.average(-3, weights=[1.0]), ArgumentError, r"each of 4, got \(1,\)"),
        (lambda w: w[0, 0].average(0), ArgumentError, "dimensions before queries"),
        (lambda w: w[0, 0].only(heads=0), ShapeError, "no heads to choose from"),
        (lambda w: w.only(rows=torch.tensor([9])), ShapeError, r"query index must be in \[-5, 5\)"),
        (lambda w: w.only(columns=slice(3, 3)), ShapeError, "at least one key"),
        (lambda w: w[..., 5, :], ShapeError, r"query index must be in \[-5, 5\)"),
        (lambda w: w.value_norms(), ArgumentError, r"value_norms\(\) needs the values.*with_values"),
        (lambda w: w.with_values(torch.ones(3, 2)), ShapeError, r"values of shape \(..., 7, E\)"),
        (lambda w: w.with_values(torch.ones(7, 2)).gradient(torch.ones(5, 2)), ShapeError, r"gradient \(2, 4, 5, 2\)"),
        (lambda w: regard.maps.stack([]), ArgumentError, "at least one map"),
        (lambda w: regard.maps.stack([w, w[0]]), ShapeError, "must share leading dimensions"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(ask: Callable[..., Any], error: type[regard.RegardError], message: str) -> None:
    q, k = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 7, 3)
    with pytest.raises(error, match=message):
        ask(regard.attention(q, k, k, return_weights=True).weights)


def test_a_short_map_has_a_summary() -> None:
    q = torch.randn(2, 3, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    strongest = weights.summary()["top_keys"]
    assert isinstance(strongest, TopKeys)
    assert strongest.indices.shape == (2, 3, 3)


def test_statistics_in_half_precision_with_a_bias_that_reads_the_vectors() -> None:
    """Without gradients tiles have buffers of their own; the vectors that a bias reads must not round there."""
    q, k = (torch.randn(2, 3, 20, 8).bfloat16() for _ in range(2))
    added = regard.call.biases.Shaw(torch.randn(9, 8).bfloat16())
    with torch.no_grad():
        weights = regard.attention(q, k, k, mask=regard.causal(), bias=added, return_weights=True).weights
        for asked in (
            weights.received(),
            weights.summary("received")["received"],
            weights.pooled(1, 20, "sum")[..., 0, :],
        ):
            torch.testing.assert_close(asked, weights.dense().sum(-2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["fused", "tiled", "reference"])
@pytest.mark.parametrize("names", [("participation_ratio",), ("entropy", "participation_ratio", "top_keys")])
def test_the_participation_of_weights_that_vanish_beside_a_sink(backend: Any, names: tuple[str, ...]) -> None:
    """A sink of 200 leaves each key a weight of e^-200, which is 0 in float32, and the shares are what they were."""
    q, k = torch.zeros(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    mask = regard.lengths(torch.tensor([[0, 2, 5]]), per_query=True)
    sink = regard.SoftmaxWithSink(torch.tensor([200.0, 60.0]))  # of e^-60 the square alone is 0
    weights = regard.attention(
        q, k, k, mask=mask, normalization=sink, return_weights=True, backend=None if backend == "fused" else backend
    ).weights
    expected = torch.tensor([0.0, 2.0, 5.0]).expand(1, 2, 3)
    assert float(weights[0, 0].dense().sum()) == 0
    torch.testing.assert_close(weights.participation_ratio(), expected)
    with torch.no_grad():  # as a watch keeps it, in memory that is used again
        kept = SummarySource.of(weights.source, regard.Summarize(*names))
    torch.testing.assert_close(AttentionMap(kept).participation_ratio(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_entropy_of_a_single_key_is_never_below_zero(dtype: torch.dtype) -> None:
    """By the fused form, by tiles, of averages, of sizes, and of a recurrence."""
    q, k, v = (9 * torch.randn(1, 2, 70, 8, dtype=dtype) for _ in range(3))
    mask = regard.window(1)
    weights = regard.attention(q, k, v, mask=mask, return_weights=True).weights
    tiled = regard.attention(q, k, v, mask=mask, backend="tiled", return_weights=True).weights
    linear = regard.linear_attention(q, k, v, decay=torch.full_like(q[..., 0], -torch.inf), return_weights=True).weights
    answers: list[Any] = [
        weights.entropy(), tiled.entropy(), weights.average().entropy(), weights.entropy(of="size"),
        weights.summary("entropy", "top_keys")["entropy"], linear.entropy(of="size"), weights[0, 1].entropy(),
    ]  # fmt: skip
    for found in answers:
        assert not found.signbit().any()
        assert float(found.max()) < 1e4 * torch.finfo(dtype).eps  # (The scores are in the thousands.)


T = 2048


@pytest.fixture
def vectors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 2, T, 4), torch.randn(1, 2, T, 4)


@pytest.mark.parametrize("ahead", [0, 5])
def test_the_distance_of_a_head_that_looks_at_its_neighbours(vectors: tuple[Tensor, Tensor], ahead: int) -> None:
    q, k = vectors
    i, j = torch.arange(T)[:, None] + ahead, torch.arange(T + ahead)
    near = torch.where(i - j < 2, 0.0, -12.0)[None, None]
    k = F.pad(k, (0, 0, ahead, 0))
    weights = regard.attention(q, k, k, mask=regard.causal(), bias=near, return_weights=True).weights
    expected = (weights.dense().double() * (i - j).abs()).sum(-1)
    torch.testing.assert_close(weights.distance().double(), expected, rtol=1e-5, atol=2e-5)


def test_divergences_of_maps_that_are_almost_equal(vectors: tuple[Tensor, Tensor]) -> None:
    q, k = (x[..., :64, :] for x in vectors)
    one, other = (regard.attention(q * scale, k, k, return_weights=True).weights for scale in (1.0, 1.001))
    p, r = one.dense().double(), other.dense().double()
    cosine = 1 - (p * r).sum(-1) / (p.norm(dim=-1) * r.norm(dim=-1))
    torch.testing.assert_close(regard.divergence(one, other, "cosine").double(), cosine, rtol=1e-2, atol=0)
    m = (p + r) / 2
    js = (torch.xlogy(p, p / m) + torch.xlogy(r, r / m)).sum(-1) / 2
    torch.testing.assert_close(regard.divergence(one, other, "js").double(), js, rtol=1e-2, atol=0)


@pytest.mark.parametrize("has_sink", [False, True])
def test_a_small_share_on_later_positions(vectors: tuple[Tensor, Tensor], has_sink: bool) -> None:
    later = torch.ones(64, 64).triu(1)
    normalization = regard.SoftmaxWithSink(torch.ones(2)) if has_sink else regard.Softmax()

    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            bias = -22 * later[None, None]
            found: Tensor = regard.attention(q, k, k, bias=bias, normalization=normalization)
            return found

    q, k = (x[..., :64, :] for x in vectors)
    with regard.watch(model := Model()) as seen:
        model(q, k)
    expected = float((seen[""].dense().double() * later).sum(-1).mean())
    assert 1e-11 < expected < 1e-8
    assert facts_of(seen.calls[0]).later == pytest.approx(expected, rel=1e-3)
