import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.tasks.runs.chosen_optimizer import chosen_optimizer
from regard.tasks.translation.made_model import make_model
from regard.training import batched_muon
from regard.training.batched_muon import TOGETHER, BatchedMuon, alike, all_nearly_orthogonal
from regard.training.optimizers import Several, torchs_muon
from tests.tasks.small_runs import small_config


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def nearly_orthogonal(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return all_nearly_orthogonal([matrix], dtype)[0]


@pytest.mark.parametrize("shape", [(6, 6), (5, 6), (6, 5), (5, 12), (12, 5), (1, 7), (7, 1)])
def test_singular_values_go_through_the_polynomial_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = normal(*shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = 3.4445, -4.775, 2.0315  # those of Jordan et al.
    values = values / matrix.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(nearly_orthogonal(matrix), left @ values.diag() @ right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(80, 80), (240, 80), (80, 240)])
def test_small_singular_values_do_not_outgrow_large_ones(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """What is rounded off a Gram matrix is large beside the squares of the smallest of them."""
    left, _, right = torch.linalg.svd(normal(*shape, dtype=torch.float64), full_matrices=False)
    matrix = left @ (1 / torch.arange(1.0, 81.0, dtype=torch.float64)).diag() @ right
    exact = nearly_orthogonal(matrix)
    error = (nearly_orthogonal(matrix.float(), dtype) - exact).norm() / exact.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (5, 2)])
def test_a_matrix_of_zeros_stays_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    both = all_nearly_orthogonal([torch.zeros(shape), torch.ones(shape)], dtype)
    assert not both[0].any()
    assert both[1].any()


def test_matrices_together_are_as_each_alone() -> None:
    for shape in ((5, 9), (9, 5)):
        several = [normal(*shape, seed=seed) for seed in range(3)]
        together = all_nearly_orthogonal(several)
        assert len(together) == 3
        for one, found in zip(several, together, strict=True):
            torch.testing.assert_close(found, nearly_orthogonal(one))


