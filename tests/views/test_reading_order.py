"""The order of tokens on an axis, against the order in which matplotlib (with libraqm) lays out the joined text."""

import random
import unicodedata
from collections.abc import Sequence

import pytest
from matplotlib.font_manager import FontPath, get_font
from matplotlib.ft2font import LoadFlags
from matplotlib.textpath import text_to_path

from regard.views.bidirectional import levels, reordered
from regard.views.fonts import letter
from regard.views.reading_order import visual_order

ALPHABET = "abאבג0123٠١+-#$,.: ()[]!&%/"


def laid_out(text: str) -> list[str]:
    """The characters of a line from the left, as libraqm places them: an algorithm that we did not write."""
    font = get_font([FontPath(face.path, face.number) for face in letter([text])[0].faces])
    font.set_size(text_to_path.FONT_SCALE, text_to_path.DPI)
    return [item.char for item in sorted(font._layout(text, LoadFlags.NO_HINTING), key=lambda item: item.x)]


def first_strong(text: str) -> int:
    """The level of a paragraph by its first letter, as libraqm takes it (P2, P3)."""
    kinds = (unicodedata.bidirectional(char) for char in text)
    return int(next((kind for kind in kinds if kind in ("L", "R", "AL")), "L") != "L")


def test_random_lines_stand_as_a_layout_engine_places_them() -> None:
    chance = random.Random(0)
    for _ in range(1_000):
        text = "".join(chance.choices(ALPHABET, k=chance.randint(2, 14)))
        ours = [text[place] for place in reordered(levels(text, first_strong(text)))]
        assert ours == laid_out(text), ascii(text)


@pytest.mark.parametrize(
    ("labels", "shown"),
    [
        (["יום", " 20", "46"], [" 20", "46", "יום"]),
        (["▁יום", "▁20", "46"], ["▁20", "46", "▁יום"]),
        (["Ġיום", "Ġ20", "Ġ46"], ["Ġ46", "Ġ20", "Ġיום"]),
        (["יום", "20", "##46"], ["20", "##46", "יום"]),
        (["<s>", "אבגד", "cd", "ef", "ג", "</s>"], ["</s>", "ג", "cd", "ef", "אבגד", "<s>"]),
        (["[CLS]", "cat", "[SEP]"], ["[CLS]", "cat", "[SEP]"]),
        ([*"אבג", "\u202e", *"cd"], ["c", "d", "\u202e", "ג", "ב", "א"]),
        (["السبت", "٢١", "نوفمبر"], ["نوفمبر", "٢١", "السبت"]),
        (["", "א", "", "ב"], ["ב", "", "א", ""]),
        (["abc", "של", "def"], ["abc", "של", "def"]),
        (["abc", "של", "12", "def"], ["abc", "12", "של", "def"]),
        ([], []),
    ],
)
def test_tokens(labels: Sequence[str], shown: Sequence[str]) -> None:
    assert [labels[place] for place in visual_order(labels)] == shown


def test_every_token_stands_once() -> None:
    chance = random.Random(1)
    for _ in range(300):
        labels = ["".join(chance.choices(ALPHABET, k=chance.randint(0, 4))) for _ in range(chance.randint(1, 9))]
        assert sorted(visual_order(labels)) == list(range(len(labels)))
