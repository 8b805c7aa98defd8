"""Every mask, in two writings: regard's, and bools from positions."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

import regard
from tests.fuzz.core.parts import Allowed, Sides
from tests.fuzz.drawing import Drawn

SIDES: tuple[Literal["left", "right", "both"], ...] = ("left", "right", "both")


class Positions:
    """Index tensors of a call that broadcast to (B, H, T, S)."""

    def __init__(self, sides: Sides) -> None:
        self.head = torch.arange(sides.heads)[:, None, None]
        self.query, self.key = torch.arange(sides.queries)[:, None], torch.arange(sides.keys)
        self.place = self.query + (sides.keys - sides.queries)
        """Where each query stands when the last query stands at the last key."""


def _each(tensor: Tensor, sides: Sides) -> Tensor:
    """A tensor (batch..., t, s) against (B, H, T, S)."""
    return tensor.expand(*sides.batch, *tensor.shape[-2:]).reshape(sides.flat, 1, *tensor.shape[-2:])


def _lengths(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    if drawn.chance(4):
        n = drawn.number(0, sides.keys + 2)
        return Allowed(f"lengths({n})", regard.lengths(n), at.key < n)
    valid = drawn.integers(0, sides.keys + drawn.of([0, 2]), *sides.batch)
    return Allowed("lengths", regard.lengths(valid), at.key < _each(valid[..., None, None], sides))


def _per_query(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    valid = drawn.integers(0, sides.keys, *sides.batch, sides.queries)
    mask = regard.lengths(valid, per_query=True)
    return Allowed("lengths per query", mask, at.key < _each(valid[..., None], sides))


def _padding(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    batch = drawn.of([sides.batch, ()])
    if drawn.chance(3):
        tokens = drawn.integers(0, 2, *batch, sides.keys)
        mask, keep = regard.padding(tokens, pad_id=0), tokens != 0
    else:
        keep = drawn.bools(*batch, sides.keys, share=drawn.of([0.8, 0.3, 0.0, 1.0]))
        mask = regard.padding(keep)
    return Allowed("padding", mask, _each(keep[..., None, :], sides))


def _causal(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    kind = drawn.of(["aligned", "offset", "each"])
    if kind == "aligned":
        return Allowed("causal()", regard.causal(), at.key <= at.place)
    if kind == "offset":
        offset = drawn.number(-sides.queries - 1, sides.keys + 1)
        return Allowed(f"causal({offset})", regard.causal(offset), at.key <= at.query + offset)
    offsets = drawn.integers(-sides.queries, sides.keys, *sides.batch)
    return Allowed(
        "causal(tensor)", regard.causal(offsets), at.key <= at.query + _each(offsets[..., None, None], sides)
    )


def _window(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    side = drawn.of(SIDES)
    size = drawn.number(1, 6)
    size += side == "both" and size % 2 == 0
    offset = drawn.of([None, drawn.number(-3, sides.keys)])
    distance = at.key - (at.place if offset is None else at.query + offset)
    before, after = {"left": (size - 1, 0), "right": (0, size - 1), "both": (size // 2, size // 2)}[side]
    mask = regard.window(size, side=side, offset=offset)
    return Allowed(f"window({size}, {side}, {offset})", mask, (distance >= -before) & (distance <= after))


def _prefix(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    if drawn.chance():
        sizes = drawn.integers(0, sides.keys, *sides.batch)
        allowed = (at.key < _each(sizes[..., None, None], sides)) | (at.key <= at.place)
        return Allowed("prefix(tensor)", regard.prefix(sizes), allowed)
    size = drawn.number(0, sides.keys + 1)
    return Allowed(f"prefix({size})", regard.prefix(size), (at.key < size) | (at.key <= at.place))


def _documents(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    most = drawn.number(0, 3)
    if sides.queries == sides.keys and drawn.chance(3):
        cuts = sorted(drawn.number(0, sides.keys) for _ in range(most))
        offsets = torch.tensor([0, *cuts, sides.keys])
        ids = torch.bucketize(torch.arange(sides.keys), offsets, right=True)
        return Allowed(f"documents(offsets={offsets.tolist()})", regard.documents(offsets=offsets), ids[:, None] == ids)
    batch = drawn.of([sides.batch, ()])
    ids = drawn.integers(0, most, *batch, sides.queries)
    key_ids = ids if sides.queries == sides.keys and drawn.chance() else drawn.integers(0, most, *batch, sides.keys)
    if drawn.chance():
        ids, key_ids = (ids.sort(-1).values, key_ids.sort(-1).values)
    mask = regard.documents(ids, key_ids=key_ids)
    return Allowed("documents", mask, _each(ids[..., :, None] == key_ids[..., None, :], sides))


def _strided(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    stride, offset = drawn.number(1, 5), drawn.of([None, drawn.number(-3, 3)])
    place = at.place if offset is None else at.query + offset
    return Allowed(
        f"strided({stride}, {offset})", regard.call.masks.strided(stride, offset=offset), (place - at.key) % stride == 0
    )


def _blocks(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    size = drawn.number(1, 5)
    rows, columns = -(-sides.queries // size) + drawn.number(0, 1), -(-sides.keys // size)
    lead = drawn.of([(), (1,), (sides.heads,)])
    pattern = drawn.bools(*lead, rows, columns)
    fine = pattern.repeat_interleave(size, -2).repeat_interleave(size, -1)[..., : sides.queries, : sides.keys]
    return Allowed(f"blocks({tuple(pattern.shape)}, {size})", regard.blocks(pattern, size), fine)


def _dense(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    full = sides.full[-2:] if drawn.chance(3) else sides.full
    shape = [n if drawn.chance() else 1 for n in full]
    dense = drawn.bools(*shape, share=drawn.of([0.6, 0.95, 0.05]))
    whole = dense.expand(sides.full).reshape(sides.flat_full)
    return Allowed(f"bools {tuple(shape)}", regard.call.masks.as_mask(dense), whole)


def _predicate(drawn: Drawn, sides: Sides, at: Positions) -> Allowed:
    by, head = drawn.number(1, 4), drawn.chance()

    def function(batch: Tensor, head_index: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query + 2 * key + (head_index if head else 0)) % by != by - 1

    return Allowed("a predicate", regard.predicate(function), function(torch.tensor(0), at.head, at.query, at.key))


MASKS: dict[str, Callable[[Drawn, Sides, Positions], Allowed]] = {
    "causal": _causal,
    "lengths": _lengths,
    "per query": _per_query,
    "padding": _padding,
    "window": _window,
    "prefix": _prefix,
    "documents": _documents,
    "strided": _strided,
    "blocks": _blocks,
    "dense": _dense,
    "predicate": _predicate,
}


def random_mask(drawn: Drawn, sides: Sides, depth: int = 2, first: Sequence[str] = ()) -> Allowed:
    if depth == 2 and not first and drawn.chance(4) is False and drawn.chance():
        return Allowed("no mask", None, torch.ones((), dtype=torch.bool))
    one = MASKS[drawn.of(first or list(MASKS))](drawn, sides, Positions(sides))
    how = drawn.of(["alone", "alone", "and", "or", "not"]) if depth else "alone"
    if how == "alone":
        return one
    if how == "not":
        return Allowed(f"~({one.name})", ~one.mask, ~one.allowed)
    other = random_mask(drawn, sides, depth - 1)
    if other.mask is None:
        return one
    if how == "and":
        return Allowed(f"({one.name} & {other.name})", one.mask & other.mask, one.allowed & other.allowed)
    return Allowed(f"({one.name} | {other.name})", one.mask | other.mask, one.allowed | other.allowed)
