"""Watching with keep="summary": the statistics of whole maps, though no map is kept."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError, NotKeptError, ShapeError
from regard.maps.sources.summary import SummarySource
from regard.watching.kept import rebuilding
from tests.maps.dense_maps import bins, sums_written_out
from tests.modules import parts, same_bits, watching
from tests.operators import WAITS, operators_of

B, H, T, D = 2, 3, 11, 5
EVERYTHING = regard.Summarize(
    "received", "entropy", "participation_ratio", "distance", "top_weight", "top_key", "top_keys", "top_p_count",
    "pooled", "pooled_sum", "pooled_max",
    k=3, rows=4, columns=3,
)  # fmt: skip


@parts(lambda: {"project": nn.Linear(H * D, 3 * H * D)})
def Attend(self: Any, x: Tensor, **settings: Any) -> Tensor:
    q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
    self.alive = [weakref.ref(t.untyped_storage()) for t in (q, k)]
    return F.scaled_dot_product_attention(q, k, v, **settings).transpose(1, 2).flatten(2)


class WrittenOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (H, D)).transpose(1, 2)
        return ((x @ x.mT).softmax(-1) @ x).transpose(1, 2).flatten(2)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(H * D, H, 16, batch_first=True).eval()


def x() -> Tensor:
    return 2 * torch.randn(B, T, H * D)


def of_dense(weights: Tensor) -> dict[str, Tensor]:
    weights = weights.double()
    values, indices = weights.topk(3)
    sums = sums_written_out(weights, 4, 3)
    pooled = sums.pop("pooled_mean")
    return sums | {
        "pooled": pooled,
        "pooled_max": bins(weights, 4, 3, Tensor.amax),
        "top_weight": weights.amax(-1),
        "top_key": weights.argmax(-1),
        "values": values,
        "indices": torch.where(values > 0, indices, -1),
        "top_p_count": (weights.sort(-1, descending=True).values.cumsum(-1) < 0.9).sum(-1) + 1,
    }


def same(statistics: Any, expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    found = {**statistics, "values": statistics["top_keys"].values, "indices": statistics["top_keys"].indices}
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [Attend, WrittenOut, encoder])
def test_every_statistic_of_every_kind_of_call(make: Callable[..., Any], context: type[Any]) -> None:
    model, inputs = make(), x()
    whole = watching(model, context=context)(inputs)
    seen = same_bits(model, inputs, context=context, how={"keep": EVERYTHING, "verify": True})
    weights: Any = seen.maps[0]
    same(weights.statistics, of_dense(whole.maps[0].dense()))
    assert not any(t.is_inference() or t.requires_grad for t in weights.statistics["top_keys"])
    assert isinstance(seen.calls[0].error, str) or seen.calls[0].error < 5e-6
    assert not seen.report().missed


@pytest.mark.parametrize(
    "mask",
    [{"is_causal": True}, {"attn_mask": torch.rand(T, T, generator=torch.Generator().manual_seed(1)) > 0.3},
     {"attn_mask": torch.randn(1, H, T, T, generator=torch.Generator().manual_seed(1))}],
)  # fmt: skip
def test_under_masks_and_biases_of_which_none_is_kept(mask: dict[str, Any]) -> None:
    model, inputs = Attend(), x()
    whole = watching(model)(inputs, **mask)
    seen = watching(model, keep=EVERYTHING)(inputs, **mask)
    same(seen[""].statistics, of_dense(whole[""].dense()))
    assert not seen.record.policy.dense_masks


def test_factors_are_let_go_at_once() -> None:
    model = nn.Sequential(*(Attend() for _ in range(4)))
    inputs = x()
    with torch.no_grad(), regard.watch(model, keep=regard.Summarize("entropy")) as seen:
        model[0](inputs)
        gc.collect()
        assert all(alive() is None for alive in model[0].alive)
        model(inputs)
    assert seen.report().held_bytes == 5 * B * H * T * 4
    assert repr(seen["3"]).startswith("AttentionMap(2, 3, 11, 11) float32 on cpu: statistics alone, by Summarize(")


def test_the_bytes_that_are_kept_are_those_that_are_promised() -> None:
    model = Attend()
    seen = watching(model, keep="summary")(x())
    # received, entropy, top 4 as numbers and 32-bit keys, and a picture that has no more rows than queries.
    assert seen.report().held_bytes == B * H * (4 * T + 4 * T + 8 * 4 * T + 4 * T * T)


def test_what_was_kept_is_read_by_the_methods_of_every_map() -> None:
    model, inputs = Attend(), x()
    whole = watching(model)(inputs)
    seen = watching(model, keep=EVERYTHING)(inputs)
    kept, weights = seen[""], whole[""]
    torch.testing.assert_close(kept.received("mean"), weights.received("mean"))
    torch.testing.assert_close(kept.sum(-2), weights.received())
    torch.testing.assert_close(kept.top_keys(2).values, weights.top_keys(2).values)
    assert torch.equal(kept.top_keys(2).indices, weights.top_keys(2).indices)
    assert kept.top_keys(3).indices.dtype == kept.top_keys(1).indices[..., 0].dtype == torch.int64
    torch.testing.assert_close(kept.pooled(4, 3), weights.pooled(4, 3))
    torch.testing.assert_close(kept[1, 2].entropy(), weights[1, 2].entropy())
    torch.testing.assert_close(kept.average().received(), weights.average().received())
    torch.testing.assert_close(kept.average().pooled(4, 3), weights.average().pooled(4, 3))
    assert (kept.grid(9, 9).rows.count, kept.grid(9, 9).columns.count) == (4, 3)
    assert (kept.grid(9, 2).rows.count, kept.grid(9, 2).columns.count) == (9, 2)  # none that is kept is so coarse
    with pytest.raises(NotKeptError, match="only statistics were kept"):
        kept.average().pooled(4, 3, "max")  # the largest of a mean is not the mean of the largest
    assert kept.shape == weights.shape
    seen = watching(model, keep=regard.Summarize("pooled", rows=T, columns=3))(inputs)
    with pytest.raises(NotKeptError, match="only statistics were kept"):
        seen[""].pooled(T, 3, "max")  # a block is one query by several keys
    seen = watching(model, keep=regard.Summarize("top_keys", k=2))(inputs)
    torch.testing.assert_close(seen[""].top_keys(1).values[..., 0], weights.top_keys(1).values[..., 0])


@pytest.mark.parametrize(
    "read",
    [
        lambda m: m.dense(),
        np.asarray,
        lambda m: m.mean(1).entropy(),
        lambda m: m[0, 0, 3],
        lambda m: m[..., 1, :],
        lambda m: m[..., torch.tensor([0]), torch.tensor([0])],
        lambda m: m @ torch.ones(T, 1),
        lambda m: m.mT @ torch.ones(T, 1),
        lambda m: m.participation_ratio(),
        lambda m: m.top_keys(5),
        lambda m: m.pooled(2, 2),
        lambda m: m.summary("entropy", "distance"),
        lambda m: m.only(rows=slice(2)).entropy(),
        lambda m: m.average().entropy(),
        lambda m: m.value_norms(),
        lambda m: m.with_values(torch.ones(T, 1)),
        lambda m: m.save("nowhere"),
        lambda m: m.to("meta"),
    ],
)
def test_what_was_not_kept_is_refused_in_one_way(read: Callable[..., Any]) -> None:
    model = Attend()
    seen = watching(model, keep="summary")(x())
    with pytest.raises(
        NotKeptError,
        match=r"only statistics were kept, by Summarize\('received', .*'top_keys', 'pooled', k=4.*keep='factors'",
    ):
        read(seen[""])


def test_wrong_settings_are_refused_at_the_door() -> None:
    with pytest.raises(ArgumentError, match=r"Summarize\(\) knows received, .*; got 'entropi'"):
        regard.Summarize("entropi")
    with pytest.raises(ArgumentError, match="k, rows and columns of at least 1"):
        regard.Summarize("top_keys", k=0)
    with pytest.raises(ArgumentError, match=r"factors, cpu, summary or a Summarize\(\.\.\.\); got 'all'"):
        regard.watch(Attend(), keep="all")  # type: ignore[arg-type]


class Steps(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        cuts = [(0, 4), *((n, n + 1) for n in range(4, T))]
        return torch.cat([self.attend(q[:, :, a:b], k[:, :, :b], causal=not a) for a, b in cuts], 2)

    def attend(self, q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=causal)


def test_the_steps_of_a_generation_are_joined() -> None:
    q, k = torch.randn(B, H, T, D), torch.randn(B, H, T, D)
    what = regard.Summarize("received", "entropy", "top_keys", "distance", "pooled", k=6)
    seen = watching(Steps(), keep=what)(q, k)
    steps = seen.joined("")
    expected = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights
    assert steps.shape == expected.shape
    torch.testing.assert_close(steps.received(), expected.received())
    torch.testing.assert_close(steps.entropy(), expected.entropy(), rtol=0, atol=1e-5)
    torch.testing.assert_close(steps.distance(), expected.distance(), rtol=0, atol=1e-5)
    torch.testing.assert_close(steps.top_keys(6).values, expected.top_keys(6).values)
    assert torch.equal(steps.top_keys(6).indices, expected.top_keys(6).indices)
    with pytest.raises(NotKeptError, match=r"Summarize\('received', 'entropy', 'top_keys', 'distance', k=6\)"):
        steps.pooled(128, 128)


def test_calls_that_do_not_continue_one_another_are_maps_of_their_own() -> None:
    model, inputs = Attend(), x()
    with torch.no_grad(), regard.watch(model, keep=regard.Summarize("entropy", "distance")) as seen:
        model(inputs)
        model(inputs)
    with pytest.raises(ShapeError, match="2 sequences"):
        seen.joined("")
    assert [one.entropy().shape for one in seen.generations("")] == [(B, H, T)] * 2


def test_steps_of_which_nothing_can_be_joined() -> None:
    q, k = torch.randn(B, H, T, D), torch.randn(B, H, T, D)
    seen = watching(Steps(), keep=regard.Summarize("pooled"))(q, k)
    with pytest.raises(NotKeptError, match="none of which can be joined"):
        seen.joined("")


@parts(lambda: {"scale": nn.Parameter(torch.ones(()))})
def BlockAttention(self: Any, x: Tensor) -> Tensor:
    whole = (x @ x.mT * self.scale).softmax(-1) @ x
    apart = (x @ x.mT).softmax(-1)
    return whole + apart[..., :3] @ x[..., :3, :] + apart[..., 3:] @ x[..., 3:, :]


def test_a_softmax_in_blocks_is_not_summarized_as_a_map() -> None:
    model = nn.Sequential(BlockAttention())
    seen = watching(model, keep="summary")(x())
    assert len(seen) == 0
    assert "in blocks" in str(seen.report())


@pytest.mark.parametrize("is_summary", [False, True])
def test_a_watch_waits_for_nothing_on_a_card(is_summary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a value that is read is waited for. Tiles read some for statistics, as a question asked later does."""
    monkeypatch.setattr(rebuilding, "can_look", lambda tensor: False)
    model, given = Attend(), x()

    def waits(run: Callable[[], object]) -> int:
        seen = operators_of(run)
        return sum(seen[name] for name in WAITS)

    with torch.no_grad():
        whole = watching(model)(given)
        of_tiles = waits(lambda: SummarySource.of(whole[""].source, EVERYTHING)) if is_summary else 0
        with regard.watch(model, keep=EVERYTHING if is_summary else "factors") as seen:
            assert waits(lambda: model(given)) == of_tiles
    assert "1 map" in str(seen.report())
