"""The contracts of docs/architecture.md as functions of one call, and all of them for an added part.

`check_score`, `check_mask` and `check_backend` ask every contract of a new score, mask or backend, over random calls.
CONTRIBUTING.md shows how; its recipes are run by tests/docs/test_contributing.py.
"""

from collections.abc import Callable, Sequence
from itertools import combinations, product, starmap

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.call.shapes import Sizes
from regard.errors import BackendError
from regard.functional import Attended, make_call
from regard.kernels import BACKENDS
from regard.tensors.guards import run_state
from tests.core.random_calls import (
    DTYPES,
    EVERYDAY,
    MAP_TOLERANCE,
    ROUNDING,
    TOLERANCE,
    Case,
    cases,
    scores_by_hand,
)
from tests.fuzz.core.masks import MASKS, Positions
from tests.fuzz.core.parts import Sides
from tests.fuzz.drawing import Drawn

Contract = Callable[[Case, str], bool]
"""Raises unless a backend keeps its word on a call; False where the backend says that it cannot run it."""


def attend(case: Case, backend: str) -> Attended | None:
    try:
        return regard.attention(*case.tensors(), **case.options(), backend=backend, return_weights=True)
    except BackendError:
        return None


def by_hand(case: Case) -> tuple[Tensor, Tensor]:
    q, k, v = (t.double() for t in case.tensors())
    if q.dim() >= 4:
        group = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scores = scores_by_hand(case.score, q, k)
    if case.bias is not None:
        scores = scores + case.bias.double()
    exponentials = torch.where(case.allowed, scores, -torch.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    weights = exponentials / torch.where(total == 0, 1.0, total)
    return weights @ v, weights


def output_and_weights_are_the_formula(case: Case, backend: str) -> bool:
    if (attended := attend(case, backend)) is None:
        return False
    dtype = case.query.dtype
    output, weights = by_hand(case)
    assert attended.output.dtype == dtype
    assert attended.output.shape == output.shape
    assert attended.weights.shape == weights.shape
    bound = max(1.0, float(output.detach().abs().max()))
    torch.testing.assert_close(attended.output.double(), output, rtol=0, atol=TOLERANCE[dtype] * bound)
    rounded = dtype == torch.bfloat16 and type(case.score) in ROUNDING
    tolerance = TOLERANCE[dtype] if rounded else MAP_TOLERANCE[dtype]
    torch.testing.assert_close(attended.weights.dense().double(), weights, rtol=0, atol=tolerance)
    return True


def weights_times_value_is_the_output(case: Case, backend: str) -> bool:
    if (attended := attend(case, backend)) is None:
        return False
    value = case.value.to(attended.weights.dtype)
    if value.dim() >= 4:
        value = value.repeat_interleave(case.query.shape[-3] // value.shape[-3], -3)
    product = attended.weights.dense() @ value
    bound = max(1.0, float(product.detach().abs().max()))
    tolerance = TOLERANCE[case.query.dtype] * bound
    torch.testing.assert_close(attended.output.to(product.dtype), product, rtol=0, atol=tolerance)
    return True


def asking_for_the_weights_changes_nothing(case: Case, backend: str) -> bool:
    """Contract 2: the same bits, the same gradients, the same random state."""
    torch.manual_seed(7)
    try:
        plain = regard.attention(*case.tensors(), **case.options(), backend=backend)
    except BackendError:
        return False
    state = torch.get_rng_state()
    torch.manual_seed(7)
    asked = regard.attention(*case.tensors(), **case.options(), backend=backend, return_weights=True)
    assert torch.equal(plain, asked.output)
    assert torch.equal(state, torch.get_rng_state())
    if plain.requires_grad:
        one, other = (torch.autograd.grad(output.sum(), case.tensors()) for output in (plain, asked.output))
        assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))
    return True


def rows_sum_to_one_or_are_exactly_zero(case: Case, backend: str) -> bool:
    if (attended := attend(case, backend)) is None:
        return False
    weights, live = attended.weights.dense(), case.allowed.any(-1)
    sums = weights.sum(-1)
    torch.testing.assert_close(sums[live].double(), torch.ones_like(sums[live]).double(), rtol=0, atol=2e-4)
    assert (weights[~live] == 0).all()
    assert (weights.masked_select(~case.allowed) == 0).all()
    assert (attended.output[~live] == 0).all()
    if attended.output.requires_grad:
        loss = attended.output.float().sum() + weights.float().square().sum()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, case.tensors()))
    return True


