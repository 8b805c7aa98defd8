"""A map beside its dense weights in float64, and how far each weight may be off."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume, note
from torch import Tensor

import regard
from tests.fuzz.core.bounds import unit, weight_error
from tests.fuzz.core.calls import Call, random_call, require_reasonable
from tests.fuzz.core.checks import BACKENDS
from tests.fuzz.drawing import Drawn


@dataclass(frozen=True)
class Mirror:
    map: regard.AttentionMap
    dense: Tensor
    error: Tensor
    number: float
    """The largest number that is summed for a score: some statistics are differences of scores."""
    unit: float
    name: str
    value: Tensor | None = None
    """The values of the call, (batch..., H, S, E), while the map is that of one call; key heads are repeated."""
    given: Tensor | None = None
    """The same as they were given."""
    grad: Tensor | None = None
    """A gradient of the output."""
    places: tuple[Tensor, Tensor] | None = None
    """Where the queries (T, 1) and the keys (S,) of a part stand in the whole."""
    is_call: bool = True
    has_signs: bool = False
    has_head: bool = True
    can_save: bool = True
    may_vanish: bool = False
    """Whether all weights of a row that has keys may be too small for float64: the participation knows them."""

    def of(self, name: str, **changes: Any) -> "Mirror":
        note(f"then {name}")
        return replace(self, name=f"{self.name}, {name}", **changes)


def random_mirror(drawn: Drawn, *, longest: int = 40) -> tuple[Mirror, Call]:
    call = random_call(drawn, longest=longest)
    with torch.no_grad():
        dense = call.dense(call.leaves(torch.float64))
        require_reasonable(call, dense)
        error = weight_error(call, dense)
        assume(error is not None)
        assert error is not None
        vectors, given = call.as_given(call.leaves())
        try:
            weights = regard.attention(*vectors, **given, backend=drawn.of(BACKENDS), return_weights=True).weights
        except regard.errors.BackendError:
            weights = regard.attention(*vectors, **given, return_weights=True).weights
    size = float(dense.size.max()) if dense.size.numel() else 0.0
    output = call.laid_out(dense.output)
    functions, keys = ("a function", "a predicate"), torch.arange(call.sides.keys)
    mirror = Mirror(
        weights, call.laid_out(dense.weights), call.laid_out(error), size, unit(call.dtype), "a call",
        value=call.laid_out(dense.value), given=vectors[2], grad=drawn.normal(*output.shape),
        places=(torch.arange(queries := call.sides.queries)[:, None] + call.sides.keys - queries, keys),
        has_head=call.sides.has_heads,
        can_save=not any(word in str(call) for word in functions),
        may_vanish=call.norm.name != "Softmax",
    )  # fmt: skip
    return mirror, call
