"""Latent, differential and forgetting attention, indexers and chosen keys, against formulas written out in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.call.biases.combined import Forgetting
from regard.call.masks.basic import causal
from regard.call.normalizations import Unnormalized
from regard.errors import ArgumentError, ShapeError
from regard.nn import DifferentialAttention, ForgetGate, LatentAttention, MultiHeadAttention

T, DIM, HEADS = 7, 24, 4
FUTURE = torch.ones(T, T, dtype=torch.bool).triu(1)


def _softmax(scores: Tensor) -> Tensor:
    return scores.masked_fill(FUTURE, -torch.inf).softmax(-1)


def _decoded(attend: Any, x: Tensor) -> Tensor:
    output, cache = attend.extend(x[:, :3], None)
    outputs = [output]
    for place in range(3, x.shape[1]):
        output, cache = attend.extend(x[:, place : place + 1], cache)
        outputs.append(output)
    return torch.cat(outputs, 1)


def test_latent_attention_in_both_forms() -> None:
    rotary = regard.Rotary(4)
    attend = LatentAttention(DIM, HEADS, latent_dim=8, head_dim=6, value_dim=5, rotary=rotary).double()
    x = torch.randn(2, T, DIM, dtype=torch.float64, requires_grad=True)
    latent, place = attend.latent(x).split((8, 4), -1)
    latent, place = attend.latent_norm(latent), rotary.rotate(place)
    outputs, maps = [], []
    for head, query in enumerate(attend.query(x).split(10, -1)):
        key = torch.cat([latent @ attend.key[head].T, place], -1)
        query = torch.cat([query[..., :6], rotary.rotate(query[..., 6:])], -1)
        maps.append(_softmax(query @ key.mT / 10**0.5))
        outputs.append(maps[-1] @ latent @ attend.value[head].T)
    exact = attend.out(torch.cat(outputs, -1))
    ours, weights = attend(x, mask=causal(), return_weights=True)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(weights.dense(), torch.stack(maps, 1))
    torch.testing.assert_close(_decoded(attend, x), exact)
    wanted = (x, *attend.parameters())
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), wanted), torch.autograd.grad(exact.sum(), wanted))


def test_the_absorbed_form_has_the_weights_of_the_expanded_one() -> None:
    attend = LatentAttention(DIM, HEADS, latent_dim=8, head_dim=6, rotary=regard.Rotary(4)).eval()
    x = torch.randn(1, T, DIM)
    exact = attend(x, mask=causal(), return_weights=True).weights
    _, cache = attend.extend(x[:, :-1], None)
    with regard.watch(attend) as seen:
        attend.extend(x[:, -1:], cache)
    (found,) = seen.maps
    torch.testing.assert_close(found.dense(), exact.dense()[:, :, -1:], rtol=1e-5, atol=1e-6)


def test_differential_attention() -> None:
    rotary = regard.Rotary(3, fraction=0.7)
    attend = DifferentialAttention(DIM, HEADS, layer=2, rotary=rotary).double()
    with torch.no_grad():
        attend.lambdas.add_(torch.randn_like(attend.lambdas))
    x = torch.randn(2, T, DIM, dtype=torch.float64, requires_grad=True)
    start = 0.8 - 0.6 * 2.718281828459045 ** (-0.6)
    q1, k1, q2, k2 = attend.lambdas
    share = (q1 @ k1).exp() - (q2 @ k2).exp() + start
    query, key, value = attend.inputs(x).split(DIM, -1)
    outputs = []
    for head in range(HEADS):
        maps = []
        for part in range(2):
            place = slice((2 * head + part) * 3, (2 * head + part) * 3 + 3)
            q, k = rotary.rotate(query[..., place]), rotary.rotate(key[..., place])
            maps.append(_softmax(q @ k.mT / 3**0.5))
        out = (maps[0] - share * maps[1]) @ value[..., 6 * head : 6 * head + 6]
        normed = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attend.norm.weight
        outputs.append(normed * (1 - start))
    exact = attend.out(torch.cat(outputs, -1))
    ours = attend(x, mask=causal())
    # Lambda is computed in float32.
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(_decoded(attend, x), exact, rtol=1e-5, atol=1e-6)
    wanted = (x, *attend.parameters())
    got, right = (torch.autograd.grad(one.square().sum(), wanted) for one in (ours, exact))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sink": True},
        *({"normalization": n} for n in ("sparsemax", "entmax15", "sigmoid", "softpick", Unnormalized())),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", [None, "tiled", "reference"])
def test_forgetting_attention(options: dict[str, Any], backend: str | None) -> None:
    attend, forget = MultiHeadAttention(DIM, HEADS, **options).double(), ForgetGate(DIM, HEADS).double()
    x = torch.randn(2, T, DIM, dtype=torch.float64)
    logs = nn.functional.logsigmoid(forget.gate(x)).mT
    decay = torch.zeros(2, HEADS, T, T, dtype=torch.float64)
    for query in range(T):
        for key in range(query + 1):
            decay[:, :, query, key] = logs[:, :, key + 1 : query + 1].sum(-1)
    torch.testing.assert_close(forget(x[:, 3:], forget(x[:, :3])).sums, forget(x).sums)
    exact = attend(x, mask=causal(), bias=decay, backend="reference", return_weights=True)
    ours = attend(x, mask=causal(), bias=forget(x), backend=backend, return_weights=True)
    torch.testing.assert_close(ours.output, exact.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.weights.dense(), exact.weights.dense(), rtol=1e-5, atol=1e-6)
    got, right = (torch.autograd.grad(one.output.square().sum(), forget.parameters()) for one in (ours, exact))
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # the kernels that give a bias no gradient
        fused = attend(x, mask=causal(), bias=forget(x), return_weights=True)
        last = attend(x[:, -1:], x, mask=causal(), bias=forget(x), return_weights=True)
    torch.testing.assert_close(fused.weights.dense(), exact.weights.dense(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused.weights.entropy(), exact.weights.entropy(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last.weights.dense(), exact.weights.dense()[..., -1:, :], rtol=1e-5, atol=1e-6)
    if not options:
        plan = regard.explain(*torch.zeros(3, 2, HEADS, T, 4), mask=causal(), bias=Forgetting(forget(x).sums.detach()))
        assert plan.backend == "fused"


def test_a_map_under_a_forgetting_gate_is_saved(tmp_path: Path) -> None:
    q, bias = torch.randn(1, HEADS, T, 4), Forgetting(-torch.rand(1, HEADS, 1, T).cumsum(-1))
    weights = regard.attention(q, q, q, bias=bias, normalization="sigmoid", return_weights=True).weights
    weights.save(tmp_path / "map.safetensors")
    assert torch.equal(regard.AttentionMap.load(tmp_path / "map.safetensors").dense(), weights.dense())


def test_a_forgetting_gate_needs_the_sums_of_all_keys() -> None:
    q = torch.zeros(1, 1, 4, 2)
    with pytest.raises(ShapeError, match="for 4 queries and 4 keys"):
        regard.attention(q, q, q, bias=Forgetting(torch.zeros(1, 1, 1, 3)))
    with pytest.raises(ShapeError, match="for 4 queries and 3 keys"):
        regard.attention(q, q[:, :, 1:], q[:, :, 1:], bias=Forgetting(torch.zeros(1, 1, 1, 3)))


@pytest.mark.parametrize("shape", [(T, 2), (2, T, 2), (1, 1, T, 2), (2, 1, T, 2), (1, HEADS, T, 2), (2, HEADS, T, 2)])
def test_chosen_keys_of_each_shape(shape: tuple[int, ...]) -> None:
    indices = torch.stack([torch.randperm(T)[:2] for _ in range(torch.Size(shape[:-1]).numel())]).view(shape)
    indices[..., 0, 0] = -1
    dense = (indices[..., None] == torch.arange(T)).any(-2)
    dense = dense[:, None] if len(shape) == 3 else dense
    q = torch.randn(2, HEADS, T, 5)
    ours = regard.attention(q, q, q, mask=regard.chosen(indices), return_weights=True)
    exact = regard.attention(q, q, q, mask=dense, return_weights=True)
    assert torch.equal(ours.weights.dense() > 0, exact.weights.dense() > 0)
    torch.testing.assert_close(ours.output, exact.output)
    both = regard.attention(q, q, q, mask=causal() & regard.chosen(indices), return_weights=True).weights
    assert torch.equal(both[1, 2].dense() > 0, dense.expand(2, HEADS, T, T)[1, 2] & ~FUTURE)


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        (torch.zeros(T, 2), "takes whole numbers"),
        (torch.zeros(3, dtype=torch.long), "takes whole numbers"),
        (torch.full((T, 2), T), "from 0 to 6, or -1 for none; got 7 to 7"),
        (torch.zeros(T + 1, 2, dtype=torch.long), r"the chosen keys must be \(7, k\)"),
    ],
)
def test_chosen_keys_that_do_not_fit(indices: Tensor, said: str) -> None:
    q = torch.randn(2, HEADS, T, 5)
    with pytest.raises(ShapeError, match=said):
        regard.attention(q, q, q, mask=regard.chosen(indices))


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="a multiple of twice num_heads"):
        DifferentialAttention(12, 4, layer=0)
    with pytest.raises(ArgumentError, match=r"must turn heads of width 3, got Rotary\(4\)"):
        DifferentialAttention(24, 4, layer=0, rotary=regard.Rotary(4))
    with pytest.raises(ArgumentError, match="latent_dim must be at least 1"):
        LatentAttention(8, 2, latent_dim=0, head_dim=4, rotary=regard.Rotary(2))
