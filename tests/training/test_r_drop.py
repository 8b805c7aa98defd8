"""R-Drop through the output layer, against the formula of the paper in plain torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import ArgumentError, ShapeError
from regard.training import output_loss
from regard.training.output_loss import output_cross_entropy
from regard.training.r_drop import output_r_drop

PAD = 0
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def example(dtype: torch.dtype, *, bias: bool = True) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(5)
    output = nn.Linear(8, 90, bias=bias).to(dtype)
    targets = torch.randint(1, 90, (3, 21))
    targets[1:, 15:] = PAD
    return torch.randn(6, 21, 8, dtype=dtype).mul_(3).requires_grad_(), output, targets


def by_the_paper(hidden: Tensor, output: nn.Linear, targets: Tensor, alpha: float, smoothing: float) -> Tensor:
    """Half of equation 4, with everything in memory."""
    exact = [parameter.double() for parameter in output.parameters()]
    first, second = F.linear(hidden.double(), *exact).chunk(2)
    each = torch.zeros(())
    for z in (first, second):
        flat = z.flatten(0, 1), targets.flatten()
        each = each + F.cross_entropy(*flat, ignore_index=PAD, label_smoothing=smoothing, reduction="sum")
    logs = [z.log_softmax(-1)[targets != PAD] for z in (first, second)]
    both = [F.kl_div(a, b, log_target=True, reduction="sum") for a, b in (logs, logs[::-1])]
    total: Tensor = (each + alpha * (both[0] + both[1]) / 2) / 2
    return total


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("bias", "smoothing", "alpha"), [(True, 0.0, 1.0), (False, 0.1, 5.0), (True, 0.1, 0.0)])
@pytest.mark.parametrize("rows", [7, 512])
def test_loss_and_gradients_are_the_papers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, smoothing: float, alpha: float, rows: int
) -> None:
    monkeypatch.setattr(output_loss, "ROWS_OF_A_PRODUCT", rows)
    monkeypatch.setattr(output_loss, "ROWS_AT_A_TIME", min(rows, 5))
    hidden, output, targets = example(dtype, bias=bias)
    inputs = (hidden, *output.parameters())
    settings = {"alpha": alpha, "label_smoothing": smoothing}
    total, count = output_r_drop(hidden, output, targets=targets, ignore_index=PAD, **settings)
    plain = by_the_paper(hidden, output, targets, alpha, smoothing)
    assert int(count) == int((targets != PAD).sum())
    assert abs(total.item() - plain.item()) <= TOLERANCES[dtype] * plain.item()
    grads = torch.autograd.grad(2.5 * total, inputs)
    for ours, theirs in zip(grads, torch.autograd.grad(2.5 * plain, inputs), strict=True):
        assert (ours.double() - theirs.double()).abs().max() <= TOLERANCES[dtype] * theirs.double().abs().max()
    with torch.no_grad():
        assert torch.equal(output_r_drop(hidden, output, targets=targets, ignore_index=PAD, **settings)[0], total)


def test_equal_passes_have_the_loss_of_one() -> None:
    hidden, output, targets = example(torch.float64)
    twice = torch.cat([hidden[:3], hidden[:3]])
    total, count = output_r_drop(twice, output, targets=targets, ignore_index=PAD, alpha=5.0, label_smoothing=0.1)
    one, tokens = output_cross_entropy(hidden[:3], output, targets=targets, ignore_index=PAD, label_smoothing=0.1)
    torch.testing.assert_close(total, one)
    assert int(count) == int(tokens)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo
def test_under_compile_it_is_the_same() -> None:
    hidden, output, targets = example(torch.float64)

    def loss(hidden: Tensor) -> Tensor:
        return output_r_drop(hidden, output, targets=targets, ignore_index=PAD, alpha=5.0, label_smoothing=0.1)[0]

    compiled = torch.compile(loss, backend="eager", fullgraph=True)(hidden)
    torch.testing.assert_close(compiled, loss(hidden))
    ours, theirs = (torch.autograd.grad(total, hidden)[0] for total in (compiled, loss(hidden)))
    torch.testing.assert_close(ours, theirs)


def test_all_padding_is_zero() -> None:
    hidden, output, targets = example(torch.float32)
    total, count = output_r_drop(hidden, output, targets=targets * 0, ignore_index=PAD, alpha=1.0)
    total.backward()
    assert (total.item(), int(count)) == (0.0, 0)
    assert not hidden.grad.any()


def test_the_door() -> None:
    hidden, output, targets = example(torch.float32)
    with pytest.raises(ArgumentError, match="alpha must be at least 0, got -1"):
        output_r_drop(hidden, output, targets=targets, ignore_index=PAD, alpha=-1)
    with pytest.raises(ArgumentError, match="label_smoothing must be between 0 and 1"):
        output_r_drop(hidden, output, targets=targets, ignore_index=PAD, alpha=1, label_smoothing=2)
    with pytest.raises(ShapeError, match=r"two rows of hidden a target needed"):
        output_r_drop(hidden[:3], output, targets=targets, ignore_index=PAD, alpha=1)
