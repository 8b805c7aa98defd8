"""The ground `recurrences`: random linear recurrences and questions to their maps, against the loop over positions in
float64; lengths around the borders of chunks, gates near 0 and 1 and closed, writes of 0 and 1, empty batches."""

from typing import Any

import torch
from torch import Tensor

import regard
from tests.fuzz.drawing import Drawn
from tests.maps.naive_recurrence import Given, recurrences, step_by_step

TOLERANCE = 1e-9


def close(ours: Tensor, exact: Tensor) -> None:
    size = float(exact.abs().max()) if exact.numel() else 1.0
    torch.testing.assert_close(ours, exact, rtol=0, atol=TOLERANCE * max(size, 1.0))


def case(drawn: Drawn) -> None:
    given: Given = drawn.draw(recurrences())
    output, dense, state = step_by_step(given)
    ours = regard.linear_attention(*given[:3], **given.options, return_weights=True, return_state=True)
    weights = ours.weights
    assert weights is not None
    close(ours.output, output)
    close(ours.state, state)
    close(weights.dense(), dense)
    length = dense.shape[-1]
    x = drawn.normal(*dense.shape[:-1], 2)
    close(weights @ x, dense @ x)
    close(weights.mT @ x, dense.mT @ x)
    close(weights.received(), dense.sum(-2))
    row = drawn.number(0, length - 1)
    close(weights[..., row, :], dense[..., row, :])
    if dense.shape[0]:
        close(weights[0, 0].dense(), dense[0, 0])
    cut = drawn.number(0, length)
    if 0 < cut < length:
        close(_in_parts(given, cut), output)


def _in_parts(given: Given, cut: int) -> Tensor:
    """The output of two calls, the second of which goes on from the state of the first."""
    length = given.query.shape[2]

    def part(x: Tensor, places: slice) -> Tensor:
        return x[:, :, places] if x.dim() > 2 and x.shape[2] == length else x

    found, state = [], None
    for places in (slice(0, cut), slice(cut, length)):
        options: dict[str, Any] = {
            name: tuple(part(x, places) for x in one) if isinstance(one, tuple)
            else part(one, places) if isinstance(one, Tensor) else one
            for name, one in given.options.items()
        }  # fmt: skip
        ours = regard.linear_attention(*(part(x, places) for x in given[:3]), **options, state=state, return_state=True)
        state = ours.state
        found.append(ours.output)
    return torch.cat(found, 2)
