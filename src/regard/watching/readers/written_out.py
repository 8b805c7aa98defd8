"""A call of weights that the model itself multiplied with values, and its rows rebuilt."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.call.shapes import UNNAMED, Dimensions
from regard.errors import ShapeError
from regard.tensors.fresh import Fresh
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_values import OutputOf, weights_gradient
from regard.watching.kept.stored_weights import StoredSource, stored
from regard.watching.origins.streams import Origins
from regard.watching.readers.contractions import Labels, sum_of_products
from regard.watching.readers.head_layouts import AS_DOCUMENTED, HeadLayout, Heads
from regard.watching.readers.no_attention import ValueProduct
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall


@dataclass(slots=True, eq=False)
class WrittenOut(ObservedCall):
    """Weights the model multiplied with values, after the product ran."""

    product: ValueProduct
    result: Tensor
    softmax: Tensor | None
    """The softmax, laid out as the weights, if it may differ from them."""
    name: str
    how: str
    notes: tuple[str, ...] = ()
    heads: Heads = AS_DOCUMENTED
    origins: Origins | None = None
    is_over_queries: bool = False
    is_part: bool = False
    token: object = field(default_factory=object)

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        product = self.product
        weights, values = product.laid_out(product.weights), product.laid_out_values()
        softmax, notes, layout = self.softmax, [*self.notes, *self.heads.notes], self.heads.layout
        names = self.heads.dimensions or Dimensions.of_call(weights.dim() - 2, has_heads=False)
        if self.origins is None:
            names = replace(names, queries="unknown", keys="unknown")
        shown: Callable[[Tensor], Tensor] = (lambda weights: weights) if layout is None else layout.unfolded
        if softmax is not None and softmax.shape == weights.shape:
            softmax = shown(softmax)
        weights, values = shown(weights), None if values is None else shown(values)
        differs = softmax is not None and not _equal(softmax, weights)
        fresh, of_softmax = Fresh(), Fresh()
        kept = policy.keep(weights, f"weights of {name}", fresh)
        received = self._gradient(policy, name, shown)
        source = stored(kept, fresh, self.name + (", changed" if differs else ""), names, received)
        beside = None
        if softmax is not None and differs:
            own = names if softmax.shape == weights.shape else Dimensions.unknown(softmax.dim() - 2, UNNAMED)
            beside = stored(policy.keep(softmax, f"softmax of {name}", of_softmax), of_softmax, self.name, own)
            notes.append(CHANGED)
        return Observation(
            None, notes, ProductRebuilding(product, self.result, source, self.heads.layout), stored=source,
            softmax=beside, evidence=self._evidence(weights.detach(), values)
        )  # fmt: skip

    def query_key_value(self) -> CallVectors:
        return CallVectors(None, None, self.product.laid_out_values())

    def _gradient(
        self, policy: RetentionPolicy, name: str, shown: Callable[[Tensor], Tensor]
    ) -> Callable[[], Tensor] | None:  # fmt: skip
        """Wait for the gradient of the weights, a tensor of the model; it gets their layout."""
        if policy.gradients is None:
            return None
        # The function must not hold the product, and with it the values.
        layout = self.product.laid_out
        output = OutputOf(self.product.weights, lambda gradient: shown(layout(gradient)))
        return weights_gradient(policy, name, output)

    def _evidence(self, weights: Tensor, values: Tensor | None) -> Evidence | None:
        """The values, which a cache passes on like keys; None if their layout differs from that of keys."""
        expected = (*weights.shape[:-2], weights.shape[-1])
        if values is None or not 3 <= weights.dim() <= 4 or values.shape[:-1] != expected:
            return None
        return Evidence(weights, values, self.product.values)


CHANGED = (
    "these are the weights that multiplied the values; the softmax that the model changed into them (by a mask, a "
    "gate, a mix of heads or dropout) is seen.softmax(name)"
)


def _equal(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal up to the rounding of another dtype."""
    if one.shape != other.shape:
        return False
    return torch.equal(one if one.dtype == other.dtype else one.to(other.dtype), other)


@dataclass(frozen=True, slots=True, eq=False)
class ProductRebuilding(Rebuilding):
    """The result of a product with saved weights, which take the way back from the layout of a map."""

    product: ValueProduct
    result: Tensor
    source: StoredSource
    layout: HeadLayout | None
    """How the heads were folded into the batch, if they were."""

    @property
    def queries(self) -> int:
        return self.source.queries

    def whole(self) -> Rebuilt:
        return self.some(range(self.queries))

    def some(self, rows: range) -> Rebuilt:
        source, product, contraction = self.source, self.product, self.product.contraction
        read = source.laid_out(source.part(range(source.flat_heads))(rows, range(source.keys)).weights)
        read = product.laid_back(read if self.layout is None else self.layout.folded(read)).detach()
        label, output = product.query_label, contraction.output
        if label is not None and label not in output:
            raise ShapeError("the product sums over its queries: its output has no rows to rebuild")

        def of_rows(tensor: Tensor, labels: Labels) -> Tensor:
            return tensor.narrow(labels.index(label), rows.start, len(rows)) if label in labels else tensor

        operands = [
            of_rows(t.detach().to(torch.promote_types(t.dtype, source.dtype)), own)
            for t, own in zip(contraction.operands, contraction.labels, strict=True)
        ]
        operands[product.place] = read.to(operands[product.place].dtype)
        rebuilt = sum_of_products(operands, contraction.labels, output)
        found = of_rows(contraction.product_of(self.result.detach().to(rebuilt.dtype)), output)
        # The dtype of the result says how far it may be rounded: under autocast the weights may have a longer one.
        return Rebuilt(rebuilt, found.to(self.result.dtype), product.values.detach())
