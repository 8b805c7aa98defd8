"""Tell attention over positions from its lookalikes: channels, vocabularies, landmarks, expectations."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from torch import Tensor

from regard.watching.origins.streams import is_learned
from regard.watching.origins.traces import SoftmaxOrigin, SoftmaxWeights
from regard.watching.readers.contractions import Contraction, Labels
from regard.watching.readers.foldings import running
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
        """Read the layout; None if the labels do not fit weights."""
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
        """The label of the queries; None for one query."""
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
        for channels, positions in _readings(shape):
            is_channel = keys == channels or keys * heads == channels
            if is_channel and features == positions and keys != positions and features * heads != channels:
                return any(channels in parameter.shape for parameter in module.parameters())
    return False


def _readings(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The possible (channels, positions) of an input's shape: (N, ..., C) or (N, C, ...)."""
    if len(shape) < 3:
        return []
    return [(shape[-1], prod(shape[1:-1])), (shape[1], prod(shape[2:]))]
