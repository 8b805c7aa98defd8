"""Labels: nothing invisible is left invisible, graphemes stay whole, and each is turned by itself."""

import itertools
import random
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.font_manager import FontPath, get_font
from matplotlib.ft2font import LoadFlags
from matplotlib.textpath import text_to_path

from regard.tasks.pictures.token_maps import axis
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.views import heatmap
from regard.views.bidirectional import levels, reordered
from regard.views.fonts import letter
from regard.views.labels import printable, width
from regard.views.reading_order import visual_order
from tests import each_once
from tests.views.written_dates import softmax

FAMILY = "👨\u200d👩\u200d👧"


@pytest.mark.parametrize(
    ("label", "shown", "columns"),
    [
        ("", "∅", 1),
        ("\u200d", "ZWJ", 3),
        ("\ufeff", "BOM", 3),
        ("\u200b", "ZWSP", 4),
        ("\u202e", "U+202E", 6),
        ("\u2066", "U+2066", 6),
        ("\xad", "SHY", 3),
        ("\u3164", "U+3164", 6),
        ("\ufe0f", "U+FE0F", 6),
        ("\ud800", "U+D800", 6),
        ("a\u200db", "a‹ZWJ›b", 7),
        ("\u202eabc", "‹U+202E›abc", 11),
        ("\u0301", "◌\u0301", 1),
        (" \u0301", "␣◌\u0301", 2),
        ("\u200b\u0301", "‹ZWSP›◌\u0301", 7),
        ("ि", "◌ि", 2),
        ("e\u0301", "e\u0301", 1),
        (FAMILY, FAMILY, 2),
        ("❤\ufe0f\u200d🔥", "❤\ufe0f\u200d🔥", 1),
        ("👍🏽", "👍🏽", 2),
        ("🏴\U000e0067\U000e007f", "🏴\U000e0067\U000e007f", 2),
        ("می\u200cخواهم", "می\u200cخواهم", 7),
        ("क\u094d\u200dष", "क\u094d\u200dष", 2),
        (f"{FAMILY}\u200d", f"{FAMILY}‹ZWJ›", 7),
    ],
)
def test_what_is_printed(label: str, shown: str, columns: int) -> None:
    assert printable(label) == shown
    assert width(shown) == columns


def test_every_character_alone_prints_something() -> None:
    """Where Unicode has formatting characters, what is printed is not made of these and spaces alone."""
    nothing, signs = ("Cc", "Cf", "Cs", "Co", "Zs", "Zl", "Zp"), "؀؁؂؃؄؅۝܏࢐࢑࣢\U000110bd\U000110cd"
    for number in [*range(0x3400), *range(0xD7F0, 0x11200), *range(0x1F000, 0x20000), *range(0xE0000, 0xE0200)]:
        text = printable(chr(number))
        assert any(char in signs or unicodedata.category(char) not in nothing for char in text), hex(number)


def test_a_long_label_is_not_cut_inside_a_letter_or_a_name() -> None:
    assert printable("नवंबर", limit=3) == "नवं…"
    assert printable(f"a{FAMILY}bcd", limit=4) == f"a{FAMILY}…"
    assert printable("abc\u202edef", limit=8) == "abc…"
    assert printable("2026年11月", limit=5) == "2026…"


def turned(columns: list[str]) -> list[tuple[str, float]]:
    ax = heatmap(np.eye(len(columns)), None, columns)
    return [(text.get_text(), text.get_rotation()) for text in ax.get_xticklabels()]


def test_labels_are_turned_one_by_one() -> None:
    found = dict(turned(4 * ["2", "0", "年", "土曜日", "a", "<eos>"]))
    assert found == {"2": 0, "0": 0, "年": 0, "土\n曜\n日": 0, "a": 0, "<eos>": 90}


@pytest.mark.parametrize(
    ("count", "mix"),
    each_once(
        [1, 2, 7, 30, 90, 200],
        [["WWWW", "i", "年", "土曜日"], ["of", "the", "internationalisation", "،"], ["MM"]],
    ),
)
def test_no_two_labels_touch_at_any_length(count: int, mix: list[str]) -> None:
    labels = [mix[place % len(mix)] for place in range(count)]
    ax = heatmap(softmax(count, count), labels, labels, title="Wide title")
    figure: Any = ax.figure
    figure.set_dpi(72)
    FigureCanvasAgg(figure).draw()
    for texts in (ax.get_xticklabels(), ax.get_yticklabels(), [*figure.axes[1].get_xticklabels()]):
        boxes = [text.get_window_extent() for text in texts]
        for one, other in itertools.pairwise(boxes):
            assert not one.overlaps(other)
        for box in boxes:
            assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1


def test_two_numbers_side_by_side_are_not_read_as_one() -> None:
    tokenizer = ByteLevelBPE(vocab_size=300).train(["in 20 46 and in 2046 it was 20 46"] * 9)
    one, two = (axis(tokenizer, tokenizer.encode(text)).texts for text in ("in 20 46", "in 2046"))
    assert [printable(text) for text in one] == ["in", "␣20", "␣46"]
    assert "".join(one) == "in 20 46"
    assert "".join(two) == "in 2046"
    assert one != two


def test_words_and_characters_stay_as_they_are() -> None:
    words, characters = Words().train(["the cat 20 46"]), Characters().train(["a 2"])
    assert axis(words, words.encode("cat 20 46")).texts == ["cat", "20", "46"]
    assert axis(characters, characters.encode("a 2")).texts == ["a", "␣", "2"]


ALPHABET = "abאבג0123٠١+-#$,.: ()[]!&%/"


def laid_out(text: str) -> list[str]:
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
