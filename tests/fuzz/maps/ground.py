"""The ground `maps`: a random map, maps made of it, and random questions."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from regard.maps.loop import one_loop
from regard.maps.statistics import tiles
from tests.fuzz.drawing import Drawn
from tests.fuzz.maps.derived import derived
from tests.fuzz.maps.gradients import check_gradients_of_statistics
from tests.fuzz.maps.kept import check_kept
from tests.fuzz.maps.mirrors import random_mirror
from tests.fuzz.maps.questions import QUESTIONS


@contextmanager
def _read_as_long_ones(elements: int, small: int) -> Iterator[None]:
    """Short maps are cut into tiles, or go by the loop over rows, as long ones do."""
    before = tiles.TILE_ELEMENTS, one_loop.SMALL
    tiles.TILE_ELEMENTS, one_loop.SMALL = elements, small
    try:
        yield
    finally:
        tiles.TILE_ELEMENTS, one_loop.SMALL = before


def case(drawn: Drawn) -> None:
    elements, small = drawn.of([tiles.TILE_ELEMENTS, 200, 20]), drawn.of([one_loop.SMALL, 0])
    with _read_as_long_ones(elements, small):
        match drawn.of(["questions", "questions", "questions", "gradients", "kept"]):
            case "gradients":
                check_gradients_of_statistics(drawn)
            case "kept":
                check_kept(drawn)
            case _:
                one, _ = random_mirror(drawn)
                with torch.no_grad():
                    one = derived(drawn, one)
                    for _ in range(3):
                        drawn.of(QUESTIONS)(drawn, one)
