"""Watching attention that a model writes out: the weights that multiplied the values are kept, in any notation."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.errors import ArgumentError, NotKeptError, NotSeenError
from regard.watching.analysis.rollout import rollout
from regard.watching.readers import written_out
from tests import each_once
from tests.modules import module, parts, same_bits

B, H, T, S, D = 2, 3, 7, 9, 5
Weights = Callable[["Written", Tensor], Tensor]


class Written(nn.Module):
    def __init__(self, weights: Weights, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> None:
        super().__init__()
        self.weights, self.product = weights, product
        self.mix, self.gate = nn.Parameter(torch.randn(H, H)), nn.Parameter(torch.randn(H, 1, 1))
        self.drop = nn.Dropout(0.5)
        self.used: list[Tensor] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.weights(self, q @ k.mT)
        self.used.append(weights.detach().clone())
        return self.product(weights, v)


def vectors(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*lead, T, D), torch.randn(*lead, S, D), torch.randn(*lead, S, D)


CHANGED: dict[str, Weights] = {
    "a gate per head": lambda m, s: s.softmax(-1) * m.gate.sigmoid(),
    "talking heads by einsum": lambda m, s: torch.einsum("bhts,hg->bgts", s.softmax(-1), m.mix),
}
"""`tests/fuzz/watch/written_out.py` has all that may stand between a softmax and the product."""


@pytest.mark.parametrize(("name", "context"), each_once(CHANGED, [torch.inference_mode, torch.enable_grad]))
def test_the_operand_of_the_product_is_kept(name: str, context: Any) -> None:
    model = Written(CHANGED[name])
    q, k, v = vectors(B, H)
    seen = same_bits(model, q, k, v, context=context)
    used, weights = model.used[-1], seen[""]
    assert torch.equal(weights.dense(), used)
    torch.testing.assert_close(weights[1, 2, 3], used[1, 2, 3], rtol=0, atol=0)
    torch.testing.assert_close(weights.received(), used.sum(-2))
    torch.testing.assert_close(weights @ v, used @ v)
    torch.testing.assert_close(weights.top_keys(2).values, used.topk(2).values)
    torch.testing.assert_close(weights.top_keys(1).values[..., 0], used.amax(-1))
    torch.testing.assert_close(weights.pooled(1, 1, "max")[..., 0, 0], used.amax((-1, -2)))
    torch.testing.assert_close(weights[..., torch.tensor([1, 2]), torch.tensor([0, 8])], used[..., [1, 2], [0, 8]])
    assert torch.equal(weights[:, 1].dense(), used[:, 1])
    assert [call.error for call in seen.calls] == [pytest.approx(0, abs=1e-6)]
    assert not seen.report().missed
    softmax = seen.softmax("")
    torch.testing.assert_close(softmax.dense(), (q @ k.mT).softmax(-1))
    assert "seen.softmax(name)" in str(seen.report())


def test_where_nothing_stands_between_the_softmax_is_the_map() -> None:
    model = Written(lambda m, s: m.drop(s.softmax(-1))).eval()
    seen = same_bits(model, *vectors(B, H))
    assert seen.softmax("") is seen[""]
    assert seen.softmax(("", 0)) is seen["", 0]
    times_one = same_bits(Written(lambda m, s: s.softmax(-1) * torch.ones(S)), *vectors(B, H))
    assert times_one.softmax("") is times_one[""]
    assert times_one.report().held_bytes == B * H * T * S * 4


def test_the_softmax_is_not_kept_with_statistics_alone() -> None:
    seen = same_bits(Written(CHANGED["a gate per head"]), *vectors(B, H), how={"keep": "summary"})
    with pytest.raises(NotKeptError, match="keep='factors'"):
        seen.softmax("")


def test_weights_below_zero_are_shown_and_not_read_as_shares() -> None:
    model = Written(CHANGED["talking heads by einsum"])
    weights = same_bits(model, *vectors(B, H))[""]
    assert (weights.dense() < 0).any()
    for ask in (
        weights.entropy,
        weights.participation_ratio,
        lambda: weights.top_p_count(0.5),
        lambda: weights.summary(),
    ):
        with pytest.raises(ArgumentError, match="below 0"):
            ask()
    square = Written(lambda m, s: torch.einsum("bhts,hg->bgts", s.softmax(-1), m.mix))
    square.num_heads = H  # type: ignore[assignment]
    x = torch.randn(B, H, T, D)
    with pytest.raises(ArgumentError, match="below 0"):
        rollout(same_bits(square, x, x, x), -1)


def test_rows_that_do_not_sum_to_one() -> None:
    model = Written(lambda m, s: 4.7 * s.softmax(-1))
    weights = same_bits(model, *vectors(B, H))[""]
    torch.testing.assert_close(weights.received().sum(-1), torch.full((B, H), 4.7 * T))
    torch.testing.assert_close(weights.entropy(), torch.special.entr(model.used[-1]).sum(-1))
    torch.testing.assert_close(
        weights.participation_ratio(), model.used[-1].sum(-1) ** 2 / (model.used[-1] ** 2).sum(-1)
    )


def test_verify_catches_weights_that_are_not_those_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    real = written_out.stored

    def planted(kept: Any, *rest: Any) -> Any:
        return real((kept / kept.sum(-1, keepdim=True)).contiguous(), *rest)

    monkeypatch.setattr(written_out, "stored", planted)
    seen = same_bits(Written(CHANGED["a gate per head"]), *vectors(B, H))
    assert isinstance(seen.calls[0].error, float)
    assert seen.calls[0].error > 0.1


def in_place(model: Written, scores: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    weights *= torch.ones(T, S).tril(2)
    weights /= weights.sum(-1, keepdim=True)
    return weights


def slots(model: Written, scores: Tensor) -> Tensor:
    weights = scores.softmax(-2)
    return weights / weights.sum(-1, keepdim=True)


def softmax(model: Written, scores: Tensor) -> Tensor:
    return scores.softmax(-1)


WRITINGS: dict[str, tuple[Weights, Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], list[Tensor]], str]] = {
    "overwritten": (in_place, torch.matmul, lambda used: [used], "overwritten"),
    "heads one by one": (
        softmax,
        lambda a, v: torch.stack([one @ two for one, two in zip(a.unbind(1), v.unbind(1), strict=True)]),
        lambda used: list(used.unbind(1)),
        "a part of a softmax (2, 3, 7, 9)",
    ),
    # As Transformer-XL has them: queries, keys, batch, heads.
    "axes in another order": (
        lambda m, s: s.permute(2, 3, 0, 1).softmax(1),
        lambda a, v: torch.einsum("tsbh,bhsd->tbhd", a, v),
        lambda used: [used.permute(2, 3, 0, 1)],
        "",
    ),
    "over the queries": (
        lambda m, s: s.softmax(-2), torch.matmul, lambda used: [used], "the columns of its weights sum to 1",
    ),
    "slots": (slots, torch.matmul, lambda used: [used], "seen.softmax(name)"),
    "in a child module": (softmax, module(lambda m, a, v: a @ v)(), lambda used: [used], ""),
    "in blocks": (softmax, lambda a, v: a[..., :4] @ v[..., :4, :] + a[..., 4:] @ v[..., 4:, :], lambda used: [],
                  "in blocks"),
}  # fmt: skip
"""How weights are made and multiplied, the maps that are then shown, and a part of the report."""


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITINGS)
def test_each_product_has_the_map_of_its_weights_and_a_note(name: str, context: Any) -> None:
    weights, product, expected, note = WRITINGS[name]
    model = Written(weights, product)
    seen = same_bits(model, *vectors(B, H), context=context)
    for found, used in zip(seen.maps, expected(model.used[-1]), strict=True):
        assert torch.equal(found.dense(), used)
    assert {path for path, _ in seen} <= {"product" if name == "in a child module" else ""}
    assert note in str(seen.report())
    assert bool(seen.report().missed) == (name == "in blocks")
    if name == "slots":
        torch.testing.assert_close(seen.softmax("").received(), torch.ones(B, H, S))


WIDTH, HEADS = 24, 4


class Projected(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.router, self.table = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(20, WIDTH))
        self.score = nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        match self.how:
            case "tokens":
                heads = (q @ k.mT).softmax(-1) @ v
            case "copied tokens":
                heads = (q.contiguous() @ k.contiguous().mT).softmax(-1) @ v.contiguous()
            case "channels":  # XCiT
                q, k, v = q.mT, k.mT, v.mT
                heads = ((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1) @ v).mT
            case "efficient":
                heads = q.softmax(-1) @ (k.softmax(-2).mT @ v)
            case "half efficient":
                heads = q @ (k.softmax(-2).mT @ v)
            case "landmarks":  # Nystromformer
                few_q, few_k = (t.unflatten(2, (-1, 2)).mean(3) for t in (q, k))
                first, last = (q @ few_k.mT).softmax(-1), (few_q @ k.mT).softmax(-1)
                heads = first @ torch.linalg.pinv((few_q @ few_k.mT).softmax(-1)) @ (last @ v)
            case "vocabulary":
                return (x @ self.table.mT).softmax(-1) @ self.table
            case "scaled vocabulary":
                return F.linear(x, self.table).softmax(-1) @ (self.table * 2)
            case "experts":
                outputs = torch.stack([expert(x) for expert in self.experts], 2)
                return torch.einsum("btn,btnd->btd", self.router(x).softmax(-1), outputs)
            case "router":
                return self.router(x).softmax(-1).topk(2).values.sum(-1, keepdim=True) * x
            case "additive":
                scores = self.score(torch.tanh(self.q(x)[:, :, None] + self.k(x)[:, None])).squeeze(-1)
                return scores.softmax(-1) @ x
            case "pooled":
                return (self.score(x).softmax(1) * x).sum(1)
            case "expectation":
                return (x @ x.mT).softmax(-1) @ torch.arange(float(length))
        return self.o(heads.transpose(1, 2).flatten(2))


ATTENTION = ["tokens", "copied tokens", "additive", "pooled"]
NO_ATTENTION = {
    "channels": "6 channels on 6 channels",
    "efficient": "linear and landmark",
    "half efficient": "linear and landmark",
    "landmarks": "product of 3 softmaxes",
    "vocabulary": "a parameter",
    "scaled vocabulary": "a parameter",
    "experts": "a mixture of experts",
    "router": "a router or classifier",
    "expectation": "an expectation",
}
CONTEXTS = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.parametrize("length", [10, WIDTH // HEADS, WIDTH])
@pytest.mark.parametrize(("how", "context"), each_once(NO_ATTENTION, CONTEXTS))
def test_what_is_no_attention_is_named_and_not_shown(how: str, context: Any, length: int) -> None:
    model = nn.Sequential(Projected(how))
    seen = same_bits(model, torch.randn(2, length, WIDTH), context=context)
    assert not seen.maps
    assert not seen.report().missed
    assert any(path == "0" and NO_ATTENTION[how] in what for path, what in seen.report().others)
    assert NO_ATTENTION[how] in str(seen.report())
    with pytest.raises(NotSeenError):
        seen["0"]


@pytest.mark.parametrize("length", [10, WIDTH // HEADS, WIDTH])
@pytest.mark.parametrize(("how", "context"), each_once(ATTENTION, CONTEXTS))
def test_attention_that_resembles_them_is_shown(how: str, context: Any, length: int) -> None:
    seen = same_bits(Projected(how), torch.randn(2, length, WIDTH), context=context)
    assert seen.maps[0].shape[-1] == length
    assert seen.calls[0].error == pytest.approx(0, abs=1e-5)
    assert not seen.report().others


OneRow = module(
    lambda m, x: (x @ x[0]).softmax(-1) @ x * m.mix.softmax(0).sum(), lambda: {"mix": nn.Parameter(torch.zeros(3))}
)
"""One query attends to tokens without a batch, by a softmax of one dimension."""

OneRowRouter = module(lambda m, x: x.sum(-1).softmax(-1) @ x)
"""A row of weights without a comparison of tokens."""


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_softmax_of_one_dimension_is_named(context: Any) -> None:
    x = torch.randn(5, WIDTH)
    report = same_bits(OneRowRouter(), x, context=context).report()
    assert [what for _, what in report.others] == [
        "a softmax over 5 numbers of one dimension: one query's attention, a router or classifier?"
    ]
    assert not report.missed
    ((_, what),) = same_bits(OneRow(), x, context=context).report().missed
    assert what.startswith("a softmax over 5 numbers of one dimension was made, which is not followed: give it")


@parts(lambda *, channels: {"channels": channels, **{name: nn.Conv2d(8, 8, 1) for name in ("q", "k", "v")}})
def Images(self: Any, x: Tensor) -> Tensor:
    """Attention between positions of an image (DANet's PAM), or between its channels (CAM)."""
    if self.channels:
        flat = x.flatten(2)
        return self.v(((flat @ flat.mT).softmax(-1) @ flat).view_as(x))
    q, k, v = (p(x).flatten(2) for p in (self.q, self.k, self.v))
    return torch.bmm(v, (q.mT @ k).softmax(-1).mT).view_as(x)


@pytest.mark.parametrize("context", CONTEXTS)
def test_channels_and_positions_of_images(context: Any) -> None:
    image = torch.randn(2, 8, 3, 4)
    positions = same_bits(Images(channels=False), image, context=context)
    assert [tuple(one.shape) for one in positions.maps] == [(2, 12, 12)]
    channels = same_bits(Images(channels=True), image, context=context)
    assert not channels.maps
    assert "8 channels on 8 channels" in str(channels.report())
    # Where an image has as many places as channels, its sizes do not tell.
    image = torch.randn(2, 8, 2, 4)
    assert same_bits(Images(channels=False), image, context=context).maps[0].shape == (2, 8, 8)
    assert "nothing tells" in str(same_bits(Images(channels=True), image, context=context).report())


def test_scores_that_are_one_projection_are_shown_with_a_note() -> None:
    """As in the tutorial of torch on translation: the keys are positions, but so could experts be."""
    Location = module(
        lambda m, state, outputs: torch.bmm(m.scores(state).softmax(-1).unsqueeze(1), outputs),
        lambda: {"scores": nn.Linear(D, S)},
    )

    seen = same_bits(Location(), torch.randn(B, D), torch.randn(B, S, D))
    assert seen.maps[0].shape == (B, 1, S)
    assert "outputs of one projection" in str(seen.report())


def test_stacked_attention_without_projections_is_shown() -> None:
    class Stacked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            once = (x @ x.mT).softmax(-1) @ x
            return (once @ once.mT).softmax(-1) @ once

    assert len(same_bits(Stacked(), torch.randn(B, T, D))) == 2


def test_values_of_relative_positions_are_no_map_of_their_own() -> None:
    class Relative(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = (q @ k.mT).softmax(-1)
            return weights @ v + torch.einsum("bhts,tsd->bhtd", weights, torch.ones(T, S, D))

    seen = same_bits(Relative(), *vectors(B, H))
    assert [tuple(one.shape) for one in seen.maps] == [(B, H, T, S)]


@torch.library.custom_op("regard_tests::flash_attention", mutates_args=())
def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


@torch.library.custom_op("regard_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


class Partly(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(q, k, v)
        output = output + torch.ops.regard_tests.flash_attention(q, k, v)
        return output + torch.ops.regard_tests.flash_attention.default(q, k, doubled(v))


def test_operators_of_others_are_named_with_their_count() -> None:
    seen = same_bits(nn.Sequential(), torch.randn(3))
    assert not seen.report().missed

    model = Partly()
    seen = same_bits(model, *vectors(B, H))
    assert len(seen) == 1
    assert seen.report().missed == (
        ("", "torch.ops.regard_tests.flash_attention, an operator that cannot be looked into (2 times)"),
        ("", "torch.ops.regard_tests.doubled, an operator that cannot be looked into"),
    )


class Picked(torch.autograd.Function):
    """x[index] as an operator, whose elements cannot be read under `torch.vmap`: transformers 4.57 masks padding so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    @staticmethod
    def setup_context(*given: Any) -> None:
        pass


Picking = module(lambda m, rows: torch.vmap(Picked.apply, in_dims=(None, 0))(rows, torch.arange(len(rows))))
"""Rows that an operator picks, one for each position."""


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32, torch.int8])
def test_an_operator_of_numbers_or_bytes_may_be_attention_and_one_of_positions_and_masks_not(
    dtype: torch.dtype,
) -> None:
    report = same_bits(Picking(), torch.ones(4, 3).to(dtype)).report()
    may_attend = dtype in (torch.float32, torch.int8)
    assert [path for path, _ in report.missed] == [""] * may_attend
    assert ("cannot be looked into" in str(report)) == may_attend


def test_torchs_operators_are_seen_as_the_functions_that_they_are() -> None:
    Aten = module(lambda m, q, k, v: torch.ops.aten.scaled_dot_product_attention.default(q, k, v))

    Kernel = module(lambda m, q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)[0])

    q, k, v = vectors(B, H)
    seen = same_bits(Aten(), q, k, v)
    torch.testing.assert_close(seen.maps[0].dense(), (q @ k.mT * D**-0.5).softmax(-1))
    missed = same_bits(Kernel(), q, k, v).report().missed
    assert "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu" in str(missed)


@parts(lambda: {"scale": nn.Parameter(torch.ones(()))})
def OfferAttention(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = (q @ k.mT * self.scale).softmax(-1) @ v
    away = torch.tensor((k @ k.mT).softmax(-1).tolist())
    return seen + (away @ v).sum()


def test_a_softmax_that_no_product_took_up_is_reported_and_good_maps_stay() -> None:
    seen = same_bits(nn.ModuleDict({"attn": OfferAttention()})["attn"], *vectors(B, H))
    assert len(seen) == 1
    assert seen.report().missed == (("", f"a softmax ({B}, {H}, {S}, {S}) that no product with values took up"),)


SLOPES = torch.rand(4)


def flex_cases() -> dict[str, dict[str, Any]]:
    from torch.nn.attention.flex_attention import create_block_mask

    bias = torch.randn(B, T, S)

    def masked(function: Callable[..., Tensor]) -> Any:
        return create_block_mask(function, B, 4, T, S, device="cpu")

    return {
        "plain": {},
        "scale": {"scale": 0.3},
        "causal": {"block_mask": masked(lambda b, h, i, j: j <= i + 2)},
        "a mask of no kind": {"block_mask": masked(lambda b, h, i, j: ((i + j + h) % 2 == 0) | (i == j))},
        "ALiBi": {"score_mod": lambda s, b, h, i, j: s + SLOPES[h] * (j - i)},
        "a soft cap and a bias": {"score_mod": lambda s, b, h, i, j: 2 * torch.tanh(s / 2) + bias[b][i][j]},
        "both": {
            "score_mod": lambda s, b, h, i, j: s * SLOPES[h],
            "block_mask": masked(lambda b, h, i, j: j <= i + b),
        },
    }


class Flexible(nn.Module):
    def __init__(self, settings: dict[str, Any], function: Any = None) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import flex_attention

        self.settings, self.function = settings, function or flex_attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.function(q, k, v, enable_gqa=True, **self.settings)


def flex_weights(q: Tensor, k: Tensor, settings: dict[str, Any]) -> Tensor:
    scores = q @ k.repeat_interleave(2, 1).mT * settings.get("scale", q.shape[-1] ** -0.5)
    mod = settings.get("score_mod", lambda s, b, h, i, j: s)
    mask = settings["block_mask"].mask_mod if "block_mask" in settings else lambda b, h, i, j: torch.tensor(True)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape)):
        scores[b, h, i, j] = torch.where(mask(b, h, i, j), mod(scores[b, h, i, j], b, h, i, j), -torch.inf)
    return scores.softmax(-1)


@pytest.mark.parametrize(
    "name",
    ["plain", "scale", "causal", "a mask of no kind", "ALiBi", "a soft cap and a bias", "both", "both, compiled"],
)
def test_flex_attention(name: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    settings = flex_cases()[name.removesuffix(", compiled")]
    model = Flexible(settings, torch.compile(flex_attention, backend="aot_eager") if "compiled" in name else None)
    q, k, v = torch.randn(B, 4, T, 8), torch.randn(B, 2, S, 8), torch.randn(B, 2, S, 8)
    seen = same_bits(model, q, k, v)
    assert len(seen) == 1
    expected, weights = flex_weights(q, k, settings), seen[""]
    torch.testing.assert_close(weights.dense(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights.received(), expected.sum(-2), rtol=0, atol=2e-6)
    torch.testing.assert_close(weights.entropy(), torch.special.entr(expected).sum(-1), rtol=0, atol=5e-6)
    torch.testing.assert_close(weights[1, 3].dense(), expected[1, 3], rtol=0, atol=1e-6)
    torch.testing.assert_close(weights[1][2].dense(), expected[1, 2], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        weights[..., torch.tensor([1, 2]), torch.tensor([0, 8])], expected[..., [1, 2], [0, 8]], rtol=0, atol=1e-6
    )  # fmt: skip
    assert seen.calls[0].error < 1e-6
    assert not seen.report().missed
    with torch.no_grad(), regard.watch(model) as twice:
        model(q, k, v), model(q, k, v)
    assert len(twice) == 2
    if name == "causal":
        assert "causal" in str(weights.source)
    summary = same_bits(model, q, k, v, how={"keep": "summary"})[""]
    torch.testing.assert_close(summary.received(), expected.sum(-2), rtol=0, atol=2e-6)


def test_a_sink_beside_a_single_key_is_cut_off() -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            scores = torch.cat([q @ k.mT, torch.zeros(*q.shape[:-1], 1)], -1)
            return torch.softmax(scores, -1)[..., :-1] @ k

    x = torch.randn(1, 2, 3, 4)
    with torch.no_grad(), regard.watch(model := Model()) as seen:
        for n in range(3):
            model(x[:, :, n : n + 1], x[:, :, : n + 1])
    assert seen.joined("").shape == (1, 2, 3, 3)
    seen.record.unread("", "a call that no reader knows")
    with pytest.raises(NotSeenError, match="'' was called besides, and rows would be missing here: a call that no"):
        seen.joined("")
