"""A watched call proves its map: one row of its output is rebuilt, and a map that does not give it refuses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard.edits import AddBias, Knockout, ScaleHeads
from regard.errors import NotSeenError, OverwrittenError
from regard.watching.kept import rebuilding
from regard.watching.kept.mask_reading import GivenMask
from regard.watching.readers import kernel_lse, multi_head_calls, sdpa_calls
from regard.watching.readers.flex_calls import BlockLists
from regard.watching.running.module_kinds import ran_fused
from tests.modules import module, parts, watching

# torch warns that FlexAttention runs uncompiled, and its compiler imports what it has deprecated itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning"),
]
B, H, T, S, D = 2, 2, 5, 7, 4
E = H * D

Sdpa = module(lambda m, q, k, v, **options: F.scaled_dot_product_attention(q, k, v, **options))
WrittenOut = module(lambda m, q, k, v, **options: (q @ k.mT / D**0.5).softmax(-1) @ v)

Flex = module(lambda m, q, k, v, **options: flex_attention(q, k, v, **options))
Own = module(lambda m, q, k, v, **options: regard.attention(q, k, v, **options))

Layers = module(
    lambda m, q, k, v: m.first(q, k, v) + m.second(q, k, v, is_causal=True), lambda: {"first": Sdpa(), "second": Sdpa()}
)
"""Several calls, to see that one wrong map loses no other."""


def vectors(keys: int = S, groups: int = H, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, H, T, D), (B, groups, keys, D), (B, groups, keys, D)
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _multi_head(*, training: bool = False, **options: Any) -> Case:
    x = torch.randn(B, T, E)
    return nn.MultiheadAttention(E, H, batch_first=True).train(training), (x, x, x), options


def _encoder_layer(**settings: Any) -> Case:
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, **settings)
    return layer.eval(), (torch.randn(B, T, E),), {"src_mask": torch.ones(T, T, dtype=torch.bool).triu(1)}


def _half(made: Case) -> Case:
    module, given, options = made
    return module.bfloat16(), tuple(x.bfloat16() for x in given), options


def _nested(module: nn.Module, times: int) -> Case:
    x = torch.nested.nested_tensor([torch.randn(1 + n % T, E) for n in range(B)])
    return module.eval(), (x,) * times, {}


def _far(q: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return q - (i - j).abs()


KINDS: dict[str, Callable[[], Case]] = {
    "sdpa": lambda: (Sdpa(), vectors(), {}),
    "causal": lambda: (Sdpa(), vectors(T), {"is_causal": True}),
    "shared keys": lambda: (Sdpa(), vectors(groups=1), {"enable_gqa": True}),
    "an added mask": lambda: (Sdpa(), vectors(), {"attn_mask": torch.randn(B, 1, T, S)}),
    "rows without keys": lambda: (Sdpa(), vectors(), {"attn_mask": torch.zeros(T, S, dtype=torch.bool)}),
    "bfloat16": lambda: (Sdpa(), vectors(dtype=torch.bfloat16), {}),
    "flex": lambda: (Flex(), vectors(), {"score_mod": _far}),
    "written out": lambda: (WrittenOut(), vectors(), {}),
    "sigmoid": lambda: (Own(), vectors(), {"normalization": regard.Sigmoid()}),
    "a sink": lambda: (Own(), vectors(), {"normalization": regard.SoftmaxWithSink(torch.randn(H))}),
    "an own bias": lambda: (Own(), vectors(), {"bias": torch.randn(T, S)}),
    "fused": lambda: _multi_head(need_weights=False),
    "fused under a mask": lambda: _multi_head(attn_mask=torch.ones(T, T, dtype=torch.bool).triu(1)),
    "an encoder layer": lambda: _encoder_layer(),
    "an encoder layer, norm first": lambda: _encoder_layer(norm_first=True, activation="gelu"),
    "an encoder layer, bfloat16": lambda: _half(_encoder_layer(activation=F.gelu)),
    "a nested batch": lambda: _nested(nn.MultiheadAttention(E, H, batch_first=True), 3),
    "a nested batch in an encoder layer": lambda: _nested(nn.TransformerEncoderLayer(E, H, 32, batch_first=True), 1),
    "projected": lambda: _multi_head(training=True),
    "projected, no weights": lambda: _multi_head(training=True, need_weights=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_rebuilds_a_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, given, options = KINDS[kind]()
    found: list[rebuilding.Rebuilt] = []
    real = rebuilding._proof

    def proof(of: Any, rebuilt: rebuilding.Rebuilt, rows: range) -> Any:
        found.append(rebuilt)
        return real(of, rebuilt, rows)

    monkeypatch.setattr(rebuilding, "_proof", proof)
    with torch.no_grad(), regard.watch(model) as seen:
        for _ in range(6):
            model(*given, **options)
    assert len(seen.maps) == len(found) == 6
    shapes = {one.rebuilt.shape[-2] if one.rebuilt.dim() > 3 else one.rebuilt.shape[1] for one in found}
    assert shapes == {1}, "one row, not all"
    tolerance = 2e-2 if "bfloat16" in kind else 1e-5
    assert max(one.error() for one in found) < tolerance
    assert len({float(one.output.sum()) for one in found}) > 1 or kind == "rows without keys", "other rows each time"


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"copy": True}, {"keep": "summary"}], ids=str)
def test_a_map_that_is_not_that_of_its_call_refuses_with_both_elements(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(sdpa_calls, "decided", lambda given: {**kernel_lse.decided(given), "is_causal": False})
    model, given = Layers(), vectors(T)
    with torch.no_grad(), regard.watch(model, **options) as seen:
        for _ in range(4):  # (The last row of a causal call sees all keys.)
            model(*given)
    assert all(one.shape == (B, H, T, T) for one in seen.calls_of("first"))
    with pytest.raises(NotSeenError, match=r"rebuilt wrongly: .* an element -?\d.* give\s+-?\d"):
        seen["second"]
    report = str(seen.report())
    assert "rebuilt wrongly" in report
    assert "first: 4 calls" in report
    assert len(seen) == len(seen.maps) < 8


@pytest.mark.parametrize("kind", [Sdpa, WrittenOut, Own])
@pytest.mark.parametrize("options", [{}, {"verify": True}], ids=str)
def test_values_that_are_not_finite_accuse_no_map(kind: type[nn.Module], options: dict[str, Any]) -> None:
    model, given = kind(), vectors(T)
    given[2][0] = torch.nan  # as after a layer that has rows without keys
    with torch.no_grad(), regard.watch(model, **options) as seen:
        for _ in range(4):
            model(*given)
    assert len(seen.maps) == 4
    assert "rebuilt wrongly" not in str(seen.report())


def test_a_wrong_map_is_seen_beside_values_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_calls, "decided", lambda given: {**kernel_lse.decided(given), "is_causal": False})
    model, given = Layers(), vectors(T)
    given[2][0] = torch.nan
    seen = watching(model, verify=True)(*given)
    with pytest.raises(NotSeenError, match="rebuilt wrongly"):
        seen["second"]


@pytest.mark.parametrize("kind", ["fused under a mask", "an encoder layer", "an encoder layer, norm first"])
def test_a_fused_call_read_under_another_mask_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(multi_head_calls.Projected, "mask", lambda *given: GivenMask())
    model, given, options = KINDS[kind]()
    with torch.no_grad(), regard.watch(model) as seen:
        for _ in range(4):
            model(*given, **options)
    assert "rebuilt wrongly" in str(seen.report())
    assert len(seen.maps) < 4


@pytest.mark.filterwarnings("ignore:Lower right causal bias:UserWarning")
@pytest.mark.parametrize(("kind", "t", "s"), [(causal_lower_right, 3, 6), (causal_upper_left, 3, 6),
                                              (causal_upper_left, 6, 6), (causal_lower_right, 6, 6)])  # fmt: skip
def test_a_causal_bias_is_its_variant(kind: Callable[[int, int], Tensor], t: int, s: int) -> None:
    q, k, v = torch.randn(B, H, t, D), torch.randn(B, H, s, D), torch.randn(B, H, s, D)
    keep = torch.ones(t, s, dtype=torch.bool).tril(s - t if kind is causal_lower_right else 0)
    scores = (q.double() @ k.double().mT / D**0.5).masked_fill(~keep, -torch.inf)
    model, mask = Sdpa(), kind(t, s)
    during: list[Tensor] = []
    with torch.no_grad():
        seen = watching(model)(q, k, v, attn_mask=mask)
        with regard.on_attention(model, lambda name, weights, *rest: during.append(weights.dense())):
            model(q, k, v, attn_mask=mask)
        with regard.edit(model, {"": Knockout(keys=0)}):
            edited = model(q, k, v, attn_mask=mask)
    for found in (seen[""].dense(), during[0]):
        torch.testing.assert_close(found.double(), scores.softmax(-1), atol=1e-6, rtol=0)
    scores[..., 0] = -torch.inf
    torch.testing.assert_close(edited.double(), scores.softmax(-1).nan_to_num() @ v.double(), atol=1e-6, rtol=0)


class Meaning(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return F.scaled_dot_product_attention(*args, **{**(kwargs or {}), "attn_mask": None})
        return super().__torch_function__(func, types, args, kwargs)


class Named(Tensor):
    pass


def test_a_mask_of_an_unknown_class_is_refused_by_name() -> None:
    model, (q, k, v) = Sdpa(), vectors()
    seen = watching(model)(q, k, v, attn_mask=torch.zeros(T, S).as_subclass(Meaning))
    assert "Meaning" in str(seen.report())
    with pytest.raises(NotSeenError, match="may mean something else than its memory holds"):
        seen[""]
    mask = torch.randn(T, S)
    seen = watching(model)(q, k, v, attn_mask=mask.as_subclass(Named))
    expected = (q @ k.mT / D**0.5 + mask).softmax(-1)
    torch.testing.assert_close(seen[""].dense().as_subclass(Tensor), expected)


DROPPED = {
    "upside down": lambda i, j: j < i,
    "nothing": lambda i, j: (j < 0) | (i < 0),
    "a window of 3": lambda i, j: (j > i) | (j <= i - 3),
}


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_where_torch_runs_fused_the_mask_counts_and_elsewhere_the_flag(name: str, context: type[Any]) -> None:
    attend, x = nn.MultiheadAttention(E, H, batch_first=True).eval(), torch.randn(B, T, E)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    drop, is_fused = DROPPED[name](i, j), context is torch.no_grad
    _, expected = attend(x, x, x, attn_mask=drop if is_fused else j > i, average_attn_weights=False)
    with context():
        plain = attend(x, x, x, attn_mask=drop, is_causal=True, need_weights=False)[0]
        with regard.watch(attend) as seen:
            output = attend(x, x, x, attn_mask=drop, is_causal=True, need_weights=False)[0]
        with regard.edit(attend, {"": ScaleHeads(0, 1.0)}):
            edited = attend(x, x, x, attn_mask=drop, is_causal=True, need_weights=False)[0]
        with regard.edit(attend, {"": AddBias(0.0, keys=0)}):
            biased = attend(x, x, x, attn_mask=drop, is_causal=True, need_weights=False)[0]
    assert torch.equal(output, plain)
    torch.testing.assert_close(seen[""].dense(), expected)
    torch.testing.assert_close(edited, plain)
    torch.testing.assert_close(biased, plain)


@pytest.mark.parametrize("leads", ["3 1 3", "1 3 3", "3 3 3", "1 1 3", "21 21 24", "24 21 24", "28 24 22", "28 22 24"])
@pytest.mark.parametrize(("length", "dim"), [(5, 4), (64, 32)])
def test_vectors_of_unlike_batches_and_heads_keep_their_bits(leads: str, length: int, dim: int) -> None:
    q, k, v = (torch.randn(*map(int, lead), length, dim) for lead in leads.split())  # "24": two sequences, four heads
    model, gqa = Sdpa(), "8" in leads
    for options in ({}, {"is_causal": True}, {"attn_mask": causal_upper_left(length, length)}):
        with torch.no_grad():
            plain = model(q, k, v, enable_gqa=gqa, **options)
            with regard.watch(model) as seen:
                assert torch.equal(model(q, k, v, enable_gqa=gqa, **options), plain)
            whole = v.repeat_interleave(plain.shape[-3] // v.shape[-3], -3)
            torch.testing.assert_close(seen[""].dense().reshape(*plain.shape[:-1], length) @ whole, plain)
            if plain.dim() > 3:
                with regard.edit(model, {"": ScaleHeads(0, 0.0)}):
                    torch.testing.assert_close(model(q, k, v, enable_gqa=gqa, **options)[:, 1:], plain[:, 1:])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_step_of_an_optimizer_changes_no_map(fused: bool, training: bool) -> None:
    """The fused optimizers write without a new version."""
    encoder = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True).train(training)
    x = torch.randn(B, T, E)
    _, expected = encoder.self_attn(x, x, x, average_attn_weights=False)
    expected = expected.detach().clone()
    with torch.set_grad_enabled(training), regard.watch(encoder) as seen:
        encoder(x)
    for parameter in encoder.parameters():
        parameter.grad = torch.randn_like(parameter)
    torch.optim.AdamW(encoder.parameters(), lr=0.1, fused=fused).step()
    if training:
        torch.testing.assert_close(seen["self_attn"].dense(), expected)
    else:
        with pytest.raises(OverwrittenError, match="the weights of"):
            seen["self_attn"].dense()
        assert "not read" in str(seen.report())


def test_a_learned_function_of_flex_that_an_optimizer_changed_is_refused() -> None:
    model, given = Flex(), vectors(T)
    bias = model.bias = nn.Parameter(torch.randn(T))
    with regard.watch(model) as seen:
        model(*given, score_mod=lambda s, b, h, i, j: s + bias[j]).square().sum().backward()
    torch.optim.AdamW([bias], lr=1.0).step()
    with pytest.raises(OverwrittenError, match="has changed since the attention call"):
        seen[""].dense()


@pytest.mark.slow
def test_compiled_flex_is_decided_by_its_block_lists() -> None:
    size, block = 256, 128
    q, k, v = (torch.randn(1, 1, size, 16) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, size, size, device="cpu", BLOCK_SIZE=block)
    mask.mask_mod = lambda b, h, i, j: (i >= j) & (j % 2 == 0)  # The full block below the diagonal does not ask it.

    Model = module(
        lambda m, q, k, v: m.attend(q, k, v, block_mask=mask), lambda: {"attend": torch.compile(flex_attention)}
    )

    model = Model()
    with torch.no_grad(), regard.watch(model) as seen:
        output = model(q, k, v)
    torch.testing.assert_close(seen[""].dense() @ v, output, atol=1e-4, rtol=0)


def test_block_lists_are_read_as_the_kernel_visits_them() -> None:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu", BLOCK_SIZE=2)
    lists = BlockLists.of(mask.as_tuple())
    assert lists.kinds[0, 0].tolist() == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]


@pytest.mark.parametrize("layer", [nn.MultiheadAttention(E, H, batch_first=True),
                                   nn.TransformerEncoderLayer(E, H, 32, batch_first=True)])  # fmt: skip
def test_an_offloaded_layer_loses_neither_its_report_nor_another_layer(layer: nn.Module) -> None:
    @parts(lambda: {"offloaded": copy.deepcopy(layer), "other": copy.deepcopy(layer)})
    def Net(self: Any, x: Tensor) -> Tensor:
        for one in (self.other, self.offloaded, self.offloaded):
            x = one(x) if isinstance(layer, nn.TransformerEncoderLayer) else one(x, x, x)[0]
        return x

    net, x = Net().eval(), torch.randn(B, T, E)
    kept, inner = dict(net.offloaded.named_parameters()), net.offloaded.forward

    def put(device: str) -> None:
        for name, tensor in kept.items():
            path, _, own = name.rpartition(".")
            setattr(net.offloaded.get_submodule(path), own, nn.Parameter(tensor.to(device), requires_grad=False))

    def forward(*args: Any, **kwargs: Any) -> Any:
        put("cpu")
        try:
            return inner(*args, **kwargs)
        finally:
            put("meta")

    net.offloaded.forward = forward
    seen = watching(net)(x)
    assert "an offload hook" in str(seen.report())
    assert [one.shape for one in seen.maps] == [(B, H, T, T)]


def test_the_conditions_of_the_fused_path_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each condition alone turns the fused path off; torch's own operator tells whether it ran."""
    ran: list[bool] = []
    real = torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *a: (ran.append(True), real(*a))[1])
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    makes: list[dict[str, Any]] = [{}, {"num_heads": 1}, {"bias": False}, {"add_bias_kv": True},
                                   {"add_zero_attn": True}, {"batch_first": False}, {"kdim": E, "vdim": 4}]  # fmt: skip
    for made in makes:
        settings = {"embed_dim": E, "num_heads": H, "batch_first": True, **made}
        for training in (False, True):
            for masks in ({}, {"attn_mask": causal}, {"attn_mask": causal.float()}):
                for grad in (False, True):
                    module = nn.MultiheadAttention(**settings).train(training)
                    x = torch.randn(T, T, E)
                    value = torch.randn(T, T, 4) if "vdim" in made else x
                    given = {"query": x, "key": x, "value": value, "attn_mask": None, "key_padding_mask": None, **masks}
                    ran.clear()
                    with torch.set_grad_enabled(grad):
                        module(**given)
                        assert ran_fused(module, given) is bool(ran), (made, training, masks, grad)


def test_compiled_flex_runs_with_a_scale_that_varies() -> None:
    """torch's compiler makes a symbol of a number that differs from that of the call before."""
    Model = module(
        lambda m, q, k, v: m.attend(q, k, v), lambda: {"attend": torch.compile(flex_attention, backend="aot_eager")}
    )

    torch._dynamo.reset()
    model = Model()
    with torch.no_grad():
        for dim in (16, 8, 4):
            q, k, v = (torch.randn(1, 2, 6, dim) for _ in range(3))
            expected = model(q, k, v) if dim == 16 else (q @ k.mT / dim**0.5).softmax(-1) @ v
            with regard.watch(model) as seen:
                torch.testing.assert_close(model(q, k, v), expected)
            torch.testing.assert_close(seen[""].dense(), (q @ k.mT / dim**0.5).softmax(-1))
