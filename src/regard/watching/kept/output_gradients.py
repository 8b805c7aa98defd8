"""Gradients of backward passes, saved for the watched calls."""

from collections.abc import Callable

from torch import Tensor

from regard.errors import GradientError
from regard.tensors.fresh import Fresh

Change = Callable[[Tensor], Tensor]

ITSELF = "the model itself"
"""Replaces the model's empty path in messages."""
NO_GRAPH = (
    "{} ran without gradients (under torch.no_grad, torch.inference_mode, or torch.utils.checkpoint with "
    "use_reentrant=True), so that no backward pass reaches it: run the model with gradients, and checkpoint with "
    "use_reentrant=False"
)
FROZEN = (
    "nothing that the output of {} was made of requires a gradient, so that no backward pass reaches it: let the "
    "model's parameters or its input require one, such as inputs_embeds.requires_grad_()"
)


class GradientOf:
    """The gradient of one tensor of the model: a hook of the tensor receives it when a backward pass comes by."""

    def __init__(self, what: str, log: "GradientLog") -> None:
        self.what = what
        self._log = log
        self._kept: Tensor | None = None
        self._fresh = Fresh()
        self._passes = 0

    def receive(self, gradient: Tensor | None) -> None:
        """Save the gradient of the first backward pass; several would be ambiguous."""
        if gradient is None:
            return
        self._passes += 1
        self._kept, self._fresh = None, Fresh()
        if self._passes == 1:
            self._kept = self._log.keep(gradient, f"gradient of {self.what}", self._fresh)

    @property
    def is_reached(self) -> bool:
        return self._passes > 0

    def clear(self) -> None:
        self._kept, self._fresh, self._passes = None, Fresh(), 0

    def tensors(self) -> list[Tensor]:
        return self._fresh.tensors()

    def read(self) -> Tensor:
        if self._passes > 1:
            raise GradientError(
                f"{self._passes} backward passes went through {self.what}, and it cannot be told of which the gradient "
                "is asked: read it after the first, and call seen.zero_grad() before the next"
            )
        if self._kept is None:
            others = self._log.reached
            came = f"a backward pass reached {others} other calls of this watch, but not" if others else (
                "no backward pass has reached"
            )  # fmt: skip
            raise GradientError(
                f"{came} {self.what}: call backward() on a loss that depends on its output, before the gradient is read"
            )
        self._fresh.check()
        return self._kept


class GradientLog:
    def __init__(self, keep: Callable[[Tensor, str, Fresh], Tensor]) -> None:
        self.keep = keep
        self.is_recording = True
        """True if the call being read ran with gradients; they may be off meanwhile."""
        self._waiting: list[GradientOf] = []

    def of(self, tensor: Tensor, what: str) -> GradientOf:
        if not tensor.requires_grad:
            raise GradientError((FROZEN if self.is_recording else NO_GRAPH).format(what))
        found = GradientOf(what, self)
        tensor.register_hook(found.receive)
        self._waiting.append(found)
        return found

    @property
    def reached(self) -> int:
        return sum(one.is_reached for one in self._waiting)

    def clear(self) -> None:
        for one in self._waiting:
            one.clear()


def called(path: str) -> str:
    """A call of a module, for messages.

    >>> called("encoder.0"), called("")
    ("this call of 'encoder.0'", 'this call of the model itself')
    """
    return f"this call of {path!r}" if path not in ("", ITSELF) else f"this call of {ITSELF}"


def refusing(reason: str) -> Callable[[], Tensor]:
    """A gradient there will never be.

    >>> refusing("nothing requires one")()
    Traceback (most recent call last):
    regard.errors.GradientError: nothing requires one
    """

    def refuse() -> Tensor:
        raise GradientError(reason)

    return refuse
