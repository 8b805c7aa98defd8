"""The drop-in MultiheadAttention against torch's, and what it does better."""

import itertools
import warnings
from typing import Any

import jaxtyping
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import regard
from regard.nn.compat import MisfitError, MultiheadAttention

SHAPES: dict[str, Any] = {"embed_dim": 8, "num_heads": 2}


def both(**options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    theirs = nn.MultiheadAttention(**SHAPES, **options, dtype=torch.float64)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = MultiheadAttention(**SHAPES, **options, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"kdim": 5, "vdim": 3}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}]
)
def test_it_is_torchs(options: dict[str, Any], batch_first: bool) -> None:
    ours, theirs = both(**options, batch_first=batch_first)
    n, t, s = 3, 5, 7
    shape = (lambda length, width: (n, length, width)) if batch_first else (lambda length, width: (length, n, width))
    query = torch.randn(*shape(t, 8), dtype=torch.float64)
    key = torch.randn(*shape(s, options.get("kdim", 8)), dtype=torch.float64)
    value = torch.randn(*shape(s, options.get("vdim", 8)), dtype=torch.float64)
    padding = torch.zeros(n, s, dtype=torch.bool)
    padding[1, 4:] = True
    float_mask = torch.randn(t, s, dtype=torch.float64)
    bool_mask = torch.rand(n * 2, t, s) < 0.3
    bool_mask[..., 0] = False
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": float_mask},
        {"attn_mask": bool_mask, "key_padding_mask": padding},
        {"average_attn_weights": False},
        {"need_weights": False},
    ):
        output, weights = ours(query, key, value, **masks)
        expected, their_weights = theirs(query, key, value, **masks)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        if their_weights is None:
            assert weights is None
        else:
            torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-12)


def test_unbatched_and_causal_without_a_mask() -> None:
    ours, theirs = both()
    x = torch.randn(5, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    output, weights = ours(x, x, x, is_causal=True)
    expected, their_weights = theirs(x, x, x, attn_mask=mask)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-12)


def test_an_empty_row_is_zero_with_finite_gradients_where_torch_has_nan() -> None:
    ours, theirs = both(batch_first=True)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 3, [True] * 3])
    output, weights = ours(x, x, x, key_padding_mask=padding)
    assert (weights[1] == 0).all()
    output[0].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())
    assert theirs(x, x, x, key_padding_mask=padding)[1].isnan().any()


def test_from_torch_copies_the_weights() -> None:
    for options in ({}, {"kdim": 5, "vdim": 3}, {"bias": False}):
        _, theirs = both(**options, batch_first=True)
        ours = regard.nn.MultiHeadAttention.from_torch(theirs)
        q = torch.randn(2, 3, 8, dtype=torch.float64)
        k = torch.randn(2, 4, options.get("kdim", 8), dtype=torch.float64)
        v = torch.randn(2, 4, options.get("vdim", 8), dtype=torch.float64)
        torch.testing.assert_close(ours(q, k, v), theirs(q, k, v)[0], rtol=0, atol=1e-12)
    with pytest.raises(regard.RegardError, match=r"use regard\.nn\.compat"):
        regard.nn.MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True))


def test_causality_leaves_the_learned_key_and_the_zeros_to_every_query() -> None:
    x, future = torch.randn(2, 5, 8, dtype=torch.float64), torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}):
        ours, theirs = both(**options, batch_first=True)
        for masks in ({}, {"key_padding_mask": padding}):
            output, weights = ours(x, x, x, is_causal=True, **masks)
            expected, their_weights = theirs(x, x, x, attn_mask=future, **masks)
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(3, 0, 4), (3, 2, 0), (0, 2, 4), (3, 0, 0)])
def test_empty_sequences_and_batches_are_as_torch_has_them(
    options: dict[str, bool], batch: int, queries: int, keys: int
) -> None:
    ours, theirs = both(**options, batch_first=True)
    query = torch.randn(batch, queries, 8, dtype=torch.float64, requires_grad=True)
    key = torch.randn(batch, keys, 8, dtype=torch.float64)
    for need_weights in (True, False):
        output, weights = ours(query, key, key, need_weights=need_weights)
        expected, their_weights = theirs(query, key, key, need_weights=need_weights)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        assert (weights is None) == (their_weights is None)
        if weights is not None:
            torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-12)
    output.sum().backward()


