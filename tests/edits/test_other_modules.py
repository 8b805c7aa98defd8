"""Edits of torch's own layers and of ours; and refusals of modules that cannot be edited."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard.edits import AddBias, Edit, Knockout, ReplaceWeights, Reweight, ScaleHeads
from regard.errors import ArgumentError
from tests.edits import eager
from tests.modules import module, parts

N, T, S, E, H = 2, 6, 8, 12, 4
CHAIN: list[Edit] = [
    Reweight([1, 4], 7.0, heads=[0, 2], queries=slice(2, None)),
    Knockout(keys=2, heads=[0]),
    AddBias(torch.tensor([1.5, -2.0]), keys=[0, 3], batch=1),
    ScaleHeads([1], 0.5, queries=slice(1, 5)),
]


def vectors(length: int, seed: int = 1) -> Tensor:
    return 2 * torch.randn(N, length, E, generator=torch.Generator().manual_seed(seed)).double()


def made(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return build().double().eval()


def written_out(
    layer: nn.MultiheadAttention, q: Tensor, k: Tensor, edits: list[Edit], mask: Tensor | None = None
) -> Tensor:
    """nn.MultiheadAttention, batch first, with the edits in it; a bool mask says who may attend."""
    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    heads = [
        F.linear(x, w, b).unflatten(-1, (H, -1)).transpose(1, 2)
        for x, w, b in zip((q, k, k), weights, biases, strict=True)
    ]
    return layer.out_proj(eager.attend(heads[0], heads[1], heads[2], edits, mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multi_head_attention(need_weights: bool, grad: bool, batch_first: bool) -> None:
    layer = made(lambda: nn.MultiheadAttention(E, H, batch_first=batch_first))
    q, k = vectors(T), vectors(S, 2)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1, -2:] = True
    given = (q, k, k) if batch_first else tuple(t.transpose(0, 1) for t in (q, k, k))
    with torch.set_grad_enabled(grad), regard.edit(layer, {"": CHAIN}), regard.watch(layer, verify=True) as seen:
        output, weights = layer(*given, key_padding_mask=padding, need_weights=need_weights)
    expected = written_out(layer, q, k, CHAIN, ~padding[:, None, None])
    torch.testing.assert_close(output if batch_first else output.transpose(0, 1), expected, atol=1e-9, rtol=1e-9)
    assert (weights is not None) == need_weights
    if need_weights:
        torch.testing.assert_close(weights, seen["", 0].dense().mean(1))
    assert seen.calls[0].error < 1e-9


def test_multi_head_attention_without_a_batch_and_with_heads_returned() -> None:
    layer = made(lambda: nn.MultiheadAttention(E, H, batch_first=True))
    q = vectors(T)
    edits = [edit for edit in CHAIN if getattr(edit, "batch", None) is None]
    with regard.edit(layer, {"": edits}):
        one, weights = layer(q[0], q[0], q[0], average_attn_weights=False)
        both, _ = layer(q, q, q, need_weights=False)
    torch.testing.assert_close(one, both[0])
    assert weights.shape == (H, T, T)
    assert float(weights[0, :, 2].detach().max()) == 0.0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_an_encoder_whose_layers_would_run_fused(padded: bool, grad: bool) -> None:
    """In eval mode torch runs such a layer as one operator, which shows no weights: an edited layer runs unfused."""
    encoder = made(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True), 2))
    x, padding = vectors(T), None
    if padded:
        padding = torch.zeros(N, T, dtype=torch.bool)
        padding[1, -2:] = True
    with torch.set_grad_enabled(grad):
        plain = encoder(x, src_key_padding_mask=padding)
        with regard.edit(encoder, {"layers.0.self_attn": CHAIN}) as run:
            output = encoder(x, src_key_padding_mask=padding)
        again = encoder(x, src_key_padding_mask=padding)
    layer = encoder.layers[0]
    mask = None if padding is None else ~padding[:, None, None]
    hidden = layer.norm1(x + written_out(layer.self_attn, x, x, CHAIN, mask))
    hidden = layer.norm2(hidden + layer.linear2(layer.linear1(hidden).relu()))
    expected = encoder.layers[1](hidden, src_key_padding_mask=padding)
    real = torch.ones(N, T, dtype=torch.bool) if padding is None else ~padding
    torch.testing.assert_close(output[real], expected[real], atol=1e-9, rtol=1e-9)
    assert torch.equal(plain, again)
    assert list(run.report().plans) == ["layers.0.self_attn"]


def test_a_learned_attention_mask_of_a_layer_keeps_its_gradient() -> None:
    layer, q = made(lambda: nn.MultiheadAttention(E, H, batch_first=True)), vectors(T)
    added = torch.randn(T, T, generator=torch.Generator().manual_seed(5)).double().requires_grad_()
    edits: list[Edit] = [Reweight(1, 5.0, heads=[0])]
    with regard.edit(layer, {"": edits}):
        output, _ = layer(q, q, q, attn_mask=added, need_weights=False)
    expected = written_out(layer, q, q, edits, added)
    torch.testing.assert_close(output, expected)
    ours, theirs = (torch.autograd.grad(one.square().sum(), added)[0] for one in (output, expected))
    torch.testing.assert_close(ours, theirs)


def test_our_own_modules_and_other_normalizations() -> None:
    layer = made(lambda: regard.nn.MultiHeadAttention(E, H))
    x = vectors(T)
    edits: list[Edit] = [Knockout(keys=2, heads=[0]), ScaleHeads(1, 0.5), Reweight(0, 4.0, queries=[2])]
    with regard.edit(layer, {"": edits}) as run, regard.watch(layer, verify=True) as seen:
        layer(x)
    assert "cut key 2, head 0" in str(run.report())
    assert float(seen["", 0].dense()[:, 0, :, 2].max()) == 0.0

    Sparse = module(lambda m, x: regard.attention(x, x, x, normalization=regard.Sparsemax()))

    model, x = Sparse(), x[:, None]
    with regard.edit(model, {"": Knockout(keys=[0, 1])}), regard.watch(model) as seen:
        output = model(x)
    expected = regard.attention(x, x[..., 2:, :], x[..., 2:, :], normalization=regard.Sparsemax())
    torch.testing.assert_close(output, expected)
    run = regard.edit(model, {"": Reweight(0, 2.0)})
    with pytest.raises(ArgumentError, match="made by sparsemax, and only a softmax turns a factor"), run:
        model(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_and_in_half_precision(dtype: torch.dtype) -> None:
    Block = module(lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True))

    x = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    edits: list[Edit] = [Reweight([0, 3], 6.0), ScaleHeads(1, 0.5), ReplaceWeights(torch.eye(9), heads=0, queries=8)]
    expected = eager.attend(*(x.to(dtype).float(),) * 3, edits, is_causal=True)
    with regard.edit(Block(), {"": edits}) as run:
        half = run.modules[""](x.to(dtype))
        with torch.autocast("cpu", dtype):
            cast = run.modules[""](x)
    assert half.dtype == cast.dtype == dtype
    torch.testing.assert_close(half.float(), expected, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(cast, half)


@parts(lambda: {"project": nn.Linear(E, 3 * E)})
def WrittenOut(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.project(x).chunk(3, -1)
    return (q @ k.mT).softmax(-1) @ v


@parts(lambda: {"project": nn.Linear(E, 3 * E)})
def Formula(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.project(x).chunk(3, -1)
    return q.relu() @ (k.relu().mT @ v)


def test_attention_that_is_written_out_is_refused_when_its_module_ends() -> None:
    model = nn.Sequential(made(WrittenOut), made(WrittenOut)).double()
    ran: list[nn.Module] = []
    model[1].register_forward_pre_hook(lambda module, args: ran.append(module))
    plain = model(vectors(T))
    ran.clear()
    match = "'0' attends by the model's own softmax, T x S weights kept, which can be watched, but not edited"
    with pytest.raises(ArgumentError, match=match), regard.edit(model, {"0": Reweight(0, 2.0)}):
        model(vectors(T))
    assert not ran, "the model went on unedited"
    assert torch.equal(model(vectors(T)), plain)
    # Of modules that are not named nothing is asked.
    both = nn.Sequential(made(WrittenOut), made(lambda: nn.TransformerEncoderLayer(E, H, 16, batch_first=True)))
    with regard.edit(both, {"1": Reweight(0, 2.0)}):
        both(vectors(T))


def test_linear_attention_is_refused_at_the_end_and_named_beside_what_was_edited() -> None:
    model = nn.Sequential(made(Formula))
    with (
        pytest.raises(ArgumentError, match="'0' was not reached by any call: '0' ran, but no attention was seen in it"),
        regard.edit(model, {"0": Knockout(keys=0)}),
    ):
        model(vectors(T))
    model.append(made(lambda: nn.TransformerEncoderLayer(E, H, 16, batch_first=True)))
    with regard.edit(model, {"*": Knockout(keys=0)}) as run:
        model(vectors(T))
    assert "not edited:\n  0: no attention was seen in it that could be edited" in str(run.report())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    Flex = module(lambda m, x: flex_attention(x, x, x))

    x = torch.randn(1, 1, 4, 8)
    match, model = "attends by flex_attention, which can be watched, but not edited", Flex()
    with pytest.raises(ArgumentError, match=match), torch.no_grad(), regard.edit(model, {"": Knockout(keys=0)}):
        model(x)


def test_operators_of_others_are_refused() -> None:
    @torch.library.custom_op("edits_of_others::flash", mutates_args=())
    def flash(q: Tensor) -> Tensor:
        return q.clone()

    Foreign = module(lambda m, x: flash(x))

    match = "was not reached by any call: torch.ops.edits_of_others.flash, an operator that cannot be looked into"
    with pytest.raises(ArgumentError, match=match), regard.edit(Foreign(), {"": Knockout(keys=0)}) as run:
        run.modules[""](torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_exported_and_scripted_models_are_refused_at_the_door() -> None:
    layer = made(WrittenOut)
    exported = torch.export.export(layer, (vectors(T),))
    for program in (exported.module(), torch.export.unflatten(exported)):
        with pytest.raises(ArgumentError, match="is a graph"):
            regard.edit(program, {"": Knockout(keys=0)})
        inner = next(name for name, _ in program.named_modules() if name)
        with pytest.raises(ArgumentError, match="is a graph"):
            regard.edit(program, {inner: Knockout(keys=0)})
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="'0' is TorchScript"):
        regard.edit(nn.Sequential(scripted), {"0": Knockout(keys=0)})
    with pytest.raises(ArgumentError, match=r"edit\(\) takes a torch.nn.Module, got int"):
        regard.edit(3, {})  # type: ignore[arg-type]


def test_guards_of_torch_func_are_refused() -> None:
    layer = made(lambda: nn.MultiheadAttention(E, H, batch_first=True))
    match = "cannot be edited inside torch.func transforms"
    with pytest.raises(ArgumentError, match=match), regard.edit(layer, {"": Knockout(keys=0)}):
        torch.func.vmap(lambda x: layer(x, x, x, need_weights=False)[0])(vectors(T)[:, None])
