"""The choice of a search in one pass, against log-probabilities in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

from regard.generation.beam import beam_search
from regard.generation.config import Beam
from regard.generation.filters import Vocabulary
from regard.generation.greedy_search import greedy
from regard.mechanisms.compiled_choice import best_of_groups
from regard.mechanisms.fast_topk import largest_of_groups
from regard.models import Transformer, TransformerConfig
from regard.models.inference import of_many, prepare
from regard.storage.choices import Choices
from tests.models.test_compiled_step import LIMITS, untrained
from tests.models.test_steps_of_many import LENGTHS, SOURCES

INF = torch.inf


def scores_of(logits: Tensor, offsets: Tensor) -> Tensor:
    """Every score (G, M * V), in float64."""
    (groups, members), columns = offsets.shape, logits.shape[1]
    gains = logits.double().log_softmax(-1).view(groups, members, columns)
    return (gains + offsets.double()[..., None]).flatten(1)


def assert_are_the_best(logits: Tensor, offsets: Tensor, k: int) -> None:
    values, places = best_of_groups(logits, offsets, k)
    scores = scores_of(logits, offsets)
    torch.testing.assert_close(values.double(), scores.gather(1, places), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values.double(), scores.topk(values.shape[1], -1).values, atol=1e-5, rtol=1e-5)
    for row, chosen in zip(values.tolist(), places.tolist(), strict=True):
        real = [place for place, value in zip(chosen, row, strict=True) if value > -INF]
        assert len(set(real)) == len(real)
        # Best first, and of equal ones the first place.
        assert [*zip(row, chosen, strict=True)] == sorted(zip(row, chosen, strict=True), key=lambda x: (-x[0], x[1]))


@settings(max_examples=150)
@given(
    groups=st.integers(1, 4),
    members=st.integers(1, 5),
    columns=st.one_of(st.integers(1, 40), st.integers(200, 700)),
    k=st.integers(1, 12),
    spread=st.sampled_from([0.0, 1.0, 8.0]),
    whole=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_best_are_chosen(
    groups: int, members: int, columns: int, k: int, spread: float, whole: bool, seed: int
) -> None:
    """Whole numbers make many equal scores."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(groups * members, columns, generator=generator)
    logits = logits.round() if whole else logits
    offsets = -torch.rand(groups, members, generator=generator)
    assert_are_the_best(logits, offsets, k)


@pytest.mark.parametrize("columns", [5, 16, 255, 256, 257, 515, 5000])
def test_each_place_is_found(columns: int) -> None:
    """The largest number stands at every place once, the last one too."""
    places = sorted({0, 1, columns // 2, *range(max(columns - 20, 0), columns)})
    logits = torch.zeros(len(places), columns)
    logits[torch.arange(len(places)), places] = 3.0
    _, found = best_of_groups(logits, torch.zeros(len(places), 1), 1)
    assert found[:, 0].tolist() == places


@pytest.mark.parametrize("equal", [[1, 16], [17, 256], [3, 514], [255, 256, 512, 514]])
def test_of_equal_ones_the_first(equal: list[int]) -> None:
    """Those of other lanes, other blocks and of the last numbers."""
    logits = torch.zeros(1, 515)
    logits[0, equal] = 3.0
    for k in range(1, len(equal) + 1):
        assert best_of_groups(logits, torch.zeros(1, 1), k)[1].tolist() == [equal[:k]]


def test_more_than_there_are() -> None:
    values, places = best_of_groups(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[0.0, -0.5]]), 9)
    assert places.tolist() == [[0, 3, 1, 2]]
    assert values.shape == (1, 4)


def test_hypotheses_that_do_not_count() -> None:
    """Hypotheses of a beam that has fewer than it may have."""
    logits = torch.randn(6, 300)
    offsets = torch.tensor([[0.0, -INF, -INF], [-INF, -1.0, -INF]])
    assert_are_the_best(logits, offsets, 6)
    _, places = best_of_groups(logits, offsets, 6)
    assert (places // 300).tolist() == [[0] * 6, [1] * 6]


def test_the_largest_logits_overflow_nothing() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4, 0.0], [-3e38, -3e38, -3e38, -3e38], [3e38, 0.0, -3e38, 3e38]])
    assert_are_the_best(logits, torch.zeros(3, 1), 3)