@pytest.mark.parametrize("batch_first", [True, False])
def test_what_torch_refuses_is_refused_in_words(batch_first: bool) -> None:
    """torch's module broadcasts neither masks nor batches; its own tests name these messages."""
    ours, theirs = both(batch_first=batch_first)

    def batch(size: int, length: int, width: int = 8) -> torch.Tensor:
        x = torch.randn(size, length, width, dtype=torch.float64)
        return x if batch_first else x.transpose(0, 1)

    q, k, no = batch(4, 5), batch(4, 3), torch.zeros
    one, two = torch.randn(5, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    refused = {
        r"to be 3-D but found 2-D and 3-D tensors respectively": (q, two, k),
        r"to be 2-D but found 2-D and 3-D tensors respectively": (one, two, k),
        r"received 4-D query tensor": (q[None], k[None], k[None]),
        r"one batch; got query": (batch(1, 5), k, k),
        r"one batch; got query .*": (q, batch(1, 3), batch(1, 3)),
        r"one length": (q, k, batch(4, 2)),
        r"must be 8, 8 and 8 wide": (batch(4, 5, 7), k, k),
        r"weights' dtype, torch.float64": (q.float(), k.float(), k.float()),
    }
    for message, inputs in refused.items():
        with pytest.raises(Exception):  # noqa: B017, PT011  (of several kinds)
            theirs(*inputs)
        with pytest.raises(MisfitError, match=message) as caught:
            ours(*inputs)
        assert isinstance(caught.value, AssertionError | regard.RegardError)
    masks = [
        (r"`attn_mask` shape to be \(5, 3\), got \(1, 3\)", {"attn_mask": no(1, 3, dtype=torch.bool)}),
        (r"`attn_mask` shape to be \(5, 3\), got \(5, 1\)", {"attn_mask": no(5, 1, dtype=torch.bool)}),
        (r"`attn_mask` shape to be \(8, 5, 3\), got \(4, 5, 3\)", {"attn_mask": no(4, 5, 3, dtype=torch.bool)}),
        (r"`None`, 2-D or 3-D but found 4-D tensor instead", {"attn_mask": no(4, 2, 5, 3, dtype=torch.bool)}),
        (r"must be bool \(True = drop\) or float", {"attn_mask": no(5, 3, dtype=torch.uint8)}),
        (r"`key_padding_mask` shape to be \(4, 3\), got \(1, 3\)", {"key_padding_mask": no(1, 3, dtype=torch.bool)}),
        (r"`None` or 2-D but found 1-D tensor instead", {"key_padding_mask": no(3, dtype=torch.bool)}),
    ]
    for message, given in masks:
        with pytest.raises((RuntimeError, AssertionError)):
            theirs(q, k, k, **given)
        with pytest.raises(MisfitError, match=message):
            ours(q, k, k, **given)
    with pytest.raises(MisfitError, match="`None` or 1-D but found 2-D tensor instead"):
        ours(one, two, two, key_padding_mask=no(1, 3, dtype=torch.bool))
    with pytest.raises(MisfitError, match=r"does not support NestedTensor .* Pad them and give key_padding_mask"):
        ours(*[torch.nested.nested_tensor([one, two], layout=torch.jagged)] * 3)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(MisfitError, match=r"weights' dtype, torch.float64; got \(torch.float32, torch.float32"),
    ):
        ours(*[q.float()] * 3)  # autocast casts neither to float64 nor from it


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 5, "vdim": 3}])
def test_any_masks_together_are_torchs(options: dict[str, Any]) -> None:
    """Bool and float masks of every shape that torch takes, with and without a batch; dead rows are NaN there."""
    for batch_first, batched in itertools.product((True, False), (True, False)):
        ours, theirs = both(**options, batch_first=batch_first)
        n, t, s = (3 if batched else 1), 4, 6
        query, key, value = (
            torch.randn(*((n,) if batched else ()), length, width, dtype=torch.float64)
            for length, width in ((t, 8), (s, options.get("kdim", 8)), (s, options.get("vdim", 8)))
        )
        if batched and not batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        for full, is_float in itertools.product((True, False), (True, False)):
            drop = torch.rand((n * 2, t, s) if full else (t, s)) < 0.4
            padding = torch.rand((n, s) if batched else (s,)) < 0.3
            added = torch.zeros(drop.shape, dtype=torch.float64).masked_fill(drop, -torch.inf)
            padded = torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, -torch.inf)
            masks = {"attn_mask": added if is_float else drop, "key_padding_mask": padded if is_float else padding}
            output, weights = ours(query, key, value, **masks, average_attn_weights=False)
            expected, their_weights = theirs(query, key, value, **masks, average_attn_weights=False)
            assert weights is not None
            torch.testing.assert_close(weights, their_weights.nan_to_num(), rtol=0, atol=1e-12)
            alive = ~expected.isnan()
            torch.testing.assert_close(output[alive], expected[alive], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"batch_first": True}])
