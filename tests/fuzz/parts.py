"""The ground `parts`: a part of a map, a part of that, and both saved and loaded, against the dense weights of the same
rows, whose places and groups of heads are those of the whole."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import note
from torch import Tensor

import regard
from regard.errors import ArgumentError
from regard.watching.analysis.head_table import OF_POSITIONS, query_values
from tests.fuzz.drawing import Drawn

Dense = dict[str, Tensor]
"""Of each pair of the whole map (B, H, T, S) its weight, its distance, its masks and its key head."""


def case(drawn: Drawn) -> None:
    one, dense = _whole(drawn)
    for _ in range(drawn.number(1, 3)):
        one, dense = _part(drawn, one, dense)
        if drawn.chance(3):
            one = _saved_and_loaded(one)
        for question in drawn.some(QUESTIONS, 4):
            question(one, dense)


def _whole(drawn: Drawn) -> tuple[Any, Dense]:
    batch, groups, size = drawn.number(1, 2), drawn.number(1, 3), drawn.number(1, 3)
    queries, keys = drawn.number(1, 12), drawn.number(1, 12)
    query, key = drawn.normal(batch, groups * size, queries, 4), drawn.normal(batch, groups, keys, 4)
    mask = drawn.of([None, regard.causal(), regard.window(3), regard.lengths(drawn.integers(1, keys, batch))])
    one = regard.attention(query, key, key, mask=mask, return_weights=True).weights
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    heads = torch.arange(groups).repeat_interleave(size)[:, None, None]
    named = {"distance": (i - j).abs(), "window": (i - j < 3) & (j <= i), "causal": j <= i, "key head": heads}
    named |= {"self": i == j, "previous": i - 1 == j, "first": (i > 0) & (j == 0)}
    weights = (query @ key.repeat_interleave(size, 1).mT / 2).masked_fill(~_allowed(mask, query, key), -torch.inf)
    return one, {"weight": weights.softmax(-1).nan_to_num()} | {n: x.expand_as(weights) for n, x in named.items()}


def _allowed(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    return torch.ones(()) > 0 if mask is None else mask.to_tensor(queries, keys, batch=len(query))[:, None]


def _part(drawn: Drawn, one: Any, dense: Dense) -> tuple[Any, Dense]:
    *lead, queries, keys = one.shape
    if lead and drawn.chance():
        place = drawn.number(0, len(lead) - 1)
        index: list[Any] = [slice(None)] * len(lead)
        index[place] = drawn.of([0, slice(0, 1), slice(None, None, 2), torch.tensor([lead[place] - 1, 0])])
        note(f"[{index}]")
        return one[tuple(index)], {name: x[tuple(index)] for name, x in dense.items()}
    rows, columns = _some(drawn, queries), _some(drawn, keys)
    note(f"only(rows={rows}, columns={columns})")
    if drawn.chance() and isinstance(rows, slice) and isinstance(columns, slice):
        return one[..., rows, columns], {name: x[..., rows, columns] for name, x in dense.items()}
    chosen = {name: x[..., rows, :][..., columns] for name, x in dense.items()}
    return one.only(rows=rows, columns=columns), chosen


def _some(drawn: Drawn, length: int) -> Any:
    first = drawn.number(0, length - 1)
    places = torch.randperm(length, generator=drawn.generator)[: first + 1]
    return drawn.of([slice(None), slice(first, None), slice(0, first + 1), slice(first, first + 1), places])


def _saved_and_loaded(one: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "map.safetensors")
        try:
            one.save(path)
        except ArgumentError:
            return one  # Chosen rows are not the map of one call.
        note("saved and loaded")
        return regard.AttentionMap.load(path)


def _close(found: Tensor, right: Tensor, said: str) -> None:
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6, msg=lambda words: f"{said}: {words}")


def _sums(name: str, ask: Callable[[Any], Tensor]) -> Callable[[Any, Dense], None]:
    return lambda one, dense: _close(ask(one), (dense["weight"] * dense[name]).sum(-1), name)


def _per_key_head(one: Any, dense: Dense) -> None:
    if one.dimensions.head is None:
        return
    weights, heads = (dense[name].movedim(one.dimensions.head, -3) for name in ("weight", "key head"))
    of = heads.reshape(-1, *heads.shape[-3:])[0, :, 0, 0]
    groups = [(of == group).nonzero().squeeze(-1) for group in dict.fromkeys(of.tolist())]
    right = [weights[..., group, :, :].mean(-3) for group in groups]
    found = one.per_key_head()
    _close(found.with_heads().dense(), torch.stack(right, -3), "per_key_head()")


def _places(one: Any, dense: Dense) -> None:
    """The columns of `head_table`: of each query its weight on a key that the part has."""
    with_heads = one if one.dimensions.has_heads_last else one.with_heads()
    for name, found in query_values(with_heads, None, OF_POSITIONS).items():
        right = (dense["weight"] * dense[name]).sum(-1)
        has_key = dense[name].any(-1) & (dense["weight"] > 0).any(-1)
        _close(found.values.reshape(right.shape), right, name)
        assert (found.counted.expand_as(found.values).reshape(right.shape) == has_key).all(), name


QUESTIONS: tuple[Callable[[Any, Dense], None], ...] = (
    lambda one, dense: _close(one.dense(), dense["weight"], "dense()"),
    _sums("distance", lambda one: one.distance()),
    _sums("distance", lambda one: one.summary("distance", "entropy")["distance"]),
    _sums("distance", lambda one: one.detach().distance()),
    _sums("window", lambda one: one.mass(regard.window(3))),
    _sums("causal", lambda one: one.mass(regard.causal())),
    _sums("causal", lambda one: one.mass(regard.causal() & (torch.ones(one.shape[-2:]) > 0))),
    lambda one, dense: _close(one.received(), dense["weight"].sum(-2), "received()"),
    lambda one, dense: _close(one.mT.distance(), (dense["weight"] * dense["distance"]).sum(-2), "mT.distance()"),
    _per_key_head,
    _places,
)
