"""Every statistic written out once more, on the dense weights in float64, and the comparison with a lazy map."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import AttentionMap
from regard.maps.sources.source import Source
from regard.maps.statistics.asked import Asked, RowReader

# Of a weight against float64; sums over n weights may be off by so much for each.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 5e-6}

NORMALIZATIONS = {
    "softmax": regard.Softmax(),
    "sink": regard.SoftmaxWithSink(0.3),
    "sparsemax": regard.Sparsemax(),
    "entmax": regard.Entmax15(),
    "sigmoid": regard.Sigmoid(-0.5),
    "softpick": regard.call.normalizations.Softpick(),
    "unnormalized": regard.call.normalizations.Unnormalized(),
}


@contextmanager
def answers_of(reader: type[RowReader]) -> Iterator[list[bool]]:
    found: list[bool] = []
    why_not, read = reader.why_not, reader.read

    def asked(self: Any, source: Source, asked: Asked) -> str | None:
        reason = why_not(self, source, asked)
        found.extend([] if reason is None else [False])
        return reason

    def reading(self: Any, source: Source, asked: Asked) -> Any:
        answers = read(self, source, asked)
        found.append(None not in answers)
        return answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "why_not", asked)
        patch.setattr(reader, "read", reading)
        yield found


def bins(dense: Tensor, rows: int, columns: int, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    for count, dim in ((rows, -2), (columns, -1)):
        parts = dense.tensor_split(min(count, dense.shape[dim]), dim)
        dense = torch.stack([reduce(part, dim) for part in parts], dim)
    return dense


def distances(queries: int, keys: int) -> Tensor:
    return (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).abs().double()


def sums_written_out(dense: Tensor, rows: int, columns: int) -> dict[str, Tensor]:
    queries, keys = dense.shape[-2:]
    positive = torch.where(dense > 0, dense, 1.0)
    squares = dense.square().sum(-1)
    return {
        "received": dense.sum(-2),
        "entropy": -(dense * positive.log()).sum(-1),
        "participation_ratio": torch.where(
            squares > 0, dense.sum(-1).square() / torch.where(squares > 0, squares, 1.0), 0.0
        ),
        "distance": (dense * distances(queries, keys)).sum(-1),
        "pooled_sum": bins(dense, rows, columns, Tensor.sum),
        "pooled_mean": bins(dense, rows, columns, Tensor.mean),
    }


def sums_asked(weights: AttentionMap, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "received": weights.received(),
        "entropy": weights.entropy(),
        "participation_ratio": weights.participation_ratio(),
        "distance": weights.distance(),
        "pooled_sum": weights.pooled(rows, columns, "sum"),
        "pooled_mean": weights.pooled(rows, columns),
    }


def check(
    weights: Any, dense: Tensor, *, tolerance: float, k: int, rows: int, columns: int, p: float, is_part: bool = False
) -> None:
    dense = dense.detach()
    queries, keys = dense.shape[-2:]
    scale = max(1.0, float(dense.sum(-1).max()), float(dense.sum(-2).max()))
    scores = max(1.0, float(torch.where(dense > 0, dense, 1.0).log().abs().max()))
    assert tuple(weights.shape) == tuple(dense.shape)

    def close(ours: Tensor, theirs: Tensor, times: float = 1.0) -> None:
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.detach().double(), theirs.double(), rtol=0, atol=tolerance * scale * times)

    close(weights.dense(), dense)
    asked, written = sums_asked(weights, rows, columns), sums_written_out(dense, rows, columns)
    # Each row of a block adds its own error to the block's sum.
    largest_sum = max(1.0, float(written["pooled_sum"].max()) / scale)
    factor = {
        "entropy": scores,
        "participation_ratio": 4 * keys**2,
        "distance": queries + keys,
        "pooled_sum": largest_sum,
    }
    together = weights.summary(*asked, "top_weight", rows=rows, columns=columns)
    for name, theirs in written.items():
        if name == "distance" and is_part:  # it is at the places of its whole
            close(weights.distance(keys - queries), theirs, factor[name])
            close(together[name], asked[name], factor[name])
            continue
        close(asked[name], theirs, factor.get(name, 1.0))
        close(together[name], theirs, factor.get(name, 1.0))
    close(weights.received("mean"), dense.mean(-2))
    close(weights.pooled(rows, columns, "max"), bins(dense, rows, columns, Tensor.amax))
    close(weights.top_keys(1).values[..., 0], dense.amax(-1))
    dead = (dense == 0).all(-1)
    for name in ("entropy", "participation_ratio", "distance"):
        assert (asked[name][dead] == 0).all()
    check_largest(weights, dense, tolerance * scale, k)
    check_quantile(weights, dense, tolerance * scale * 10, p)
    generator = torch.Generator().manual_seed(keys)
    x, y = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (keys, queries))
    close(weights @ x.to(weights.dtype), dense @ x, 10)
    close(weights.mT @ y.to(weights.dtype), dense.mT @ y, 10)
    y = torch.randn(*dense.shape[:-1], 2, generator=generator, dtype=torch.float64)
    close(weights.mT @ y.to(weights.dtype), dense.mT @ y, 10)
    close(weights @ torch.arange(keys).to(weights.dtype), dense @ torch.arange(keys).double(), keys)


def check_largest(weights: AttentionMap, dense: Tensor, tolerance: float, k: int) -> None:
    top = weights.top_keys(k)
    torch.testing.assert_close(top.values.detach().double(), dense.topk(k).values, rtol=0, atol=tolerance)
    for values, indices in (top, (weights.top_keys(1).values, weights.top_keys(1).indices)):
        assert ((indices == -1) == (values == 0)).all()
        there = torch.where(indices >= 0, dense.gather(-1, indices.clamp_min(0)), 0.0)
        torch.testing.assert_close(values.detach().double(), there, rtol=0, atol=tolerance)
    for row in top.indices.flatten(0, -2).tolist():
        named = [key for key in row if key >= 0]
        assert len(named) == len(set(named))


def check_quantile(weights: AttentionMap, dense: Tensor, tolerance: float, p: float) -> None:
    """n keys hold p of the mass, and n - 1 do not."""
    count = weights.top_p_count(p)
    held = torch.nn.functional.pad(dense.sort(-1, descending=True).values.cumsum(-1), (1, 0))
    goal = p * dense.sum(-1)
    assert ((count == 0) == (goal == 0)).all()
    assert (held.gather(-1, count[..., None])[..., 0] >= goal - tolerance).all()
    fewer = held.gather(-1, (count - 1).clamp_min(0)[..., None])[..., 0]
    assert (fewer[goal > 0] <= goal[goal > 0] + tolerance).all()
