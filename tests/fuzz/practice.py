"""Two grounds with a known fault each, on which `make fuzz` itself is tested."""

import os

from tests.fuzz.drawing import Drawn


def faulty(drawn: Drawn) -> None:
    """Numbers from 7 on are wrong; the smallest case is 7."""
    number = drawn.number(0, 1000)
    assert number < 7, f"the number is {number}"


def deadly(drawn: Drawn) -> None:
    os.abort()
