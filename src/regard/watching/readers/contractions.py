"""Read a call that multiplies tensors as a sum over labelled axes, for any function of torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Labels = tuple[object, ...]
"""One label for each axis of a tensor. Axes with the same label run together, as in an einsum."""


@dataclass(frozen=True, slots=True, eq=False)
class Contraction:
    r"""The product of some tensors, summed over every label the output does not have."""

    operands: tuple[Tensor, ...]
    labels: tuple[Labels, ...]
    output: Labels
    alpha: float = 1.0
    """The result is `alpha` times the product,"""
    beta: float = 0.0
    """plus `beta` times `added`."""
    added: Tensor | None = None

    def product_of(self, result: Tensor) -> Tensor:
        if self.added is not None and self.beta:
            result = result - self.beta * self.added
        return result / self.alpha if self.alpha != 1.0 else result


def sum_of_products(operands: Sequence[Tensor], labels: Sequence[Labels], output: Labels) -> Tensor:
    """Compute a contraction; axes of size 1 are broadcast against others with their label."""
    numbers = {label: n for n, label in enumerate(dict.fromkeys([*output, *(one for own in labels for one in own)]))}
    sizes: dict[object, int] = {}
    for tensor, own in zip(operands, labels, strict=True):
        for label, size in zip(own, tensor.shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    parts: list[Any] = []
    for tensor, own in zip(operands, labels, strict=True):
        keep = [n for n, label in enumerate(own) if tensor.shape[n] == sizes[label]]
        squeezed = tensor.squeeze([n for n in range(tensor.dim()) if n not in keep])
        parts += [squeezed, [numbers[own[n]] for n in keep]]
    return torch.einsum(*parts, [numbers[label] for label in output])


def read_contraction(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Contraction | None:
    if (reader := READERS.get(name)) is None:
        return None
    named = sorted((key for key in kwargs if key in OPERANDS), key=OPERANDS.index)
    settings = {key: value for key, value in kwargs.items() if key not in OPERANDS and key != "out"}
    return reader(*args, *(kwargs[key] for key in named), **settings)


def _matmul(input: Tensor, other: Tensor) -> Contraction:
    batch = [("batch", n) for n in range(max(input.dim(), other.dim()) - 2)]

    def lead(tensor: Tensor) -> list[object]:
        return list(batch[len(batch) - (tensor.dim() - 2) :]) if tensor.dim() > 2 else []

    left = ["k"] if input.dim() == 1 else [*lead(input), "t", "k"]
    right = ["k"] if other.dim() == 1 else [*lead(other), "k", "e"]
    output = [*batch, *(["t"] if input.dim() > 1 else []), *(["e"] if other.dim() > 1 else [])]
    return Contraction((input, other), (tuple(left), tuple(right)), tuple(output))


def _added(make: Callable[[Tensor, Tensor], Contraction]) -> Callable[..., Contraction]:
    def read(added: Tensor, one: Tensor, two: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Contraction:
        made = make(one, two)
        return Contraction(made.operands, made.labels, made.output, float(alpha), float(beta), added)

    return read


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Contraction:
    rows = tuple(("row", n) for n in range(input.dim() - 1))
    own: Labels = ("e", "k") if weight.dim() == 2 else ("k",)
    output = (*rows, "e") if weight.dim() == 2 else rows
    return Contraction((input, weight), ((*rows, "k"), own), output, 1.0, 0.0 if bias is None else 1.0, bias)


def _inner(input: Tensor, other: Tensor) -> Contraction:
    left = tuple(("left", n) for n in range(input.dim() - 1))
    right = tuple(("right", n) for n in range(other.dim() - 1))
    return Contraction((input, other), ((*left, "k"), (*right, "k")), (*left, *right))


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, *rest: Any) -> Contraction | None:
    if rest:
        # torch.ops.aten.tensordot takes the axes of both tensors one after the other.
        dims = (dims, rest[0])
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    if not isinstance(dims, Sequence) or len(dims) != 2:
        return None
    ours, theirs = ([dims[0]], [dims[1]]) if isinstance(dims[0], int) else dims
    left: list[object] = [("left", n) for n in range(a.dim())]
    right: list[object] = [("right", n) for n in range(b.dim())]
    for number, (i, j) in enumerate(zip(ours, theirs, strict=True)):
        left[i] = right[j] = ("k", number)
    output = [label for label in (*left, *right) if label[0] != "k"]  # type: ignore[index]
    return Contraction((a, b), (tuple(left), tuple(right)), tuple(output))


def _chain(tensors: Any, *rest: Any) -> Contraction:
    operands = tuple(tensors) if isinstance(tensors, list | tuple) else (tensors, *rest)
    labels: list[Labels] = [(n, n + 1) for n in range(len(operands))]
    if operands[0].dim() == 1:
        labels[0] = (1,)
    if operands[-1].dim() == 1:
        labels[-1] = (len(operands) - 1,)
    ends = ([0] if operands[0].dim() > 1 else []) + ([len(operands)] if operands[-1].dim() > 1 else [])
    return Contraction(operands, tuple(labels), tuple(ends))


def _einsum(equation: Any, *operands: Any, path: Any = None) -> Contraction | None:
    if not isinstance(equation, str):
        return _einsum_of_lists(equation, *operands)
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return None
    # The ellipsis stands for the operand's unlabelled axes, aligned at the right.
    labels = [_dotted(term, tensor.dim()) for term, tensor in zip(terms, operands, strict=True)]
    dots = max((tuple(one for one in own if isinstance(one, tuple)) for own in labels), key=len)
    if arrow:
        before, has_dots, after = right.partition("...")
        output = (*before, *(dots if has_dots else ()), *after)
    else:
        letters = [letter for letter in left if letter.isalpha()]
        output = (*dots, *sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return Contraction(tuple(operands), tuple(labels), output)


def _dotted(term: str, dims: int) -> Labels:
    before, has_dots, after = term.partition("...")
    count = dims - len(before) - len(after)
    dots = tuple(("dot", n) for n in range(-count, 0)) if has_dots else ()
    return (*before, *dots, *after)


def _einsum_of_lists(*parts: Any) -> Contraction | None:
    """The other form of einsum: einsum(a, [0, 1], b, [1, 2], [0, 2])."""
    parts = tuple(parts[0]) if len(parts) == 1 and isinstance(parts[0], list | tuple) else parts
    output = parts[-1] if len(parts) % 2 else None
    pairs = parts[: len(parts) - len(parts) % 2]
    operands, labels = pairs[::2], pairs[1::2]
    if output is None or any(Ellipsis in own for own in (*labels, output)):
        return None
    return Contraction(tuple(operands), tuple(map(tuple, labels)), tuple(output))


OPERANDS = (
    "equation", "self", "input", "mat1", "batch1", "mat", "a", "tensors", "other", "mat2", "batch2", "vec", "vec2", "b",
    "tensor", "weight", "bias",
)  # fmt: skip
"""The names of these functions' operands, in order."""

READERS: dict[str, Callable[..., Contraction | None]] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "vdot", "linalg_matmul"), _matmul),
    "__rmatmul__": lambda input, other: _matmul(other, input),
    **dict.fromkeys(("baddbmm", "addmm", "addmv"), _added(_matmul)),
    "addbmm": _added(lambda one, two: Contraction((one, two), (("b", "t", "k"), ("b", "k", "e")), ("t", "e"))),
    "linear": _linear,
    "inner": _inner,
    "tensordot": _tensordot,
    "einsum": _einsum,
    "linalg_multi_dot": _chain,
    "chain_matmul": _chain,
}
"""The product functions, each by its common name in torch, its tensors and its operators."""
