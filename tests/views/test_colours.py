"""The ramp: even steps of lightness, as a second formula (CIE L*) measures them, and inside sRGB."""

from typing import Any

import numpy as np
import pytest

from regard.views.colours import hexadecimal, ramp


def lightness(colours: Any) -> Any:
    """CIE L* of sRGB colours, 0..100."""
    colours = np.asarray(colours)
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126729, 0.7151522, 0.0721750]
    return 116 * np.cbrt(luminance) - 16


@pytest.mark.parametrize("dark", [False, True])
def test_steps_are_even(dark: bool) -> None:
    colours = ramp(dark=dark)
    assert np.min(colours) >= 0
    assert np.max(colours) <= 1
    steps = np.diff(lightness(colours)) * (1 if dark else -1)
    assert steps.min() > 0.4 * steps.mean()
    assert steps.max() < 1.8 * steps.mean()


def test_hex_is_the_same_colour() -> None:
    read = [[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in map(hexadecimal, ramp(steps=9))]
    np.testing.assert_allclose(read, ramp(steps=9), atol=0.5 / 255)
