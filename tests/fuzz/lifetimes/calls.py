"""Random calls of `regard.attention` and of modules of `regard.nn`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import note
from torch import Tensor, nn

import regard
from regard.maps.attention_map import AttentionMap
from tests.fuzz.drawing import Drawn
from tests.fuzz.lifetimes.subject import Life, Subject

HEADS, DIM = 2, 4


class _Score(nn.Module):
    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones((), dtype=matrix.dtype))
        self.power, self.calls = 1, 0

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        self.calls += 1
        return (query @ self.matrix) @ key.mT * self.scale**self.power


class Parts:
    def __init__(self, drawn: Drawn, queries: int, keys: int) -> None:
        self.drawn, self.queries, self.keys = drawn, queries, keys
        self.options: dict[str, Any] = {}
        self.subject = Subject("regard.attention", self._no_run)
        self.add("mask", drawn.of(MASKS))
        self.add("score", drawn.of(SCORES))
        if drawn.chance(3):
            self.add("bias", drawn.of(BIASES))
        if drawn.chance(4):
            self.add("normalization", lambda parts: regard.SoftmaxWithSink(parts.parameter(HEADS)))

    def _no_run(self) -> Life:
        raise AssertionError

    def add(self, name: str, make: Callable[["Parts"], Any]) -> None:
        made = make(self)
        if made is not None:
            note(f"{name}: {type(made).__name__}")
            self.options[name] = made

    def tensor(self, tensor: Tensor) -> Tensor:
        self.subject.tensors.append(tensor)
        return tensor

    def parameter(self, *shape: int) -> nn.Parameter:
        made = nn.Parameter(self.drawn.normal(*shape))
        self.subject.parameters.append(made)
        return made

    def frozen_or_learned(self, *shape: int) -> Tensor:
        return self.parameter(*shape) if self.drawn.chance() else self.tensor(self.drawn.normal(*shape))


def _window(parts: Parts) -> regard.Mask:
    width, step = parts.drawn.number(1, 4), parts.drawn.number(1, 5)

    def change() -> None:
        nonlocal width
        width += step

    parts.subject.variables.append(change)
    return regard.predicate(lambda b, h, i, j: (i - j < width) & (j - i < width + 1))


def _of_list(parts: Parts) -> regard.Mask:
    widths = [parts.drawn.number(1, 4)]
    parts.subject.variables.append(lambda: widths.append(widths[-1] + 2))
    return regard.predicate(lambda b, h, i, j: (i - j).abs() < widths[-1])


def _of_table(parts: Parts) -> regard.Mask:
    table = parts.tensor(parts.drawn.bools(parts.queries, parts.keys))
    return regard.predicate(lambda b, h, i, j: table[i, j])


def _of_default(parts: Parts) -> regard.Mask:
    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
        return table[j]

    return regard.predicate(partial(allowed, table=parts.tensor(parts.drawn.bools(parts.keys))))


def _several(parts: Parts) -> regard.Mask:
    one, other = (MASKS[parts.drawn.number(1, len(MASKS) - 2)](parts) for _ in range(2))
    match parts.drawn.of(["and", "or", "not"]):
        case "and":
            return one & other
        case "or":
            return one | other
        case _:
            return ~one & other


MASKS: list[Callable[[Parts], Any]] = [
    lambda parts: None,
    lambda parts: regard.lengths(parts.tensor(parts.drawn.integers(1, parts.keys, 2))),
    lambda parts: regard.lengths(parts.tensor(parts.drawn.integers(0, parts.keys, 2, parts.queries))),
    lambda parts: regard.padding(parts.tensor(parts.drawn.bools(2, parts.keys))),
    lambda parts: regard.documents(
        parts.tensor(parts.drawn.integers(0, 2, 2, parts.queries)),
        key_ids=parts.tensor(parts.drawn.integers(0, 2, 2, parts.keys)),
    ),
    lambda parts: regard.causal(parts.tensor(parts.drawn.integers(0, 3, 2))),
    lambda parts: regard.blocks(parts.tensor(parts.drawn.bools(4, 4)), 3),
    _window,
    _of_list,
    _of_table,
    _of_default,
    _several,
]


def _own_module(parts: Parts) -> _Score:
    score = _Score(parts.drawn.normal(DIM, DIM))
    parts.subject.parameters.append(score.matrix)
    parts.subject.tensors.append(score.scale)
    parts.subject.modules.append(score)
    parts.subject.variables.append(lambda: setattr(score, "power", score.power + 1))
    parts.subject.variables.append(lambda: score.scale.fill_(3.0) and None)
    return score


def _closure(parts: Parts) -> Callable[[Tensor, Tensor], Tensor]:
    matrix = parts.frozen_or_learned(DIM, DIM)
    return lambda query, key: (query @ matrix) @ key.mT


SCORES: list[Callable[[Parts], Any]] = [
    lambda parts: regard.ScaledDot(),
    lambda parts: regard.Additive(parts.frozen_or_learned(DIM)),
    lambda parts: regard.SoftCapped(regard.Additive(parts.frozen_or_learned(DIM)), 2.0),
    # (Torch keeps what projects queries before the call, and misses writes that count no version.)
    lambda parts: regard.Bilinear(parts.parameter(DIM, DIM)),
    lambda parts: regard.Cosine(parts.parameter(HEADS)),
    _own_module,
    _closure,
]
BIASES: list[Callable[[Parts], Any]] = [
    lambda parts: parts.frozen_or_learned(1, HEADS, parts.queries, parts.keys),
    lambda parts: parts.frozen_or_learned(2, 1, 1, parts.keys),
    lambda parts: regard.T5Bias(parts.frozen_or_learned(8, HEADS)),
    lambda parts: regard.ALiBi(parts.frozen_or_learned(HEADS)),
    lambda parts: regard.call.biases.Shaw(parts.frozen_or_learned(5, DIM)),
]


def attention(drawn: Drawn) -> Subject:
    queries, keys = drawn.number(1, 12), drawn.number(1, 12)
    parts = Parts(drawn, queries, keys)
    # The gradients of leaves are torch's own matter: it keeps them, and misses writes that count no version.
    shapes = ((2, HEADS, queries, DIM), (2, HEADS, keys, DIM), (2, HEADS, keys, DIM))
    leaves = [nn.Parameter(drawn.normal(*shape)) for shape in shapes]
    mode = drawn.of(["leaves", "results", "packed", "no_grad", "inference"])
    backend: Any = drawn.of([None, "tiled", "reference"])
    note(f"{queries} x {keys}, {mode}, {backend}")
    if mode == "leaves":
        parts.subject.parameters += leaves[:2]
    subject = parts.subject

    def run() -> Life:
        given: list[Tensor] = [*leaves] if mode in ("leaves", "no_grad") else [leaf * 1.5 for leaf in leaves]
        if mode == "packed" and queries == keys:
            given = [*torch.cat(given, -1).chunk(3, -1)]
        with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode not in ("no_grad", "inference")):
            if mode == "inference":
                given = [leaf.detach().clone() for leaf in leaves]
                subject.tensors.append(given[0])
            output, weights = regard.attention(*given, **parts.options, backend=backend, return_weights=True)
        goes_back = output.requires_grad and mode != "leaves"
        return Life(lambda: _dense(weights), output, [*leaves, *subject.parameters] if goes_back else ())

    subject.run = run
    return subject


def _dense(weights: AttentionMap) -> Tensor:
    with torch.no_grad():
        return weights.dense()


def module(drawn: Drawn) -> Subject:
    torch.manual_seed(drawn.number(0, 99))
    lengths = drawn.integers(1, 5, 2)
    x = drawn.normal(2, 5, 8)
    made: Any = drawn.of(
        [lambda: regard.nn.AdditiveAttention(8, 8, 6), lambda: regard.nn.MultiHeadAttention(8, 2)]
    )().double()
    note(type(made).__name__)
    arguments = (x, x, x) if isinstance(made, regard.nn.AdditiveAttention) else (x,)
    subject = Subject(type(made).__name__, lambda: Life(lambda: x, x), list(made.parameters()), [lengths], [], [made])

    def run() -> Life:
        output, weights = made(*arguments, mask=regard.lengths(lengths), return_weights=True)
        return Life(lambda: _dense(weights), output)

    subject.run = run
    return subject


SUBJECTS: dict[str, Callable[[Drawn], Subject]] = {"attention": attention, "module": module}
