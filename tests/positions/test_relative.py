"""Position biases against the papers' formulas written out, and against Hugging Face, on every backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.call.biases.of_vectors import log_bucket
from regard.call.biases.relative import Relative, alibi_slopes, t5_bucket
from regard.call.masks.basic import Causal
from regard.call.shapes import Sizes
from regard.errors import ArgumentError, BackendError, ShapeError
from regard.kernels import tiled
from tests.largest import Largest

BATCH, HEADS, GROUPS, DIM, WIDTH = 2, 4, 2, 4, 3


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("reach", "longest"), [(4, 32), (8, 20), (256, 512)])
def test_disentangled_distances_are_those_of_transformers(reach: int, longest: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distances = torch.arange(-longest, longest)
    expected = make_log_bucket_position(distances, 2 * (reach // 2), longest)
    assert torch.equal(log_bucket(distances, reach=reach, max_distance=longest), expected.long())


BIASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "alibi": (lambda: regard.ALiBi(HEADS), ()),
    "learned alibi": (regard.ALiBi, ((HEADS,),)),
    "t5": (lambda table: regard.T5Bias(table, max_distance=6), ((8, HEADS),)),
    "t5, decoder": (lambda table: regard.T5Bias(table, False, max_distance=6), ((8, HEADS),)),
    "shaw": (regard.call.biases.Shaw, ((5, DIM),)),
    "disentangled": (
        lambda keys, queries: regard.call.biases.Disentangled(keys, queries, None, 32), ((HEADS, 8, DIM),) * 2
    ),
}  # fmt: skip
"""Each bias, from tensors of these shapes; `tests/fuzz/core/biases.py` has their formulas."""


def made(name: str) -> tuple[Any, tuple[Tensor, ...]]:
    make, shapes = BIASES[name]
    learned = tuple(normal(*shape) for shape in shapes)
    return make(*learned), learned


def vectors(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(BATCH, HEADS, queries, DIM), normal(BATCH, GROUPS, keys, DIM), normal(BATCH, GROUPS, keys, WIDTH)


@pytest.mark.parametrize("name", ["learned alibi", "t5", "shaw", "disentangled"])
def test_gradients_are_the_finite_differences_and_can_be_differentiated_again(name: str) -> None:
    bias, learned = made(name)
    q, k, v = normal(1, HEADS, 2, DIM), normal(1, GROUPS, 3, DIM), normal(1, GROUPS, 3, 1)

    def run(q: Tensor, k: Tensor, *learned: Tensor) -> Tensor:
        return regard.attention(q, k, v.detach(), bias=bias, mask=regard.causal(), backend="tiled")

    assert torch.autograd.gradcheck(run, (q, k, *learned), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, k, *learned), fast_mode=True)


def test_a_relative_bias_of_ones_own_is_five_lines() -> None:
    @dataclass(frozen=True, eq=False)
    class Near(Relative):
        offset: int | None = 0

        def of(self, head: Any, distance: Any) -> Any:
            return -((distance / (1 + head)) ** 2)

    q = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    i = torch.arange(5.0)
    dense = -(((i - i[:, None]) / torch.arange(1.0, 4.0)[:, None, None]) ** 2)[None].double()
    for backend in ("reference", "tiled", "fused"):
        output = regard.attention(q, q, q, bias=Near(), backend=backend)
        expected = regard.attention(q, q, q, bias=dense, backend="reference")
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (1, 9), (7, 4)])
def test_alibi_is_exactly_a_sum_per_key_and_per_query_where_the_causal_mask_allows(queries: int, keys: int) -> None:
    sizes = Sizes((BATCH,), HEADS, GROUPS, queries, keys, True)
    bias = regard.ALiBi(HEADS).bind(sizes, torch.device("cpu"))
    nothing = torch.empty(0)
    dense = bias.block(torch.arange(queries), torch.arange(keys), query=nothing, key=nothing, sizes=sizes)
    split: Any = bias.split(sizes, torch.device("cpu"), causal=True)
    per_key, per_query = split
    assert per_key.shape == (1, HEADS, 1, keys)
    assert per_query.shape == (1, HEADS, queries)
    total = (per_key + per_query[..., None])[0]
    allowed = regard.causal().dense(sizes)[0, 0]
    assert torch.equal(total[:, allowed], dense[0][:, allowed])
    assert bias.split(sizes, torch.device("cpu"), causal=False) is None


def test_alibi_splits_only_where_no_query_sees_a_key_after_it() -> None:
    sizes = Sizes((), 1, 1, 3, 7, False)
    split = {
        o: regard.ALiBi(1, o).bind(sizes, torch.device("cpu")).split(sizes, torch.device("cpu"), causal=True)
        for o in (0, 3, 4, 5)
    }
    assert [o for o, parts in split.items() if parts is not None] == [4, 5]


@pytest.mark.parametrize("beyond", [-1, 0, 1, 2])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 4)])
def test_alibi_under_a_causal_mask_of_any_offset_is_the_formula(queries: int, keys: int, beyond: int) -> None:
    """A query that sees the keys after its own position needs the distance to these, and no sum per key gives it."""
    q, k, v = (t.detach() for t in vectors(queries, keys))
    options: dict[str, Any] = {"bias": regard.ALiBi(HEADS), "mask": regard.causal(keys - queries + beyond)}
    expected = regard.attention(q, k, v, **options, backend="reference", return_weights=True)
    found = regard.attention(q, k, v, **options, backend="fused", return_weights=True)
    torch.testing.assert_close(found.output, expected.output, rtol=0, atol=1e-9)
    dense = expected.weights.dense()
    torch.testing.assert_close(found.weights.received(), dense.sum(-2), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.weights.entropy(), torch.special.entr(dense).sum(-1), rtol=0, atol=1e-9)
    taking_part = dense.sum(-1).square() / dense.square().sum(-1).clamp_min(1e-30)
    torch.testing.assert_close(found.weights.participation_ratio(), taking_part, rtol=0, atol=1e-9)


@pytest.mark.parametrize("backend", ["fused", "tiled", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_slopes_in_half_precision_are_not_rounded_again(dtype: torch.dtype, backend: str) -> None:
    """A model in half precision has its slopes in it too; 300 positions away, m |i - j| would be off by 0.5."""
    q, slopes = torch.randn(1, 2, 300, 4).to(dtype), torch.tensor([0.013, 0.3]).to(dtype)
    mask = regard.causal()
    weights = regard.attention(
        q, q, q, bias=regard.ALiBi(slopes), mask=mask, backend=backend, return_weights=True
    ).weights
    wide = regard.attention(
        q.double(), q.double(), q.double(), bias=regard.ALiBi(slopes.double()), mask=mask, return_weights=True
    ).weights
    torch.testing.assert_close(weights.dense().double(), wide.dense(), rtol=0, atol=2e-4)


def test_alibi_with_steep_negative_slopes_is_not_split() -> None:
    """The reach of the split numbers is the slope's size: a slope of -9 over 400 positions is as large as one of 9."""
    sizes = Sizes((), 1, 1, 400, 400, False)
    for slope in (9.0, -9.0):
        bias = regard.ALiBi(torch.tensor([slope])).bind(sizes, torch.device("cpu"))
        assert bias.split(sizes, torch.device("cpu"), causal=True) is None


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8, 12, 16, 25, 33, 71])
def test_alibi_is_blooms(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    q, k, v = (torch.randn(1, heads, 9, 4) for _ in range(3))
    theirs = bloom.build_alibi_tensor(torch.ones(1, 9), heads, torch.float32)
    torch.testing.assert_close(alibi_slopes(heads), theirs[:, 0, 1], rtol=1e-6, atol=0)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = (q @ k.mT / 2 + theirs[None]).masked_fill(~causal, -torch.inf).softmax(-1) @ v
    for backend in ("reference", "tiled", "fused"):
        output = regard.attention(q, k, v, bias=regard.ALiBi(heads), mask=regard.causal(), backend=backend)
        torch.testing.assert_close(output, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(32, 128), (32, 256), (8, 20), (6, 5), (64, 512), (16, 100), (4, 2), (12, 1000)]
)
def test_t5_buckets_are_hugging_faces_at_every_distance(buckets: int, max_distance: int, bidirectional: bool) -> None:
    t5_model = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(-3000, 3001)
    theirs = t5_model.T5Attention._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    ours = t5_bucket(distance, num_buckets=buckets, bidirectional=bidirectional, max_distance=max_distance)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["t5", "shaw"])
