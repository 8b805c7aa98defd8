import pytest
import torch
import torch.nn.functional as F

from regard.errors import ArgumentError, ShapeError
from regard.tasks.training.losses import cross_entropy

PAD = 0


def example(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    return logits, torch.randint(0, vocab, (rows,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("rows", [1, 5, 131])
def test_equals_torch_forward_and_backward(rows: int, smoothing: float) -> None:
    logits, targets = example(rows, 11, torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy(ours, targets, ignore_index=PAD, label_smoothing=smoothing)
    expected = F.cross_entropy(theirs, targets, ignore_index=PAD, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(loss.total, expected, rtol=1e-12, atol=1e-12)
    assert int(loss.count) == int((targets != PAD).sum())
    (2.5 * loss.total).backward()
    (2.5 * expected).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_padding_has_neither_loss_nor_gradient() -> None:
    logits, _ = example(4, 7, torch.float32)
    logits[2:] = 1e30  # whatever padded rows hold
    logits.requires_grad_()
    targets = torch.tensor([3, 4, PAD, PAD])
    loss = cross_entropy(logits, targets, ignore_index=PAD, label_smoothing=0.1)
    loss.total.backward()
    alone = cross_entropy(logits[:2], targets[:2], ignore_index=PAD, label_smoothing=0.1)
    assert loss.total.item() == alone.total.item()
    assert logits.grad is not None
    assert bool((logits.grad[2:] == 0).all())


def test_all_padding_is_zero() -> None:
    logits, _ = example(3, 7, torch.float32)
    loss = cross_entropy(logits, torch.zeros(3, dtype=torch.int64), ignore_index=PAD)
    assert (float(loss.total), int(loss.count)) == (0.0, 0)


def test_bf16_logits_are_summed_in_float32() -> None:
    logits, targets = example(2000, 7, torch.bfloat16)
    loss = cross_entropy(logits, targets, ignore_index=PAD)
    precise = cross_entropy(logits.double(), targets, ignore_index=PAD)
    assert loss.total.dtype == torch.float32
    assert float(loss.total) == pytest.approx(float(precise.total), rel=1e-6)  # a bf16 sum errs by 4e-3


def test_leading_dimensions_are_rows() -> None:
    logits, targets = example(6, 7, torch.float32)
    flat = cross_entropy(logits, targets, ignore_index=PAD)
    shaped = cross_entropy(logits.view(2, 3, 7), targets.view(2, 3), ignore_index=PAD)
    assert float(flat.total) == float(shaped.total)


def test_bad_arguments() -> None:
    logits, targets = example(6, 7, torch.float32)
    with pytest.raises(ArgumentError, match=r"between 0 and 1, got 1\.5"):
        cross_entropy(logits, targets, ignore_index=PAD, label_smoothing=1.5)
    with pytest.raises(ShapeError, match=r"\(6, 7\) and targets \(5,\)"):
        cross_entropy(logits, targets[:5], ignore_index=PAD)
