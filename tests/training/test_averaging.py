import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.errors import ArgumentError, RunFolderError
from regard.tasks.training.checkpoints import Checkpoints, Position
from regard.tasks.training.fit_config import FitConfig
from regard.tasks.training.optimizers import in_place_of, moving_average
from regard.tasks.training.reporting import Event, Saved
from tests.training.toy_training import train_toy

CONFIG = FitConfig(steps=40, validate_every=10, save_every=10, log_every=1, ema_decay=0.9)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight


def test_the_average_by_its_formula() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    average, expected = moving_average(model, 0.8), model.weight.detach().clone()
    for step in range(1, 60):
        with torch.no_grad():
            model.weight.add_(torch.randn(3, 4))
        average.update_parameters(model)
        decay = min(0.8, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(average.module.weight.detach(), expected, rtol=0, atol=1e-12)


def test_tied_weights_have_one_average_under_both_names() -> None:
    model = Tied()
    average = moving_average(model, 0.5)
    own = model.output.weight
    with torch.no_grad():
        own.fill_(1.0)
    average.update_parameters(model)
    with in_place_of(average, model):
        assert model.output.weight is model.embedding.weight is own
        inside = model.output.weight.clone()
    state = average.module.state_dict()
    assert torch.equal(state["embedding.weight"], inside)
    assert torch.equal(state["output.weight"], inside)
    assert torch.equal(model.output.weight, torch.ones(5, 3))


def test_an_error_inside_leaves_the_model_its_own_weights() -> None:
    model = nn.Linear(2, 2)
    average, before = moving_average(model, 0.5), model.weight.clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    with pytest.raises(ZeroDivisionError), in_place_of(average, model):
        1 / 0  # noqa: B018
    assert torch.equal(model.weight, before + 1.0)


def test_averages_of_another_model_are_refused(tmp_path: Path) -> None:
    train_toy(tmp_path, config=replace(CONFIG, steps=2, ema_decay=0.0))
    with pytest.raises(RunFolderError, match=r"does not fit the model: .* and absent in the checkpoint"):
        train_toy(tmp_path, config=replace(CONFIG, steps=4))


def test_training_validates_and_keeps_the_average(tmp_path: Path) -> None:
    """The average computed here from the weights after each of ten steps is what the checkpoints hold."""
    steps = [Checkpoints(tmp_path / str(n)) for n in range(1, 11)]
    for n, checkpoints in enumerate(steps, start=1):
        train_toy(checkpoints.folder, config=replace(CONFIG, steps=n, save_every=100))
    weights = [checkpoints.load_last().model["out.weight"].double() for checkpoints in steps]
    saved = steps[-1].load_last()
    assert saved.average is not None
    # After step 1 the average lies between the first weights, which are not kept, and these: begin there.
    first = steps[0].load_last().average
    assert first is not None
    expected = first["out.weight"].double()
    for n, value in enumerate(weights[1:], start=2):
        expected = expected.lerp(value, 1 - min(0.9, (1 + n) / (10 + n)))
    torch.testing.assert_close(saved.average["out.weight"].double(), expected, rtol=0, atol=1e-6)
    for which in ("best", "last"):
        assert torch.equal(steps[-1].load_model(which)["out.weight"], saved.average["out.weight"])


def test_best_by_a_metric_that_grows(tmp_path: Path) -> None:
    """The highest of a metric is the best, and an unknown one is named."""
    config = replace(CONFIG, steps=20)
    with pytest.raises(ArgumentError, match=r"best_by must be one of the metrics \['loss'\], got 'step_squared'"):
        train_toy(tmp_path, config=config, best_by="step_squared")
    position = Checkpoints(tmp_path / "grown")
    train_toy(tmp_path / "grown", config=config, best_by="accuracy", metrics=lambda: {"accuracy": 3.0})
    assert position.position("best").best_step == 10  # 3.0 is not above 3.0
    assert math.isclose(position.position("best").best_value or 0.0, 3.0)


@pytest.mark.parametrize(("by", "better", "worse"), [("loss", 1.0, 2.0), ("bleu", 2.0, 1.0)])
def test_the_best_checkpoint_is_better_by_its_own_measure(tmp_path: Path, by: str, better: float, worse: float) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert not checkpoints.has_better(Position(best_value=worse), by=by)  # there is no best checkpoint
    checkpoints.save_model("best", {"w": torch.zeros(1)}, Position(best_value=better))
    assert checkpoints.has_better(Position(best_value=worse), by=by)
    assert not checkpoints.has_better(Position(best_value=better), by=by)
    assert not checkpoints.has_better(Position(), by=by)
    checkpoints.save_model("best", {"w": torch.zeros(1)}, Position(best_value=worse))
    assert not checkpoints.has_better(Position(best_value=better), by=by)


def test_a_run_that_goes_on_from_before_its_best_model_keeps_it(tmp_path: Path) -> None:
    """It died after it had saved the best model, and before it saved the last one; then it validates worse."""
    config = replace(CONFIG, steps=20, ema_decay=0.0)
    values = iter([1.0, 5.0, 2.0, 3.0])

    def keep_the_first(event: Event) -> None:
        if isinstance(event, Saved) and (event.step, event.which) == (10, "last"):
            shutil.copy(Checkpoints(tmp_path).path("last"), tmp_path / "first")

    def train(steps: int) -> None:
        train_toy(
            tmp_path, config=replace(config, steps=steps), best_by="accuracy", callbacks=(keep_the_first,),
            metrics=lambda: {"accuracy": next(values)},
        )  # fmt: skip

    train(20)
    best = Checkpoints(tmp_path).load_model("best")["out.weight"]
    (tmp_path / "first").replace(Checkpoints(tmp_path).path("last"))
    train(30)
    assert Checkpoints(tmp_path).position("best").best_value == 5.0
    assert torch.equal(Checkpoints(tmp_path).load_model("best")["out.weight"], best)
