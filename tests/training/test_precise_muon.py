from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.tasks.runs.chosen_optimizer import chosen_optimizer
from regard.tasks.translation.made_model import make_model
from regard.training.optimizers import Several, torchs_muon
from regard.training.precise_muon import PreciseMuon, nearly_orthogonal
from tests.tasks.small_runs import small_config


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5), (1, 7), (7, 1)])
def test_singular_values_go_through_the_polynomial_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = normal(*shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = 3.4445, -4.775, 2.0315  # those of Jordan et al.
    values = values / matrix.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(nearly_orthogonal(matrix), left @ values.diag() @ right)


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not nearly_orthogonal(torch.zeros(3, 2)).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_a_step_is_torchs_but_for_the_digits_of_bfloat16() -> None:
    """Hidden matrices of three shapes, four steps with decay; one weight gets no gradient."""
    shapes = [(24, 24), (40, 16), (16, 40), (3, 3)]
    ours, theirs = ([nn.Parameter(normal(*shape, seed=1)) for shape in shapes] for _ in range(2))
    how: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.8}
    precise, rounded = PreciseMuon(ours, **how), torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **how)
    for step in range(4):
        for optimizer in (precise, rounded):
            optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        for place, (a, b) in enumerate(zip(ours[:3], theirs[:3], strict=True)):
            a.grad = normal(*a.shape, seed=10 * step + place)
            b.grad = a.grad.clone()
        precise.step()
        rounded.step()
    for a, b, shape in zip(ours[:3], theirs[:3], shapes, strict=False):
        moved = (b - normal(*shape, seed=1)).norm()
        assert (a - b).norm() <= 0.02 * moved
        assert not torch.equal(a, b)
        assert torch.equal(precise.state[a]["momentum_buffer"], rounded.state[b]["momentum_buffer"])
    assert torch.equal(ours[3], normal(3, 3, seed=1))
    assert ours[3] not in precise.state


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_it_goes_on_from_the_state_of_torchs() -> None:
    first, second = (nn.Parameter(normal(8, 4)) for _ in range(2))
    torchs, ours = torch.optim.Muon([first], momentum=0.5), PreciseMuon([second], momentum=0.5)
    first.grad = second.grad = normal(8, 4, seed=1)
    torchs.step()
    ours.load_state_dict(torchs.state_dict())
    ours.step()
    torch.testing.assert_close(ours.state[second]["momentum_buffer"], 0.75 * normal(8, 4, seed=1))


def test_a_closure_computes_the_gradient_first() -> None:
    weight = nn.Parameter(torch.eye(2))
    optimizer = PreciseMuon([weight], lr=0.1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = weight.square().sum()
        value.backward()
        return value

    assert optimizer.step(loss) == 2.0
    assert weight.diagonal().max() < 1


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_run_in_float32_has_its_muon_in_float32(precision: str, tmp_path: Any) -> None:
    kind = PreciseMuon if precision == "float32" else getattr(torch.optim, "Muon", PreciseMuon)
    config = small_config(tmp_path, optimizer="muon", precision=precision)
    model = make_model(config.sizes, source_vocab_size=9, target_vocab_size=9)
    chosen = chosen_optimizer(config, model, model.output)
    assert isinstance(chosen, Several)
    assert [type(part) for part, _ in chosen._parts] == [kind, torch.optim.AdamW]


def test_before_torch_had_one_ours_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    made = torchs_muon([{"params": [nn.Parameter(torch.eye(2))], "lr": 0.5}])
    assert type(made) is PreciseMuon
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
    optimizer = PreciseMuon([weight])
    optimizer.state[weight]["exp_avg"] = torch.zeros(2, 2)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], torch.full((2, 2), 0.05))


def test_what_is_no_matrix_and_numbers_below_0_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"matrices, got a parameter \(3,\)"):
        PreciseMuon([nn.Parameter(torch.zeros(3))])
    for wrong in ({"lr": -0.1}, {"weight_decay": -1.0}, {"momentum": -0.5}):
        with pytest.raises(ArgumentError, match="must be at least 0"):
            PreciseMuon([nn.Parameter(torch.eye(2))], **wrong)
