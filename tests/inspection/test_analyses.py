"""Rollout, head tables and comparison against the dense weights in float64, and on watched models."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.errors import ArgumentError, ShapeError
from regard.watching import compare, head_table, rollout
from regard.watching.analysis.tables import HeadTable
from tests.largest import Largest
from tests.modules import watching

MASKS = {
    "everything": None,
    "causal": regard.causal(),
    "padded": regard.lengths(torch.tensor([13, 0])),
    "left padded, causal": regard.causal() & regard.padding(torch.arange(13) >= torch.tensor([[0], [4]])),
}


def maps_of(
    mask: regard.Mask | None, count: int = 3, dtype: torch.dtype = torch.float64, sharp: float = 2.0, queries: int = 13
) -> list[Any]:
    made = []
    for _ in range(count):
        q, k = sharp * torch.randn(2, 4, queries, 8, dtype=dtype), torch.randn(2, 2, 13, 8, dtype=dtype)
        made.append(regard.attention(q, k, k, mask=mask, return_weights=True).weights)
    return made


def rolled_out(dense: Sequence[Tensor], residual: float, shares: Any) -> Tensor:
    total = torch.eye(dense[0].shape[-1], dtype=dense[0].dtype)
    for weights in dense:
        mean = (weights * shares[:, None, None]).sum(-3) / shares.sum()
        one = residual * torch.eye(mean.shape[-1], dtype=mean.dtype) + (1 - residual) * mean
        total = one / one.sum(-1, keepdim=True) @ total
    return total


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("residual", "heads"), [(0.5, None), (0.2, [1.0, 2.0, 0.0, 4.0])])
def test_rollout_is_the_dense_product(name: str, residual: float, heads: list[float] | None) -> None:
    maps = maps_of(MASKS[name])
    shares = torch.ones(4).double() if heads is None else torch.tensor(heads).double()
    expected = rolled_out([one.dense() for one in maps], residual, shares)
    asked: dict[str, Any] = {"residual": residual, "heads": heads}
    torch.testing.assert_close(rollout(maps, [0, 5, -1], **asked), expected[:, [0, 5, 12]], rtol=0, atol=1e-12)
    torch.testing.assert_close(rollout(maps, 7, **asked), expected[:, 7], rtol=0, atol=1e-12)
    torch.testing.assert_close(rollout(maps, [2]).sum(-1), torch.ones(2, 1).double(), rtol=0, atol=1e-12)


def test_rollout_has_gradients() -> None:
    q = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)

    def last(q: Tensor) -> Tensor:
        maps = [regard.attention(q * n, q, q, mask=regard.causal(), return_weights=True).weights for n in (1, 2)]
        return rollout(maps, [-1, 2])

    assert torch.autograd.gradcheck(last, (q,), fast_mode=True)


def mean_over(values: Tensor, counted: Tensor) -> Tensor:
    return torch.stack([values[:, h][counted[:, h]].mean() for h in range(values.shape[1])])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("queries", [13, 6])
def test_the_numbers_of_every_head(name: str, queries: int) -> None:
    maps = maps_of(MASKS[name], 2, queries=queries)
    tokens = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 1, 4, 5, 4, 2, 2], [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3]])
    table = head_table(maps, ids=tokens)
    assert table.layers == ("0", "1")
    place = torch.arange(queries) + 13 - queries
    keys = torch.arange(13)
    for layer, weights in enumerate(maps):
        dense = weights.dense()
        live = dense.sum(-1) > 0

        def expect(column: str, values: Tensor, counted: Tensor, layer: int = layer) -> None:
            torch.testing.assert_close(
                table[column][layer], mean_over(values, counted), rtol=0, atol=1e-12, equal_nan=True
            )

        expect("distance", (dense * (place[:, None] - keys).abs()).sum(-1), live)
        expect("entropy", torch.special.entr(dense).sum(-1), live)
        expect("self", dense[..., torch.arange(queries), place], live)
        expect("previous", dense[..., torch.arange(queries), (place - 1).clamp_min(0)], live & (place > 0))
        expect("first", dense[..., 0], live & (place > 0))
        follows, equals = torch.zeros(2, 2, 1, queries, 13, dtype=torch.bool)
        for b in range(2):
            for i in range(queries):
                for j in range(int(place[i])):
                    follows[b, 0, i, j] = j > 0 and tokens[b, j - 1] == tokens[b, place[i]]
                    equals[b, 0, i, j] = tokens[b, j] == tokens[b, place[i]]
        expect("induction", (dense * follows).sum(-1), live & follows.any(-1))
        expect("duplicate", (dense * equals).sum(-1), live & equals.any(-1))


def test_tokens_are_strings_and_ids_are_their_numbers() -> None:
    maps = maps_of(MASKS["causal"], 1, queries=13)
    rows = [list("abcabcaadedbb"), list("aaaabcdefghib")]
    ids = torch.tensor([[ord(one) for one in row] for row in rows])
    for tokens, numbers in ((rows, ids), (rows[0], ids[0])):
        ours, theirs = head_table(maps, tokens), head_table(maps, ids=numbers)
        assert not ours["induction"].isnan().any()
        for column in ("induction", "duplicate"):
            torch.testing.assert_close(ours[column], theirs[column], rtol=0, atol=0)


def test_nothing_of_t_times_t() -> None:
    length = 1536
    q = torch.randn(1, 2, length, 4)
    maps = [regard.attention(q * n, q, q, mask=regard.causal(), return_weights=True).weights for n in (1, 2)]
    with Largest() as largest:
        rollout(maps, [-1, 5])
        head_table(maps, ids=torch.randint(0, 9, (length,)))
        compare(maps[:1], maps[1:])
    assert largest.elements <= 1 << 20 < length * length


def test_a_table_of_many_heads_prints_the_first_and_the_last() -> None:
    table = head_table(maps_of(None, 9))
    lines = str(table).splitlines()
    assert len(lines) == 26
    assert lines[13] == "... 12 more"
    assert repr(table) == "HeadTable(9 layers, up to 4 heads: distance, entropy, self, previous, first); print it"
    layer, head, value = table.top("entropy", 2)[0]
    assert value == table["entropy"].max() == table["entropy"][int(layer), head]


def test_layers_of_other_widths_share_a_table() -> None:
    two, four = maps_of(None, 1)[0][:, :2], maps_of(None, 1)[0]
    table = head_table([two, four])
    assert table["entropy"].shape == (2, 4)
    assert table["entropy"][0, 2:].isnan().all()
    assert len(str(table).splitlines()) == 7
    assert all(not math.isnan(value) for _, _, value in table.top("entropy", 8))


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda m: rollout(m, 13), ShapeError, r"token index must be in \[-13, 13\)"),
        (lambda m: rollout(m, 0, residual=2.0), ArgumentError, r"in \[0, 1\], got 2.0"),
        (lambda m: rollout(m, 0, heads=[1.0]), ArgumentError, "one weight for each of 4"),
        (lambda m: rollout([], 0), ArgumentError, "no maps"),
        (lambda m: head_table(cast(Any, [np.ones((3, 3))])), ArgumentError, "got ndarray"),
        (lambda m: head_table(m, ids=torch.ones(5)), ShapeError, r"for each key of the maps .*; got \(5,\)"),
        (lambda m: head_table(m, ["a", "b"]), ShapeError, r"for each key of the maps .*; got \(2,\)"),
        (lambda m: head_table(m, cast(Any, torch.ones(13))), ArgumentError, "Numbers go by ids="),
        (lambda m: head_table(m, "thirteen letter"), ArgumentError, "tokens are strings, one for each key"),
        (lambda m: head_table(m, ["a"] * 13, ids=torch.ones(13)), ArgumentError, "leave one of them out"),
        (lambda m: head_table(m)["entropi"], ArgumentError, "columns distance, entropy.*got 'entropi'"),
        (lambda m: compare(m, m[:1]), ShapeError, "got 2 and 1"),
    ],
)
def test_a_wrong_argument_is_named(ask: Callable[..., Any], error: type[regard.RegardError], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(maps_of(None, 2))


def test_kept_means_answer_sums_and_sums_means() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    for kept in ("pooled_mean", "pooled_sum"):
        seen = watching(layer.eval(), keep=regard.Summarize(kept, rows=3, columns=2))(torch.ones(1, 7, 16))
        ((_, summary),) = seen.items()
        torch.testing.assert_close(summary.pooled(3, 2, "sum").sum((-2, -1)), torch.full((1, 4), 7.0))
        blocks = torch.tensor([3, 2, 2])[:, None] * torch.tensor([4, 3])
        torch.testing.assert_close(summary.pooled(3, 2, "mean") * blocks, summary.pooled(3, 2, "sum"))


def test_each_sequence_is_read_with_its_own_tokens_in_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.maps.statistics.tiles.TILE_ELEMENTS", 200)
    q, tokens = torch.randn(4, 2, 20, 3), torch.randint(0, 5, (4, 20))
    weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
    dense, table = weights.dense(), head_table(weights, ids=tokens)
    for name, back in (("induction", 1), ("duplicate", 0)):
        expected, has_keys = torch.zeros(4, 2, 20), torch.zeros(4, 20, dtype=torch.bool)
        for b, row in enumerate(tokens.tolist()):
            for i in range(20):
                keys = [j for j in range(back, i) if row[j - back] == row[i]]
                expected[b, :, i], has_keys[b, i] = dense[b, :, i, keys].sum(-1), bool(keys)
        mean = (expected * has_keys[:, None]).sum((0, 2)) / has_keys.sum()
        torch.testing.assert_close(table[name][0], mean)


def test_heads_that_do_not_exist_are_not_among_the_largest() -> None:
    numbers = HeadTable(("a", "b"), {"x": torch.tensor([[-3.0, -2.0], [-1.0, torch.nan]])})
    assert numbers.top("x", 2) == [("b", 0, -1.0), ("a", 1, -2.0)]
    assert numbers.top("x", 9) == [("b", 0, -1.0), ("a", 1, -2.0), ("a", 0, -3.0)]


def test_maps_have_the_names_that_the_caller_gives() -> None:
    one, two = maps_of(None, 2)
    assert head_table({"first": one, "second": two}).layers == ("first", "second")
    others = cast(Any, {3: one, ("a", "b", "c"): two})
    assert head_table(others).layers == ("3", "('a', 'b', 'c')")


@pytest.mark.parametrize("wrong", [5, None, "abc", {"a": 3}, [np.ones((2, 2))]], ids=repr)
def test_what_is_no_map_is_refused(wrong: Any) -> None:
    takers: list[Callable[[Any], Any]] = [head_table, lambda maps: rollout(maps, 0), regard.view]
    for take in takers:
        with pytest.raises(ArgumentError, match=f"got {'int' if wrong == {'a': 3} else ''}"):
            take(wrong)


def test_a_comparison_has_the_mean_divergence_of_every_sequence() -> None:
    one = torch.randn(3, 2, 5, 4)
    other: Any = one.clone()
    other[2, 1] += torch.randn(5, 4)
    maps = [regard.attention(x, x, x, return_weights=True).weights for x in (one, other)]
    found = compare([maps[0]], [maps[1]])
    p, r = ((x @ x.mT / 2).softmax(-1) for x in (one, other))
    m = (p + r) / 2
    apart = (p * (p / m).log() + r * (r / m).log()).sum(-1).mean((0, 2)) / 2
    torch.testing.assert_close(found["jensen-shannon"][0], apart)
    assert apart[1] > 1e-3 > apart[0]