def test_half_precision_input_reads_a_float32_table(name: str) -> None:
    (bias, _), (q, k, v) = made(name), (t.detach() for t in vectors(5, 7))
    half = [t.to(torch.bfloat16) for t in (q, k, v)]
    expected = regard.attention(*(t.double() for t in half), bias=bias, backend="reference")
    for backend in ("reference", "tiled"):
        output = regard.attention(*half, bias=bias, backend=backend)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=3e-2)


def test_explain_says_why_the_fused_kernels_refuse() -> None:
    q, k, v = vectors(5, 7)
    why = {name: regard.explain(q, k, v, bias=made(name)[0]).refused.get("fused", "") for name in BIASES}
    assert why["alibi"] == ""
    assert "reads the vectors" in why["shaw"]
    assert all("gradient to a bias" in why[name] for name in ("learned alibi", "t5", "t5, decoder"))
    with torch.no_grad():
        assert regard.explain(q, k, v, bias=made("t5")[0]).backend == "fused"
    assert regard.explain(q, k, v, bias=made("alibi")[0], mask=regard.causal()).backend == "fused"
    with pytest.raises(BackendError, match="reads the vectors"):
        regard.attention(q, k, v, bias=made("shaw")[0], backend="fused")


def test_causal_alibi_on_the_fused_kernel_is_one_number_per_key() -> None:
    length, heads, dim = 2048, 2, 8
    q, k, v = (torch.randn(1, heads, length, dim, requires_grad=True) for _ in range(3))
    for mask in (regard.causal(), regard.causal() & regard.lengths(torch.tensor([length - 7]))):
        with Largest() as largest:
            output, weights = regard.attention(
                q, k, v, bias=regard.ALiBi(heads), mask=mask, backend="fused", return_weights=True
            )
            (output.sum() + weights[..., 5, :].sum()).backward()
        # Nothing beyond vectors of length T with a column or two more.
        assert largest.elements <= heads * length * (dim + 8)


