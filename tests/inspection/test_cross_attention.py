"""Cross-attention is known by the origin of its keys, whatever its module is called, and edits follow it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.edits import AddBias, Knockout, ReplaceWeights, ScaleHeads
from regard.errors import ArgumentError
from regard.watching import relevance
from tests.modules import parts, watching

C, H, T, S = 8, 2, 3, 5


class Attention(nn.Module):
    def __init__(self, how: str = "sdpa") -> None:
        super().__init__()
        self.how = how
        self.one, self.two, self.three, self.out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip((self.one, self.two, self.three), (query, key, value), strict=True)
        q, k, v = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer, x in parts)
        q, k = self.turned(q), self.turned(k)
        if self.how == "sdpa":
            heads = F.scaled_dot_product_attention(q, k, v)
        elif self.how == "regard":
            heads = regard.attention(q, k, v)
        else:
            heads = (q @ k.mT / 2 + torch.zeros(1)).softmax(-1) @ v
        return self.out(heads.transpose(1, 2).reshape(query.shape))

    def turned(self, x: Tensor) -> Tensor:
        return x * 0.5 + torch.cat([-x[..., 2:], x[..., :2]], -1) * 0.5


class TwoWay(nn.Module):
    """As SAM's mask decoder: two streams ask each other in turn, and both come to hold something of both.

    The names are those of the wrong kinds.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.cross_attn, self.self_attn, self.encoder_self_attention = (Attention(how) for _ in range(3))
        self.norm = nn.LayerNorm(C)

    def forward(self, tokens: Tensor, image: Tensor, place: Tensor) -> Tensor:
        start = tokens
        for _ in range(2):
            asking = tokens + start
            tokens = self.norm(tokens + self.cross_attn(asking, asking, tokens))
            tokens = self.norm(tokens + self.self_attn(tokens + start, image + place, image))
            image = self.norm(self.encoder_self_attention(image + place, tokens + start, tokens) + image)
        return tokens


def two_way() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, T, C), torch.randn(1, S, C), torch.randn(1, S, C)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("how", ["sdpa", "softmax", "regard"])
def test_the_origin_of_the_keys_tells_cross_attention(how: str, mode: Callable[[], Any]) -> None:
    seen = watching(TwoWay(how), context=mode)(*two_way())
    found = {call.name: call.crosses for call in seen.calls}
    assert found == {"cross_attn": False, "self_attn": True, "encoder_self_attention": True}
    assert len(seen.calls) == 6


@pytest.mark.parametrize("how", ["sdpa", "regard"])
def test_an_edit_finds_the_queries_of_cross_attention(how: str) -> None:
    """The third query of fewer queries than keys, which a cached step would have at the end of its keys."""
    model, given = TwoWay(how), two_way()
    with torch.no_grad():
        plain = watching(model)(*given)
        with regard.watch(model) as edited, regard.edit(model, {("self_attn", 0): Knockout(keys=1, queries=2)}):
            model(*given)
    one, other = (seen["self_attn", 0].dense()[0, 0] for seen in (plain, edited))
    assert torch.equal(one[:2], other[:2])
    assert other[2, 1] == 0 < one[2, 1]


@pytest.mark.parametrize(
    "edit",
    [
        ScaleHeads(None, 0.0, queries=slice(7, 9)),
        Knockout(keys=slice(7, 9)),
        Knockout(keys=0, queries=slice(7, 9)),
        Knockout(edges=lambda b, h, i, j: i == j, heads=slice(5, 7)),
        AddBias(1.0, keys=0, heads=slice(5, 7)),
        AddBias(1.0, keys=0, batch=torch.tensor([False])),
        ReplaceWeights(torch.full((T, T), 1 / T), batch=slice(4, 5)),
    ],
)
def test_an_edit_whose_positions_reach_nothing_is_an_error(edit: Any) -> None:
    model, given = TwoWay("sdpa"), two_way()
    run = regard.edit(model, {"cross_attn": edit})
    with torch.no_grad(), pytest.raises(ArgumentError, match=f"{type(edit).__name__} changes nothing, because"), run:
        model(*given)
    assert "changes nothing" in str(run.report())