def test_matrices_are_alike_by_shape_dtype_and_size() -> None:
    matrices = [normal(3, 4), normal(4, 3), normal(3, 4, seed=1), normal(3, 4, dtype=torch.float64)]
    assert [len(group) for group in alike(matrices)] == [2, 1, 1]
    assert [one for group in alike(matrices) for one in group][1] is matrices[2]
    large = [torch.empty(1024, TOGETHER // 2048) for _ in range(5)]
    assert [len(group) for group in alike(large)] == [2, 2, 1]
    assert [len(group) for group in alike([torch.empty(2048, TOGETHER // 1024)] * 2)] == [1, 1]
    assert list(alike([])) == []


def test_bfloat16_is_torchs_precision() -> None:
    matrix = normal(30, 20)
    rounded, exact = nearly_orthogonal(matrix, torch.bfloat16), nearly_orthogonal(matrix)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).norm() < 0.02 * exact.norm()
    double = matrix.double()
    assert torch.equal(nearly_orthogonal(double, torch.bfloat16), nearly_orthogonal(double))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_torchs_but_for_the_digits_of_bfloat16(dtype: torch.dtype) -> None:
    """Hidden matrices of three shapes, four steps with decay; one weight gets no gradient."""
    shapes = [(24, 24), (40, 16), (24, 24), (16, 40), (3, 3)]
    ours, theirs = ([nn.Parameter(normal(*shape, seed=1)) for shape in shapes] for _ in range(2))
    how: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.8}
    batched = BatchedMuon(ours, **how, dtype=dtype)
    torchs = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **how)
    for step in range(4):
        for optimizer in (batched, torchs):
            optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        for place, (a, b) in enumerate(zip(ours[:4], theirs[:4], strict=True)):
            a.grad = normal(*a.shape, seed=10 * step + place)
            b.grad = a.grad.clone()
        batched.step()
        torchs.step()
    for a, b, shape in zip(ours[:4], theirs[:4], shapes, strict=False):
        moved = (b - normal(*shape, seed=1)).norm()
        assert (a - b).norm() <= 0.02 * moved
        assert not torch.equal(a, b)
        assert torch.equal(batched.state[a]["momentum_buffer"], torchs.state[b]["momentum_buffer"])
    assert torch.equal(ours[4], normal(3, 3, seed=1))
    assert ours[4] not in batched.state


@pytest.mark.parametrize("together", [1, 2 * 24 * 8, TOGETHER])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_steps_are_those_of_the_formula(
    dtype: torch.dtype, bound: float, decay: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of tall, wide and nearly square matrices of other sizes, however many are computed together."""
    monkeypatch.setattr(batched_muon, "TOGETHER", together)
    shapes = [(24, 8), (24, 8), (24, 8), (8, 24), (8, 24), (9, 8)]
    weights = [nn.Parameter(normal(*shape, seed=place)) for place, shape in enumerate(shapes)]
    groups: list[dict[str, Any]] = [{"params": weights[:2], "lr": 0.1}, {"params": weights[2:]}]
    optimizer = BatchedMuon(groups, lr=0.02, weight_decay=decay, momentum=0.8, dtype=dtype)
    exact, means = [weight.detach().double() for weight in weights], [torch.zeros(()).double() for _ in weights]
    for step in range(3):
        given = []
        for place, weight in enumerate(weights):
            gradient = 10.0**place * normal(*weight.shape, seed=10 * step + place)
            weight.grad = gradient.clone()
            means[place] = 0.8 * means[place] + 0.2 * gradient.double()
            rate = 0.1 if place < 2 else 0.02
            update = nearly_orthogonal(0.2 * gradient.double() + 0.8 * means[place])
            exact[place] = (1 - rate * decay) * exact[place] - 0.2 * rate * max(weight.shape) ** 0.5 * update
            given.append(gradient)
        optimizer.step()
        for gradient, weight in zip(given, weights, strict=True):
            assert weight.grad is not None
            assert torch.equal(gradient, weight.grad)
    for place, (weight, right) in enumerate(zip(weights, exact, strict=True)):
        moved = (right - normal(*weight.shape, seed=place)).norm()
        assert (weight - right).norm() <= bound * moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 12), (24, 8), (8, 24)])
def test_gradients_of_any_size_leave_weights_finite(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Beyond 1e19 the length is beyond float32, and far below 1e-7 it counts as that: then nothing moves."""
    one = nearly_orthogonal(normal(*shape), dtype)
    torch.testing.assert_close(nearly_orthogonal(2.0**50 * normal(*shape), dtype), one)
    for size in (0.0, 1e-30, 1e30):
        weight = nn.Parameter(torch.ones(shape))
        weight.grad = size * normal(*shape)
        BatchedMuon([weight], lr=0.1, weight_decay=0.5, dtype=dtype).step()
        torch.testing.assert_close(weight.detach(), torch.full(shape, 0.95))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_it_goes_on_from_the_state_of_torchs() -> None:
    first, second = (nn.Parameter(normal(8, 4)) for _ in range(2))
    torchs, ours = torch.optim.Muon([first], momentum=0.5), BatchedMuon([second], momentum=0.5)
    first.grad = second.grad = normal(8, 4, seed=1)
    torchs.step()
    ours.load_state_dict(torchs.state_dict())
    ours.step()
    torch.testing.assert_close(ours.state[second]["momentum_buffer"], 0.75 * normal(8, 4, seed=1))


def test_a_closure_computes_the_gradient_first() -> None:
    weight = nn.Parameter(torch.eye(2))
    optimizer = BatchedMuon([weight], lr=0.1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = weight.square().sum()
        value.backward()
        return value

    assert optimizer.step(loss) == 2.0
    assert weight.diagonal().max() < 1


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_run_has_its_muon_in_its_own_precision(precision: str, tmp_path: Any) -> None:
    config = small_config(tmp_path, optimizer="muon", precision=precision)
    model = make_model(config.sizes, source_vocab_size=9, target_vocab_size=9)
    chosen = chosen_optimizer(config, model, model.output)
    assert isinstance(chosen, Several)
    parts = [part for part, _ in chosen._parts]
    assert [type(part) for part in parts] == [BatchedMuon, torch.optim.AdamW]
    assert isinstance(parts[0], BatchedMuon)
    assert parts[0]._dtype == (torch.float32 if precision == "float32" else torch.bfloat16)


def test_before_torch_had_one_ours_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    made = torchs_muon([{"params": [nn.Parameter(torch.eye(2))], "lr": 0.5}])
    assert type(made) is BatchedMuon
    assert made.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_limit(dtype: torch.dtype) -> None:
    """The squares of these numbers are beyond float16."""
    matrix = (2_000 * normal(64, 64)).to(dtype)
    found = nearly_orthogonal(matrix)
    assert found.dtype == dtype
    torch.testing.assert_close(found, nearly_orthogonal(matrix.float()).to(dtype))
    assert found.float().norm() > 5


def test_small_gradients_move_as_far_as_large_ones() -> None:
    matrix = normal(6, 4)
    torch.testing.assert_close(nearly_orthogonal(1e-5 * matrix), nearly_orthogonal(matrix))


def test_a_state_of_another_optimizer_is_no_mean() -> None:
    weight = nn.Parameter(torch.eye(2))
    optimizer = BatchedMuon([weight])
    optimizer.state[weight]["exp_avg"] = torch.zeros(2, 2)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], torch.full((2, 2), 0.05))


def test_copies_compute_as_the_first_does() -> None:
    optimizer = BatchedMuon([nn.Parameter(torch.eye(2))], dtype=torch.bfloat16)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        copied.param_groups[0]["params"][0].grad = torch.ones(2, 2)
        copied.step()
        assert copied._dtype == torch.bfloat16


def test_what_is_no_matrix_and_numbers_below_0_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"matrices of real numbers, got a parameter \(3,\)"):
        BatchedMuon([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ArgumentError, match="complex64"):
        BatchedMuon([nn.Parameter(torch.eye(2) * 1j)])
    refused: list[dict[str, Any]] = [{"lr": -0.1}, {"weight_decay": -1.0}, {"momentum": -0.5}]
    for wrong in refused:
        with pytest.raises(ArgumentError, match="must be at least 0"):
            BatchedMuon([nn.Parameter(torch.eye(2))], **wrong)