def gradients_are_those_of_the_formula(case: Case, backend: str) -> bool:
    case = case.to(torch.float64)
    if (attended := attend(case, backend)) is None:
        return False
    if not attended.output.requires_grad:
        return True
    output, weights = by_hand(case)
    d_output, d_weights = torch.randn_like(output), torch.randn_like(weights)
    loss = (attended.output * d_output).sum() + (attended.weights.dense() * d_weights).sum()
    ours = torch.autograd.grad(loss, case.tensors())
    theirs = torch.autograd.grad((output * d_output).sum() + (weights * d_weights).sum(), case.tensors())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    return True


def the_order_of_keys_does_not_matter(case: Case, backend: str) -> bool:
    """In float64, with the mask as a tensor, whose keys move along."""
    case = case.to(torch.float64)
    order = torch.randperm(case.key.shape[-2], device=case.key.device)
    mask = case.allowed
    moved = Case(
        case.query, case.key[..., order, :], case.value[..., order, :], mask[..., order], mask[..., order],
        None if case.bias is None else case.bias.expand(mask.shape)[..., order], case.score,
    )  # fmt: skip
    one, other = attend(case, backend), attend(moved, backend)
    if one is None or other is None:
        return False
    torch.testing.assert_close(one.output, other.output, rtol=0, atol=1e-10)
    return True


CONTRACTS: tuple[Contract, ...] = (
    output_and_weights_are_the_formula,
    weights_times_value_is_the_output,
    asking_for_the_weights_changes_nothing,
    rows_sum_to_one_or_are_exactly_zero,
    gradients_are_those_of_the_formula,
    the_order_of_keys_does_not_matter,
)


def _overlapping(x: Tensor) -> Tensor:
    """Rows that begin one element after the other, as windows over one signal do."""
    batch, heads, length, width = x.shape
    flat = x.flatten()[: batch * heads * length + width]
    return flat.as_strided(x.shape, (heads * length, length, 1, 1))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "strided": lambda x: torch.nn.functional.pad(x, (1, 2)).repeat_interleave(2, 2)[:, :, ::2, 1:-2],
    "transposed heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed": lambda x: x.mT.contiguous().mT,
    "expanded batch": lambda x: x[:1].expand(x.shape),
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
    "expanded rows": lambda x: x[:, :, :1].expand(x.shape),
    "overlapping": _overlapping,
    "channels-last": lambda x: x.to(memory_format=torch.channels_last),
    "negated": torch._neg_view,
    "parts of one product": lambda x: torch.stack([x, x], 1).transpose(2, 3).contiguous().transpose(2, 3)[:, 1],
}
"""How a tensor (B, H, T, D) may stand in memory."""


