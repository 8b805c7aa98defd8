"""The loop over rows gives the answers of the tiles, and leaves other questions to the tiles."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch

import regard
from regard.call.masks import strided
from regard.maps.loop import one_loop, row_tiles
from regard.maps.sources.dot_scores import DotScores
from regard.maps.statistics.asked import MOST_RANKED
from regard.watching.analysis.head_table import BY_QUERY, query_values
from tests.maps.dense_maps import answers_of

pytest.importorskip("numba", reason="the loop comes with the extra 'fast'")

USUAL = ("received", "entropy", "top_keys", "pooled_mean", "pooled_max")
Answered = list[bool]


@pytest.fixture(scope="module", autouse=True)
def answered() -> Iterator[Answered]:
    """Whether the loop has answered, each time that it was asked; small maps go through it too."""
    with answers_of(one_loop.NumbaRows) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_loop, "SMALL", 0)
        yield found


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("queries", [333, 411, 130])
@pytest.mark.parametrize(
    "mask", [None, regard.causal(), regard.window(40), regard.lengths(torch.tensor([0, 333]))], ids=str
)
def test_the_numbers_of_heads_are_those_of_float64(
    mask: regard.Mask | None, queries: int, threads: int, answered: Answered
) -> None:
    """Distances, places and equal tokens in one pass with the others; queries before the first key, and dead ones."""
    q, k, tokens = torch.randn(2, 2, queries, 8), torch.randn(2, 1, 333, 8), torch.randint(9, (2, 333))
    tokens[0, 100:] = 3
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            weights = regard.attention(3 * q, k, k, mask=mask, return_weights=True).weights
            same = regard.attention(3 * q.double(), k.double(), k.double(), mask=mask, return_weights=True).weights
            answered.clear()
            found = query_values(weights, tokens, BY_QUERY)
            assert answered == [True]
            expected = query_values(same, tokens, BY_QUERY)
    finally:
        torch.set_num_threads(1)
    assert list(found) == list(BY_QUERY)
    for name, theirs in expected.items():
        ours = found[name]
        assert ours.counted.equal(theirs.counted)
        size = 333 if name == "distance" else 1
        torch.testing.assert_close(ours.values.double(), theirs.values, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_and_the_default_device_are_not_those_of_the_loop(
    dtype: torch.dtype, answered: Answered
) -> None:
    q = torch.randn(1, 2, 200, 8)
    with torch.no_grad():
        weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
        expected = weights.summary(*USUAL)
        answered.clear()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                found = weights.summary(*USUAL)
        finally:
            torch.set_default_dtype(torch.float32)
    assert answered == [True]
    for name in USUAL:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("names", [("pooled_mean",), ("pooled_max",), ("pooled_sum", "pooled_max"), ("pooled_sum",)])
def test_pictures_alone_are_those_that_are_asked_together(names: tuple[str, ...], answered: Answered) -> None:
    q = torch.randn(2, 2, 200, 8)
    with torch.no_grad():
        weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
        together = weights.summary("pooled_mean", "pooled_sum", "pooled_max", rows=60, columns=70)
        answered.clear()
        alone = weights.summary("entropy", *names, rows=60, columns=70)
    assert answered == [True]
    for name in names:
        torch.testing.assert_close(alone[name], together[name])


DOCUMENTS = regard.documents(torch.arange(333) // 50, key_ids=torch.arange(325) // 50)


@pytest.mark.parametrize("most_added", [1 << 20, 12_000])
@pytest.mark.parametrize(
    ("mask", "is_made_once"),
    [
        (regard.causal(), True),
        (regard.causal(offset=7), True),
        (regard.causal() & regard.window(90), True),
        (regard.causal() & DOCUMENTS, False),
        (regard.causal(offset=7) | DOCUMENTS, False),
        (regard.window(90) & regard.predicate(lambda _b, _h, query, key: (query * key) % 3 > 0), False),
    ],
    ids=str,
)
def test_blocks_on_one_diagonal_are_made_once(
    mask: regard.Mask, is_made_once: bool, most_added: int, answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five whole tiles and a rest, in one run of the loop and in several.

    What a mask hides on one diagonal it may show on the next, if it reads more; and the last keys are fewer.
    """
    made = list[range]()
    real = DotScores.added

    def counted(scores: DotScores, rows: range, columns: range) -> torch.Tensor:
        made.append(rows)
        return real(scores, rows, columns)

    monkeypatch.setattr(DotScores, "added", counted)
    monkeypatch.setattr(row_tiles, "ADDED_ELEMENTS", most_added)
    monkeypatch.setattr(row_tiles, "kept_batches", {})
    q, k = torch.randn(1, 2, 333, 8), torch.randn(1, 2, 325, 8)
    with torch.no_grad():
        answered.clear()
        found = regard.attention(q, k, k, mask=mask, return_weights=True).weights.summary(*USUAL, rows=30, columns=40)
        dense = regard.attention(q.double(), k.double(), k.double(), mask=mask, return_weights=True).weights.dense()
    assert answered == [True]
    if most_added == 1 << 20:
        assert (len(made) < 333 // row_tiles.MOST_ROWS) is is_made_once
    torch.testing.assert_close(found["received"].double(), dense.sum(-2), rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(found["entropy"].double(), torch.special.entr(dense).sum(-1), rtol=0, atol=5e-6)


def test_tiles_are_kept_for_equal_masks_alone(answered: Answered, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[range]()
    real = DotScores.added
    monkeypatch.setattr(
        DotScores, "added", lambda scores, rows, columns: made.append(rows) or real(scores, rows, columns)
    )
    monkeypatch.setattr(row_tiles, "kept_batches", {})
    masks = [
        regard.causal(), regard.causal(offset=3), regard.window(30), regard.window(40), regard.window(31, side="both"),
        regard.causal() & regard.window(30), strided(3), strided(4), regard.causal() | regard.window(8),
        regard.documents(torch.arange(200) // 50), regard.documents(torch.arange(200) // 40), None,
    ]  # fmt: skip
    for keys in (200, 150):
        for mask in masks:
            if keys == 150 and mask is not None and "documents" in str(mask):
                continue
            q, k = torch.randn(1, 2, 200, 8), torch.randn(1, 2, keys, 8)
            with torch.no_grad():
                answered.clear()
                found = regard.attention(q, k, k, mask=mask, return_weights=True).weights.summary("received", "top_key")
                exact = regard.attention(*(t.double() for t in (q, k, k)), mask=mask, return_weights=True).weights
                assert answered == [True]
                torch.testing.assert_close(found["received"].double(), exact.dense().sum(-2), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for heads in (2, 3):
            made.clear()
            q = torch.randn(2, heads, 170, 16)
            regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.summary("received", "top_key")
            assert bool(made) is (heads == 2), "the second is of the same size, under an equal mask"


def test_few_tiles_are_kept_and_no_large_ones(answered: Answered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tiles, "kept_batches", {})
    with torch.no_grad():
        for keys in range(30, 30 + row_tiles.MOST_KEPT + 3):
            q = torch.randn(1, 1, keys, 4)
            regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.summary("received", "top_key")
        assert [key[1] for key in row_tiles.kept_batches] == list(range(33, 33 + row_tiles.MOST_KEPT))
        q = torch.randn(1, 1, 600, 4)
        answered.clear()
        regard.attention(q, q, q, mask=strided(2), return_weights=True).weights.summary("received", "top_key")
        assert answered == [True]
    assert all(batch[1].numel() <= row_tiles.KEPT_ELEMENTS for batch in row_tiles.kept_batches.values())
    assert 600 not in [key[1] for key in row_tiles.kept_batches]


def test_memory_that_vectors_read_begins_at_a_line_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does made the loop up to twice as fast on an Intel Xeon, by chance."""
    told, real = dict[str, int](), row_tiles.addresses

    def addresses(**arrays: Any) -> dict[str, int]:
        told.update(found := real(**arrays))
        return found

    monkeypatch.setattr(one_loop, "addresses", addresses)
    q = torch.randn(1, 2, 200, 8)
    with torch.no_grad():
        regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.summary(*USUAL)
    assert (told["peaks"] - told["sums"]) % 4096 == 2048
    assert {name: told[name] % 64 for name in ("panels", "added", "sums", "peaks")} == dict.fromkeys(
        ("panels", "added", "sums", "peaks"), 0
    )
    from regard.tensors.vector_code import aligned_numbers

    assert [aligned_numbers(count).ctypes.data % 64 for count in (1, 5, 64, 1000)] == [0] * 4
    assert aligned_numbers(1000).size == 1000


def test_without_the_threads_of_openmp_those_of_python_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 200, 8)
    with torch.no_grad():
        weights = regard.attention(q, q, q, return_weights=True).weights
        expected = weights.summary("received", "top_weight")
        monkeypatch.setattr(one_loop, "openmp", lambda: None)
        torch.set_num_threads(3)
        try:
            found = weights.summary("received", "top_weight")
        finally:
            torch.set_num_threads(1)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_two_threads_may_ask_at_once() -> None:
    q = torch.randn(1, 4, 300, 8)
    weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
    expected = weights.summary(*USUAL)["entropy"]

    def asked(_number: int) -> bool:
        torch.set_num_threads(2)
        with torch.no_grad():
            return torch.equal(cast(Any, weights.summary(*USUAL)["entropy"]), cast(Any, expected))

    try:
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(asked, range(9)))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("ranked", [1, 16, 17, 64])
@pytest.mark.parametrize("count", [8, 9, 33, 64, 65, 100])
def test_of_few_and_of_many_equal_weights_the_first_keys_are_named(count: int, ranked: int) -> None:
    """Up to 64 weights that reach the bound are compared with one another; more take their places one by one."""
    chosen = torch.randperm(300)[:count].sort().values
    q, k = torch.ones(1, 1, 5, 4), torch.zeros(1, 1, 300, 4)
    k[..., chosen, :] = 2.0
    with torch.no_grad():
        found = regard.attention(q, k, k, return_weights=True).weights.summary("top_keys", k=ranked)["top_keys"]
    others = torch.arange(300)[~torch.isin(torch.arange(300), chosen)]
    assert torch.equal(found.indices[0, 0], torch.cat([chosen, others])[:ranked].expand(5, ranked))


def test_large_weights_are_packed_the_same_without_the_instruction() -> None:
    """Only some processors pack chosen numbers of a vector by an instruction."""
    import numba

    from regard.maps.loop.row_ranks import pack, pack_by_bits

    def packing(way: Any) -> Any:
        @numba.njit
        def packed(weights: Any, bound: Any, few: Any, places: Any) -> int:
            count = 0
            for start in range(0, weights.size, 16):
                to, at = few.ctypes.data + 4 * count, places.ctypes.data + 4 * count
                count += way(weights.ctypes.data + 4 * start, start, bound, to, at)
            return count

        return packed

    weights = np.random.default_rng(0).random(320, np.float32)
    weights[::7] = 0.5
    for bound in (0.0, 0.5, 0.9, 2.0):
        chosen = np.flatnonzero(weights >= np.float32(bound))
        for way in (pack, pack_by_bits):
            few, places = np.empty(340, np.float32), np.empty(340, np.int32)
            count = packing(way)(weights, np.float32(bound), few, places)
            assert count == len(chosen)
            assert np.array_equal(places[:count], chosen)
            assert np.array_equal(few[:count], weights[chosen])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_go_by_tiles(bad: float, answered: Answered) -> None:
    q, k = torch.randn(1, 1, 50, 4), torch.randn(1, 1, 50, 4)
    k[0, 0, 7] = bad
    answered.clear()
    with torch.no_grad():
        found = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights.summary(*USUAL)
    assert answered == [False]
    entropy = found["entropy"]
    assert isinstance(entropy, torch.Tensor)
    assert entropy[0, 0, :7].isfinite().all()
    assert entropy[0, 0, 7:].isnan().any()


def test_what_goes_by_tiles(answered: Answered) -> None:
    q = torch.randn(1, 2, 80, 4)

    def asked(*names: str, weights: regard.AttentionMap, **options: Any) -> Answered:
        answered.clear()
        weights.summary(*names, **options)
        return answered.copy()

    weights = regard.attention(q, q, q, return_weights=True).weights
    assert asked(*USUAL, weights=weights) == [True]
    assert asked(*USUAL, "top_p_count", weights=weights) == [False]
    assert asked("top_keys", "entropy", weights=weights, k=MOST_RANKED + 1) == [False]
    assert asked(*USUAL, weights=weights.average()) == [False]
    assert asked(*USUAL, weights=regard.attention(*[q.double()] * 3, return_weights=True).weights) == [False]
    q.requires_grad_()
    weights = regard.attention(q, q, q, return_weights=True).weights
    assert asked(*USUAL, weights=weights) == [False]
    assert asked(*USUAL, weights=weights.detach()) == [True]


def test_small_maps_do_not_load_numba(monkeypatch: pytest.MonkeyPatch, answered: Answered) -> None:
    monkeypatch.setattr(one_loop, "SMALL", 80 * 80 + 1)
    q = torch.randn(1, 1, 80, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    answered.clear()
    weights.summary(*USUAL)
    assert answered == [False]


def test_without_the_extra_tiles_answer_and_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_loop, "has_numba", lambda: False)
    q = torch.randn(1, 1, 80, 4)
    with torch.no_grad():
        weights = regard.attention(q, q, q, return_weights=True).weights
        torch.testing.assert_close(weights.summary("received", "top_weight")["received"], weights.received())
    said = regard.explain(q, q, q)
    assert said.statistics == "tiles"
    assert "not by one loop over each row (numba): numba is not installed (pip install 'regard[fast]')" in str(said)
    monkeypatch.setattr(one_loop, "has_numba", lambda: True)
    assert "together: by one loop over each row" in str(regard.explain(q, q, q))
    assert "a softmax of dot products in float32" in str(regard.explain(*[q.double()] * 3))
    assert "a softmax of dot products" in str(regard.explain(q, q, q, normalization=regard.Sparsemax()))
    assert "no scaled dot product" in str(regard.explain(q, q, q, score=regard.Additive(torch.ones(4))))


@torch.no_grad()
def test_a_map_of_no_sequence_goes_by_tiles() -> None:
    q = torch.randn(0, 2, 5, 4)
    weights = regard.attention(q, q, q, return_weights=True).weights
    assert weights.top_keys(1).values[..., 0].shape == (0, 2, 5)
    assert weights.summary()["entropy"].shape == (0, 2, 5)


def test_where_nothing_can_be_kept_each_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba import types
    from numba.core import caching

    from regard.tensors.vector_code import compiled_function

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    doubled = compiled_function(types.int64(types.int64))(lambda x: 2 * x)
    assert doubled.ctypes(21) == 42


def test_numbers_in_new_memory_are_not_read(answered: Answered, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 8, 512, 16)
    weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True)[1]
    names = ("received", "entropy", "distance", "top_weight", "pooled_mean", "pooled_max")
    answered.clear()
    right, real = weights.summary(*names), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: real(*size, **options).fill_(7))
    found = weights.summary(*names)
    assert all(answered)
    for name in names:
        torch.testing.assert_close(found[name], right[name], rtol=0, atol=0)