@pytest.mark.parametrize("mask", [None, regard.causal()], ids=str)
def test_position_biases_take_memory_linear_in_the_lengths(
    mask: Causal | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 1 << 15)
    length, heads, dim = 512, 2, 4
    q, k, v = (torch.randn(1, heads, length, dim, requires_grad=True) for _ in range(3))
    table = torch.randn(9, dim, requires_grad=True)
    biases = [
        regard.T5Bias(torch.randn(32, heads, requires_grad=True)),
        regard.call.biases.Shaw(table),
        regard.ALiBi(torch.rand(heads, requires_grad=True)),
    ]
    for bias in biases:
        with Largest() as largest:
            regard.attention(q, k, v, bias=bias, mask=mask, backend="tiled").sum().backward()
        assert largest.elements <= 3 << 15 < length * length, bias


def test_errors_say_what_to_do() -> None:
    q = torch.zeros(1, 2, 3, 4)
    row = torch.zeros(2, 4)
    attend = regard.attention
    with pytest.raises(ShapeError, match="each of the query's 2 heads, got 3 slopes"):
        attend(q, q, q, bias=regard.ALiBi(3))
    with pytest.raises(ShapeError, match=r"one float slope per head, got torch.float32 of shape \(2, 4\)"):
        regard.ALiBi(row)
    with pytest.raises(ArgumentError, match="at least one head, got 0"):
        regard.ALiBi(0)
    with pytest.raises(ShapeError, match="got 5 columns in its table"):
        attend(q, q, q, bias=regard.T5Bias(torch.zeros(8, 5)))
    with pytest.raises(ShapeError, match=r"float tensor \(buckets, H\), got torch.int64"):
        regard.T5Bias(torch.zeros(8, 5, dtype=torch.long))
    with pytest.raises(ArgumentError, match="the table has 7 rows"):
        regard.T5Bias(torch.zeros(7, 2))
    with pytest.raises(ArgumentError, match="must be above that, got 8"):
        regard.T5Bias(torch.zeros(32, 2), max_distance=8)
    with pytest.raises(ShapeError, match=r"2k \+ 1 rows, for the distances -k to k; got 4"):
        regard.call.biases.Shaw(torch.zeros(4, 4))
    with pytest.raises(ShapeError, match=r"as wide as the query, 4, got \(5, 3\)"):
        attend(q, q, q, bias=regard.call.biases.Shaw(torch.zeros(5, 3)))
    with pytest.raises(ArgumentError, match="has not met a call yet"):
        regard.ALiBi(2).value(torch.tensor(0), torch.tensor(0), torch.tensor(0), q, q)


@pytest.mark.parametrize("heads", [3, 9, 12])
@pytest.mark.parametrize("backend", ["fused", "tiled", "reference"])
def test_a_call_in_float64_has_slopes_in_float64(heads: int, backend: str) -> None:
    """The slopes of 9 heads are no float32: a map in float64 was wrong by 1e-9."""
    power = 1 << (heads.bit_length() - 1)
    exact = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    exact += [2.0 ** (-4.0 * h / power) for h in range(1, 2 * (heads - power), 2)]
    q = torch.randn(1, heads, 30, 4, dtype=torch.float64)
    distance = (torch.arange(30)[:, None] - torch.arange(30)).abs()
    scores = q @ q.mT / 2 - torch.tensor(exact, dtype=torch.float64)[:, None, None] * distance
    hidden = torch.ones(30, 30, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    bias = regard.ALiBi(heads)
    found = regard.attention(q, q, q, mask=regard.causal(), bias=bias, backend=backend, return_weights=True).weights
    torch.testing.assert_close(found.dense(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", ["fused", "tiled", "reference"])
@pytest.mark.parametrize("name", ["T5", "a tensor"])
def test_numbers_of_float64_are_not_rounded_to_float32(backend: str, name: str) -> None:
    q, numbers = torch.randn(1, 2, 5, 4, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    table: Any = regard.T5Bias(numbers[:4, :2]) if name == "T5" else numbers
    output, weights = regard.attention(q, q, q, bias=table, backend=backend, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 5, dtype=torch.float64), rtol=0, atol=1e-13)
    exact = regard.attention(q, q, q, bias=table, backend="reference")
    torch.testing.assert_close(output, exact, rtol=0, atol=1e-13)
