"""Observe attention that a model writes out itself: a softmax whose result is multiplied with values.

Not every softmax is attention (routers and classifiers use it too). A softmax counts as attention once its result, or a
tensor of the same shape, is the left side of a product in the same module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.inspection.capture.evidence import Evidence
from regard.inspection.capture.folded_heads import Folding, find_folding, note_of
from regard.inspection.capture.module_stack import Frame, Thread
from regard.inspection.capture.observed_call import ObservedCall, Reading
from regard.inspection.capture.retention import Keeper
from regard.inspection.capture.stored_weights import stored
from regard.mechanisms.shapes import Sizes


@dataclass(frozen=True, slots=True, eq=False)
class WrittenOut(ObservedCall):
    """Weights that the model computed, and how many of their columns are keys."""

    weights: Tensor
    columns: int
    values: Tensor | None = None
    """What they were multiplied with."""
    how: str = "the model's own softmax, T x S weights kept"

    def read(self, keeper: Keeper, name: str) -> Reading:
        """Keep the weights themselves."""
        weights = self.weights.detach()[..., : self.columns]
        folding: Folding | str | None = None
        if self.values is not None and weights.dim() == 3 and self._are_rows():
            folding = find_folding(self.values)
        if isinstance(folding, Folding):
            weights = folding.unfolded(weights)
        *lead, queries, keys = weights.shape
        has_heads = len(lead) > 1
        batch, heads = (lead[:-1], lead[-1]) if has_heads else (lead, 1)
        sizes = Sizes(tuple(batch), heads, heads, queries, keys, has_heads)
        # Columns beyond the keys are sinks: the rows then sum to less than 1.
        factors = stored(
            keeper.keep(weights, f"the weights of {name}"), sizes, sums_to_one=keys == self.weights.shape[-1]
        )
        return Reading(
            factors, [note_of(folding)] if folding else [], "the weights are the model's own", is_stored=True,
            evidence=self._evidence(weights, folding), mixed=folding if isinstance(folding, str) else "",
        )  # fmt: skip

    def _are_rows(self) -> bool:
        """Whether the values have the layout of keys, (..., S, E)."""
        return self.values is not None and self.values.shape[:-1] == (*self.weights.shape[:-2], self.columns)

    def _evidence(self, weights: Tensor, folding: Folding | str | None) -> Evidence | None:
        """The values, which a cache hands on as it does keys; None if their layout is another than that of keys."""
        if self.values is None or not self._are_rows() or not 3 <= weights.dim() <= 4:
            return None
        values = folding.unfolded(self.values) if isinstance(folding, Folding) else self.values
        return Evidence(weights, values, self.values)


def observe_softmax(thread: Thread, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a softmax, and remember its result in the running module: it may turn out to be attention."""
    weights = func(*args, **kwargs)
    thread.try_to(_remember, thread, weights, kwargs.get("dim", args[1] if len(args) > 1 else None))
    return weights


def _remember(thread: Thread, weights: Tensor, dim: object) -> None:
    frame = _frame(thread)
    if frame is not None and isinstance(dim, int) and weights.dim() > 2 and dim in (-1, weights.dim() - 1):
        frame.pending.append(weights)


def observe_product(thread: Thread, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a product, and check whether one side is a softmax that was remembered."""
    frame = _frame(thread)
    if frame is not None and frame.pending:
        thread.try_to(_settle, thread, frame, [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)])
    return func(*args, **kwargs)


def _settle(thread: Thread, frame: Frame, operands: list[Tensor]) -> None:
    """Find the newest softmax that fits one operand of a product, and hand it to the watches."""
    pairs = [(left, right) for left in operands for right in operands if right is not left]
    for weights in reversed(frame.pending):
        # If values are as wide as there are keys, less one, two readings fit: the one with more columns counts.
        if columns := max((_columns(weights, *pair) for pair in pairs), default=0):
            frame.pending = [other for other in frame.pending if other is not weights]
            values = [right for left, right in pairs if _columns(weights, left, right) == columns]
            thread.give(WrittenOut(weights, columns, values[0]))
            return


def _columns(weights: Tensor, left: Tensor, right: Tensor) -> int:
    """How many columns of a softmax a product uses: all, or all but a sink; 0 if it is not the product with values."""
    if left.dim() < 2 or left.shape[-2] != weights.shape[-2]:
        return 0
    columns, keys = left.shape[-1], weights.shape[-1]
    fits = columns in (keys, keys - 1) and left.numel() == weights.numel() // keys * columns
    return columns if fits and columns in right.shape else 0


def _frame(thread: Thread) -> Frame | None:
    """The running module whose code this is; an nn.Softmax does not count, because the module around it calls it."""
    frames = [frame for frame in thread.stack[-2:] if not isinstance(frame.module, nn.Softmax)]
    return frames[-1] if frames else None
