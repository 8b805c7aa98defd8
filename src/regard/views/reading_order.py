"""The order of tokens on an axis, by the direction of their script. Letters of Hebrew and Arabic run from right to
left, the digits of a number in them from left to right. All views share this order."""

import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from regard.errors import require
from regard.views.bidirectional import levels, reordered
from regard.views.labels import SPECIAL, right_to_left

_OBJECT = "\ufffc"
"""A neutral placeholder for a control token."""
_SPACES = str.maketrans({"▁": " ", "Ġ": " ", "␣": " ", "⍽": " ", "Ċ": "\n", "↵": "\n", "⇥": "\t"})
"""The signs of tokenizers for a space or the end of a line."""


def visual_order(labels: Sequence[str]) -> list[int]:
    """The displayed order of tokens from the left: the Unicode bidirectional algorithm over the joined text.

    The labels are read as one line of text, in the direction of most of its letters. Whole words without spaces are
    joined by spaces, except between two numbers. A control token such as <eos> counts as one neutral sign. Controls of
    direction, such as U+202E, are tokens like others and move nothing.

    Args:
        labels: one a token, in the order of the sequence.

    Returns:
        Positions in the sequence, from the left.

    Source: Unicode Standard Annex #9.

    >>> visual_order(["a", "b"]), visual_order(list("ב 20")), visual_order(["יום", "5", "2046", "<eos>"])
    ([0, 1], [2, 3, 1, 0], [3, 1, 2, 0])
    """
    require(labels, Sequence, "labels", "a list of texts")
    for label in labels:
        require(label, str, "each label", "text")
    texts = [_text(label) for label in labels]
    if not any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for text in texts for char in text):
        return list(range(len(labels)))
    base = int(right_to_left(labels))
    gaps = _gaps(texts)
    line = "".join(gap + text for gap, text in zip(gaps, texts, strict=True))
    at = {char: place for place, char in enumerate(reordered(levels(line, base)))}
    places, start = [], 0
    for gap, text in zip(gaps, texts, strict=True):
        start += len(gap)
        # The first letter or digit places the token.
        places.append(at[start + next((n for n, char in enumerate(text) if char.isalnum()), 0)])
        start += len(text)
    return sorted(range(len(labels)), key=places.__getitem__)


def _text(label: str) -> str:
    if not label or SPECIAL.fullmatch(label):
        return _OBJECT
    return label.removeprefix("##").translate(_SPACES) if len(label) > 2 else label.translate(_SPACES)


def _gaps(texts: Sequence[str]) -> list[str]:
    """The text before each token: a space for whole words, else nothing."""
    own = [text for text in texts if text != _OBJECT]
    single = all(sum(unicodedata.category(char)[0] != "M" for char in text) <= 1 for text in own)
    if single or any(char.isspace() for text in own for char in text):
        return [""] * len(texts)
    numbers = (before[-1:].isdigit() and text[:1].isdigit() for before, text in pairwise(texts))
    return ["", *("" if number else " " for number in numbers)]
