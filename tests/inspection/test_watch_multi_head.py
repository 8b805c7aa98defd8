"""nn.MultiheadAttention, the layers made of it with their fused paths, and our own models."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.errors import OverwrittenError
from regard.functional import Attended
from regard.models import Transformer, TransformerConfig
from tests.inspection.test_watch import close, watched
from tests.modules import module, parts, watching

# torch says of its own fast path that nested tensors are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")

B, T, S, E, H = 2, 7, 9, 16, 4
PAD = torch.arange(T) >= torch.tensor([7, 4])[:, None]


def test_dropout_and_autocast() -> None:
    module, x = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True), torch.randn(B, T, E)
    seen = watched(module, x, x, x, context=torch.enable_grad)
    close(seen[""].dense(), module.eval()(x, x, x, average_attn_weights=False)[1].detach())
    assert seen.calls[0].error == "dropout"
    with torch.autocast("cpu", torch.bfloat16):
        seen = watched(module, x, x, x, context=torch.enable_grad)
    source: Any = seen[""].source
    assert source.call.query.dtype == torch.bfloat16
    assert seen.calls[0].error < 2e-2


def test_the_function_itself() -> None:
    @parts(lambda: {name: nn.Linear(E, E) for name in ("q", "k", "v", "out")})
    def Pool(self: Any, x: Tensor, static_k: Tensor | None = None) -> Any:
        """As CLIP's attention pooling calls it."""
        return F.multi_head_attention_forward(
            x[:1], x, x, E, H, None, torch.cat([self.q.bias, self.k.bias, self.v.bias]), None, None, False, 0.0,
            self.out.weight, self.out.bias, training=self.training, use_separate_proj_weight=True,
            q_proj_weight=self.q.weight, k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
            static_k=static_k, static_v=static_k, average_attn_weights=False,
        )  # fmt: skip

    x = torch.randn(T, B, E)
    for static in (None, torch.randn(B * H, S, E // H)):
        seen = watched(model := Pool(), x, static_k=static, how={"verify": static is None})
        close(seen[""].dense(), model(x, static_k=static)[1].detach())
        assert seen.calls[0].how == "F.multi_head_attention_forward"


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_map_keeps_the_projected_heads_and_not_the_weights_of_the_layer(need_weights: bool) -> None:
    module, x = nn.MultiheadAttention(E, H), torch.randn(T, B, E)
    _, expected = module(x, x, x, average_attn_weights=False)
    with regard.watch(module) as seen:
        module(x, x, x, need_weights=need_weights)[0].sum().backward()
        with torch.no_grad():
            module.in_proj_weight.sub_(0.1)
    close(seen[""].dense(), expected.detach())


def test_weights_of_queries_and_keys_are_saved_once() -> None:
    module, x = nn.MultiheadAttention(E, H, batch_first=True).eval(), torch.randn(B, T, E)
    with regard.watch(module) as seen, torch.no_grad():
        module(x, x, x)
    source: Any = seen[""].source
    assert [tuple(one.shape) for one in source.factors.tensors()] == [(B, T, E), (3 * E, E), (3 * E,)]
    module.in_proj_bias.data[E] += 1.0  # of a key
    for read in (lambda: seen[""].top_keys(2), lambda: seen[""].entropy(), lambda: seen[""][..., 0, :]):
        with pytest.raises(OverwrittenError, match="the weights of"):
            read()


def test_copies_of_weights_that_an_optimizer_changes() -> None:
    module, x = nn.MultiheadAttention(E, H, batch_first=True).eval(), torch.randn(B, T, E)
    with regard.watch(module, copy=True) as seen:
        _, expected = module(x, x, x, average_attn_weights=False)
        with torch.no_grad():
            module.in_proj_weight.sub_(0.1)
            x.zero_()
    close(seen[""].dense(), expected.detach())
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, norm_first=True).eval()
    x = torch.randn(B, T, E)
    with torch.no_grad(), regard.watch(layer, copy=True) as seen:
        layer(x)
        y = layer.norm1(x)
        expected = layer.self_attn(y, y, y, average_attn_weights=False)[1]
        for parameter in layer.parameters():
            parameter.mul_(0.5)
    close(seen["self_attn", 0].dense(), expected)


def encoder(**settings: Any) -> nn.TransformerEncoder:
    nested = not settings.get("norm_first", False)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


def fused_operators(model: nn.Module, *inputs: Tensor, **settings: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(*inputs, **settings)
    names = ("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention")
    return sorted((event.key for event in profile.key_averages() if event.key in names), reverse=True)


def test_fused_layers_stay_fused() -> None:
    model, x = encoder().eval(), torch.randn(B, T, E)
    with torch.no_grad():
        assert fused_operators(model, x)[0] == "aten::_transformer_encoder_layer_fwd"
        with regard.watch(model) as seen:
            assert fused_operators(model, x)[0] == "aten::_transformer_encoder_layer_fwd"
            assert fused_operators(model, x, src_key_padding_mask=PAD)[0] == "aten::_transformer_encoder_layer_fwd"
        assert {call.how for call in seen.calls} == {"nn.TransformerEncoderLayer, fused"}
        alone = model.layers[0].self_attn
        with regard.watch(alone):
            assert fused_operators(alone, x, x, x) == ["aten::_native_multi_head_attention"]


def test_a_batch_without_sequences_or_tokens_crashes_nothing() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True).eval()
    for seen in (watched(layer, x := torch.randn(0, T, E)), watching(layer)(x)):
        assert seen["self_attn", 0].shape == (0, H, T, T)
    ((_, why),) = watching(layer)(torch.randn(B, 0, E)).report().missed
    assert why == "ShapeError: lengths must be at least 1, got 0 queries and 0 keys"


def test_a_layer_of_ones_own_between_torchs() -> None:
    class Mine(nn.TransformerEncoderLayer):
        def forward(
            self, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
        ) -> Tensor:
            return F.scaled_dot_product_attention(src, src, src)

    model = encoder().eval()
    model.layers[1] = Mine(E, H, 32, batch_first=True).eval()
    seen = watched(model, torch.randn(B, T, E))
    assert list(seen) == [("layers.0.self_attn", 0), ("layers.1", 0)]


@pytest.mark.parametrize("raises", [False, True])
def test_what_follows_a_fused_layer_is_seen(raises: bool) -> None:
    @parts(lambda: {"layer": nn.TransformerEncoderLayer(E, H, 32, batch_first=True)})
    def After(self: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(AssertionError, RuntimeError):
            x = self.layer(x[..., :3] if raises else x)
        return F.scaled_dot_product_attention(x, x, x)

    seen = watched(After().eval(), torch.randn(B, T, E))
    assert list(seen) == ([] if raises else [("layer.self_attn", 0)]) + [("", 0)]


@pytest.mark.parametrize("backend", ["fused", "tiled", "reference"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_our_attention_on_every_backend(backend: str, context: type[Any]) -> None:
    mask = regard.window(3) & regard.lengths(torch.tensor([600, 5]))

    Ours = module(lambda m, q, k, v, **settings: regard.attention(q, k, v, mask=mask, backend=backend, **settings))

    q, k, v = torch.randn(B, 4, 600, 8), torch.randn(B, 2, 600, 8), torch.randn(B, 2, 600, 8)
    seen = watched(Ours(), q, k, v, context=context)
    assert torch.equal(seen[""][0, 1].dense(), Ours()(q, k, v, return_weights=True).weights[0, 1].dense())
    assert len(seen) == 1  # one call, however many blocks the kernel ran in
    assert seen.calls[0].error < 2e-6


def test_scores_and_normalizations_of_ours() -> None:
    class Ours(nn.Module):
        def forward(self, x: Tensor) -> Attended:
            sink = regard.SoftmaxWithSink(torch.zeros(3))
            x = regard.attention(x, x, x, normalization=sink, score=regard.Cosine(3.0), dropout=0.1)
            return regard.attention(x, x, x, normalization=regard.Sparsemax(), return_weights=True)

    x = torch.randn(B, 3, T, 8)
    torch.manual_seed(2)
    plain = Ours()(x)
    torch.manual_seed(2)
    with regard.watch(model := Ours(), verify=True) as seen:
        output, weights = model(x)
    assert torch.equal(output, plain.output)
    assert torch.equal(seen["", 1].dense(), weights.dense())
    assert seen.calls[0].error == "dropout"
    assert seen.calls[1].error < 1e-6
    assert (seen["", 0].dense().sum(-1) < 1).all()


def transformer() -> Transformer:
    config = TransformerConfig(
        dim=12, num_heads=3, encoder_layers=2, decoder_layers=2, feed_forward_dim=19, dropout=0.0
    )
    return Transformer(config, source_vocab_size=13, target_vocab_size=17).eval()


def test_our_transformer() -> None:
    model = transformer()
    source, lengths, target = torch.randint(1, 13, (3, 7)), torch.tensor([7, 4, 1]), torch.randint(1, 17, (3, 5))
    seen = watched(model, source, lengths, target)
    told = model.attend(source, lengths, target)
    assert len(seen) == 6
    for found, weights in zip(seen.maps, told.values(), strict=True):
        assert torch.equal(found.dense(), weights.dense())
    cross = [name for name, _ in seen if "cross" in name]
    assert [tuple(seen[name].shape) for name in cross] == [(3, 3, 5, 7)] * 2
    assert [call.name for call in seen.calls if call.crosses] == cross
    assert all(call.error < 1e-6 for call in seen.calls)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, *inputs: Any, **settings: Any) -> Any:
        (x,) = inputs
        return super().forward(x, x, x, **settings)[0]


class OwnBlock(nn.TransformerEncoderLayer):
    """Attends in a method of its own, which torch passes over where it runs the layer fused."""

    def _sa_block(self, x: Tensor, *masks: Any, is_causal: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(
    "make", [lambda: SelfAttention(E, H, batch_first=True), lambda: OwnBlock(E, H, 32, 0.0, batch_first=True)]
)
def test_subclasses_keep_their_bits_and_are_never_mistaken(make: Callable[..., Any], context: type[Any]) -> None:
    model, x = make().eval(), torch.randn(B, T, E)
    with context():
        before = model(x)
        with regard.watch(model) as seen:
            assert torch.equal(model(x), before)
    if context is torch.no_grad:
        assert len(seen) == 0
        assert seen.report().missed[0][1].startswith("torch may have run it fused")
        return
    expected = F.softmax(x @ x.mT * E**-0.5, -1)
    if isinstance(model, SelfAttention):
        expected = nn.MultiheadAttention.forward(model, x, x, x, average_attn_weights=False)[1].detach()
    close(seen[""].dense(), expected)


@pytest.mark.filterwarnings("ignore:.*script:DeprecationWarning")  # from torch 2.10 on
def test_torchscript_and_transforms_are_reported() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(B, T, E)
    model = nn.Sequential(torch.jit.script(Plain()))
    seen = watching(model)(x)
    assert ("0", "TorchScript, whose calls cannot be observed") in seen.report().missed
    plain = Plain()
    with regard.watch(plain) as seen:
        out = torch.func.vmap(plain)(x)
    assert torch.equal(out, torch.func.vmap(plain)(x))
    assert "torch.func" in str(seen.report())
