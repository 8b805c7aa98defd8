"""Maps that are made of maps: a step takes a mirror to another one, or leaves it as it is where it does not apply."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard
from regard.maps import stack
from tests.fuzz.drawing import Drawn
from tests.fuzz.maps.mirrors import Mirror

Step = Callable[[Drawn, Mirror], Mirror]


def random_index(drawn: Drawn, length: int, *, may_drop: bool = True) -> tuple[str, Any]:
    """Something that stands for some of `length` positions, never for none of a dimension that is not empty."""
    kind = drawn.of(["slice", "list", "tensor", "bools", "integer" if may_drop else "slice", "step"])
    if not length:
        return "slice", slice(None)
    picked = [drawn.number(-length, length - 1) for _ in range(drawn.number(1, 4))]
    start = drawn.number(0, length - 1)
    match kind:
        case "integer":
            return kind, picked[0]
        case "list":
            return kind, picked
        case "tensor":
            return kind, torch.tensor(picked, dtype=drawn.of([torch.int64, torch.int32]))
        case "bools":
            keep = drawn.bools(length)
            keep[start] = True
            return kind, keep
        case "step":
            return kind, slice(start, None, drawn.number(1, 3))
    return kind, slice(start, drawn.of([None, drawn.number(start + 1, length)]))


def _index(drawn: Drawn, one: Mirror) -> Mirror:
    """Leading dimensions, by one index or by several of which at most one is not a slice or an integer."""
    lead = one.dense.dim() - 2
    if not lead:
        return one
    index: list[Any] = []
    is_free = True
    for n in one.dense.shape[: drawn.number(1, lead)]:
        kind, which = random_index(drawn, n)
        if kind in ("list", "tensor", "bools"):
            which = which if is_free else slice(None)
            is_free = False
        index.append(which)
    # A slice between two integers and a tensor would move dimensions, as it does in NumPy.
    if any(isinstance(i, int) for i in index) and not is_free:
        index = [slice(i, i + 1 or None) if isinstance(i, int) else i for i in index]
    where = tuple(index)
    keeps_heads = len(where) < lead or not isinstance(where[lead - 1], int)
    found = one.map[where]
    assert isinstance(found, regard.AttentionMap)
    changes = {name: _taken(getattr(one, name), where) for name in ("value", "grad")}
    return one.of(
        f"[{where}]", map=found, dense=one.dense[where], error=one.error[where], given=None,
        has_head=one.has_head and keeps_heads, **changes,
    )  # fmt: skip


def _taken(tensor: Tensor | None, where: Any) -> Tensor | None:
    return None if tensor is None else tensor[where]


def _select(drawn: Drawn, one: Mirror) -> Mirror:
    wanted: dict[str, Any] = {}
    dense, error, places = one.dense, one.error, list(one.places or ())
    for name, dim in (("rows", -2), ("columns", -1)):
        if drawn.chance():
            _, index = random_index(drawn, dense.shape[dim])
            wanted[name] = index
            where = torch.arange(dense.shape[dim])[index].reshape(-1)
            dense, error = dense.index_select(dim, where), error.index_select(dim, where)
            if places:
                places[dim] = places[dim][where]
    if one.map.dimensions.has_heads_last and drawn.chance(3):
        _, index = random_index(drawn, dense.shape[-3], may_drop=False)
        wanted["heads"] = index
        dense, error = dense[..., index, :, :], error[..., index, :, :]
    if not wanted:
        return one
    left: Any = {"places": tuple(places) or None, "dense": dense, "error": error, **NOT_A_CALL}
    return one.of(f"only({wanted})", map=one.map.only(**wanted), **left)


NOT_A_CALL: dict[str, Any] = {"value": None, "given": None, "grad": None, "is_call": False}
NOWHERE: dict[str, Any] = {**NOT_A_CALL, "places": None}


def _average(drawn: Drawn, one: Mirror) -> Mirror:
    lead = one.dense.dim() - 2
    if not lead:
        return one
    dim = -3 - drawn.number(0, lead - 1)
    if not one.dense.shape[dim]:
        return one
    weights = None
    shares = torch.full((one.dense.shape[dim],), 1 / one.dense.shape[dim], dtype=torch.float64)
    if drawn.chance():
        weights = drawn.normal(one.dense.shape[dim]).abs() + 0.1
        shares = weights / weights.sum()
    shaped = shares.reshape(-1, *[1] * (-dim - 1))
    found = one.map.average(drawn.of([dim, dim + one.dense.dim()]), weights=weights)
    error = (one.error * shaped).sum(dim) + 8 * one.unit * (one.dense.abs() * shaped).sum(dim)
    changes = {**NOT_A_CALL, "has_head": one.has_head and dim != -3}
    return one.of(f"average({dim})", map=found, dense=(one.dense * shaped).sum(dim), error=error, **changes)


def _with_heads(drawn: Drawn, one: Mirror) -> Mirror:
    found = one.map.with_heads()
    if found.shape == one.map.shape:
        return one
    changes = {name: t.unsqueeze(-3) for name in ("value", "grad") if (t := getattr(one, name)) is not None}
    return one.of(
        "with_heads()", map=found, dense=one.dense.unsqueeze(-3), error=one.error.unsqueeze(-3), given=None,
        has_head=True, **changes,
    )  # fmt: skip


def _elsewhere(drawn: Drawn, one: Mirror) -> Mirror:
    if drawn.chance():
        return one.of("detach()", map=one.map.detach())
    return one.of("to('cpu')", map=one.map.to("cpu"))


def _file(drawn: Drawn, one: Mirror) -> Mirror:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "map.safetensors")
        try:
            one.map.save(path)
        except regard.errors.ArgumentError:
            assert not (one.is_call and one.can_save), "a map of one call could not be saved"
            return one
        loaded = regard.AttentionMap.load(path)
        assert repr(loaded) == repr(one.map)
        return one.of("saved and loaded", map=loaded)


def _stack(drawn: Drawn, one: Mirror) -> Mirror:
    """Below itself, or below some of its rows with fewer keys, as the steps of a generation are."""
    parts, dense, error = [one.map], [one.dense], [one.error]
    for _ in range(drawn.number(1, 2)):
        rows, keys = slice(drawn.number(0, one.dense.shape[-2] - 1), None), drawn.number(1, one.dense.shape[-1])
        part = one.map.only(rows=rows, columns=slice(0, keys))
        parts.append(part)
        for tensors, tensor in ((dense, one.dense), (error, one.error)):
            cut = tensor[..., rows, :keys]
            tensors.append(torch.nn.functional.pad(cut, (0, tensor.shape[-1] - keys)))
    order = drawn.shuffled(range(len(parts)))
    return one.of(
        f"stack of {len(parts)}", map=stack([parts[n] for n in order]), dense=torch.cat([dense[n] for n in order], -2),
        error=torch.cat([error[n] for n in order], -2), **NOWHERE,
    )  # fmt: skip


def _with_values(drawn: Drawn, one: Mirror) -> Mirror:
    if one.given is None or one.value is None or one.grad is None or not one.is_call:
        return one
    kept = one.map.with_values(one.given)
    kind = drawn.of(["value_norms", "gradient", "attribution"])
    note_of = f"{kind}()"
    u = one.unit
    if kind == "value_norms":
        norms = one.value.norm(dim=-1)[..., None, :]
        error = one.error * norms + 16 * u * one.dense.abs() * norms
        return one.of(note_of, map=kept.value_norms(), dense=one.dense * norms, error=error, **NOWHERE)
    grad = one.grad.to(kept.dtype)
    products = one.grad @ one.value.mT
    rounding = 16 * u * (one.grad.abs() @ one.value.abs().mT) + 1e-30
    changes = {**NOWHERE, "has_signs": True}
    if kind == "gradient":
        return one.of(note_of, map=kept.gradient(grad), dense=products, error=rounding, **changes)
    error = one.error * products.abs() + rounding * one.dense.abs() + one.error * rounding
    return one.of(note_of, map=kept.attribution(grad), dense=one.dense * products, error=error, **changes)


STEPS: tuple[Step, ...] = (_index, _select, _average, _with_heads, _elsewhere, _file, _stack, _with_values)


def parted(drawn: Drawn, one: Mirror) -> Mirror:
    """A part, or a part of a part, perhaps saved and loaded."""
    for _ in range(drawn.number(1, 3)):
        one = drawn.of((_select, _select, _index, _file))(drawn, one)
    return one


def derived(drawn: Drawn, one: Mirror) -> Mirror:
    for _ in range(drawn.of([0, 1, 1, 2, 3])):
        if one.dense.shape[-1] * one.dense.shape[-2] < 20_000:
            one = drawn.of(STEPS)(drawn, one)
    return one
