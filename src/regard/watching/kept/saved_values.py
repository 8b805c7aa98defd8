"""The saved values and output gradient of a call."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard.call.shapes import Sizes
from regard.errors import GradientError
from regard.maps.sources.factors import NOTHING_HELD
from regard.maps.sources.values import CallValues, of_heads
from regard.tensors.fresh import Fresh
from regard.tensors.undisturbed import undisturbed
from regard.watching.kept.output_gradients import GradientOf, called, refusing
from regard.watching.kept.retention import RetentionPolicy

DROPPED = (
    "{} ran with dropout {}, and which weights its kernel dropped is not known: call model.eval() first, which keeps "
    "the gradients and leaves dropout out"
)


@dataclass(frozen=True, slots=True, eq=False)
class OutputOf:
    tensor: Tensor | None
    """None if the model got no output of its attention."""
    laid_out: Callable[[Tensor], Tensor]
    """Turns the gradient of the output into (B, H, T, E)."""
    dropout: float = 0.0
    fresh: Fresh = NOTHING_HELD
    """The tensors it is turned with."""


@dataclass(frozen=True, slots=True, eq=False)
class ValuesOf:
    """The values of a call: a function for (B, G or H, S, E), and its source tensors."""

    make: Callable[[], Tensor]
    fresh: Fresh

    def read(self) -> Tensor:
        self.fresh.check()
        return self.make()


def saved_values(
    policy: RetentionPolicy, name: str, sizes: Sizes, values: Callable[[], ValuesOf], output: Callable[[], OutputOf]
) -> CallValues:
    """Save values and gradients, as the watch demands. `values` saves the values; `output` gives the output, and saves
    the tensors that transform its gradient."""
    made = values() if policy.values else None
    value = None if made is None else lambda: of_heads(made.read(), sizes.heads)
    held = [] if made is None else made.fresh.tensors()
    if policy.gradients is None:
        return CallValues(value, None, lambda: held)
    found = output()
    gradient = _gradient(policy, name, found)
    if not isinstance(gradient, GradientOf):
        return CallValues(value, gradient, lambda: held)
    turned = _Turned(gradient, found.laid_out, found.fresh)
    return CallValues(value, lambda: turned.read().flatten(0, 1), lambda: held + gradient.tensors())


@dataclass(frozen=True, slots=True, eq=False)
class _Turned:
    received: GradientOf
    laid_out: Callable[[Tensor], Tensor]
    fresh: Fresh

    def read(self) -> Tensor:
        gradient = self.received.read()
        self.fresh.check()
        with undisturbed():
            return self.laid_out(gradient)


def weights_gradient(policy: RetentionPolicy, name: str, weights: OutputOf) -> Callable[[], Tensor]:
    gradient = _gradient(policy, name, weights)
    if not isinstance(gradient, GradientOf):
        return gradient
    return _Turned(gradient, weights.laid_out, NOTHING_HELD).read


def _gradient(policy: RetentionPolicy, name: str, output: OutputOf) -> GradientOf | Callable[[], Tensor]:
    assert policy.gradients is not None
    what = called(name)
    if output.dropout > 0:
        return refusing(DROPPED.format(what, output.dropout))
    if output.tensor is None:
        return refusing(f"the fused layer of {name} gives no output of its attention: run it with gradients")
    try:
        return policy.gradients.of(output.tensor, what)
    except GradientError as error:
        return refusing(str(error))
