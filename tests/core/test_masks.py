"""Masks by hand, their renderings against one another, and their errors."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.call.masks.row_spans import FAR, RowRanges, RowSpans
from regard.call.masks.selection import SelectedMask
from regard.call.shapes import Sizes
from regard.errors import ShapeError
from tests.core.contracts import every_rendering_asks_the_predicate, part
from tests.core.random_calls import combined
from tests.fuzz.core.masks import MASKS, Positions, random_mask
from tests.fuzz.core.parts import Sides
from tests.fuzz.drawing import Drawn


@given(data=st.data())
def test_every_rendering_is_the_same_predicate(data: st.DataObject) -> None:
    mask, allowed = combined(data.draw, Sides((2,), 3, 3, 11, 13, 1, 1, True))
    if not isinstance(mask, regard.Mask):
        return
    every_rendering_asks_the_predicate(mask, allowed, part(data, 11), part(data, 13))


def test_masks_combine_with_bool_tensors_on_either_side() -> None:
    x, keep = torch.randn(2, 3, 5, 4), torch.rand(5, 5) > 0.4
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for mask, same in (
        (keep & regard.causal(), keep & causal),
        (regard.causal() & keep, keep & causal),
        (keep | regard.causal(), keep | causal),
        (~regard.causal() | keep, keep | ~causal),
    ):
        assert torch.equal(regard.attention(x, x, x, mask=mask), regard.attention(x, x, x, mask=same))
    with pytest.raises(TypeError, match="'Causal' and 'Tensor'"):
        regard.causal() & torch.zeros(5, 5)


def test_drawings_name_the_combination() -> None:
    mask = (regard.causal() | regard.lengths(torch.tensor([1]))) & ~regard.causal(0)
    assert str(mask) == "(causal | lengths) & ~(causal)"


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3), r"torch.float32; a float tensor goes in as bias="),
        (torch.tensor([1, 2]), r"valid lengths go in as lengths\(\.\.\.\)"),
        ("causal", r"got str"),
        (torch.ones(3, 2, dtype=torch.bool), r"or be 2-D \(2, 3\); got \(3, 2\)"),
        (torch.ones(2, 2, 3, dtype=torch.bool), r"got \(2, 2, 3\)"),
    ],
)
def test_a_wrong_mask_is_named(mask: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        regard.attention(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3, 4), mask=mask)


def test_wrong_lengths_are_named() -> None:
    x = torch.ones(2, 3, 4)
    with pytest.raises(ShapeError, match=r"lengths must have shape \(2,\), got \(3,\)"):
        regard.attention(x, x, x, mask=regard.lengths(torch.tensor([1, 2, 3])))
    with pytest.raises(ShapeError, match=r"integers, got torch.float32"):
        regard.lengths(torch.tensor([1.0]))
    with pytest.raises(ShapeError, match=r"padding must have shape \(2, 3\), got \(2, 4\)"):
        regard.attention(x, x, x, mask=regard.padding(torch.ones(2, 4, dtype=torch.bool)))
    with pytest.raises(ShapeError, match=r"bool tensor \(True = keep\) or ids with pad_id="):
        regard.padding(torch.ones(2, 4))


def test_a_predicate_that_does_not_answer_with_bools_is_named() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ShapeError, match="must return a bool tensor"):
        regard.attention(x, x, x, mask=regard.predicate(lambda b, h, q, k: q - k))


@pytest.mark.parametrize(
    ("shape", "meant"),
    [
        ((2, 7), r"regard\.padding\(mask\)"),
        ((2, 5, 7), r"for all heads alike it is mask\[\.\.\., None, :, :\]"),
        ((6, 5, 7), r"it is mask\.unflatten\(0, \(2, 3\)\)"),
        ((3, 5, 7), r"got \(3, 5, 7\)$"),
    ],
)
def test_masks_as_other_libraries_take_them_are_refused_with_what_to_write(shape: tuple[int, ...], meant: str) -> None:
    query, key, mask = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.ones(shape, dtype=torch.bool)
    with pytest.raises(regard.RegardError, match=meant):
        regard.attention(query, key, key, mask=mask)


@pytest.mark.parametrize(("kind", "offset"), [("causal_lower_right", 4), ("causal_upper_left", 0)])
def test_torchs_causal_bias_is_its_variant_and_not_its_memory(kind: str, offset: int) -> None:
    from torch.nn.attention import bias

    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    made = getattr(bias, kind)
    output, weights = regard.attention(q, k, k, mask=made(5, 9), return_weights=True)
    expected = regard.attention(q, k, k, mask=regard.causal(offset), return_weights=True)
    assert torch.equal(output, expected.output)
    assert torch.equal(weights.dense(), expected.weights.dense())
    assert torch.equal(expected.weights.mass(made(5, 9)), expected.weights.mass(regard.causal(offset)))
    with pytest.raises(ShapeError, match=r"for \(T, S\) = \(6, 9\), and the call has \(5, 9\)"):
        regard.attention(q, k, k, mask=made(6, 9))
    with pytest.raises(ShapeError, match="bias= got torch's CausalBias, which is a mask"):
        regard.attention(q, k, k, bias=made(5, 9))


def test_a_plain_subclass_of_tensor_gets_its_weights() -> None:
    class Image(torch.Tensor):
        pass

    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    output, weights = regard.attention(*(x.as_subclass(Image) for x in (q, k, k)), return_weights=True)
    expected = regard.attention(q, k, k, return_weights=True)
    assert type(output) is Image
    assert torch.equal(output.as_subclass(torch.Tensor), expected.output)
    assert torch.equal(weights.dense().as_subclass(torch.Tensor), expected.weights.dense())
    assert [torch.equal(a, b) for a, b in zip(weights.top_keys(2), expected.weights.top_keys(2), strict=True)] == [
        True,
        True,
    ]


CPU = torch.device("cpu")
ALWAYS = ("lengths", "per query", "causal", "padding", "window", "prefix")
"""Masks that are one range for each query, whatever they were drawn to be."""


def check(mask: regard.Mask | None, allowed: torch.Tensor, sizes: Sizes) -> bool:
    """The ranges of a mask (B, H, T, S), if it has any, and the numbers of its rows: those of a row at a time."""
    found = RowRanges.of(mask, sizes, CPU)
    if found is None:
        return False
    query, key = torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys)
    dense = ((query + found.lower <= key) & (key < query + found.upper))[None]
    dense = dense if found.first is None else dense & (found.first[..., None] <= key)
    dense = dense if found.stop is None else dense & (key < found.stop[..., None])
    dense = dense if found.keep is None else dense & found.keep[:, None]
    assert torch.equal(dense[:, None].expand(allowed.shape), allowed)
    spans, read = (
        found.spans(sizes, CPU),
        RowSpans.read(lambda rows: (allowed[:, :1, rows.start : rows.stop], None), sizes.queries, 3),
    )
    for name in ("first", "last", "count", "live", "keys", "is_whole"):
        own, other = getattr(spans, name), getattr(read, name)
        assert torch.equal(own.expand(other.shape), other.to(own.dtype)), name
    return True


def test_closed_forms_are_numbers_and_other_masks_have_no_ranges() -> None:
    sizes = Sizes((2,), 1, 1, T := 11, S := 9, False)
    found = RowRanges.of((regard.causal() & regard.window(4)).bind(sizes, CPU), sizes, CPU)
    assert found is not None
    assert (found.lower, found.upper) == (S - T - 3, S - T + 1)
    assert found.first is found.stop is found.keep is None
    assert RowRanges.of(None, sizes, CPU).lower == -FAR
    assert check(regard.causal(1 << 40).bind(sizes, CPU), torch.ones(2, 1, T, S) > 0, sizes)
    assert RowRanges.of((regard.padding(torch.ones(2, S) > 0) | regard.causal()).bind(sizes, CPU), sizes, CPU) is None


@given(data=st.data(), queries=st.integers(1, 19), keys=st.integers(1, 23))
def test_the_ranges_are_the_mask(data: st.DataObject, queries: int, keys: int) -> None:
    sides, sizes = Sides((2,), 3, 3, queries, keys, 1, 1, True), Sizes((2,), 3, 3, queries, keys, True)
    drawn = random_mask(Drawn(data.draw), sides)
    if drawn.mask is not None:
        has_ranges = check(drawn.mask.bind(sizes, CPU), drawn.allowed.expand(sides.full), sizes)
        assert has_ranges or re.search(r"[|~]|bools|blocks|documents|predicate|strided", drawn.name), drawn.name
    both = regard.window(5, side="both", offset=torch.tensor([0, 2])).bind(sizes, CPU)
    assert check(both, both.dense(sizes).expand(sides.full), sizes)
    ids, key_ids = (torch.arange(n).expand(2, -1) // by for n, by in ((queries, 4), (keys, 3)))
    chunks = regard.documents(ids, key_ids=key_ids).bind(sizes, CPU)
    assert check(chunks, (ids[..., None] == key_ids[:, None])[:, None].expand(sides.full), sizes)


@pytest.mark.parametrize("name", ALWAYS)
@given(data=st.data(), other=st.sampled_from(ALWAYS))
def test_the_usual_masks_have_ranges_also_joined_of_chosen_heads(name: str, data: st.DataObject, other: str) -> None:
    sides = Sides((2,), 3, 3, 9, 11, 1, 1, True)
    found, more = (MASKS[kind](Drawn(data.draw), sides, Positions(sides)) for kind in (name, other))
    sizes, one = Sizes((2,), 3, 3, 9, 11, True), Sizes((4,), 1, 1, 9, 11, False)
    bound, allowed = (found.mask & more.mask).bind(sizes, CPU), (found.allowed & more.allowed).expand(sides.full)
    assert check(bound, allowed, sizes)
    batches, heads = torch.tensor([1, 0, 1, 1]), torch.tensor([2, 0, 1, 1])
    assert check(SelectedMask(bound, batches, heads), allowed[batches, heads][:, None], one)


def test_documents_in_order_have_ranges_and_others_have_none() -> None:
    sizes = Sizes((1,), 1, 1, 6, 6, True)
    for ids, is_in_order in (([0, 0, 3, 3, 3, 7], True), ([0, 1, 0, 1, 2, 2], False)):
        tensor = torch.tensor([ids])
        bound = regard.documents(tensor).bind(sizes, CPU)
        assert check(bound, (tensor[..., None] == tensor[:, None])[:, None], sizes) == is_in_order
    strided = regard.call.masks.strided(2).bind(sizes, CPU)
    assert RowRanges.of(strided, sizes, CPU) is None
