from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, TorchVersionError
from regard.nn import LearnedPositions, TokenEmbedding
from regard.tasks import train_translation
from regard.tasks.training.fit_config import cosine, inverse_square_root
from regard.tasks.training.metrics import bleu, chrf, exact_match
from regard.tasks.training.optimizers import adamw, muon, parameter_groups
from tests.tasks.small_runs import small_config


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 7, bias=False)
        self.norm = nn.LayerNorm(5)
        self.hidden = nn.Linear(5, 5)
        self.embedding = nn.Embedding(7, 5)
        self.embedding.weight = self.out.weight
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def test_only_matrices_decay() -> None:
    decayed, others = parameter_groups(Tied(), weight_decay=0.3)
    assert [name for name, _ in decayed["params"]] == ["hidden.weight"]
    assert {name for name, _ in others["params"]} == {"out.weight", "norm.weight", "norm.bias", "hidden.bias"}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)


def test_our_own_embeddings_do_not_decay_either() -> None:
    model = nn.ModuleDict({"token": TokenEmbedding(7, 5), "place": LearnedPositions(9, 5), "linear": nn.Linear(5, 5)})
    decayed, others = parameter_groups(model, weight_decay=0.3)
    assert [name for name, _ in decayed["params"]] == ["linear.weight"]
    assert {"token.weight", "place.weight"} <= {name for name, _ in others["params"]}


def test_adamw_is_fused_on_cpu_and_decays_what_it_should() -> None:
    model = Tied()
    optimizer = adamw(model, weight_decay=0.5)
    assert optimizer.defaults["fused"] is True
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    hidden, out = model.hidden.weight.detach().clone(), model.out.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.hidden.weight.detach(), hidden * 0.95)
    torch.testing.assert_close(model.out.weight.detach(), out)


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.ModuleDict({"in": nn.Embedding(7, 5), "hidden": nn.Linear(5, 9), "back": nn.Linear(9, 5), "out": Out()})


class Out(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cube = nn.Linear(5, 7), nn.Parameter(torch.randn(2, 3, 4))


def some_steps(model: nn.Module, *optimizers: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.get("rate", 1.0) * 0.01 * (step + 1)
            optimizer.step()


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_muon_is_torchs_with_adamw_beside_it() -> None:
    ours, theirs = small_model(), small_model()
    hidden = [p for n, p in theirs.named_parameters() if n in ("hidden.weight", "back.weight")]
    decaying = [p for n, p in theirs.named_parameters() if n in ("out.linear.weight", "out.cube")]
    others = [p for n, p in theirs.named_parameters() if n in ("in.weight",) or n.endswith("bias")]
    apart = [
        torch.optim.Muon([{"params": hidden, "rate": 3.0}], weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": decaying, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.98), eps=1e-9, fused=True,
        ),
    ]  # fmt: skip
    some_steps(ours, muon(ours, aside=[ours.get_submodule("out")], rate=3.0, weight_decay=0.2), seed=1)
    some_steps(theirs, *apart, seed=1)
    for a, b in zip(weights_of(ours), weights_of(theirs), strict=True):
        assert torch.equal(a, b)


def test_a_torch_without_muon_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(TorchVersionError, match=r"has no Muon, and torch 2\.9 has it: .* --optimizer adamw"):
        muon(small_model())
    config = small_config(tmp_path, optimizer="muon")
    with pytest.raises(TorchVersionError, match="has no Muon"):
        train_translation(config)
    assert not config.out.exists()


def test_several_optimizers_take_one_closure_and_call_hooks_once() -> None:
    model = small_model()
    optimizer, called = muon(model), list[str]()
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))

    def loss() -> float:
        called.append("loss")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return 2.0

    assert optimizer.step(loss) == 2.0
    assert called == ["loss", "hook"]


def test_a_model_without_hidden_matrices_is_not_for_muon() -> None:
    with pytest.raises(ArgumentError, match="Embedding has no matrix in a hidden layer"):
        muon(nn.Embedding(3, 2))


def test_a_model_without_parameters() -> None:
    with pytest.raises(ArgumentError, match="Identity has no parameter"):
        parameter_groups(nn.Identity(), weight_decay=0.1)


def test_inverse_square_root_is_vaswanis() -> None:
    """lrate = dim ** -0.5 * min(step ** -0.5, step * warmup ** -1.5), section 5.3."""
    rate = inverse_square_root((512 * 4000) ** -0.5, 4000)
    for step in (1, 100, 3999, 4000, 4001, 100_000):
        assert rate(step) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5), rel=1e-12)


def test_cosine_agrees_with_torch() -> None:
    rate = cosine(0.4, 0, 50)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    for step in range(50):
        assert rate(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        theirs.step()
    assert rate(70) == 0.0
    assert cosine(0.4, 10, 50)(5) == pytest.approx(0.2)


@pytest.mark.parametrize("make", [lambda: inverse_square_root(1.0, 0), lambda: cosine(1.0, -1, 5)])
def test_warmup_out_of_range(make: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError, match="warmup_steps must be at least"):
        make()


def test_a_cosine_may_end_before_its_warm_up() -> None:
    assert [cosine(1.0, 10, 10)(step) for step in (5, 10)] == [0.5, 1.0]
    assert cosine(1.0, 100, 10)(10) == pytest.approx(0.1)
    assert cosine(1.0, 0, 1)(1) == pytest.approx(0.0)


def test_scores_are_percentages_and_take_several_references() -> None:
    ours = ["the cat sat on the mat", "a dog barks at the moon tonight"]
    first, second = ["the cat sat on the mat", "x"], ["y", "a dog barks at the moon tonight"]
    assert bleu(ours, first, second).value == pytest.approx(100.0)
    assert bleu(ours, first).value < 90
    assert chrf(ours, first, second).value == pytest.approx(100.0)
    assert 0 < chrf(ours, first).value < 100
    assert exact_match(ours, first) == 50.0


@pytest.mark.parametrize("metric", [bleu, chrf, exact_match])
def test_counts_must_agree(metric: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError, match=r"got 2 hypotheses and \[1\]"):
        metric(["a", "b"], ["a"])
    with pytest.raises(ArgumentError, match=r"got 0 hypotheses and \[0\]"):
        metric([], [])