@pytest.mark.parametrize("bad", [torch.nan, INF, -INF])
@pytest.mark.parametrize("columns", [3, 70])
def test_a_row_that_means_nothing_harms_no_other(bad: float, columns: int) -> None:
    """Its places are places all the same, so that nothing is read beyond a row; its scores are NaN, as torch's are."""
    logits, offsets = torch.randn(4, columns), torch.zeros(2, 2)
    expected = best_of_groups(logits[2:], offsets[1:], 4)
    logits[1] = bad
    values, places = best_of_groups(logits, offsets, 4)
    assert ((places >= 0) & (places < 2 * columns)).all()
    assert values[0, : min(4, columns)].isnan().all()
    torch.testing.assert_close((values[1:], places[1:]), expected)


@pytest.mark.parametrize("bad", [torch.nan, INF])
def test_one_number_that_is_none_makes_a_row_none(bad: float) -> None:
    logits = torch.randn(2, 70)
    logits[0, 33] = bad
    values, _ = best_of_groups(logits, torch.zeros(1, 2), 4)
    assert values.isnan().all()
    assert largest_of_groups(logits.log_softmax(-1), torch.zeros(1, 2), 4)[0].isnan().all()


def test_threads_and_strides_change_no_bit() -> None:
    logits, offsets, before = torch.randn(21, 901), torch.randn(7, 3), torch.get_num_threads()
    wide, tall = torch.zeros(21, 1000), logits.T.contiguous().T
    wide[:, :901] = logits
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += [best_of_groups(each, offsets, 9) for each in (logits, wide[:, :901], tall)]
    finally:
        torch.set_num_threads(before)
    for values, places in found:
        assert torch.equal(values, found[0][0])
        assert torch.equal(places, found[0][1])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "fastest", lambda _self, _kind, ways, _x: [*ways][-1])


@pytest.mark.usefixtures("always")
def test_tokens_that_may_not_be_chosen_are_not() -> None:
    model = untrained({})
    ready, allowed = of_many(prepare(model)), {2, *range(40, 60)}
    constraints = [Vocabulary.of(sorted(allowed), 331)]
    limits: dict[str, Any] = {**LIMITS, "alignments": False, "constraints": constraints}
    for found in greedy(ready, SOURCES, LENGTHS, **limits):
        assert set(found.tokens) <= allowed
    for best in beam_search(ready, SOURCES, LENGTHS, beam=Beam(3), **limits):
        assert set(best[0].tokens) <= allowed


class OtherLogits:
    """A decoder behind another, which makes other logits of its own."""

    def __init__(self, ready: Any, change: Any) -> None:
        self.ready, self.change = ready, change

    def start(self, *given: Any) -> Any:
        return self.ready.start(*given)

    def reorder(self, *given: Any) -> Any:
        return self.ready.reorder(*given)

    def step(self, *given: Any) -> Any:
        logits, *others = self.ready.step(*given)
        return self.change(logits), *others


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("change", [Tensor.double, Tensor.bfloat16, lambda logits: logits.double().float()])
def test_logits_that_are_not_the_decoders(change: Any) -> None:
    """They are float32 no more, and compiled code would read them as such."""
    model = untrained({})
    limits: dict[str, Any] = {**LIMITS, "alignments": False}
    ours, theirs = OtherLogits(of_many(prepare(model)), change), OtherLogits(prepare(model), change)
    found, expected = (greedy(one, SOURCES, LENGTHS, **limits) for one in (ours, theirs))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    best, right = (beam_search(one, SOURCES, LENGTHS, beam=Beam(3), **limits) for one in (ours, theirs))
    assert [one[0].tokens for one in best] == [one[0].tokens for one in right]


@pytest.mark.usefixtures("always")
def test_a_beam_that_wants_more_than_there_are_tokens() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(dim=8, num_heads=2, encoder_layers=1, decoder_layers=1)
    model = Transformer(config, source_vocab_size=53, target_vocab_size=7).eval()
    limits: dict[str, Any] = {"bos_id": 1, "eos_id": 2, "max_steps": 5, "beam": Beam(5)}
    found, expected = (beam_search(one, SOURCES, LENGTHS, **limits) for one in (of_many(prepare(model)), model))
    assert [best[0].tokens for best in found] == [best[0].tokens for best in expected]
