"""The ground `lifetimes`: random sequences of calls, of changes of what they were made of, and of reads.

What is read is that of the call, or an error: OverwrittenError, or torch's own.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import note
from torch import Tensor

from regard.errors import RegardError
from tests.fuzz.drawing import Drawn
from tests.fuzz.lifetimes.calls import SUBJECTS
from tests.fuzz.lifetimes.changes import change
from tests.fuzz.lifetimes.subject import Life
from tests.fuzz.lifetimes.watched import MODELS

TORCHS = ("modified by an inplace operation", "a second time", "Inference tensors", "has changed", "is different")
"""Words of torch's own refusals in a backward pass."""


@dataclass
class Called:
    number: int
    life: Life
    weights: Tensor
    gradients: Sequence[Tensor]

    def check_read(self) -> None:
        try:
            read = self.life.read()
        except RegardError as error:
            note(f"call {self.number} refuses: {error}")
            return
        off = float((read - self.weights).abs().max())
        assert off < 1e-6, f"call {self.number}: weights are off by {off:.3g}, without an error"

    def check_backward(self) -> None:
        if not self.gradients:
            return
        try:
            found = _gradients(self.life)
        except RegardError as error:
            note(f"call {self.number} refuses to go back: {error}")
            return
        except RuntimeError as error:
            if not any(words in str(error) for words in TORCHS):
                raise
            note(f"call {self.number}: torch refuses to go back: {error}")
            return
        for one, right in zip(found, self.gradients, strict=True):
            off = float((one - right).abs().max()) / max(1.0, float(right.abs().max()))
            assert off < 1e-5, f"call {self.number}: gradients are off by {off:.3g}, without an error"


def _gradients(life: Life) -> list[Tensor]:
    found = torch.autograd.grad(
        life.output.square().sum(), life.leaves, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return [grad.clone() for grad in found]


def case(drawn: Drawn) -> None:
    warnings.simplefilter("ignore")
    subjects = {**SUBJECTS, **MODELS}
    subject = subjects[drawn.of(sorted(subjects))](drawn)
    calls: list[Called] = []
    for _ in range(drawn.number(2, 7)):
        match drawn.of(["call", "change", "change", "read", "back"]) if calls else "call":
            case "call":
                twin = subject.run()
                weights, gradients = twin.read().clone(), _gradients(twin) if twin.leaves else []
                note(f"call {len(calls)}")
                calls.append(Called(len(calls), subject.run(), weights, gradients))
            case "change":
                change(drawn, subject)
            case "read":
                drawn.of(calls).check_read()
            case _:
                drawn.of(calls).check_backward()
    change(drawn, subject)
    for called in calls:
        called.check_read()
        called.check_backward()
