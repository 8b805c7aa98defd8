"""Changes to the parts of a call after it."""

from collections.abc import Callable

import torch
from hypothesis import note
from torch import Tensor

from tests.fuzz.drawing import Drawn
from tests.fuzz.lifetimes.subject import Subject

OPTIMIZERS = ["AdamW", "SGD", "Adam", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Rprop", "ASGD", "Adadelta"]
FUSED = ["AdamW", "SGD", "Adam", "Adagrad"]


def _step(drawn: Drawn, subject: Subject) -> None:
    name, how = drawn.of(OPTIMIZERS), drawn.of(["fused", "foreach", "plain"])
    options = {"fused": True} if how == "fused" and name in FUSED else {"foreach": how == "foreach"}
    note(f"a step of {name}, {options}")
    for parameter in subject.parameters:
        parameter.grad = drawn.normal(*parameter.shape).to(parameter)
    getattr(torch.optim, name)(subject.parameters, lr=0.5, **options).step()
    for parameter in subject.parameters:
        parameter.grad = None


def _written(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return ~tensor
    return tensor * 2 + 1 if tensor.is_floating_point() else (tensor + 1) % 5 + 1


def _write(drawn: Drawn, subject: Subject) -> None:
    tensor = drawn.of([*subject.tensors, *subject.parameters])
    how = drawn.of(["in place", "data", "a part of it", "numpy", "the memory of another"])
    note(f"a write to {tuple(tensor.shape)} {tensor.dtype}: {how}")
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        other = _written(tensor.detach())
        match how:
            case "in place":
                tensor.copy_(other)
            case "data":
                tensor.data.copy_(other)
            case "a part of it":
                tensor.data.view(-1)[-1:].copy_(other.view(-1)[-1:]) if tensor.is_contiguous() else tensor.copy_(other)
            case "numpy" if not tensor.is_inference():
                tensor.detach().numpy()[...] = other.numpy()
            case _:
                tensor.data = other.clone()


def _load(drawn: Drawn, subject: Subject) -> None:
    module, assign = drawn.of(subject.modules), drawn.chance()
    note(f"load_state_dict, assign={assign}")
    module.load_state_dict({n: _written(t.detach()).clone() for n, t in module.state_dict().items()}, assign=assign)
    subject.parameters[:] = [p for each in subject.modules for p in each.parameters()]


def _vary(drawn: Drawn, subject: Subject) -> None:
    number = drawn.number(0, len(subject.variables) - 1)
    note(f"variable {number}")
    subject.variables[number]()


Change = Callable[[Drawn, Subject], None]


def change(drawn: Drawn, subject: Subject) -> None:
    may: list[Change] = [_step] if subject.parameters else []
    may += [_write] if subject.tensors or subject.parameters else []
    may += [_load] if subject.modules else []
    may += [_vary] if subject.variables else []
    if may:
        drawn.of(may)(drawn, subject)
