"""A student learns the attention of a teacher: KL divergence and its gradient, against the dense matrices of both."""

import torch
from torch import Tensor

import regard
from benchmarks.consumers.frame import Report, measure
from benchmarks.harness import Run

TITLE = "Consumers: the KL divergence between two maps, and its gradient"
HEADS, DIM = 8, 64


def factors(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query and key of the teacher, and of the student, whose gradients are wanted."""
    torch.manual_seed(0)
    drawn = [torch.randn(1, HEADS, length, DIM) for _ in range(4)]
    return drawn[0], drawn[1], drawn[2].requires_grad_(), drawn[3].requires_grad_()


def eager(length: int) -> Run:
    teacher_query, teacher_key, query, key = factors(length)

    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def logs(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT * DIM**-0.5).masked_fill(hidden, -1e9).log_softmax(-1)

    def run() -> tuple[Tensor, ...]:
        p, q = logs(teacher_query, teacher_key), logs(query, key)
        loss = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
        return (loss, *torch.autograd.grad(loss, (query, key)))

    return run


def ours(length: int) -> Run:
    teacher_query, teacher_key, query, key = factors(length)

    def run() -> tuple[Tensor, ...]:
        mask = regard.causal()
        p = regard.map_of(teacher_query, teacher_key, mask=mask)
        loss = regard.divergence(p, regard.map_of(query, key, mask=mask)).mean()
        return (loss, *torch.autograd.grad(loss, (query, key)))

    return run


def run() -> Report:
    return measure(
        __name__,
        note=f"{HEADS} heads of {DIM}, causal, float32: the mean over queries and heads, and the gradients of the "
        "student's queries and keys.",
    )
