"""Textbook examples and strangers' attention: the numbers are theirs, or their published formula written out.

labml-nn 0.5.1 and d2l 1.0.3 are not installed for the tests. d2l's module imports torchvision, IPython, pandas and
requests at the top; labml-nn's package requires torchtext and fairscale, which hold torch back. Their formulas stand
below as their sources have them, and were compared with those sources once, by running them: d2l's to the bit,
labml-nn's to 1e-7.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import regard
import regard.nn


def test_the_textbooks_context_vector_of_the_second_word() -> None:
    """A sentence of eight words, an embedding of 10 x 16 and three projections of 16 x 16."""
    sentence = torch.tensor([0, 7, 1, 2, 5, 6, 4, 3])
    torch.manual_seed(123)
    embedded = nn.Embedding(10, 16)(sentence).detach()
    torch.manual_seed(123)
    w_query, w_key, w_value = (torch.rand(16, 16) for _ in range(3))
    query, keys, values = w_query @ embedded[1], embedded @ w_key.T, embedded @ w_value.T
    omega = [sum(query[d] * key[d] for d in range(16)) / math.sqrt(16) for key in keys]
    total = sum(math.exp(score) for score in omega)
    alpha = [math.exp(score) / total for score in omega]
    context = sum(weight * value for weight, value in zip(alpha, values, strict=True))

    projected = (embedded @ weight.T for weight in (w_query, w_key, w_value))
    output, weights = regard.attention(*projected, return_weights=True)
    torch.testing.assert_close(output[1], context, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights[1], torch.tensor(alpha), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["fused", "tiled", "reference"])
def test_a_padded_batch_of_lengths_2_and_4(backend: str) -> None:
    """No weight at all beyond each length; what stands in the rows of padding is exactly zero."""
    lengths = torch.tensor([2, 4])
    x = torch.randn(2, 4, 8)
    own = torch.where(torch.arange(4) < lengths[:, None], lengths[:, None], 0)
    output, weights = regard.attention(
        x, x, x, mask=regard.lengths(own, per_query=True), backend=backend, return_weights=True
    )
    dense = weights.dense()
    assert (dense[0, :, 2:] == 0).all()
    assert (dense[0, 2:] == 0).all()
    assert (output[0, 2:] == 0).all()
    assert (dense[0, :2, :2] > 0).all()
    assert (dense[1] > 0).all()
    torch.testing.assert_close(dense.sum(-1), (own > 0).float())


# -- d2l -----------------------------------------------------------------------------------------------


def d2l_masked_softmax(scores: Tensor, valid_lens: Tensor | None) -> Tensor:
    """d2l 1.0.3, `masked_softmax`: what is beyond a length is set to -1e6. On a copy: theirs writes to its input."""
    if valid_lens is None:
        return torch.softmax(scores, dim=-1)
    rows, keys = scores.shape[1:]
    valid_lens = torch.repeat_interleave(valid_lens, rows) if valid_lens.dim() == 1 else valid_lens.reshape(-1)
    beyond = torch.arange(keys, dtype=torch.float32)[None, :] >= valid_lens[:, None]
    return torch.softmax(scores.reshape(-1, keys).masked_fill(beyond, -1e6).reshape(scores.shape), dim=-1)


@pytest.mark.parametrize(
    "valid_lens", [None, torch.tensor([2, 3]), torch.tensor([[1, 3], [2, 4]])], ids=["none", "1-D", "2-D"]
)
def test_valid_lens_are_d2ls(valid_lens: Tensor | None) -> None:
    query, key, value = torch.randn(2, 2, 4), torch.randn(2, 4, 4), torch.randn(2, 4, 5)
    expected = d2l_masked_softmax(query @ key.mT / 2, valid_lens)
    mask = None if valid_lens is None else regard.lengths(valid_lens)
    output, weights = regard.attention(query, key, value, mask=mask, return_weights=True)
    torch.testing.assert_close(weights.dense(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(output, expected @ value, rtol=0, atol=5e-6)


def test_additive_attention_is_d2ls() -> None:
    """d2l 1.0.3, `AdditiveAttention`: w_v^T tanh(W_q q + W_k k), its two weights without biases."""
    query, key, value = torch.randn(2, 3, 5), torch.randn(2, 6, 4), torch.randn(2, 6, 7)
    valid_lens = torch.tensor([2, 6])
    attend = regard.nn.AdditiveAttention(query_dim=5, key_dim=4, hidden_dim=8)
    weights = dict(attend.named_parameters())
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    w_q, w_k, w_v = (next(weights[n] for n, s in shapes.items() if s == shape) for shape in ((8, 5), (8, 4), (8,)))
    features = torch.tanh((query @ w_q.T).unsqueeze(2) + (key @ w_k.T).unsqueeze(1))
    expected = torch.bmm(d2l_masked_softmax(features @ w_v, valid_lens), value)
    torch.testing.assert_close(attend(query, key, value, mask=regard.lengths(valid_lens)), expected, rtol=0, atol=5e-6)


# -- labml-nn ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_masked", [False, True])
def test_time_first_attention_is_labmls(is_masked: bool) -> None:
    """labml-nn 0.5.1, `MultiHeadAttention` on (T, B, d): scores 'ibhd,jbhd->ijbh', softmax over j, mask 1 = keep."""
    heads, dim = 2, 8
    attend = regard.nn.MultiHeadAttention(dim, heads)
    x = torch.randn(5, 3, dim)
    weight, bias = attend.in_weights[0], attend.in_bias

    def project(part: int) -> Tensor:
        rows = slice(part * dim, (part + 1) * dim)
        return (x @ weight[rows].T + bias[rows]).view(5, 3, heads, dim // heads)

    query, key, value = (project(part) for part in range(3))
    scores = torch.einsum("ibhd,jbhd->ijbh", query, key) * (dim // heads) ** -0.5
    if is_masked:
        mask = torch.tril(torch.ones(5, 5))[:, :, None, None]
        scores = scores.masked_fill(mask == 0, float("-inf"))
    gathered = torch.einsum("ijbh,jbhd->ibhd", torch.softmax(scores, dim=1), value)
    expected = attend.out(gathered.reshape(5, 3, -1))

    # The line of docs/coming-from.md.
    ours = attend(x.transpose(0, 1), mask=regard.causal() if is_masked else None).transpose(0, 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-6)


# -- Hugging Face --------------------------------------------------------------------------------------


def vectors(heads: int = 4, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, heads, 5, 8), torch.randn(2, groups, 5, 8), torch.randn(2, groups, 5, 8)


CAUSAL = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)[None, None]


@pytest.mark.parametrize("cap", [2.0, 50.0])
def test_the_soft_cap_is_gemma_2s(cap: float) -> None:
    modeling = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    query, key, value = vectors()
    module = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=8)
    output, weights = modeling.eager_attention_forward(module, 4 * query, key, value, CAUSAL, scaling=0.3, softcap=cap)
    score = regard.SoftCapped(regard.ScaledDot(0.3), cap)
    ours = regard.attention(4 * query, key, value, score=score, mask=regard.causal(), return_weights=True)
    torch.testing.assert_close(ours.weights.dense(), weights, rtol=0, atol=5e-6)
    torch.testing.assert_close(ours.output, output.transpose(1, 2), rtol=0, atol=5e-6)


def test_the_sinks_are_gpt_osss() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    query, key, value = vectors()
    sinks = torch.randn(4, requires_grad=True)
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    output, weights = modeling.eager_attention_forward(module, query, key, value, CAUSAL, scaling=8**-0.5)
    ours = regard.attention(
        query, key, value, normalization=regard.SoftmaxWithSink(sinks), mask=regard.causal(), return_weights=True
    )
    torch.testing.assert_close(ours.weights.dense(), weights, rtol=0, atol=5e-6)
    torch.testing.assert_close(ours.output, output.transpose(1, 2), rtol=0, atol=5e-6)
    (theirs,) = torch.autograd.grad(output.square().sum(), sinks)
    (mine,) = torch.autograd.grad(ours.output.square().sum(), sinks)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
