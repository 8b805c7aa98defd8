"""The loss through the output layer: that of its logits, without them."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from regard.errors import ArgumentError, ShapeError
from regard.models import DecoderOnly, DecoderOnlyConfig, EncoderOnly, EncoderOnlyConfig, Transformer, TransformerConfig
from regard.models.config import RNNConfig
from regard.models.rnn import RNNSeq2Seq
from regard.tasks.training import losses as output_loss
from regard.tasks.training.losses import cross_entropy, loss_of_rows, output_cross_entropy

PAD = 0
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}


def example(
    dtype: torch.dtype, *, bias: bool = True, shape: tuple[int, ...] = (4, 40)
) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(5)
    output = nn.Linear(8, 300, bias=bias).to(dtype)
    targets = torch.randint(1, 300, shape)
    targets[:, shape[1] - 5 :] = PAD
    return torch.randn(*shape, 8, dtype=dtype).mul_(3).requires_grad_(), output, targets


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("rows", [7, 512])
def test_loss_and_gradients_are_those_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, smoothing: float, rows: int
) -> None:
    monkeypatch.setattr(output_loss, "ROWS_OF_A_PRODUCT", rows)
    monkeypatch.setattr(output_loss, "ROWS_AT_A_TIME", min(rows, 5))
    hidden, output, targets = example(dtype, bias=bias)
    inputs = (hidden, *output.parameters())
    total, count = output_cross_entropy(hidden, output, targets=targets, ignore_index=PAD, label_smoothing=smoothing)
    exact = nn.functional.linear(*(t.double() for t in inputs))
    plain = cross_entropy(exact, targets, ignore_index=PAD, label_smoothing=smoothing)
    assert int(count) == int(plain.count) == int((targets != PAD).sum())
    assert abs(total.item() - plain.total.item()) <= TOLERANCES[dtype] * plain.total.item()
    grads = torch.autograd.grad(2.5 * total, inputs)
    for ours, theirs in zip(grads, torch.autograd.grad(2.5 * plain.total, inputs), strict=True):
        assert (ours.double() - theirs.double()).abs().max() <= TOLERANCES[dtype] * theirs.double().abs().max()


def test_under_autocast_sums_are_float32() -> None:
    hidden, output, targets = example(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = output_cross_entropy(hidden, output, targets=targets, ignore_index=PAD)
        logits = output(hidden)
    plain = cross_entropy(logits, targets, ignore_index=PAD)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, plain.total, rtol=1e-4, atol=0)  # the bias is added to rounded products
    ours = torch.autograd.grad(total, (hidden, output.weight))
    theirs = torch.autograd.grad(plain.total, (hidden, output.weight))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()


def test_without_gradients_it_is_the_same_loss() -> None:
    hidden, output, targets = example(torch.float32)
    total, _ = output_cross_entropy(hidden, output, targets=targets, ignore_index=PAD)
    with torch.no_grad():
        assert torch.equal(output_cross_entropy(hidden, output, targets=targets, ignore_index=PAD)[0], total)


def test_all_padding_is_zero() -> None:
    hidden, output, targets = example(torch.float32)
    total, count = output_cross_entropy(hidden, output, targets=targets * 0, ignore_index=PAD)
    total.backward()
    assert (total.item(), int(count)) == (0.0, 0)
    assert not hidden.grad.any()
    assert not output.weight.grad.any()


def test_a_probability_that_underflows_is_no_infinite_loss() -> None:
    layer = nn.Linear(1, 3, bias=False)
    nn.init.constant_(layer.weight, 0.0)
    layer.weight.data[0] = 200.0
    total, _ = output_cross_entropy(torch.ones(1, 1), layer, targets=torch.tensor([2]), ignore_index=PAD)
    assert total.item() == pytest.approx(200.0)


def test_another_layer_is_run_whole() -> None:
    class Capped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    layer, x, targets = Capped(4, 7), torch.randn(5, 4), torch.randint(1, 7, (5,))
    total, _ = output_cross_entropy(x, layer, targets=targets, ignore_index=PAD)
    torch.testing.assert_close(total, cross_entropy(layer(x), targets, ignore_index=PAD).total)


def test_every_model_takes_it() -> None:
    source, lengths = torch.randint(1, 11, (3, 5)), torch.tensor([5, 3, 4])
    sizes: dict[str, Any] = {"dim": 8, "num_heads": 2, "dropout": 0.0}
    vocabularies = {"source_vocab_size": 11, "target_vocab_size": 11}
    models = [
        (Transformer(TransformerConfig(**sizes), **vocabularies), (source, lengths, source)),
        (RNNSeq2Seq(RNNConfig(embedding_dim=6, hidden_dim=4, attention_dim=5, dropout=0.0), **vocabularies),
         (source, lengths, source)),
        (DecoderOnly(DecoderOnlyConfig(**sizes), vocab_size=11), (source,)),
        (EncoderOnly(EncoderOnlyConfig(**sizes), vocab_size=11), (source, lengths)),
    ]  # fmt: skip
    for model, inputs in models:
        targets = source.flip(1)
        plain = cross_entropy(model(*inputs), targets, ignore_index=PAD)
        total, count = model(*inputs, loss=partial(output_cross_entropy, targets=targets, ignore_index=PAD))
        torch.testing.assert_close(total, plain.total)
        assert int(count) == int(plain.count)
        expected = torch.autograd.grad(plain.total, list(model.parameters()), allow_unused=True)
        found = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_door() -> None:
    hidden, output, targets = example(torch.float32)
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        output_cross_entropy(hidden, output, targets=targets, ignore_index=PAD, label_smoothing=1.5)
    with pytest.raises(ShapeError, match="one target a row"):
        output_cross_entropy(hidden, output, targets=targets[:, 1:], ignore_index=PAD)


def test_a_target_that_is_no_column_is_refused() -> None:
    hidden, layer = torch.randn(9, 4), nn.Linear(4, 50)
    for target in (50, -1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            output_cross_entropy(hidden, layer, targets=torch.full((9,), target), ignore_index=PAD)


def test_a_recorded_loss_of_several_blocks_runs_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product of the graph may write into memory that was given, which autograd refuses."""
    monkeypatch.setattr(output_loss, "ROWS_OF_A_PRODUCT", 7)
    hidden, output, targets = example(torch.float32, shape=(1, 40))

    def loss(hidden: Tensor) -> Tensor:
        return loss_of_rows(hidden[0], output, targets[0], 0.1)

    graph = make_fx(loss)(hidden.detach())
    torch.testing.assert_close(graph(hidden), loss(hidden))


