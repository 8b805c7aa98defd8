"""Linear attention and its maps: against a loop over positions in float64, and transformers' own functions."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.errors import ArgumentError, NonFiniteError, ShapeError
from regard.kernels import recurrence
from regard.kernels.recurrence import Recurrence
from regard.maps.sources.linear_recurrent import GivenRecurrence
from tests.largest import Largest
from tests.maps.dense_maps import check_largest
from tests.maps.naive_recurrence import Given, recurrences, step_by_step

FEW = (1, 2, 5, 63, 64, 65, 130)


def close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    size = float(exact.abs().max()) if exact.numel() else 1.0
    torch.testing.assert_close(ours.double(), exact.double(), rtol=0, atol=tolerance * max(size, 1.0))


@given(recurrences())
@settings(max_examples=120)
def test_the_output_the_weights_and_the_state_are_those_of_the_loop(drawn: Given) -> None:
    output, weights, state = step_by_step(drawn)
    ours = regard.linear_attention(*drawn[:3], **drawn.options, return_weights=True, return_state=True)
    assert ours.weights is not None
    close(ours.output, output, 1e-9)
    close(ours.state, state, 1e-9)
    close(ours.weights.dense(), weights, 1e-9)
    same = torch.eye(weights.shape[-1], dtype=torch.float64)
    close(ours.weights @ same, weights, 1e-9)
    close(ours.weights.mT @ same, weights.mT, 1e-9)


@given(recurrences(lengths=FEW), st.data())
@settings(max_examples=60)
def test_parts_and_statistics_are_those_of_the_dense_weights(drawn: Given, data: st.DataObject) -> None:
    dense = step_by_step(drawn)[1]
    weights = regard.linear_attention(*drawn[:3], **drawn.options, return_weights=True).weights
    length = dense.shape[-1]
    pick = st.lists(st.integers(0, length - 1), min_size=1, max_size=5)
    rows, columns = (torch.tensor(data.draw(pick)) for _ in range(2))
    close(weights.block(rows, columns), dense[..., rows, :][..., columns], 1e-9)
    first, last = sorted(data.draw(st.tuples(st.integers(0, length - 1), st.integers(0, length - 1))))
    close(weights.block(range(first, last + 1), range(first, length)), dense[..., first : last + 1, first:], 1e-9)
    close(weights[..., last, :], dense[..., last, :], 1e-9)
    if not dense.numel():
        return
    close(weights.received(), dense.sum(-2), 1e-8)
    close(weights.sum(-1), dense.sum(-1), 1e-8)
    close(weights.mass(regard.window(3)), (dense * dense.new_ones(length, length).tril().triu(-2)).sum(-1), 1e-8)
    for how in ("sum", "max"):
        found = weights.pooled(3, 2, how)
        blocks = [row.tensor_split(min(2, length), -1) for row in dense.tensor_split(min(3, length), -2)]
        exact = [[b.sum((-1, -2)) if how == "sum" else b.amax((-1, -2)) for b in row] for row in blocks]
        close(found, torch.stack([torch.stack(row, -1) for row in exact], -2), 1e-8)
    k = min(3, length)
    check_largest(weights, dense, 1e-9, k)
    close(weights.top_keys(k, of="size").values, dense.abs().topk(k).values, 1e-9)
    shares = dense.abs() / dense.abs().sum(-1, keepdim=True).clamp_min(1e-300)
    close(weights.entropy(of="size"), -torch.xlogy(shares, shares).sum(-1), 1e-7)
    close(weights.average().received(), dense.mean(1).sum(-2), 1e-8)
    close(weights[0].dense(), dense[0], 1e-9)


def test_gates_that_close_lose_no_digits_of_what_follows() -> None:
    """Exponents as differences of one long sum would be off by the rounding of 1e5."""
    length = 60
    q, k, v = torch.rand(3, 1, 1, length, 4).unbind()
    decay = torch.full((1, 1, length), -0.01)
    decay[..., 5] = -1e5
    for one in (decay, decay[..., None].expand(-1, -1, -1, 4)):
        drawn = Given(q, k, v, {"decay": one})
        close(regard.linear_attention(q, k, v, decay=one), step_by_step(drawn)[0], 3e-7)


def small(seed: int = 0, length: int = 6, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    return [numbers(1, 1, length, 2) for _ in range(3)], {name: make(numbers) for name, make in options.items()}


@pytest.mark.parametrize("channels", [(), (2,)])
@pytest.mark.parametrize("kind", ["none", "delta", "pair"])
def test_gradients(kind: str, channels: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "CHUNK", 4)
    parts, options = small(beta=lambda n: n(1, 1, 6), decay=lambda n: n(1, 1, 6, *channels), a=lambda n: n(1, 1, 6, 2))

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, a: Tensor) -> Any:
        removal: Any = {"none": None, "delta": "delta", "pair": (a, 0.3 * k)}[kind]
        output, weights = regard.linear_attention(
            q, k, v, decay=-decay, beta=beta, removal=removal, return_weights=True
        )
        return output, weights[..., 4, :], weights.top_keys(2, of="size").values, weights.mT @ v, weights.pooled(2, 2)

    assert torch.autograd.gradcheck(run, (*parts, options["beta"], options["decay"], options["a"]), fast_mode=True)


def test_memory_is_linear() -> None:
    length = 2048
    q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    options: dict[str, Any] = {"decay": -torch.rand(1, 2, length), "beta": torch.rand(1, 2, length), "removal": "delta"}
    k = torch.nn.functional.normalize(k, dim=-1)
    with Largest() as largest:
        output, weights = regard.linear_attention(q, k, v, **options, return_weights=True)
        (output.sum() + weights.top_keys(3, of="size").values.sum() + weights.pooled(9, 9).square().sum()).backward()
        weights.detach().entropy(of="size")
    assert largest.elements <= length * length // 4


def test_far_weights_of_the_delta_rule() -> None:
    """Rows reach over four joined chunks and more."""
    query, key, value = torch.randn(3, 1, 1, 400, 3, dtype=torch.float64).unbind()
    key = torch.nn.functional.normalize(key, dim=-1)
    options = {"decay": -torch.rand(1, 1, 400, dtype=torch.float64) / 1e3, "beta": torch.rand(1, 1, 400).double() / 100}
    drawn = Given(query, key, value, {**options, "removal": "delta"})
    weights = regard.linear_attention(*drawn[:3], **drawn.options, return_weights=True).weights
    dense = step_by_step(drawn)[1]
    assert dense[0, 0, -1, :60].abs().max() > 1e-3
    close(weights.dense(), dense, 1e-9)


def test_a_map_without_values_has_signs() -> None:
    q = torch.zeros(1, 1, 5, 4, device="meta")
    weights = regard.linear_attention(q, q, q, return_weights=True).weights
    assert weights.source.has_signs
    assert weights.received().shape == (1, 1, 5)


def test_a_query_may_stand_at_the_last_of_more_keys() -> None:
    (query, key, value), _ = small(length=70)
    drawn = Given(query, key, value, {})
    dense = step_by_step(drawn)[1].detach()
    q, k = (x.detach()[0] for x in drawn[:2])
    made = GivenRecurrence(Recurrence(q[:, -3:], k, 2**-0.5), (1,), regard.map_of(q, k).dimensions)
    weights = regard.AttentionMap(made)
    close(weights.dense(), dense[0, :, -3:], 1e-12)
    close(weights @ k, dense[0, :, -3:] @ k, 1e-12)
    close(weights.mT @ q[:, -3:], dense[0, :, -3:].mT @ q[:, -3:], 1e-12)
    close(weights.block(torch.tensor([2, 0]), range(70)), dense[0, :, [-1, -3]], 1e-12)


def test_a_map_of_signs_refuses_to_be_read_as_shares() -> None:
    q, k, v = torch.randn(3, 1, 1, 9, 4).unbind()
    weights = regard.linear_attention(q, k, v, return_weights=True).weights
    shares: list[Any] = [weights.entropy, weights.participation_ratio, lambda: weights.top_p_count(0.5)]
    scores: list[Any] = [lambda: weights.lse, weights.max_logit, weights.gradient, lambda: weights.with_values(v)]
    for asked in shares:
        with pytest.raises(ArgumentError, match="some weights of this map are below 0: it is a linear recurrence"):
            asked()
    for asked in scores:
        with pytest.raises(ArgumentError, match="is for the map of one call with scores"):
            asked()
    # Queries and keys without signs have weights without them.
    positive = regard.linear_attention(q.abs(), k.abs(), v, return_weights=True).weights
    dense = positive.dense()
    torch.testing.assert_close(positive.entropy(), -torch.xlogy(dense, dense).sum(-1))
    with pytest.raises(ArgumentError, match="of must be 'value' or 'size', got 'sizes'"):
        weights.entropy(of="sizes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{}, {"decay": -torch.rand(1, 2, 9)}, {"decay": -torch.rand(1, 2, 9, 4)}, {"beta": torch.rand(1, 2, 9)}],
    ids=lambda options: ", ".join(options),
)
def test_a_scale_below_zero_gives_a_map_with_signs(options: dict[str, torch.Tensor]) -> None:
    q, k, v = torch.rand(3, 1, 2, 9, 4).unbind()
    weights = regard.linear_attention(q, k, v, scale=-1.0, return_weights=True, **options).weights
    for asked in (weights.entropy, weights.participation_ratio, lambda: weights.top_p_count(0.5)):
        with pytest.raises(ArgumentError, match="some weights of this map are below 0"):
            asked()
    last = weights.dense()[..., -1:, :]
    assert last.max() < 0
    torch.testing.assert_close(weights.top_keys(1).values[..., 0][..., -1:], last.amax(-1))
    torch.testing.assert_close(weights.only(rows=slice(8, 9)).pooled(1, 1, "max"), last.amax(-1, keepdim=True))


def test_a_watched_write_below_zero_has_signs() -> None:
    q, k = torch.rand(2, 1, 5, 4).unbind()
    made = GivenRecurrence(Recurrence(q, k, 1.0, beta=-torch.ones(1, 5)), (1,), regard.map_of(q, k).dimensions)
    assert made.has_signs


def test_layouts() -> None:
    q, k, v = torch.randn(3, 5, 4).unbind()
    exact = regard.linear_attention(q[None, None], k[None, None], v[None, None])[0, 0]
    decay = -torch.ones(5, 4)
    torch.testing.assert_close(regard.linear_attention(q, k, v), exact)
    torch.testing.assert_close(regard.linear_attention(q[None], k[None], v[None]), exact[None])
    by_channel = regard.linear_attention(q, k, v, decay=decay)
    torch.testing.assert_close(by_channel, regard.linear_attention(q, k, v, decay=decay[:, 0]))
    many = regard.linear_attention(q.expand(2, 3, 4, 5, 4), k.expand(1, 3, 2, 5, 4), v.expand(2, 1, 1, 5, 4))
    torch.testing.assert_close(many, exact.expand(2, 3, 4, 5, 4))
    half = regard.linear_attention(*(x.bfloat16() for x in (q, k, v)), return_state=True)
    assert (half.output.dtype, half.state.dtype) == (torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert regard.linear_attention(q, k, v).dtype == torch.bfloat16


q, k, v = torch.ones(3, 2, 4, 9, 8).unbind()
row = torch.zeros(2, 4, 9)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "a decay above 0": ((q, k, v), {"decay": row + 0.5}, ArgumentError, "decay must be at most 0, got values from 0.5"),
    "a decay of nan": ((q, k, v), {"decay": row * torch.nan}, NonFiniteError, "decay must be finite, got values"),
    "a beta below 0": ((q, k, v), {"beta": row - 1}, ArgumentError, "beta must be at least 0, got values from -1"),
    "a beta above 2": (
        (q, k, v), {"beta": row + 3, "removal": "delta"}, ArgumentError, "beta must be in .0, 2. with removal",
    ),
    "a value of nan": ((q, k, v * torch.nan), {}, NonFiniteError, "value must be finite"),
    "a key of inf": ((q, k * torch.inf, v), {}, NonFiniteError, "key must be finite, got values from inf to inf"),
    "unlike lengths": ((q, k, v[:, :, :5]), {}, ShapeError, "must have one length"),
    "unlike widths": ((q, k[..., :5], v), {}, ShapeError, "query and key one width"),
    "unlike heads": ((q, k[:, :3], v), {}, ShapeError, "each number of heads must divide the largest"),
    "unlike dtypes": ((q, k, v.double()), {}, ShapeError, "must share one floating-point dtype"),
    "unlike ranks": ((q, k, v[0]), {}, ShapeError, "must share one rank"),
    "unlike batches": ((q, k.expand(2, 4, 9, 8)[:1].expand(3, 4, 9, 8), v), {}, ShapeError, "the batch dimensions"),
    "a short decay": ((q, k, v), {"decay": row[..., :5]}, ShapeError, r"decay must have the shape \(2, 4, 9\)"),
    "an unknown removal": ((q, k, v), {"removal": "gated"}, ArgumentError, 'removal must be "delta", a pair'),
    "no tensor": ((q, k, None), {}, ShapeError, "value must be a torch.Tensor, got NoneType"),
    "a state of another width": ((q, k, v), {"state": torch.zeros(2, 4, 8, 7)}, ShapeError, "state must have the"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("as_installed")
def test_bad_input_is_refused_in_a_sentence(name: str) -> None:
    parts, options, error, said = BAD[name]
    with pytest.raises(error, match=said):
        regard.linear_attention(*parts, **options)
