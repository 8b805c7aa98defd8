"""The colours of every view: weights from nothing to the largest in even steps of lightness, and paper, text and lines.

The scale is made in OKLCH (Björn Ottosson, "A perceptual color space for image processing", 2020,
https://bottosson.github.io/posts/oklab/). Lightness falls linearly along the scale, so that equal steps look equally
large, also in print and to a colour-blind reader. `regard.views.scales` maps weights onto it.
"""

from dataclasses import dataclass
from math import cos, pi, sin

Colour = tuple[float, float, float]
"""An sRGB triple in 0..1."""
STEPS = 256


def ramp(*, dark: bool = False, steps: int = STEPS) -> list[Colour]:
    """The colours of shares from 0 to 1 of the scale, 2 or more; on dark paper it starts near black."""
    first, last = ((0.26, 0.02, 275), (0.94, 0.06, 200)) if dark else ((0.985, 0.004, 250), (0.24, 0.11, 285))
    shares = [step / (steps - 1) for step in range(steps)]
    return [_colour(share, first, last) for share in shares]


def diverging(*, dark: bool = False, steps: int = STEPS + 1) -> list[Colour]:
    """The colours of values from -1 to 1: orange below 0, the paper at 0, blue above.

    The two sides have the same lightness at the same distance from 0. Blue and orange stay apart under the common
    kinds of colour blindness. The number of colours is odd, so that 0 has one of its own.

    >>> negative, zero, positive = diverging(steps=3)
    >>> negative[0] > negative[2], positive[0] < positive[2]
    (True, True)
    """
    half = steps // 2 + 1
    light = (0.26, 0.0, 0.94) if dark else (0.985, 0.0, 0.3)
    below, above = (
        [_colour(step / (half - 1), (light[0], 0.004, hue), (light[2], chroma, hue)) for step in range(half)]
        for hue, chroma in ((55, 0.07), (265, 0.12))
    )
    return [*below[:0:-1], *above]


def hexadecimal(colour: Colour) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in colour)


def _colour(share: float, first: Colour, last: Colour) -> Colour:
    lightness, chroma, hue = (a + (b - a) * share for a, b in zip(first, last, strict=True))
    # The ends are nearly grey. The middle may be vivid, as far as sRGB allows at its lightness.
    chroma += 0.11 * sin(pi * share)
    while max(_rgb(lightness, chroma, hue)) > 1 or min(_rgb(lightness, chroma, hue)) < 0:
        chroma *= 0.995
    linear = _rgb(lightness, chroma, hue)
    red, green, blue = (12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in linear)
    return red, green, blue


def _rgb(lightness: float, chroma: float, hue: float) -> Colour:
    """Linear sRGB of an OKLCH colour, outside 0..1 for colours beyond the gamut."""
    a, b = chroma * cos(hue * pi / 180), chroma * sin(hue * pi / 180)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of paper, text and lines, for light or for dark paper."""

    paper: str
    """The background of the figure."""
    ink: str
    line: str
    """Frames and ticks."""
    masked: str
    """Masked cells. Differs from every colour of a weight, including 0."""
    hatch: str
    """Lines over these cells."""
    gap: str
    """The gaps between the heads of a grid."""
    accents: tuple[str, ...]
    """Lines and bars, in order of use; distinct under the common kinds of colour blindness."""
    is_dark: bool

    def colours(self) -> list[Colour]:
        """The colours of weights from 0 up."""
        return ramp(dark=self.is_dark)

    def signed_colours(self) -> list[Colour]:
        """The colours of weights on both sides of 0."""
        return diverging(dark=self.is_dark)


LIGHT = Theme(
    paper="#ffffff",
    ink="#1b1d26",
    line="#666666",
    masked="#ece8e1",
    hatch="#d6d0c6",
    gap="#ffffff",
    accents=("#3355c8", "#b8500a", "#00766c", "#8a3ea0", "#5f5f5f", "#a8006a", "#6b6200", "#0078b4"),
    is_dark=False,
)
"""White paper, as for print."""
DARK = Theme(
    paper="#14161d",
    ink="#e9ebf2",
    line="#9a9da8",
    masked="#2c2923",
    hatch="#47423a",
    gap="#14161d",
    accents=("#8fb0ff", "#ffab66", "#4fd1c1", "#d79be8", "#c0c0c0", "#ff8fc8", "#d8cc5a", "#6cc8ff"),
    is_dark=True,
)
"""Dark paper, for screens and slides."""