def test_an_edit_that_reaches_some_call_or_leaves_numbers_as_they_are_is_none() -> None:
    model, given = TwoWay("sdpa"), two_way()
    edits: dict[Any, Any] = {"cross_attn": [ScaleHeads(0, 1.0), AddBias(0.0, keys=0)], "*": Knockout(keys=slice(T, S))}
    with torch.no_grad(), regard.edit(model, edits) as run:
        model(*given)
    assert "changes nothing" not in str(run.report())


def test_steps_of_a_cache_are_self_attention_and_memory_is_not() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.buffer = nn.Linear(C, C), nn.Linear(C, C), torch.zeros(1, H, T, C // H)

        def heads(self, x: Tensor) -> Tensor:
            return x.unflatten(-1, (H, -1)).transpose(1, 2)

        def forward(self, kind: str) -> None:
            held = self.heads(self.k(torch.randn(1, S, C)))
            for n in range(T):
                x = torch.randn(1, 1, C)
                q, k = self.heads(self.q(x)), self.heads(self.k(x))
                if kind == "appended":
                    held = torch.cat([held, k], 2)
                if kind == "written":
                    held = self.buffer.index_copy_(2, torch.tensor([n]), k)
                if kind == "assigned":
                    self.buffer[:, :, n : n + 1] = k
                    held = self.buffer
                F.scaled_dot_product_attention(q, held, held)

    for kind, crosses in (("appended", False), ("written", False), ("assigned", False), ("memory", True)):
        seen = watching(Steps())(kind)
        assert {call.crosses for call in seen.calls} == {crosses}, kind


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_torchs_module_with_positions_in_its_queries_and_keys(batch_first: bool, grad: bool) -> None:
    """DETR adds positions to queries and keys, and none to values: that is no other sequence."""
    layer, x = nn.MultiheadAttention(C, H, batch_first=batch_first).eval(), torch.randn(T, T, C)
    placed = x + 1
    with torch.set_grad_enabled(grad), regard.watch(layer) as seen:
        layer(placed, placed, x)
        layer(x + 1, x + 2, x)
        layer(x, torch.randn(T, T, C), x)
    assert [call.crosses for call in seen.calls] == [False, False, True]
    edit = regard.edit(layer, {"": Knockout(keys=0, queries=T - 1)})
    with torch.no_grad(), edit:
        layer(placed, placed, x)


@pytest.mark.parametrize("grad", [True, False])
def test_the_layers_of_torch(grad: bool) -> None:
    model = nn.Transformer(C, H, 2, 2, C, batch_first=True).eval()
    with torch.set_grad_enabled(grad), regard.watch(model) as seen:
        model(torch.randn(1, T, C), torch.randn(1, T, C))
    assert [call.crosses for call in seen.calls] == [False, False, False, True, False, True]


def test_relevance_goes_by_the_origin_of_the_keys() -> None:
    @parts(lambda: {name: nn.ModuleList([Attention()]) for name in ("first", "second")})
    def Both(self: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.first[0](x, x, x)
        return self.second[0](y, x, x)

    model, inputs = Both(), (torch.randn(1, T, C), torch.randn(1, T, C))
    with regard.watch(model, values=True, gradients=True) as seen:
        model(*inputs).sum().backward()
    assert relevance(seen).lengths == {"encoder": T, "decoder": T}


@pytest.mark.parametrize("how", ["clamped", "chosen by a list", "pooled", "activated"])
def test_functions_between_a_projection_and_the_kernel_lose_no_sequence(how: str) -> None:
    """As in DBRX, Falcon and Hiera: without the way of its keys, self-attention would look like cross-attention."""

    @parts(lambda: {"qkv": nn.Linear(8, 24)})
    def Between(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if how == "clamped":
            q, k = q.clamp(-1.0, 1.0), k.clamp(-1.0, 1.0)
        if how == "chosen by a list":
            k, v = k[:, [0]], v[:, [0]]
        if how == "pooled":
            q = q.unflatten(2, (2, -1)).max(2)[0]
        if how == "activated":
            q, k = F.silu(q), F.silu(k)
        q, k = q * 2 + q.flip(-1), k * 2 + k.flip(-1)  # (Rotary angles are sums of products too.)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=how == "chosen by a list")

    seen = watching(Between())(torch.randn(2, 6, 8))
    assert [call.crosses for call in seen.calls] == [False]


class Longest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cummax(1)[0]


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "an own function": lambda x: Longest.apply(x),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "an operator": lambda x: x.cumsum(1),
    "an operator before a convolution": lambda x: F.relu(x.mT[..., None].cumsum(2)),
}


def _pooled(name: str, rank: int, x: Tensor) -> Tensor:
    """A pool over windows of one position, of a sequence, an image or a video that is one position wide."""
    x = x[(..., *[None] * (rank - 1))]
    found: Tensor = getattr(F, name)(x, x.shape[2:] if "adaptive" in name else 1)
    return found.flatten(2)


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a video": lambda x: F.conv3d(x[..., None, None], torch.ones(C, C, 1, 1, 1)).flatten(2),
    "an image": lambda x: F.conv2d(x[..., None], torch.ones(C, C, 1, 1)).flatten(2),
    "conv_transpose": lambda x: F.conv_transpose1d(x, torch.ones(C, C, 2), stride=2),
    **{f"{name}{rank}d": partial(_pooled, f"{name}{rank}d", rank) for rank in (1, 2, 3)
       for name in ("avg_pool", "max_pool", "adaptive_avg_pool")},
    "resized": lambda x: F.interpolate(x, scale_factor=2),
    "instance norm": F.instance_norm,
    "stacked": lambda x: torch.stack([x, x.sin()], -1).flatten(2),
    "mixed by a share": lambda x: torch.lerp(x, F.logsigmoid(x), 0.5),
    **{one.__name__: one for one in (F.leaky_relu, F.elu, F.softplus, F.mish, F.hardswish, F.relu6)},
}  # fmt: skip


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.near = nn.Linear(C, C), nn.Linear(C, C), nn.Conv2d(C, C, 1)
        self.attend = nn.MultiheadAttention(C, H, batch_first=True)

    def forward(self, way: str, query: Tensor, key: Tensor) -> None:
        key = KNOWN[way](key.mT).mT if way in KNOWN else UNKNOWN[way](key) if way else key
        key = self.near(key)[..., 0].mT if key.dim() == 4 else key
        self.attend(query, key, key)
        F.scaled_dot_product_attention(self.q(query)[:, None], self.k(key)[:, None], key[:, None])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("way", UNKNOWN)
def test_keys_behind_an_unknown_function_may_be_of_any_sequence(way: str, mode: Callable[[], Any]) -> None:
    x, other = torch.randn(1, T, C), torch.randn(1, S, C)
    with mode(), regard.watch(Ways().eval()) as seen:
        seen.modules[""](way, x, key=x)
        seen.modules[""](way, x, key=other)
        seen.modules[""]("", query=x, key=other)
        seen.modules[""]("", x.cumsum(1), x)
        seen.modules[""]("", x, x)
    assert [call.crosses for call in seen.calls] == [None] * 4 + [True] * 4 + [False] * 2
    assert [call.kind for call in seen.calls] == ["attention"] * 4 + ["cross-attention"] * 4 + ["attention"] * 2


@pytest.mark.parametrize("way", KNOWN)
def test_images_videos_pools_and_activations_keep_their_sequence(way: str) -> None:
    x, other = torch.randn(1, T, C), torch.randn(1, S, C)
    with torch.no_grad(), regard.watch(Ways().eval()) as seen:
        seen.modules[""](way, x, key=x)
        seen.modules[""](way, x, key=other)
    assert [call.crosses for call in seen.calls] == [False] * 2 + [True] * 2


def test_embeddings_and_noise_are_known_beginnings() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 2

    class Model(Ways):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Scaled(5, C)

        def forward(self, ids: Tensor) -> None:  # type: ignore[override]
            one_hot = F.one_hot(ids, C).float()
            for key in (torch.randn(1, S, C), one_hot, nn.Embedding(5, C)(ids)):
                super().forward("", self.embedding(ids[:, :T]), key)

    seen = watching(Model().eval())(torch.arange(S)[None])
    assert [call.crosses for call in seen.calls] == [True] * 6
