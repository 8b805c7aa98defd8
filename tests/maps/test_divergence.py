"""`regard.divergence` against the formulas on dense weights, with gradients to both sides."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.errors import ArgumentError, NotKeptError, ShapeError
from regard.maps.statistics.divergence import Divergence
from tests.core.random_calls import Case, cases

KINDS: tuple[Divergence, ...] = get_args(Divergence)


def dense_logs(weights: Tensor) -> Tensor:
    return torch.where(weights > 0, torch.where(weights > 0, weights, 1.0).log(), -torch.inf)


def terms(weights: Tensor, logs: Tensor) -> Tensor:
    """weights * logs, with 0 for a weight of 0; infinite logarithms give no gradient, where autograd gives NaN."""
    found = (weights * torch.where(torch.isfinite(logs), logs, 0.0)).sum(-1)
    beyond = (weights > 0) & ~torch.isfinite(logs)
    return torch.where(beyond.any(-1), torch.where(beyond, logs, 0.0).sum(-1).detach(), found)


def written_out(p: Tensor, q: Tensor, kind: Divergence) -> Tensor:
    of_p, of_q, of_m = dense_logs(p), dense_logs(q), dense_logs((p + q) / 2)
    if kind == "js":
        return (terms(p, of_p - of_m) + terms(q, of_q - of_m)) / 2
    formulas: dict[Divergence, Callable[[], Tensor]] = {
        "kl": lambda: terms(p, of_p - of_q),
        "cross_entropy": lambda: -terms(p, of_q),
        "mse": lambda: (p - q).square().mean(-1),
        "cosine": lambda: 1 - (p * q).sum(-1) / (p.norm(dim=-1) * q.norm(dim=-1)),
    }
    return formulas[kind]()


def map_of_case(case: Case, **options: Any) -> regard.AttentionMap:
    return regard.attention(*case.tensors(), **case.options(), return_weights=True, **options).weights


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def with_gradients(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    assert torch.equal(torch.isfinite(ours), torch.isfinite(theirs))
    finite = torch.isfinite(theirs)
    close(ours[finite], theirs[finite])
    weights = torch.linspace(0.5, 2, int(finite.sum()), dtype=ours.dtype)
    found = [
        torch.autograd.grad((loss[finite] * weights).sum(), inputs, retain_graph=True, materialize_grads=True)
        for loss in (ours, theirs)
    ]
    for one, other in zip(*found, strict=True):
        close(one, other, 1e-8)


def pair(p_mask: Any, q_mask: Any, *, groups: int = 2) -> tuple[regard.AttentionMap, regard.AttentionMap, list[Tensor]]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 4, 37, 8, dtype=torch.float64)
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, q + 1, (k - 1)[:, :groups])]
    p = regard.attention(*inputs[:2], inputs[1], mask=p_mask, return_weights=True).weights
    other = regard.attention(*inputs[2:], inputs[3], mask=q_mask, return_weights=True).weights
    return p, other, inputs


MASKS = {
    "no masks": (None, None),
    "causal": (regard.causal(), regard.causal()),
    "p sees less": (regard.causal(), None),
    "p sees more": (None, regard.causal()),
    "windows": (regard.window(3), regard.window(9)),
    "a row without keys": (regard.causal(-2), regard.causal(-2)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_two_maps(kind: Divergence, masks: tuple[Any, Any]) -> None:
    p, q, inputs = pair(*masks)
    dense = written_out(p.dense(), q.dense(), kind)
    if kind == "cosine":
        dense = dense.nan_to_num(nan=0.0)
        dead = p.detach().dense().sum(-1) + q.detach().dense().sum(-1) == 0
        assert float(regard.divergence(p.detach(), q.detach(), kind)[dead].abs().sum()) == 0
        if dead.any():
            return
    with_gradients(regard.divergence(p, q, kind), dense, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_and_rows_that_are_given(kind: Divergence) -> None:
    p, q, inputs = pair(regard.causal(), regard.causal())
    rows = q.dense()
    with_gradients(regard.divergence(p, rows, kind), written_out(p.dense(), rows, kind), inputs)
    with_gradients(regard.divergence(rows, p, kind), written_out(rows, p.dense(), kind), inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_means_over_heads(kind: Divergence) -> None:
    p, q, inputs = pair(regard.causal(), regard.causal())
    dense = written_out(p.dense().mean(1), q.dense().mean(1), kind)
    with_gradients(regard.divergence(p.average(), q.average(), kind), dense, inputs)
    chosen = written_out(p.dense().mean(1), q.dense()[:, 2], kind)
    with_gradients(regard.divergence(p.average(), q[:, 2], kind), chosen, inputs)


@pytest.mark.parametrize("kind", ["kl", "cross_entropy"])
def test_weights_that_underflow_leave_the_loss_finite(kind: Divergence) -> None:
    q = torch.tensor([[[[200.0]]]]).expand(1, 1, 4, 1)
    k = torch.tensor([1.0, 0.0, 0.5, -1.0])[None, None, :, None]
    sharp = regard.attention(q, k, k, score=regard.Dot(), return_weights=True).weights
    flat = regard.attention(0 * q, k, k, return_weights=True).weights
    expected = (200.0 + 0 + 100 + 400) / 4 - (1.3862944 if kind == "kl" else 0.0)
    torch.testing.assert_close(regard.divergence(flat, sharp, kind), torch.full((1, 1, 4), expected))
    by_tiles = regard.divergence(flat.only(columns=slice(None)), sharp.only(columns=slice(0, 4)), kind)
    torch.testing.assert_close(by_tiles, torch.full((1, 1, 4), expected))


def test_one_product_answers_for_a_plain_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q, _ = pair(regard.causal(), regard.causal())
    expected = regard.divergence(p, q.dense())

    def refuse(*_: Any) -> Any:
        raise AssertionError("a pass over tiles")

    monkeypatch.setattr("regard.maps.statistics.tiles.one_pass", refuse)
    close(regard.divergence(p, q), expected)
    with pytest.raises(AssertionError, match="tiles"):
        regard.divergence(p, q, "js")


def test_what_cannot_be_compared() -> None:
    p, q, _ = pair(None, None)
    with pytest.raises(ArgumentError, match=r"kind must be one of kl, js.*'hellinger'"):
        regard.divergence(p, q, "hellinger")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"\(2, 4, 37, 37\) on cpu and \(2, 37, 37\)"):
        regard.divergence(p, q.average())
    with pytest.raises(ArgumentError, match="Tensor and Tensor"):
        regard.divergence(p.dense(), q.dense())
    with pytest.raises(ShapeError, match=r"torch\.int64"):
        regard.divergence(p, torch.zeros(p.shape, dtype=torch.int64))
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad(), regard.watch(model, keep="summary") as seen:
        model(*[torch.randn(1, 5, 8)] * 3)
    with pytest.raises(NotKeptError):
        regard.divergence(seen.maps[0], seen.maps[0])


@given(case=cases(), kind=st.sampled_from(KINDS))
def test_any_call_on_either_side(case: Case, kind: Divergence) -> None:
    q = map_of_case(case).detach()
    uniform = torch.full_like(q.dense(), 1 / q.shape[-1])
    mixed = (uniform + q.dense()) / 2
    assume(not (kind == "cosine" and bool((q.dense().sum(-1) == 0).any())))
    close(regard.divergence(q, uniform, kind), written_out(q.dense(), uniform, kind), 1e-9)
    for rows in (uniform, mixed):
        close(regard.divergence(rows, q, kind), written_out(rows, q.dense(), kind), 1e-9)
    if bool((q.dense().sum(-1) > 0).all()):
        close(regard.divergence(q, q, kind), written_out(q.dense(), q.dense(), kind), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 10.0, 40.0])
def test_rounding_leaves_nothing_below_zero(kind: Divergence, scale: float) -> None:
    torch.manual_seed(0)
    q, k = scale * torch.randn(1, 2, 150, 16), torch.randn(1, 2, 150, 16)
    p = regard.map_of(q, k, mask=regard.causal())
    close_by = (q + 1e-5 * torch.randn_like(q)).requires_grad_()
    other = regard.map_of(close_by, k, mask=regard.causal())
    for one, two in ((p, other), (p.average(), other.average()), (other, p), (p, p)):
        found = regard.divergence(one, two, kind)
        assert float(found.detach().min()) >= 0
        assert kind != "js" or float(found.detach().max()) <= 0.6931472
    (ours,) = torch.autograd.grad(
        regard.divergence(other, p.average().dense()[:, None].expand(p.shape), kind).sum(), close_by
    )
    assert bool(ours.isfinite().all())


def test_a_number_below_zero_keeps_its_gradient() -> None:
    """In float32 the difference of a row from itself may round to less than 0, which is shown as 0."""
    torch.manual_seed(0)
    q, k = 10 * torch.randn(1, 1, 64, 16), torch.randn(1, 1, 64, 16)
    near = (q + 1e-3 * torch.randn_like(q)).requires_grad_()
    (ours,) = torch.autograd.grad(regard.divergence(regard.map_of(q, k), regard.map_of(near, k)).sum(), near)
    exact = near.detach().double().requires_grad_()
    p, other = (regard.map_of(x.double(), k.double()).dense() for x in (q, exact))
    (theirs,) = torch.autograd.grad(written_out(p, other, "kl").sum(), exact)
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-5)


def test_rows_that_are_no_shares_keep_their_sign() -> None:
    p, _, _ = pair(None, None)
    p = p.detach()
    for rows in (3 * p.dense(), 0.3 * p.dense()):
        close(regard.divergence(p, rows), written_out(p.dense(), rows, "kl"))
        close(regard.divergence(rows, p), written_out(rows, p.dense(), "kl"))
    assert float(regard.divergence(p, 3 * p.dense()).max()) < -1


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_given_rows_is_not_hidden(kind: Divergence) -> None:
    p, _, _ = pair(None, None)
    p, rows = p.detach(), p.detach().dense()
    rows[0, 1, 5, 7] = torch.nan
    for found in (regard.divergence(p, rows, kind), regard.divergence(rows, p, kind)):
        assert found.isnan().nonzero().tolist() == [[0, 1, 5]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made", [lambda w: w, lambda w: w.to(torch.float64)], ids=["float32", "to float64"])
def test_sides_of_two_dtypes(kind: Divergence, made: Any) -> None:
    q, k = torch.randn(2, 1, 2, 5, 4)
    one, other = regard.map_of(q, k), regard.map_of(2 * q, k).dense().double()
    found = regard.divergence(made(one), other, kind)
    expected = regard.divergence(one, other.float(), kind)
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-6)
    wide = regard.divergence(made(one), regard.map_of(2 * q.double(), k.double()), kind)
    torch.testing.assert_close(
        wide.float(), regard.divergence(one, regard.map_of(2 * q, k), kind), rtol=1e-5, atol=1e-6
    )
