"""Who computes: the backends, in the order in which `backend=None` asks them."""

from dataclasses import replace

from torch import Tensor

from regard.backends.base import Backend, Call
from regard.backends.fused import Fused
from regard.backends.reference import Reference
from regard.backends.tiled import Tiled
from regard.errors import ArgumentError

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Fused(), Tiled(), Reference())}


def execute(backend: Backend, call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and row state of the call's own normalization, which a backend runs by its base."""
    base = call.normalization.base
    if base is call.normalization:
        return backend.run(call, value)
    output, state = backend.run(replace(call, normalization=base), value)
    return call.normalization.finish(output, state)


def choose(call: Call, name: str | None) -> Backend:
    """The named backend, or the first that runs the call.

    Raises:
        ArgumentError: no backend has that name.
        BackendError: the named backend cannot run the call; it never falls back in silence.
    """
    base = call.normalization.base
    call = call if base is call.normalization else replace(call, normalization=base)
    if name is not None and name not in BACKENDS:
        raise ArgumentError(f"backend must be None or one of {', '.join(BACKENDS)}; got {name!r}")
    if name is not None and not BACKENDS[name].why_not(call):
        return BACKENDS[name]
    first = next(backend for backend in BACKENDS.values() if not backend.why_not(call))
    if name is not None:
        BACKENDS[name].require(call, others=f"backend=None would take {first.name!r}")
    return first
