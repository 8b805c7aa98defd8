"""The plan of a million documents in docs/scale.md is what its script computes."""

from pathlib import Path

import pytest

from benchmarks import corpus_plan
from benchmarks.corpus_plan import plan, rows, value, work

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def test_the_page_has_the_lines_of_the_script() -> None:
    assert "\n".join(corpus_plan.page()) in PAGE.read_text(encoding="utf-8")


def test_the_passes_are_those_of_the_formula() -> None:
    assert rows() == 1e6 * 32 * 32
    assert work() == pytest.approx(1e9 * (2 * 6.74e9 + 2 * 32 * 1000 * 4096))
    speed = 67e12 * value("share of the peak") * value("share of the pass's tokens/s")
    for gpus in corpus_plan.GPUS:
        one = plan(gpus)
        assert one.passes * 3600 == pytest.approx(work() / speed / gpus)
        assert one.hours > one.passes
        assert one.dollars == pytest.approx(one.hours * gpus * value("price"))


def test_what_does_not_shrink_with_more_gpus_is_the_bottleneck_that_the_page_names() -> None:
    most = plan(corpus_plan.GPUS[-1])
    assert most.merging == plan(1).merging > most.reading
    assert most.passes > most.merging + most.reading + most.loading
    beyond = plan(512)
    assert beyond.passes < beyond.loading
