import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from regard.errors import ArgumentError
from regard.nn import LearnedPositions, TokenEmbedding
from regard.training.metrics import bleu, chrf, exact_match
from regard.training.optimizers import adamw, parameter_groups
from regard.training.schedules import cosine, inverse_square_root


class Tied(nn.Module):
    """A linear layer that comes before the embedding whose matrix it shares."""

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


def test_bleu_by_hand() -> None:
    """Precisions 4/5, 3/4, 2/3, 1/2 and no brevity penalty."""
    score = bleu(["the cat sat on mats"], ["the cat sat on it"])
    assert score.value == pytest.approx(100 * math.exp(sum(map(math.log, (4 / 5, 3 / 4, 2 / 3, 1 / 2))) / 4))
    assert score.signature.startswith("nrefs:1|")
    assert "tok:13a" in score.signature


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
