"""A random call of `regard.attention`, and its expected results, densely in float64."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume, note
from torch import Tensor

import regard
from regard.functional import Attended
from tests.fuzz.core.biases import random_bias
from tests.fuzz.core.masks import random_mask
from tests.fuzz.core.normalizations import random_norm
from tests.fuzz.core.parts import Added, Allowed, Norm, Score, Sides
from tests.fuzz.core.scores import random_score
from tests.fuzz.drawing import Drawn

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Call:
    sides: Sides
    dtype: torch.dtype
    vectors: dict[str, Tensor]
    """query, key and value in the caller's layout, with the caller's strides."""
    score: Score
    norm: Norm
    mask: Allowed
    bias: Added | None

    def named(self) -> dict[str, Tensor]:
        learned = {f"score.{n}": t for n, t in self.score.tensors.items()}
        learned |= {f"normalization.{n}": t for n, t in self.norm.tensors.items()}
        learned |= {f"bias.{n}": t for n, t in (self.bias.tensors if self.bias else {}).items()}
        return {**self.vectors, **learned}

    def as_given(self, tensors: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        parts: dict[str, dict[str, Tensor]] = {"score": {}, "normalization": {}, "bias": {}}
        for name, tensor in tensors.items():
            if "." in name:
                part, own = name.split(".")
                parts[part][own] = tensor
        options = {
            "score": self.score.make(parts["score"]),
            "normalization": self.norm.make(parts["normalization"]),
            "mask": self.mask.mask,
            "bias": self.bias.make(parts["bias"]) if self.bias else None,
        }
        return (tensors["query"], tensors["key"], tensors["value"]), options

    def leaves(self, dtype: torch.dtype | None = None, *, grad: bool = False) -> dict[str, Tensor]:
        made = {}
        for name, tensor in self.named().items():
            leaf = as_dtype(tensor, dtype or self.dtype)
            made[name] = leaf.requires_grad_() if grad else leaf
        return made

    def dense(self, tensors: dict[str, Tensor]) -> "Dense":
        """Everything in float64 by the formulas, flat: (B, H, ...)."""
        sides = self.sides
        q, k, v = (self.flat(tensors[n], n) for n in ("query", "key", "value"))
        own = {part: {n.split(".")[1]: t for n, t in tensors.items() if n.startswith(part)} for part in PARTS}
        raw = self.score.formula(own["score"], q, k)
        size = self.score.size({n: t.detach() for n, t in own["score"].items()}, q.detach(), k.detach())
        allowed = self.mask.allowed.expand(sides.flat_full)
        if self.bias is not None:
            added = self.bias.formula(own["bias"], q, k).expand(sides.flat_full)
            allowed = allowed & (added > -math.inf)
            added = torch.where(allowed, added, 0.0)
            raw = raw + added
            # A bias that reads the vectors sums as many products as the score does.
            size = size + added.detach().abs() * (1 if self.bias.name.startswith(("tensor", "ALiBi", "T5")) else 8)
        scores = torch.where(allowed & (raw > -math.inf), raw, -math.inf)
        weights = self.norm.formula(own["normalization"], scores)
        allowed = allowed & (scores > -math.inf)
        weights = torch.where(allowed, weights, 0.0)
        size = torch.where(allowed, size.expand(sides.flat_full), 0.0)
        return Dense(weights @ v, weights, allowed, scores.detach(), size, v)

    def flat(self, tensor: Tensor, name: str) -> Tensor:
        sides = self.sides
        tensor = tensor if sides.has_heads else tensor.unsqueeze(-3)
        tensor = tensor.expand(*sides.batch, *tensor.shape[-3:]).reshape(sides.flat, *tensor.shape[-3:])
        return tensor if name == "query" else tensor.repeat_interleave(sides.heads // sides.groups, 1)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """(B, H, ...) in the caller's layout."""
        return tensor.reshape(*self.sides.leading, *tensor.shape[2:])

    def __str__(self) -> str:
        s = self.sides
        shapes = ", ".join(f"{n} {tuple(t.shape)} strides {t.stride()}" for n, t in self.vectors.items())
        return (
            f"batch {s.batch}, H {s.heads}, G {s.groups}, T {s.queries}, S {s.keys}, {self.dtype}; {shapes}; "
            f"{self.score.name}, {self.norm.name}, mask {self.mask.name}, bias {self.bias and self.bias.name}"
        )


PARTS = ("score", "normalization", "bias")


