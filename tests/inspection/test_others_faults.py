"""Faults that were reported to other projects, each against a dense reference in float64."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap
from torch.nn import functional as F

import regard
from regard.functional import Attended
from regard.watching.analysis.rollout import rollout

# transformers calls functions that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def close(found: Tensor, truth: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), truth.double(), atol=atol, rtol=0)


def projected(layer: nn.MultiheadAttention, x: Tensor) -> list[Tensor]:
    """The queries, keys and values (N, H, L, D) of a packed layer, in float64."""
    parts = zip(layer.in_proj_weight.detach().chunk(3), layer.in_proj_bias.detach().chunk(3), strict=True)
    return [F.linear(x.double(), m.double(), b.double()).unflatten(-1, (2, -1)).transpose(1, 2) for m, b in parts]


@pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True:UserWarning", "ignore:The PyTorch API of nested:UserWarning"
)
@pytest.mark.parametrize(("batch_first", "nested", "as_float", "with_grad"), list(product([True, False], repeat=4)))
def test_padding_at_the_end_of_a_whole_batch(batch_first: bool, nested: bool, as_float: bool, with_grad: bool) -> None:
    """Source: pytorch/pytorch#97111, #128209, #86120."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x, pad = torch.randn(3, 6, 8), torch.zeros(3, 6, dtype=torch.bool)
    pad[:, 4:] = pad[1, 2:] = True
    given = torch.zeros(3, 6).masked_fill(pad, -torch.inf) if as_float else pad
    q, k, _ = projected(encoder.layers[0].self_attn, x)
    truth = (q @ k.mT / 2).masked_fill(pad[:, None, None], -torch.inf).softmax(-1)
    laid = x if batch_first else x.transpose(0, 1)
    with torch.set_grad_enabled(with_grad):
        plain = encoder(laid, src_key_padding_mask=given)
        with regard.watch(encoder) as seen:
            assert torch.equal(encoder(laid, src_key_padding_mask=given), plain)
    found = seen["layers.0.self_attn"].dense()
    n, s = found.shape[-2:]
    real = (~pad)[:, None, :n].expand(-1, 2, -1)
    close(found[real], truth[:, :, :n, :s][real])
    assert not [finding for finding in seen.audit() if finding.severity == "error"]


