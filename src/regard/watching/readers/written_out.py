"""Weights T x S that the model itself multiplied with values: judged to be attention over positions or a lookalike
(channels, vocabularies, landmarks, expectations), kept unchanged, and the rows of the product rebuilt.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from regard.call.shapes import UNNAMED, Dimensions
from regard.errors import ArgumentError, ShapeError
from regard.maps.sources.combined import ScaledSource
from regard.maps.sources.given import TensorSource
from regard.maps.sources.source import Source
from regard.maps.sources.values import read_now, widened
from regard.tensors.fresh import Fresh
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_values import OutputOf, weights_gradient
from regard.watching.origins.streams import Origins, is_learned
from regard.watching.origins.traces import SoftmaxOrigin, SoftmaxWeights
from regard.watching.readers.contractions import Contraction, Labels, sum_of_products
from regard.watching.readers.heads import AS_DOCUMENTED, HeadLayout, Heads, running
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall
from regard.watching.running.thread_state import ThreadState


@dataclass(frozen=True, slots=True, eq=False)
class ValueProduct:
    """A product of weights with values, and the layout (batch..., H, T, S) of the weights in it."""

    contraction: Contraction
    place: int
    key: object
    order: tuple[int, ...]
    """The axes of the weights, in the order batch..., heads, queries, keys."""
    has_queries: bool
    unfolded: tuple[int, ...] = ()
    """The sizes of the axes folded into the first; empty without folding."""

    @classmethod
    def of(cls, contraction: Contraction, place: int, key: object) -> "ValueProduct | None":
        labels = contraction.labels[place]
        beside = {label for m, own in enumerate(contraction.labels) if m != place for label in own}
        shared = [n for n, label in enumerate(labels) if label != key and label in beside]
        free = [n for n, label in enumerate(labels) if label not in beside and label in contraction.output]
        summed = [n for n, label in enumerate(labels) if label not in beside and label not in contraction.output]
        if labels.count(key) != 1 or summed:
            return None
        axis = labels.index(key)
        return cls(contraction, place, key, (*shared, *free, axis), bool(free))

    @property
    def weights(self) -> Tensor:
        return self.contraction.operands[self.place]

    @property
    def values(self) -> Tensor:
        return self.contraction.operands[self._values]

    @property
    def _values(self) -> int:
        return next(m for m, own in enumerate(self.contraction.labels) if m != self.place and self.key in own)

    @property
    def values_labels(self) -> Labels:
        return self.contraction.labels[self._values]

    @property
    def query_label(self) -> object | None:
        return self.contraction.labels[self.place][self.order[-2]] if self.has_queries else None

    @property
    def queries(self) -> int:
        return self.weights.shape[self.order[-2]] if self.has_queries else 1

    @property
    def keys(self) -> int:
        return self.weights.shape[self.order[-1]]

    @property
    def features(self) -> list[int]:
        known = set(self.contraction.labels[self.place])
        return [n for n, label in enumerate(self.values_labels) if label not in known]

    def unfold(self, trace: SoftmaxWeights) -> "ValueProduct":
        shape = trace.origins[0].shape
        lead = tuple(shape[:-2])
        is_folded = self.order == (0, 1, 2) and len(lead) > 1 and prod(lead) == self.weights.shape[0]
        if trace.is_moved or not is_folded or trace.origins[0].axis != len(shape) - 1 or shape[-2] != self.queries:
            return self
        return replace(self, unfolded=lead)

    @property
    def laid_out(self) -> Callable[[Tensor], Tensor]:
        """From weights in the layout of the product to (batch..., H, T, S), without references to tensors."""
        return partial(_laid_out, self.order, self.has_queries, self.unfolded)

    def laid_out_values(self) -> Tensor | None:
        """The values (batch..., H, S, E) beside the weights; None in other layouts."""
        lead = [self.contraction.labels[self.place][n] for n in self.order[: -2 if self.has_queries else -1]]
        known = self.values_labels
        if len(self.features) != 1 or any(label not in known for label in lead) or len(known) != len(lead) + 2:
            return None
        order = [*(known.index(label) for label in lead), known.index(self.key), self.features[0]]
        laid = self.values.permute(order)
        return laid.unflatten(0, self.unfolded) if self.unfolded else laid

    def laid_back(self, weights: Tensor) -> Tensor:
        """Weights (batch..., H, T, S) in the layout of the product."""
        weights = weights.flatten(0, len(self.unfolded) - 1) if self.unfolded else weights
        weights = weights if self.has_queries else weights.squeeze(-2)
        back = [0] * len(self.order)
        for n, axis in enumerate(self.order):
            back[axis] = n
        return weights.permute(back)


def _laid_out(order: tuple[int, ...], has_queries: bool, unfolded: tuple[int, ...], weights: Tensor) -> Tensor:
    laid = weights.permute(order)
    laid = laid if has_queries else laid.unsqueeze(-2)
    return laid.unflatten(0, unfolded) if unfolded else laid


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason why a product is no attention over positions; or the uncertain parts of one that is."""

    reason: str = ""
    notes: tuple[str, ...] = ()