@dataclass
class Dense:
    output: Tensor
    weights: Tensor
    allowed: Tensor
    scores: Tensor
    size: Tensor
    """For each score, how large the numbers are that were summed for it."""
    value: Tensor


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    if 0 in tensor.stride() and copy.numel():
        # A dimension that was expanded is written once.
        once = tuple(slice(0, 1) if st == 0 else slice(None) for st in tensor.stride())
        copy[once].copy_(tensor[once])
        return copy.detach()
    return copy.copy_(tensor.detach()).detach()


def random_sides(drawn: Drawn, *, longest: int = 40) -> Sides:
    rank = drawn.of([4, 2, 3, 5, 4])
    batch = {
        2: (),
        3: (drawn.of([2, 1, 3, 0]),),
        4: (drawn.of([2, 1, 3, 0]),),
        5: (drawn.of([2, 1, 0]), drawn.of([1, 3])),
    }
    groups = drawn.of([1, 2, 3]) if rank >= 4 else 1
    heads = groups * drawn.of([1, 2, 3]) if rank >= 4 else 1
    lengths = [1, 2, 3, 5, 8, 17, longest]
    return Sides(
        batch[rank], heads, groups, drawn.of(lengths), drawn.of(lengths), drawn.of([4, 1, 3, 8, 16]),
        drawn.of([4, 1, 5, 8]) if drawn.chance(3) else drawn.of([4]), rank >= 4,
    )  # fmt: skip


def _strided(drawn: Drawn, tensor: Tensor) -> Tensor:
    match drawn.of(["contiguous", "contiguous", "transposed", "sliced", "heads last", "expanded"]):
        case "transposed":
            return tensor.mT.contiguous().mT
        case "sliced":
            return tensor.repeat_interleave(2, -1)[..., ::2]
        case "heads last" if tensor.dim() > 3:
            return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
        case "expanded" if tensor.shape[0] > 0:
            return tensor[:1].expand(tensor.shape)
    return tensor


def _vectors(drawn: Drawn, sides: Sides, dtype: torch.dtype) -> dict[str, Tensor]:
    lead = {"query": sides.heads, "key": sides.groups, "value": sides.groups}
    tails = {"query": (sides.queries, sides.dim), "key": (sides.keys, sides.dim), "value": (sides.keys, sides.width)}
    made = {}
    for name, heads in lead.items():
        batch = tuple(1 if sides.batch and drawn.chance(12) else n for n in sides.batch)
        shape = (*batch, heads, *tails[name]) if sides.has_heads else (*batch, *tails[name])
        size = drawn.of([1.0, 1.0, 1.0, 0.0, 1e-4, 8.0, 60.0])
        numbers = drawn.normal(*shape) * size
        if drawn.chance(10):
            numbers = numbers.sign()  # many scores are equal
        made[name] = _strided(drawn, numbers.to(dtype).double())
    if all(t.shape[: len(sides.batch)] != torch.Size(sides.batch) for t in made.values()):
        shape = (*sides.batch, *made["query"].shape[len(sides.batch) :])
        made["query"] = made["query"].expand(shape).clone()
    return made


def random_call(drawn: Drawn, *, longest: int = 40) -> Call:
    sides = random_sides(drawn, longest=longest)
    dtype = drawn.of(DTYPES)
    vectors = _vectors(drawn, sides, dtype)
    # Each batch dimension is full in one of the three, or the sizes are smaller than was thought.
    batches = torch.broadcast_shapes(*(t.shape[: len(sides.batch)] for t in vectors.values()))
    sides = Sides(tuple(batches), *(getattr(sides, n) for n in list(Sides.__dataclass_fields__)[1:]))
    score = random_score(drawn, sides)
    call = Call(
        sides, dtype, vectors, score, random_norm(drawn, sides), random_mask(drawn, sides),
        random_bias(drawn, sides, score),
    )  # fmt: skip
    for part in (call.score, call.norm, call.bias):
        for name, tensor in part.tensors.items() if part else ():
            part.tensors[name] = tensor.to(dtype).double()
    note(str(call))
    return call


def answers(call: Call, backend: str | None, **options: Any) -> Attended | None:
    vectors, given = call.as_given(call.leaves())
    try:
        return regard.attention(*vectors, **given, backend=backend, return_weights=True, **options)
    except regard.errors.BackendError:
        assert backend is not None, "backend=None has refused a call"
        return None


def require_reasonable(call: Call, dense: Dense) -> None:
    if call.norm.name == "Unnormalized" and dense.scores.numel():
        assume(float(dense.scores.max()) < 10)
    if call.sides.flat and call.score.name.startswith("Boxcar"):
        # A jump of the kernel must not lie within rounding.
        assume(not bool((dense.size > 1e5).any()))