def a_way_reads_every_layout(name: str, layouts: Sequence[str], dtype: torch.dtype, mask: regard.Mask | None) -> bool:
    """Output, log-sum-exp and gradients of a registered way are those of the reference; False where it refuses."""
    generator = torch.Generator().manual_seed(0)
    shape = 8, 4, 33, 64
    made = (LAYOUTS[layout](torch.randn(shape, generator=generator).to(dtype)).detach() for layout in layouts)
    tensors = [t.requires_grad_() for t in made]
    plain = [t.detach().double().clone(memory_format=torch.contiguous_format).requires_grad_() for t in tensors]
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for vectors, way, into in ((tensors, BACKENDS[name], found), (plain, BACKENDS["reference"], expected)):
        call, value = make_call(
            *vectors, score=regard.ScaledDot(), normalization=regard.Softmax(), mask=mask, bias=None, dropout=0.0
        )
        if way.why_not(call, run_state(call.query)) is not None:
            return False
        output, state = way.run(call, value)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
        into += [output, *([] if state is None or dtype.itemsize < 4 else [state])]
        into += torch.autograd.grad(output, vectors, grad)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4}.get(dtype, 5e-2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    return True


def every_rendering_asks_the_predicate(mask: regard.Mask, allowed: Tensor, rows: range, columns: range) -> None:
    """Contract 4: dense, by blocks, and all that the mask says of itself; `allowed` is (B, H, T, S), by hand."""
    batch, heads, queries, keys = allowed.shape
    sizes, device = Sizes((batch,), heads, heads, queries, keys, True), torch.device("cpu")
    bound, whole = mask.bind(sizes, device), mask.dense(sizes)
    assert torch.equal(whole.expand(allowed.shape), allowed), "dense() is not the predicate written out by hand"
    some = torch.tensor([queries - 1, 0])
    rendered = bound.block(some, columns, sizes=sizes, device=device)
    assert torch.equal(rendered.expand(batch, heads, 2, len(columns)), allowed[:, :, some][..., _slice(columns)])
    for axis, size in zip(("batch", "head", "query", "key"), whole.shape, strict=True):
        assert size == 1 or axis in bound.depends_on(), f"depends_on() leaves out {axis}"
    a_block_is_what_the_mask_says(bound, allowed, sizes, rows, columns)
    if bound.is_relative():
        assert all(len(set(d.tolist())) == 1 for d in _diagonals(allowed)), "is_relative(), but a diagonal differs"
    assert all(0 < cut < queries for cut in bound.row_cuts(sizes)), "row_cuts() lie outside of the rows"


def a_block_is_what_the_mask_says(
    bound: regard.Mask, allowed: Tensor, sizes: Sizes, rows: range, columns: range
) -> None:
    """No key is left out that may be attended to, and nothing is covered that holds a pair that may not."""
    block = allowed[:, :, rows.start : rows.stop]
    seen, outside = bound.key_range(rows, sizes), block.clone()
    outside[..., _slice(seen)] = False
    assert not outside.any(), f"key_range({rows}) leaves out a key that may be attended to"
    if bound.covers(rows, columns):
        assert block[..., _slice(columns)].all(), f"covers({rows}, {columns}) holds a pair that is not allowed"


def _slice(where: range) -> slice:
    return slice(where.start, where.stop)


def _diagonals(allowed: Tensor) -> list[Tensor]:
    return [a.diagonal(d) for a in allowed.flatten(0, 1) for d in range(1 - a.shape[0], a.shape[1])]


def check_score(name: str) -> None:
    _check(cases(scores=(name,)), EVERYDAY)


def check_mask(name: str) -> None:
    """What a mask that `MASKS` names says of itself, for every block of rows and columns; then every contract."""

    @settings(max_examples=20)
    @given(data=st.data())
    def rendered(data: st.DataObject) -> None:
        queries, keys = (data.draw(st.integers(1, 9)) for _ in range(2))
        sides = Sides((2,), 3, 3, queries, keys, 1, 1, True)
        found = MASKS[name](Drawn(data.draw), sides, Positions(sides))
        mask, allowed = found.mask, found.allowed.expand(sides.full)
        every_rendering_asks_the_predicate(mask, allowed, part(data, queries), part(data, keys))
        sizes = Sizes((2,), 3, 3, queries, keys, True)
        bound = mask.bind(sizes, torch.device("cpu"))
        for rows, columns in product(*(starmap(range, combinations(range(n + 1), 2)) for n in (queries, keys))):
            a_block_is_what_the_mask_says(bound, allowed, sizes, rows, columns)

    rendered()
    _check(cases(masks=(name,)), EVERYDAY)


def check_backend(name: str) -> None:
    ran = _run_all(cases(), [name])
    with torch.no_grad():
        ran += _run_all(cases(), [name])
    assert ran, f"the backend {name!r} has refused every call"


def part(data: st.DataObject, length: int) -> range:
    start = data.draw(st.integers(0, length - 1))
    return range(start, data.draw(st.integers(start + 1, length)))


def _check(calls: st.SearchStrategy[Case], backends: Sequence[str]) -> None:
    assert _run_all(calls, backends), f"every backend of {', '.join(backends)} has refused every call"


def _run_all(calls: st.SearchStrategy[Case], backends: Sequence[str]) -> int:
    return sum(_run(calls, *what) for what in product(CONTRACTS, backends, DTYPES))


def _run(calls: st.SearchStrategy[Case], contract: Contract, backend: str, dtype: torch.dtype) -> int:
    ran = 0

    @settings(max_examples=15)
    @given(case=calls)
    def ask(case: Case) -> None:
        nonlocal ran
        ran += contract(case.to(dtype), backend)

    ask()
    return ran