def judged(thread: ThreadState, product: ValueProduct, trace: SoftmaxWeights) -> Verdict:
    values, keys = product.values, product.keys
    projected = any(origin.is_projected for origin in trace.origins)
    if is_learned(values) or (projected and _is_like_a_parameter(thread, values)):
        return Verdict(
            f"a softmax over {keys} that multiplied a parameter {tuple(values.shape)}: a mixture of learned vectors "
            "(of a vocabulary?), not of positions"
        )
    if not product.features:
        return Verdict(f"a softmax over {keys} that averaged one number each: an expectation, not attention")
    axis = product.values_labels.index(product.key)
    known = thread.streams.is_channel(values, axis)
    if known or (known is None and _sizes_say_channel(thread, product)):
        return Verdict(f"attention of {product.queries} channels on {keys} channels, not of positions")
    if product.queries == keys and all(_is_handed_over(thread, origin) for origin in trace.origins):
        return Verdict(f"weights {keys} x {keys} from another module, which compared no queries with keys: a "
                       "mixture of streams at each position?")  # fmt: skip
    if projected and not product.has_queries:
        return Verdict(f"a softmax over the {keys} outputs of a projection that mixed {keys} values of each position: "
                       "a mixture of experts?")  # fmt: skip
    if projected:
        return Verdict(notes=(
            "the scores are the outputs of one projection, not products of queries and keys: the keys may be experts, "
            "classes or features in place of positions",
        ))  # fmt: skip
    if known is None and product.queries == keys and [values.shape[n] for n in product.features] == [keys]:
        return Verdict(
            notes=(f"the values are {keys} x {keys}, and nothing tells their positions from their channels",)
        )
    return Verdict()


def _is_handed_over(thread: ThreadState, origin: SoftmaxOrigin) -> bool:
    """True for weights of another module than the one that multiplies values, made without a look at pairs."""
    is_unlike = not origin.is_compared and not origin.is_projection
    return is_unlike and origin.module is not None and origin.module is not thread.innermost_module()


def _is_like_a_parameter(thread: ThreadState, values: Tensor) -> bool:
    """True if values have the layout of a parameter of the model (a scaled or cast embedding)."""
    if values.dim() != 2 or not thread.stack:
        return False
    shapes = {values.shape, values.mT.shape}
    return any(p.shape in shapes for p in thread.stack[0].module.parameters())


def _sizes_say_channel(thread: ThreadState, product: ValueProduct) -> bool:
    """True if the sizes of a module's input make the keys its channels, and the features its positions. Used only
    without a known projection."""
    if not thread.stack or product.queries != product.keys or len(product.features) != 1:
        return False
    if (module := thread.innermost_module()) is None:
        return False
    shapes = next(([tuple(one.shape) for one in given] for running_, given in running() if running_ is module), [])
    features, keys = product.values.shape[product.features[0]], product.keys
    heads = prod(product.weights.shape[n] for n in product.order[1:-2]) if len(product.order) > 2 else 1
    for shape in shapes:
        if len(shape) < 3:
            continue
        # An input is (N, ..., C) or (N, C, ...).
        for channels, positions in ((shape[-1], prod(shape[1:-1])), (shape[1], prod(shape[2:]))):
            is_channel = keys == channels or keys * heads == channels
            if is_channel and features == positions and keys != positions and features * heads != channels:
                return any(channels in parameter.shape for parameter in module.parameters())
    return False


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
        raise ArgumentError(
            f"{asked} needs the queries and keys of a call, and of {self} the weights alone were kept: dense() gives "
            "them as a tensor"
        )

    def gradient(self, grad_output: Tensor | None, asked: str) -> Source:
        received = self._received(f"{asked}()", grad_output)
        if asked == "attribution":
            return ScaledSource(self.mapped(Tensor.detach), widened(received))
        fresh = Fresh(gradient_of_the_weights=received)
        return replace(self, held=received, fresh=fresh, name=f"gradient of {self.name}", received=None)

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
    has_keys: Tensor | None = None
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
        if policy.gradients is None:
            return None
        # The function must not hold the product, and with it the values.
        layout = self.product.laid_out
        output = OutputOf(self.product.weights, lambda gradient: shown(layout(gradient)))
        return weights_gradient(policy, name, output)

    def _evidence(self, weights: Tensor, values: Tensor | None) -> Evidence | None:
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