def _penalty(module: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
    z = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(module(z, z, z, **options)[0].square().sum(), z, create_graph=True)
    return torch.autograd.grad(g.square().sum(), z)[0]


def _per_sample(module: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(module, parameters, (one[None],) * 3, options)[0].square().sum()

    return torch.cat([g.flatten() for g in vmap(grad(loss), (None, 0))(dict(module.named_parameters()), x).values()])


QUESTIONS: dict[str, Any] = {
    "gradient penalty": _penalty,
    "gradients of each sample": _per_sample,
    "jacfwd": lambda m, x, options: jacfwd(lambda z: m(z, z, z, **options)[0])(x[:1]),
    "jacrev": lambda m, x, options: jacrev(lambda z: m(z, z, z, **options)[0])(x[:1]),
    "hessian": lambda m, x, options: hessian(lambda z: m(z, z, z, **options)[0].square().sum())(x[:1]),
}


class Attends(nn.MultiheadAttention):
    """torch's module, causal, by `regard.attention`."""

    def forward(self, *given: Any, **options: Any) -> Any:
        x, need_weights = given[0], options["need_weights"]
        parts = zip(self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
        q, k, v = (F.linear(x, m, b).unflatten(-1, (2, -1)).transpose(-3, -2) for m, b in parts)
        attended = regard.attention(q, k, v, mask=regard.causal(), return_weights=need_weights)
        output = attended.output if isinstance(attended, Attended) else attended
        return self.out_proj(output.transpose(-3, -2).flatten(-2)), None


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("question", QUESTIONS)
def test_derivatives_that_the_kernels_of_torch_lack(question: str, need_weights: bool) -> None:
    """Source: pytorch/pytorch#116350, #181177. torch's written-out path has them."""
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    ours = Attends(8, 2, batch_first=True, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x, future = torch.randn(3, 4, 8, dtype=torch.float64), torch.ones(4, 4, dtype=torch.bool).triu(1)
    wanted = QUESTIONS[question](theirs, x, {"attn_mask": future, "need_weights": True})
    close(QUESTIONS[question](ours, x, {"attn_mask": future, "need_weights": need_weights}), wanted, 1e-9)


def test_the_second_derivative_of_a_call() -> None:
    z = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda a: regard.attention(a, a, a, mask=regard.causal()), (z,), fast_mode=True)


@pytest.mark.parametrize("need_weights", [True, False])
def test_weights_before_dropout_sum_to_one(need_weights: bool) -> None:
    """Source: pytorch/pytorch#42929, facebookresearch/fairseq#351."""
    module, x = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).train(), torch.randn(2, 6, 8)
    with regard.watch(module) as seen:
        module(x, x, x, need_weights=need_weights)
    close(seen[""].dense().sum(-1), torch.ones(2, 2, 6))


def test_written_out_dropout_is_seen_and_so_is_the_softmax_before_it() -> None:
    class Written(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.p = F.dropout((q @ k.mT).softmax(-1), 0.5, self.training)
            return self.p @ v

    model = Written()
    with regard.watch(model) as seen:
        model(*torch.randn(3, 2, 2, 6, 4))
    assert torch.equal(seen[""].dense(), model.p)
    close(seen.softmax("").dense().sum(-1), torch.ones(2, 2, 6))


def test_rows_of_false_and_an_added_mask_of_0_and_1() -> None:
    """Source: pytorch/pytorch#103963, #103749."""
    q, k, v = (torch.rand(1, 1, 8, 8) for _ in range(3))
    keep = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    keep[..., :4, :4] = True
    scores = q.double() @ k.double().mT / 8**0.5

    class Model(nn.Module):
        def forward(self, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    truths = ((keep, scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num()),
              (keep.float(), (scores + keep.double()).softmax(-1)))  # fmt: skip
    for mask, truth in truths:
        with torch.no_grad(), regard.watch(Model()) as seen:
            seen.modules[""](mask)
        close(seen[""].dense(), truth, 1e-6)
        assert any(f.reason == "no key" for f in seen.audit()) == (mask.dtype == torch.bool)
    output, weights = regard.attention(q.requires_grad_(), k, v, mask=keep, return_weights=True)
    assert not output[..., 4:, :].any()
    assert not weights.dense()[..., 4:, :].any()
    output.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 12, 33, 71])
def test_slopes_of_any_number_of_heads(heads: int) -> None:
    """Source: ml-explore/mlx#343, baichuan-inc/Baichuan-13B#172."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    wanted = bloom.build_alibi_tensor(torch.ones(1, 9), heads, torch.float32).view(heads, 9).double().softmax(-1)
    zeros = torch.zeros(1, heads, 9, 8, dtype=torch.float64)
    close(regard.map_of(zeros, zeros, bias=regard.ALiBi(heads), mask=regard.causal())[..., 8, :][0], wanted, 1e-6)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (32, 256), (8, 20), (64, 512), (16, 100), (128, 256)])
def test_buckets_of_far_positions(buckets: int, far: int, both: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    t, table = 2100, torch.randn(buckets, 2)
    zeros = torch.zeros(1, 2, t, 8)
    which = t5.T5Attention._relative_position_bucket(
        torch.arange(-t, t + 1), bidirectional=both, num_buckets=buckets, max_distance=far
    )
    found = regard.map_of(zeros, zeros, bias=regard.T5Bias(table, bidirectional=both, max_distance=far))
    for row, part in ((0, which[t : 2 * t]), (t - 1, which[1 : t + 1])):
        close(found[..., row, :][0, 0], table[part, 0].double().softmax(-1), 1e-7)


@pytest.mark.parametrize("fused", [True, False])
def test_rollout_of_a_vit_with_two_tokens(fused: bool) -> None:
    """Source: jacobgil/vit-explain#23, pytorch/pytorch#102374: a class token and a distillation token."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.norm, self.qkv, self.proj = 4, nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            self.truth = (q.double() @ k.double().mT / 2).softmax(-1).detach()
            mixed = F.scaled_dot_product_attention(q, k, v) if fused else (q @ k.mT / 2).softmax(-1) @ v
            return x + self.proj(mixed.transpose(1, 2).flatten(2))

    vit, x = nn.Sequential(*[Block() for _ in range(3)]).eval(), torch.randn(2, 51, 16)
    with torch.no_grad(), regard.watch(vit) as seen:
        vit(x)
    half = 0.5 * torch.eye(51, dtype=torch.float64)
    dense = 2 * half
    for block in vit:
        assert isinstance(block, Block)
        dense = (0.5 * block.truth.mean(1) + half) @ dense
    found = rollout(seen.maps, [0, 1])
    close(found.reshape(2, 2, 51), dense[:, :2], 1e-6)