def test_the_output_lies_in_memory_as_torchs_does(options: dict[str, Any]) -> None:
    ours, theirs = both(**options)
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    for need_weights in (True, False):
        assert theirs(x, x, x, need_weights=need_weights)[0].mT.mT.is_contiguous() == (not options)
        assert ours(x, x, x, need_weights=need_weights)[0].is_contiguous()


@pytest.mark.parametrize("low", [-1e6, -1e30, torch.finfo(torch.float32).min])
def test_weights_of_a_row_of_low_numbers_sum_to_one(low: float) -> None:
    """Other libraries write finfo.min where ours writes -inf; a row of padding has nothing else."""
    ours, theirs = (module.float() for module in both(batch_first=True))
    x, mask = torch.randn(2, 5, 8), torch.zeros(5, 5)
    mask[1], mask[2, :3] = low, low
    padding = torch.zeros(2, 5)
    padding[1] = low
    for masks in ({"attn_mask": mask}, {"key_padding_mask": padding}):
        output, weights = ours(x, x, x, **masks)
        expected, their_weights = theirs(x, x, x, **masks)
        torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-6)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_weights_of_a_row_of_low_numbers_sum_to_one_in_a_graph() -> None:
    """A graph cannot look for such rows, so that their weights are divided by their sums."""
    ours, _ = (module.float() for module in both(batch_first=True))
    x, mask = torch.randn(2, 5, 8), torch.zeros(5, 5)
    mask[1] = torch.finfo(torch.float32).min
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    _, weights = compiled(x, x, x, attn_mask=mask)
    torch.testing.assert_close(weights, ours(x, x, x, attn_mask=mask)[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))


def test_a_float_mask_has_a_gradient_also_where_there_is_no_key() -> None:
    for queries, keys in ((3, 0), (0, 3), (3, 4)):
        ours, _ = both(batch_first=True)
        query, key = (torch.randn(2, length, 8, dtype=torch.float64) for length in (queries, keys))
        mask = torch.zeros(queries, keys, dtype=torch.float64, requires_grad=True)
        ours(query, key, key, attn_mask=mask)[0].sum().backward()
        assert mask.grad is not None
        assert mask.grad.shape == (queries, keys)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_with_hooks_may_nest_the_sequences() -> None:
    """torch's encoder drops the padding in evaluation. With hooks it calls the attention on what is left."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    layer: Any = encoder.layers[0]
    ours = MultiheadAttention(8, 2, batch_first=True).eval()
    ours.load_state_dict(layer.self_attn.state_dict())
    x, padding = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        layer.self_attn, calls = ours, []
        ours.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0].is_nested))
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), expected, rtol=0, atol=1e-5)
    assert calls == [True]


def test_second_derivatives_are_torchs() -> None:
    """A penalty on the gradient of a critic needs them."""
    ours, theirs = both(batch_first=True)
    padding, found = torch.tensor([[False] * 5, [False, False, False, True, True]]), []
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    for module in (ours, theirs):
        output, weights = module(x, x, x, key_padding_mask=padding)
        (grad,) = torch.autograd.grad(output.square().sum() + weights.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), [x, *module.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_a_trace_keeps_neither_masks_nor_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # in a trace, sizes are tensors

    class Attend(nn.Module):
        def __init__(self, need_weights: bool) -> None:
            super().__init__()
            self.attend, self.need_weights = MultiheadAttention(8, 2, batch_first=True).eval(), need_weights

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> tuple[torch.Tensor, ...]:
            output, weights = self.attend(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)
            return (output,) if weights is None else (output, weights)

    x, none = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    some = torch.tensor([[False] * 5, [False, False, False, True, True]])
    for need_weights, learns in itertools.product((True, False), (True, False)):
        module = Attend(need_weights)
        with torch.set_grad_enabled(learns):
            traced = _traced(module, x, none)
            torch.testing.assert_close(traced(x, some), module(x, some), rtol=0, atol=1e-6)
            if not need_weights:
                assert "scaled_dot_product_attention" in str(traced.inlined_graph)
                longer, more = torch.cat([x, x], 1), torch.cat([some, some], 1)
                torch.testing.assert_close(traced(longer, more), module(longer, more), rtol=0, atol=1e-6)
        graph = make_fx(module)(x, none)
        torch.testing.assert_close(graph(x, some), module(x, some), rtol=0, atol=1e-6)


def _traced(module: nn.Module, *inputs: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and warns of every size that is looked at.
        return torch.jit.trace(module, inputs, check_trace=False)
