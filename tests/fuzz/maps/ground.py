"""The ground `maps`: a random map, maps made of it, and random questions."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from regard.maps import tiles
from tests.fuzz.drawing import Drawn
from tests.fuzz.maps.derived import derived
from tests.fuzz.maps.gradients import check_gradients_of_statistics
from tests.fuzz.maps.kept import check_kept
from tests.fuzz.maps.mirrors import random_mirror
from tests.fuzz.maps.questions import QUESTIONS


@contextmanager
def _tiles_of(elements: int) -> Iterator[None]:
    """Short calls are cut into tiles, as long ones are."""
    before, tiles.TILE_ELEMENTS = tiles.TILE_ELEMENTS, elements
    try:
        yield
    finally:
        tiles.TILE_ELEMENTS = before


def case(drawn: Drawn) -> None:
    """One random map, and three questions to it; or gradients; or what is kept of it."""
    with _tiles_of(drawn.of([tiles.TILE_ELEMENTS, 200, 20])):
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
