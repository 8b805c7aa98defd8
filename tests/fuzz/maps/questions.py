"""What is asked of a map: each answer against the same of the dense weights, within what the weights may be off."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regard
from regard.maps import Grid
from regard.maps.statistics.by_name import How
from regard.watching.analysis.head_table import OF_POSITIONS, query_values
from tests.fuzz.core.bounds import require_close
from tests.fuzz.drawing import Drawn
from tests.fuzz.maps.derived import parted, random_index
from tests.fuzz.maps.mirrors import Mirror

Question = Callable[[Drawn, Mirror], None]
TINY = 1e-37
HOWS: tuple[How, ...] = ("mean", "sum", "max")


def _summed(one: Mirror, factor: Tensor, dim: int) -> Tensor:
    terms = one.dense.abs() * factor
    count = one.dense.shape[dim]
    return (one.error * factor).sum(dim) + (8 + 2 * count**0.5) * one.unit * terms.sum(dim) + TINY


def _blocks(drawn: Drawn, one: Mirror) -> None:
    _, rows = random_index(drawn, one.dense.shape[-2])
    _, columns = random_index(drawn, one.dense.shape[-1])

    def cut(tensor: Any) -> Any:
        return tensor[..., rows, :][..., columns]

    found = cut(one.map)
    if not isinstance(found, Tensor):  # queries and keys stay
        found = found.dense()
    require_close(f"[..., {rows}, :][..., {columns}]", found, cut(one.dense), cut(one.error) + TINY)


def _dense(drawn: Drawn, one: Mirror) -> None:
    require_close("dense()", one.map.dense(), one.dense, one.error + TINY)
    if not one.has_signs:
        assert (one.map.dense()[one.dense == 0].abs() <= 1e-30).all(), "a weight of 0 is not 0"


def _points(drawn: Drawn, one: Mirror) -> None:
    n = drawn.number(1, 5)
    i, j = (torch.tensor([drawn.number(-length, length - 1) for _ in range(n)]) for length in one.dense.shape[-2:])
    require_close(f"[..., {i}, {j}]", one.map[..., i, j], one.dense[..., i, j], one.error[..., i, j] + TINY)


def _product(drawn: Drawn, one: Mirror) -> None:
    width = drawn.of([3, 1, 8, 40])
    lead = drawn.of([(), tuple(one.dense.shape[:-2])])
    is_transposed = drawn.chance()
    dense, error = (one.dense.mT, one.error.mT) if is_transposed else (one.dense, one.error)
    x = drawn.normal(*lead, dense.shape[-1], width) * drawn.of([1.0, 100.0])
    found = (one.map.mT if is_transposed else one.map) @ x.to(one.map.dtype)
    if not lead and width == 1:
        by_vector = (one.map.mT if is_transposed else one.map) @ x[:, 0].to(one.map.dtype)
        torch.testing.assert_close(by_vector, found[..., 0])
    x = x.to(one.map.dtype).double()
    bound = error @ x.abs() + (16 + 4 * dense.shape[-1] ** 0.5) * one.unit * (dense.abs() @ x.abs()) + TINY
    require_close(f"{'transposed ' if is_transposed else ''}product with {tuple(x.shape)}", found, dense @ x, bound)


def _received(drawn: Drawn, one: Mirror) -> None:
    ones = torch.ones_like(one.dense)
    require_close("received()", one.map.received(), one.dense.sum(-2), _summed(one, ones, -2))
    found, count = one.map.received("mean"), one.dense.shape[-2]
    require_close("received('mean')", found, one.dense.mean(-2), _summed(one, ones, -2) / count)


def _terms(dense: Tensor) -> Tensor:
    """-P ln P, with 0 ln 0 = 0."""
    return -dense * torch.where(dense > 0, dense, 1.0).log()


def entropy_error(one: Mirror) -> Tensor:
    logs = torch.where(one.dense > 0, one.dense, 1.0).log().abs()
    # It may be a difference of the log-sum-exp and a mean score, which are as large as the scores.
    sums = one.dense.sum(-1)
    floor = one.error * torch.where(one.error > 0, one.error, 1.0).log().abs()
    return _summed(one, logs + 2, -1) + floor.sum(-1) + 64 * one.unit * (1 + one.number) * (sums + 1)


def _entropy(drawn: Drawn, one: Mirror) -> None:
    if one.has_signs:
        return
    found = one.map.entropy()
    require_close("entropy()", found, _terms(one.dense).sum(-1), entropy_error(one))
    assert (found[(one.dense == 0).all(-1)] == 0).all(), "the entropy of a row with no key is not 0"


def _participation(drawn: Drawn, one: Mirror) -> None:
    if one.has_signs or not one.dense.numel():
        return
    sums, squares = one.dense.sum(-1), one.dense.square().sum(-1)
    is_told = sums > 1e-12
    safe, safe_squares = torch.where(is_told, sums, 1.0), torch.where(is_told, squares, 1.0)
    right = torch.where(is_told, safe.square() / safe_squares, 0.0)
    relative = 2 * one.error.sum(-1) / safe + 2 * (one.dense * one.error).sum(-1) / safe_squares
    bound = right * (relative * (1 + relative) + 64 * one.unit * (1 + one.number)) + TINY
    found = one.map.participation_ratio()
    is_dead = (one.dense == 0).all(-1)
    # Where all weights vanish, it is still that of weights that are small.
    is_right = (found[is_dead] == 0) | (one.may_vanish & (found[is_dead] >= 1 - 1e-6))
    assert is_right.all(), "the participation of a row with no key is not 0"
    require_close("participation_ratio()", found[is_told], right[is_told], bound[is_told])


def _distance(drawn: Drawn, one: Mirror) -> None:
    queries, keys = one.dense.shape[-2:]
    number = drawn.number(-5, keys + 3)
    offset = drawn.of([None, number]) if one.is_call else number  # a part is at the places of its whole
    start = keys - queries if offset is None else offset
    away = (torch.arange(queries)[:, None] + start - torch.arange(keys)).abs().double()
    # Under a causal mask it is the difference of two products, as large as the positions.
    bound = _summed(one, away, -1) + 32 * one.unit * one.dense.abs().sum(-1) * (queries + keys + abs(start))
    bound = bound + one.error.sum(-1) * (queries + keys + abs(start))
    require_close(f"distance({offset})", one.map.distance(offset), (one.dense * away).sum(-1), bound)


def _places(drawn: Drawn, one: Mirror) -> None:
    """A part is at the places of its whole: for distances, for masks, and for the columns of `head_table`."""
    one = parted(drawn, one)
    _dense(drawn, one)
    _received(drawn, one)
    if one.places is None:
        return
    i, j = one.places
    answers = {
        "distance": (one.map.distance(), (i - j).abs()),
        "window": (one.map.mass(regard.window(3)), (i - j < 3) & (j <= i)),
        "causal": (one.map.mass(regard.causal()), j <= i),
    }
    if len(j.unique()) == len(j):
        weights = one.map if one.map.dimensions.has_heads_last else one.map.with_heads()
        chosen = {"self": i == j, "previous": i - 1 == j, "first": (i > 0) & (j == 0)}
        for name, column in query_values(weights, None, OF_POSITIONS).items():
            answers[name] = column.values, chosen[name]
    reach = 2 + float(i.abs().max() + j.max())
    bound = reach * (one.error.sum(-1) + 32 * one.unit * one.dense.abs().sum(-1)) + TINY
    for name, (found, factor) in answers.items():
        right = (one.dense * factor).sum(-1)
        require_close(f"{name} of a part", found.reshape(right.shape), right, bound)
    keys = reach * (one.error.sum(-2) + 32 * one.unit * one.dense.abs().sum(-2)) + TINY
    require_close("mT.distance()", one.map.mT.distance(), (one.dense * (i - j).abs()).sum(-2), keys)


def _top(drawn: Drawn, one: Mirror) -> None:
    k = drawn.number(1, one.dense.shape[-1])
    values, indices = one.map.top_keys(k)
    error = one.error.amax(-1, keepdim=True) + TINY
    require_close(f"top_keys({k})", values, one.dense.topk(k).values, error.expand(values.shape))
    _check_keys(f"top_keys({k})", one, values, indices)


def _check_keys(name: str, one: Mirror, values: Tensor, indices: Tensor) -> None:
    """The keys that are named have the weights that are said, once each; a key is named where there is a weight."""
    error = one.error.amax(-1, keepdim=True) + TINY
    there = torch.where(indices >= 0, one.dense.gather(-1, indices.clamp_min(0)), 0.0)
    require_close(f"{name}: weight of the key that is named", values, there, 2 * error.expand(values.shape))
    if not one.has_signs:
        assert ((indices == -1) == (values == 0)).all(), f"{name}: -1 and a weight of 0 do not go together"
    for row in indices.flatten(0, -2).tolist()[:50]:
        named = [key for key in row if key >= 0]
        assert len(named) == len(set(named)), f"{name}: a key is named twice"


def _quantile(drawn: Drawn, one: Mirror) -> None:
    if one.has_signs or not one.dense.numel():
        return
    p = drawn.of([0.5, 0.9, 1.0, 0.1, 0.999, 1e-6])
    count = one.map.top_p_count(p)
    held = torch.nn.functional.pad(one.dense.sort(-1, descending=True).values.cumsum(-1), (1, 0))
    goal = p * one.dense.sum(-1)
    off = 2 * one.error.sum(-1) + 64 * one.unit * one.dense.sum(-1) + TINY
    is_told = goal > 1e-30
    assert (count[(one.dense == 0).all(-1)] == 0).all(), "top_p_count() of a row with no key is not 0"
    assert (count <= one.dense.shape[-1]).all()
    enough = held.gather(-1, count[..., None])[..., 0] >= goal - off
    fewer = held.gather(-1, (count - 1).clamp_min(0)[..., None])[..., 0] <= goal + off
    assert enough[is_told].all(), f"top_p_count({p}): too few keys"
    assert fewer[is_told].all(), f"top_p_count({p}): too many keys"


def _bins(dense: Tensor, rows: int, columns: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    bands = dense.tensor_split(min(rows, dense.shape[-2]), -2)
    count = min(columns, dense.shape[-1])
    return torch.stack([torch.stack([reduce(b) for b in band.tensor_split(count, -1)], -1) for band in bands], -2)


def _pooled(drawn: Drawn, one: Mirror) -> None:
    rows, columns, how = drawn.number(1, 9), drawn.number(1, 9), drawn.of(HOWS)
    found = one.map.pooled(rows, columns, how)
    if how == "max":
        right, bound = (_bins(t, rows, columns, lambda b: b.amax((-2, -1))) for t in (one.dense, one.error))
    else:
        reduce = {"mean": lambda b: b.mean((-2, -1)), "sum": lambda b: b.sum((-2, -1))}[how]
        right = _bins(one.dense, rows, columns, reduce)
        bound = _bins(one.error + 64 * one.unit * one.dense.abs(), rows, columns, reduce)
    require_close(f"pooled({rows}, {columns}, {how})", found, right, bound + TINY)
    grid = one.map.grid(rows, columns)
    assert isinstance(grid, Grid)
    assert [len(r) for r in grid.rows.ranges()] == [
        len(r) for r in torch.arange(one.dense.shape[-2]).tensor_split(min(rows, one.dense.shape[-2]))
    ]


def _together(drawn: Drawn, one: Mirror) -> None:
    alone: dict[str, Callable[[], Any]] = {
        "received": one.map.received, "entropy": one.map.entropy, "distance": one.map.distance,
        "pooled_sum": lambda: one.map.pooled(3, 4, "sum"), "pooled_max": lambda: one.map.pooled(3, 4, "max"),
        "top_weight": lambda: one.map.top_keys(1).values[..., 0],
        "top_key": lambda: one.map.top_keys(1).indices[..., 0],
        "top_keys": lambda: one.map.top_keys(1).values,
    }  # fmt: skip
    names = list(dict.fromkeys(drawn.shuffled(sorted(alone))[: drawn.number(1, 5)]))
    if one.has_signs:
        names = [name for name in names if name != "entropy"] or ["received"]
    found = one.map.summary(*names, k=1, rows=3, columns=4)
    assert list(found) == names
    size = float(one.dense.abs().sum((-2, -1)).max()) if one.dense.numel() else 0.0
    reach = sum(one.dense.shape[-2:])
    for name in names:
        answer = found[name]
        ours = answer.values if isinstance(answer, regard.maps.TopKeys) else answer
        right = alone[name]()
        if name == "top_key":
            # Of weights that are equal but for their rounding either may be called the largest.
            _check_keys("summary('top_key')", one, one.map.top_keys(1).values, ours[..., None])
            continue
        off = (
            one.unit * 300 * (1 + one.number) * reach
            + float(one.error.sum((-2, -1)).max() if one.error.numel() else 0) * reach
        ) * (1 + size)
        require_close(f"summary({name!r})", ours, right.double(), torch.tensor(off))


def _shape(drawn: Drawn, one: Mirror) -> None:
    assert tuple(one.map.shape) == tuple(one.dense.shape)
    assert len(one.map) == one.dense.shape[0]
    assert repr(one.map)
    assert one.map.mT.shape == one.dense.mT.shape


QUESTIONS: tuple[Question, ...] = (
    _dense,
    _blocks,
    _points,
    _product,
    _product,
    _received,
    _entropy,
    _participation,
    _distance,
    _places,
    _places,
    _top,
    _quantile,
    _pooled,
    _together,
    _shape,
)
