"""The ground `recurrences`: random linear recurrences and questions to their maps, against the loop over positions in
float64; lengths around the borders of chunks, gates near 0 and 1 and closed, writes of 0 and 1, empty batches."""

from typing import Any, cast

import torch
from torch import Tensor

import regard
from tests.fuzz.drawing import Drawn
from tests.maps.naive_recurrence import Given, recurrences, step_by_step
from tests.maps.test_linear_recurrent import close
from tests.maps.test_linear_recurrent import test_parts_and_statistics_are_those_of_the_dense_weights as of_parts
from tests.maps.test_linear_recurrent import test_the_output_the_weights_and_the_state_are_those_of_the_loop as of_loop


def case(drawn: Drawn) -> None:
    given: Given = drawn.draw(recurrences())
    loop, parts = cast(Any, of_loop), cast(Any, of_parts)  # each has the function that hypothesis runs
    loop.hypothesis.inner_test(given)
    parts.hypothesis.inner_test(given, drawn)
    cut = drawn.number(0, given.query.shape[2])
    if 0 < cut < given.query.shape[2]:
        close(_in_parts(given, cut), step_by_step(given)[0], 1e-9)


def _in_parts(given: Given, cut: int) -> Tensor:
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
