"""The ground `watch`: random models, single writings of attention, and generations."""

import warnings

import torch
from hypothesis import note
from torch import Tensor

from tests.fuzz.drawing import Drawn
from tests.fuzz.watch.generation import check_generation
from tests.fuzz.watch.models import random_model
from tests.fuzz.watch.truths import Truths
from tests.fuzz.watch.watching import require_same_bits, require_truth
from tests.fuzz.watch.written_out import Writing, Written


def case(drawn: Drawn) -> None:
    warnings.simplefilter("ignore")
    drawn.of([check_model, check_model, check_model, check_writing, check_generation])(drawn)


def check_writing(drawn: Drawn) -> None:
    truths = Truths()
    torch.manual_seed(drawn.number(0, 99))
    model = Written(8, 2, Writing.random(drawn), truths).train(drawn.chance(3))
    x, memory = drawn.normal(2, 5, 8).float(), drawn.normal(2, 7, 8).float()
    context = drawn.of([torch.no_grad, torch.enable_grad, torch.inference_mode])
    note(f"{model.writing}, {context.__name__}")

    def run() -> list[Tensor]:
        with context():
            return [model(x, memory).detach().clone()]

    seen = require_same_bits(model, truths, run, verify=True)
    require_truth(model, seen, truths)
    report = seen.report()
    assert len(seen.maps) == (4 if model.writing.product.startswith("each") and not model.writing.is_folded else 1)
    assert not [*report.missed, *report.others], str(report)
    errors = [call.error for call in seen.calls if call.error != "dropout"]
    assert all(isinstance(error, float) and error < 1e-5 for error in errors), errors


def check_model(drawn: Drawn) -> None:
    truths, dim = Truths(), 8
    model = random_model(drawn, truths, dim)
    model.train(drawn.chance(3))
    mode = drawn.of(["no_grad", "grad", "inference"])
    x, memory = (drawn.normal(drawn.of([2, 1]) if n else 2, drawn.of([5, 1, 3, 9]), dim).float() for n in (0, 0))
    keep = None
    if drawn.chance():
        t = x.shape[1]
        keep = torch.ones(t, t, dtype=torch.bool).tril()[None, None]
        if drawn.chance():
            keep = (drawn.bools(t, t) | torch.eye(t, dtype=torch.bool))[None, None]
    note(
        f"{model}\n{'training' if model.training else 'eval'}, {mode}, x {tuple(x.shape)}, memory {tuple(memory.shape)}"
    )

    def run() -> list[Tensor]:
        if mode == "grad":
            model.zero_grad()
            given = x.clone().requires_grad_()
            output = model(given, memory, keep)
            output.sum().backward()
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            return [output.detach(), given.grad, *grads]
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            return [model(x, memory, keep).clone()]

    seen = require_same_bits(model, truths, run, verify=drawn.chance(3), copy=drawn.chance(6))
    require_truth(model, seen, truths)
