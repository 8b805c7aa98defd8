"""Maps of calls with rows of nothing but large biases, against torch's softmax of the same float32 scores."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.call.shapes import Sizes
from regard.functional import Attended
from regard.kernels import row_state
from regard.kernels.base import Call
from regard.maps.sources import factors
from tests.maps.dense_maps import sums_asked, sums_written_out

FAR = [-1e4, -1e6, -1e9, torch.finfo(torch.float32).min, 1e4, 1e9, 1e30]
MASKS = {"none": None, "causal": regard.causal(), "lengths": regard.lengths(torch.tensor([9, 0]))}
B, H, G, T, S, D = 2, 4, 2, 33, 33, 8


def inputs(far: float, shape: tuple[int, ...] = (B, H, T, S)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a bias with some rows that are far from 0 and one that is so in part."""
    torch.manual_seed(0)
    bias = torch.randn(shape)
    rows = slice(None) if shape[-2] == 1 else slice(5, 9)
    bias[..., rows, :] += far
    if shape[-2] > 1:
        bias[..., 20, ::2] += far
    return torch.randn(B, H, T, D), torch.randn(B, G, S, D), torch.randn(B, G, S, D), bias


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def written_out(query: Tensor, key: Tensor, bias: Tensor, mask: regard.Mask | None) -> Tensor:
    """torch's softmax of scores in float32, to which the bias is added as the kernel adds it."""
    scores = query @ key.repeat_interleave(H // G, dim=1).mT * D**-0.5 + bias
    if mask is not None:
        scores = scores.masked_fill(~mask.dense(Sizes((B,), H, G, T, S, True)), -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("far", FAR)
def test_every_reader_sees_the_weights_that_the_kernel_used(far: float, mask: regard.Mask | None) -> None:
    query, key, value, bias = inputs(far)
    output, weights = regard.attention(query, key, value, mask=mask, bias=bias, return_weights=True)
    expected = written_out(query, key, bias, mask)
    dense = weights.dense()
    # Where scores are added to 1e4, the last bit of a score is 1e-3: the kernel and torch's product may differ by it.
    step = 2e-3 if abs(far) == 1e4 else 2e-6
    close(dense, expected, step)
    close(dense @ value.repeat_interleave(H // G, dim=1), output, step)
    asked, direct = sums_asked(weights, 3, 5), sums_written_out(dense.double(), 3, 5)
    for name, found in asked.items():
        torch.testing.assert_close(found.double(), direct[name], rtol=1e-5, atol=1e-4)
    close(weights.top_keys(3).values, dense.topk(3).values)
    close(weights.mass(regard.window(4)), in_window(dense))
    close(weights.only(heads=[3, 1]).dense(), dense[:, [3, 1]])
    close(weights.block(range(4, 8), range(3, 30)), dense[:, :, 4:8, 3:30])
    close(torch.as_tensor(weights[1, 2, 6, 4]), dense[1, 2, 6, 4])
    close(weights.average().dense(), dense.mean(1))
    summary = weights.summary("entropy", "top_weight", "received", "pooled_mean", rows=3, columns=5)
    direct["top_weight"] = dense.amax(-1).double()
    for name in ("top_weight", "received", "pooled_mean"):
        answer = summary[name]
        assert isinstance(answer, Tensor)
        torch.testing.assert_close(answer.double(), direct[name], rtol=1e-5, atol=1e-5)


def in_window(dense: Tensor) -> Tensor:
    before = torch.arange(T)[:, None] - torch.arange(S)
    return (dense * ((before >= 0) & (before < 4))).sum(-1)


def test_float64_where_it_too_has_no_digits_left() -> None:
    query, key, value, bias = (one.double() for one in inputs(-1e30))
    weights = regard.attention(query, key, value, bias=bias, return_weights=True).weights
    close(weights.dense(), written_out(query, key, bias, None), 1e-14)


def test_half_precision() -> None:
    query, key, value, bias = (one.bfloat16() for one in inputs(-1e9))
    output, weights = regard.attention(query, key, value, bias=bias, return_weights=True)
    dense = weights.dense()
    close(dense.sum(-1), torch.ones(B, H, T), 1e-5)
    rebuilt = dense @ value.float().repeat_interleave(H // G, dim=1)
    close(output.float(), rebuilt, 2e-2)


def test_gradients_through_the_weights() -> None:
    *vectors, bias = (one.requires_grad_() for one in inputs(-1e6))
    query, key, value = vectors
    weights = regard.attention(query, key, value, bias=bias, return_weights=True).weights
    with torch.no_grad():  # The first reader wants no gradient, and a later one does.
        weights.entropy()
    torch.manual_seed(1)
    factor = torch.randn(B, H, T, S)
    ours = torch.autograd.grad((weights.dense() * factor).sum(), [query, key, bias], retain_graph=True)
    theirs = torch.autograd.grad(
        (written_out(query, key, bias, None) * factor).sum(), [query, key, bias], retain_graph=True
    )
    for one, other in zip(ours, theirs, strict=True):
        close(one, other, 1e-5)
    found = torch.autograd.grad(weights.entropy().sum(), [query, key, bias])
    dense = written_out(query, key, bias, None)
    entropy = -(dense * torch.where(dense > 0, dense, 1.0).log()).sum()
    for one, other in zip(found, torch.autograd.grad(entropy, [query, key, bias]), strict=True):
        close(one, other, 2e-5)


@pytest.mark.parametrize("is_learned", [False, True])
@pytest.mark.parametrize("backend", [None, "tiled", "reference"])
@pytest.mark.parametrize("far", [-1e4, -1e9, 1e9])
def test_gradients_of_the_output_and_of_products(far: float, backend: Any, is_learned: bool) -> None:
    """torch's kernel on the CPU makes its backward pass of a log-sum-exp without digits: gradients are off by 20."""
    query, key, value, bias = inputs(far)
    learned = [one.requires_grad_() for one in (query, key, value, bias)][: 4 if is_learned else 3]
    bias.requires_grad_(is_learned)
    torch.manual_seed(1)
    factor = torch.randn(B, H, T, D)
    expected = written_out(query, key, bias, None) @ value.repeat_interleave(H // G, dim=1)
    theirs = torch.autograd.grad((expected * factor).sum(), learned)
    output, weights = regard.attention(query, key, value, bias=bias, backend=backend, return_weights=True)
    for found in (output, weights @ value.repeat_interleave(H // G, dim=1)):
        ours = torch.autograd.grad((found * factor).sum(), learned, retain_graph=True)
        for one, other in zip(ours, theirs, strict=True):
            # Where scores are added to 1e4, a last bit of a score is a thousandth.
            close(one, other, 2e-2 if far == -1e4 else 1e-5)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="what docs/design/attention-call.md says of 2.13")
def test_torchs_own_gradients_of_such_a_row_are_wrong() -> None:
    query, key, value, bias = inputs(-1e9)
    key, value = (one.repeat_interleave(H // G, dim=1) for one in (key, value))
    learned = [one.requires_grad_() for one in (query, key, value)]
    factor = torch.randn(B, H, T, D)
    expected = torch.softmax(query @ key.mT * D**-0.5 + bias, -1) @ value
    theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    close(theirs, expected, 2e-6)
    one, other = (torch.autograd.grad((output * factor).sum(), learned)[0] for output in (expected, theirs))
    assert float((one - other).abs().max()) > 5 * float(one.abs().max())


SCORES = {
    "of a compact kernel": regard.call.scores.Boxcar(4.0),
    "that falls off": regard.call.scores.Gaussian(),
    "soft-capped": regard.SoftCapped(regard.ScaledDot(), 5.0),
    "of angles": regard.Cosine(),
    "a function": lambda query, key: (query[..., :, None, :] - key[..., None, :, :]).abs().mean(-1),
}


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_other_scores(score: Any) -> None:
    """Those of a compact kernel are -inf where a key is far: the rows that need nothing stay as they were, too."""
    query, key, value, bias = inputs(-1e9)
    weights = regard.attention(query, key, value, score=score, bias=bias, return_weights=True).weights
    output = regard.attention(query, key, value, score=score, bias=bias, backend="reference")
    dense = weights.dense()
    assert bool(dense.isfinite().all())
    close(dense @ value.repeat_interleave(H // G, dim=1), output, 2e-6)
    plain = regard.attention(query, key, value, score=score, bias=inputs(0.0)[3], return_weights=True).weights.dense()
    rows = [row for row in range(T) if row not in (5, 6, 7, 8, 20)]
    close(dense[:, :, rows], plain[:, :, rows], 2e-6)


@pytest.mark.parametrize(("far", "sink"), [(1e9, 0.0), (-1e9, 0.0), (-1e9, -1e9)])
def test_a_sink_is_lowered_with_its_row(far: float, sink: float) -> None:
    query, key, value, bias = inputs(far, (B, 1, 1, S))
    normalization = regard.SoftmaxWithSink(sink)
    weights = regard.attention(
        query, key, value, bias=bias, normalization=normalization, return_weights=True
    ).weights  # fmt: skip
    scores = query @ key.repeat_interleave(H // G, dim=1).mT * D**-0.5 + bias
    expected = torch.softmax(F.pad(scores, (0, 1), value=sink), -1)[..., :-1]
    close(weights.dense(), expected, 2e-6)


def test_a_map_that_a_compiled_function_made_is_read_outside_of_it() -> None:
    query, key, value, bias = inputs(-1e9)

    @torch.compile(fullgraph=True, backend="eager")
    def made(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Attended:
        found = regard.attention(query, key, value, bias=bias, return_weights=True)
        return Attended(found.output, found.weights)

    close(made(query, key, value, bias).weights.dense(), written_out(query, key, bias, None), 2e-6)


def test_a_map_that_was_saved(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="saved maps come with the extra `train`")
    query, key, value, bias = inputs(-1e9)
    weights = regard.attention(query, key, value, bias=bias, return_weights=True).weights
    weights.entropy()
    weights.save(tmp_path / "map.safetensors")
    again = regard.AttentionMap.load(tmp_path / "map.safetensors")
    close(again.dense(), weights.dense(), 1e-6)
    close(again.lse, weights.lse, 0)


@pytest.mark.parametrize("far", [-1e4, -1e6, -5e7])
def test_a_watched_model(far: float) -> None:
    """At -1e8 and below a watch knows such a row as an even one; above it the bias is read."""
    query, key, _, bias = inputs(far)
    key = key.repeat_interleave(H // G, dim=1)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, key, torch.eye(S).expand(B, H, S, S), attn_mask=bias)

    model = Model()
    with regard.watch(model, verify=True) as seen:
        output = model(query)
    close(seen.maps[0].dense(), output, 2e-3 if far == -1e4 else 2e-6)
    error = seen.calls[0].error
    assert error is not None
    assert error < (2e-3 if far == -1e4 else 1e-5)


def test_few_rows_are_lowered_and_most_calls_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0

    def counted(call: Call) -> Tensor:
        nonlocal passes
        passes += 1
        return found(call)

    found = row_state
    monkeypatch.setattr(factors, "row_state", counted)
    query, key, value, bias = inputs(-1e9)
    for one, expected in ((bias * 0, 0), (bias.clamp_min(-100), 0), (bias, 1)):
        weights = regard.attention(query, key, value, bias=one, return_weights=True).weights
        weights.entropy(), weights.dense(), weights.received()
        assert passes == expected
    assert math.isclose(float(weights.lse[0, 0, 6]), -1e9, rel_tol=1e-6)