def logits_and_targets(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    return logits, torch.randint(0, vocab, (rows,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("rows", [1, 5, 131])
def test_equals_torch_forward_and_backward(rows: int, smoothing: float) -> None:
    logits, targets = logits_and_targets(rows, 11, torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy(ours, targets, ignore_index=PAD, label_smoothing=smoothing)
    expected = F.cross_entropy(theirs, targets, ignore_index=PAD, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss.total, expected, rtol=1e-12, atol=1e-12)
    assert int(loss.count) == int((targets != PAD).sum())
    (2.5 * loss.total).backward()
    (2.5 * expected).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_padding_has_neither_loss_nor_gradient() -> None:
    logits, _ = logits_and_targets(4, 7, torch.float32)
    logits[2:] = 1e30  # whatever padded rows hold
    logits.requires_grad_()
    targets = torch.tensor([3, 4, PAD, PAD])
    loss = cross_entropy(logits, targets, ignore_index=PAD, label_smoothing=0.1)
    loss.total.backward()
    alone = cross_entropy(logits[:2], targets[:2], ignore_index=PAD, label_smoothing=0.1)
    assert loss.total.item() == alone.total.item()
    assert logits.grad is not None
    assert bool((logits.grad[2:] == 0).all())


def test_all_padding_of_logits_is_zero() -> None:
    logits, _ = logits_and_targets(3, 7, torch.float32)
    loss = cross_entropy(logits, torch.zeros(3, dtype=torch.int64), ignore_index=PAD)
    assert (float(loss.total), int(loss.count)) == (0.0, 0)


def test_bf16_logits_are_summed_in_float32() -> None:
    logits, targets = logits_and_targets(2000, 7, torch.bfloat16)
    loss = cross_entropy(logits, targets, ignore_index=PAD)
    precise = cross_entropy(logits.double(), targets, ignore_index=PAD)
    assert loss.total.dtype == torch.float32
    assert float(loss.total) == pytest.approx(float(precise.total), rel=1e-6)  # a bf16 sum errs by 4e-3


def test_bad_arguments() -> None:
    logits, targets = logits_and_targets(6, 7, torch.float32)
    with pytest.raises(ArgumentError, match=r"between 0 and 1, got 1\.5"):
        cross_entropy(logits, targets, ignore_index=PAD, label_smoothing=1.5)
    with pytest.raises(ShapeError, match=r"\(6, 7\) and targets \(5,\)"):
        cross_entropy(logits, targets[:5], ignore_index=PAD)
