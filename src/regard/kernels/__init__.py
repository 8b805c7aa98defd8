"""The backends that compute attention, and the choice among them."""

from dataclasses import replace

import torch
from torch import Tensor

from regard.call.shapes import repeated, without_autocast
from regard.errors import ArgumentError
from regard.kernels.base import Backend, BackendName, Call
from regard.kernels.fused import Fused
from regard.kernels.tiled import Tiled
from regard.tensors.guards import State, is_recorded, run_state


class Reference(Backend):
    """The specification: $O = \\mathrm{drop}(P) V$, with P in full: T x S weights for each head.

    Scores and weights are computed in at least float32 and the output is returned in the input's dtype.
    All other backends are checked against it in float64.
    """

    name = "reference"

    def why_not(self, call: Call, state: State) -> str | None:
        return None

    def run(self, call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
        scores = call.scores(range(call.sizes.queries), range(call.sizes.keys))
        weights, state = call.normalization.normalize(scores)
        weights = torch.dropout(weights, call.dropout, train=call.dropout > 0)
        dtype = value.dtype
        value = repeated(value.to(call.compute_dtype), call.sizes.heads)
        return (weights @ value).to(dtype), state


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Fused(), Tiled(), Reference())}
"""All backends by name, in the order of choice for `backend=None`."""


def execute(backend: Backend, call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(call.query.device):
        return run(backend, call, value)


def run(backend: Backend, call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
    """The same in the state of the caller, who has left autocast."""
    if not call.normalization.has_base:
        output, state = backend.run(call, value)
    else:
        call_ = replace(call, normalization=call.normalization.base)
        output, state = backend.run(call_, value)
        output, state = call.normalization.finish(output, state)
    if call.snapshot is not None:
        call.guard(output, state)
    return output, state


def row_state(call: Call) -> Tensor:
    """The row state by a second pass over the scores, for a kernel with no exact one.

    In the compute dtype, with a gradient if gradients are recorded.
    """
    grad = is_recorded()
    # The state is cached. It must not be an inference tensor, even if its first read is in inference mode.
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        dtype, at = call.compute_dtype, run_state(call.query)
        query, key = call.query.to(dtype), call.key.to(dtype)
        call = replace(call, query=query, key=key, dropout=0.0)
        # Any values would do: pass the keys.
        return (execute if at.is_cast else run)(choose_backend(call, None, at), call, key)[1]


def choose_backend(call: Call, name: BackendName | None, state: State | None = None) -> Backend:
    if call.normalization.has_base:
        call = replace(call, normalization=call.normalization.base)
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        raise ArgumentError(f"backend must be None or one of {', '.join(BACKENDS)}; got {name!r}")
    state = run_state(call.query) if state is None else state
    if name is not None and not BACKENDS[name].why_not(call, state):
        return BACKENDS[name]
    for first in BACKENDS.values():
        if not first.why_not(call, state):
            break
    if name is not None:
        BACKENDS[name].require(call, state, others=f"backend=None would take {first.name!r}")
    return first.unnamed()
