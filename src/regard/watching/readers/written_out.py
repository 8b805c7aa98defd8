"""A call of weights T x S that the model itself multiplied with values, kept unchanged, and its rows rebuilt."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor

from regard.call.shapes import UNNAMED, Dimensions
from regard.errors import ArgumentError, ShapeError
from regard.maps.sources.combined import ScaledSource
from regard.maps.sources.given import TensorSource
from regard.maps.sources.values import read_now, widened
from regard.tensors.fresh import Fresh
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_values import OutputOf, weights_gradient
from regard.watching.origins.streams import Origins
from regard.watching.readers.contractions import Labels, sum_of_products
from regard.watching.readers.head_layouts import AS_DOCUMENTED, HeadLayout, Heads
from regard.watching.readers.no_attention import ValueProduct
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall


@dataclass(frozen=True, slots=True, eq=False)
class StoredSource(TensorSource):
    """The weights (batch..., H, T, S) of a tensor the model made. They may be negative, and need not sum to 1."""

    held: Tensor
    """(flat_heads, T, S)."""
    fresh: Fresh
    layout: tuple[int, ...]
    """(batch..., H)."""
    name: str
    names: Dimensions
    received: Callable[[], Tensor] | None = None
    """Gives the gradient of the weights (flat_heads, T, S), if a watch waits for it."""

    def __reduce__(self) -> tuple[object, ...]:
        parts = (self.weights, self.fresh, self.layout, self.name, self.names, read_now(self.received))
        return StoredSource, parts

    @property
    def tensor(self) -> Tensor:
        return self.held

    def __str__(self) -> str:
        return self.name

    def refuse(self, asked: str) -> NoReturn:
        """Raise ArgumentError: there are weights, without queries and keys."""
        raise ArgumentError(
            f"{asked} needs the queries and keys of a call, and of {self} the weights alone were kept: dense() gives "
            "them as a tensor"
        )

    def gradient(self, grad_output: Tensor | None) -> "StoredSource":
        received = self._received("gradient()", grad_output)
        fresh = Fresh(gradient_of_the_weights=received)
        return replace(self, held=received, fresh=fresh, name=f"gradient of {self.name}", received=None)

    def attribution(self, grad_output: Tensor | None) -> ScaledSource:
        received = widened(self._received("attribution()", grad_output))
        return ScaledSource(self.mapped(Tensor.detach), received)

    def _received(self, asked: str, grad_output: Tensor | None) -> Tensor:
        if grad_output is not None:
            self.refuse(f"{asked} for a given gradient of the output")
        if self.received is None:
            raise ArgumentError(
                f"{asked} needs the gradient of the weights, which was not kept: regard.watch(model, values=True, "
                "gradients=True), and ask after backward()"
            )
        return self.received()

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "StoredSource":
        names = Dimensions.unknown(len(leading), UNNAMED)
        if flat_heads is None:
            return replace(self, layout=leading, names=names)
        chosen, received = self.weights[flat_heads], _then(self.received, lambda t: t[flat_heads])
        return replace(self, held=chosen, fresh=Fresh(weights=chosen), layout=leading, names=names, received=received)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "StoredSource":
        made = change(self.weights)
        return replace(self, held=made, fresh=Fresh(weights=made), received=_then(self.received, change))


def _then(make: Callable[[], Tensor] | None, change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor] | None:
    return None if make is None else lambda: change(make())


def stored(
    weights: Tensor, fresh: Fresh, name: str, dimensions: Dimensions, received: Callable[[], Tensor] | None = None
) -> StoredSource:  # fmt: skip
    """The source of saved weights (batch..., H, T, S), (batch, T, S) or (T, S), with their gradient in that layout."""
    layout = tuple(weights.shape[:-2])
    flat_heads = weights.reshape(-1, *weights.shape[-2:])
    if flat_heads.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr():
        fresh = Fresh()  # A reshaped copy has memory of its own.
        fresh.own("weights", flat_heads)
    back = _then(received, lambda gradient: gradient.reshape(flat_heads.shape))
    return StoredSource(flat_heads, fresh, layout, name, dimensions, back)


@dataclass(slots=True, eq=False)
class WrittenOut(ObservedCall):
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
