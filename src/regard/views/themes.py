"""The colours of a picture other than those of weights: for light and for dark paper."""

from dataclasses import dataclass

from regard.views.colours import Colour, diverging, ramp


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of paper, text and lines."""

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
