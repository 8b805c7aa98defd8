"""Tags of the source in the translation: each once, well-formed, and where the alignment says."""

import random
import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from regard.tasks.generation.config import Beam
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.text.words import units
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.markup import marks_of, pieces_of
from regard.tasks.translation.tags import between_units, put_back, taken_out
from tests.tasks.test_translate_options import make


@pytest.mark.parametrize(
    ("source", "plain", "translation", "aligned", "expected"),
    [
        ("a <b>red</b> house", "a red house", "une maison rouge", [0, 2, 1], "une maison <b>rouge</b>"),
        ("the <b>house</b>.", "the house.", "la maison.", [0, 1, 2], "la <b>maison</b>."),
        ("see {name} now", "see now", "voir maintenant", [0, 1], "voir {name} maintenant"),
        ("see {name}.", "see .", "voir .", [0, 1], "voir {name}."),
        ("{name} sees", "sees", "voit", [0], "{name} voit"),
        ("he sees %s", "he sees ", "il voit", [0, 1], "il voit %s"),
        ("one<br/>two", "one two", "un deux", [0, 1], "un<br/> deux"),
        ("<p>a <i>b</i> <b>c</b></p>", "a b c", "C A B", [2, 0, 1], "<p><b>C</b> A <i>B</i></p>"),
        # Two pairs would cross: the later is cut.
        ("<b>a b</b> <i>c d</i>", "a b c d", "A C B D", [0, 2, 1, 3], "<b>A C B</b> <i>D</i>"),
        # A pair in the words of another pair.
        ("<b>a c</b> <i>b</i>", "a c b", "A B C", [0, 2, 1], "<b>A <i>B</i> C</b>"),
        ("<b>gone</b> here", "gone here", "ici", [1], "<b>ici</b>"),  # a link around nothing cannot be followed
        ("<b>gone</b> here", "gone here", "", [], "<b></b>"),
        # What has no closing tag stands alone, and does not keep its neighbours from being pairs.
        ("<b>a<br>b</b> c", "a b c", "C A B", [2, 0, 1], "C <b>A<br> B</b>"),
        ("<b>a</b> {n} c", "a c", "A C", [0, 1], "<b>A</b> {n} C"),
        (
            "am un<b>believ</b>able now",
            "am unbelievable now",
            "suis incroyable là",
            [0, 1, 2],
            "suis <b>incroyable</b> là",
        ),
        ("我今天<b>喜欢</b>茶。", "我今天喜欢茶。", "I like tea today.", [0, 2, 3, 1, 4], "I <b>like</b> tea today."),
        ("I <b>like</b> tea today.", "I like tea today.", "我今天喜欢茶。", [0, 3, 1, 2, 4], "我今天<b>喜欢</b>茶。"),
        ("ผม<b>รัก</b>คุณ", "ผมรักคุณ", "I love you", [0, 1, 2], "I <b>love</b> you"),
        ("<b>हिन्दी</b> पढ़ना", "हिन्दी पढ़ना", "read Hindi", [1, 0], "read <b>Hindi</b>"),
        ('a <a title="x > y" href="u">cat</a>', "a cat", "un chat", [0, 1], 'un <a title="x > y" href="u">chat</a>'),
        ("cold <!-- <b> a note --> now", "cold now", "froid ici", [0, 1], "froid <!-- <b> a note --> ici"),
        ("I have %.2f euros", "I have euros", "j'ai euros", [0, 0, 1, 2], "j'ai %.2f euros"),
        (
            "{n, plural, one {# cat} other {# cats}} here",
            "here",
            "ici",
            [0],
            "{n, plural, one {# cat} other {# cats}} ici",
        ),
        ("a </b> b <b> c", "a b c", "A B C", [0, 1, 2], "A </b> B <b> C"),
        ("2 < 3 > 1", "2 < 3 > 1", "2 < 3 > 1", [0, 1, 2, 3, 4], "2 < 3 > 1"),
        ("100% sure", "100% sure", "sûr à 100%", [2, 2, 0, 1], "sûr à 100%"),
    ],
)
def test_tags_come_back_where_they_belong(
    source: str, plain: str, translation: str, aligned: list[int], expected: str
) -> None:
    found = taken_out(source)
    assert found.plain.split() == plain.split()
    assert put_back(translation, found.tags, sharp(aligned, found.plain)) == expected


def sharp(aligned: list[int], plain: str) -> torch.Tensor:
    """The weights of units that look at one unit each."""
    return torch.eye(max(len(units(plain)), 1))[aligned]


def test_whatever_the_alignment_every_tag_comes_back_once_and_well_formed() -> None:
    dice = random.Random(7)
    for _ in range(2000):
        source = _tagged(dice, depth=3)
        found = taken_out(source)
        words = [f"w{n}" for n in range(dice.randint(0, 7))]
        translation = "".join(word + dice.choice([" ", ", ", " "]) for word in words).strip()
        aligned = [dice.randrange(max(len(units(found.plain)), 1)) for _ in units(translation)]
        answer = put_back(translation, found.tags, sharp(aligned, found.plain))
        assert marks_of(answer) == marks_of(source), (source, answer)
        assert without_marks(answer) == re.sub(r"\s", "", translation)
        ElementTree.fromstring(f"<all>{answer}</all>")


def without_marks(text: str) -> str:
    return re.sub(r"\s", "", "".join(piece.text for piece in pieces_of(text) if piece.kind == "text"))


def _tagged(dice: random.Random, depth: int) -> str:
    parts = []
    for _ in range(dice.randint(1, 4)):
        kind = dice.randrange(4) if depth else 0
        name = dice.choice("bip")
        parts.append(
            [f"s{dice.randrange(9)}", f"<{name}>{_tagged(dice, depth - 1) if depth else ''}</{name}>", "<br/>", "{x}"][
                kind
            ]
        )
    return dice.choice([" ", ""]).join(parts)


@pytest.mark.parametrize("tokenizer", [Words, Characters, lambda: ByteLevelBPE(vocab_size=280)])
def test_a_translator_translates_without_the_tags_and_puts_them_back(tokenizer: Any) -> None:
    translator = make(tokenizer=tokenizer, max_length=24)
    sources = ["<b>we</b> see {n} two", "{name}", "", "we see", "<i>Zoë sees <b>Oslo</b></i>"]
    plain = ["we see two", "", "", "we see", "Zoë sees Oslo"]
    tagged = list(translator.translate(sources, beam=Beam(2), keep_tags=True))
    without = [one.text for one in translator.translate(plain, beam=Beam(2))]
    for source, one, text in zip(sources, tagged, without, strict=True):
        assert one.source == source
        assert marks_of(one.text) == marks_of(source)
        assert without_marks(one.text) == re.sub(r"\s", "", text)
    assert tagged[1].text == "{name}"


def test_a_unit_is_aligned_with_the_unit_that_its_tokens_look_at_most() -> None:
    """The source is "so nice here", whose second word has two tokens; the third token of the translation is a mark."""
    source_places, target_places = [(0, 2), (2, 5), (5, 7), (7, 12)], [(0, 3), (3, 7), (7, 7)]
    alignment = torch.tensor([[0.1, 0.2, 0.1, 0.6, 0.0], [0.4, 0.3, 0.2, 0.1, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    weights = between_units(alignment, source_places, target_places, "so nice here", "ici bon")
    assert weights.argmax(-1).tolist() == [2, 1]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.3, 0.6], [0.4, 0.5, 0.1]]))


def test_a_pair_stands_around_what_is_aligned_with_its_word() -> None:
    """The alignment that the command prints, read by hand."""
    translator, which = make(), AlignmentOf(layer=1, head=2)
    (one,) = translator.translate(["we <b>see</b> two"], beam=Beam(1), keep_tags=True, alignments=which)
    best = one.candidates[0]
    words = [label for label in best.labels if not label.startswith("<")]
    rows = best.alignment[: len(words), :3].argmax(-1).tolist()
    inside = [n for n, column in enumerate(rows) if column == 1] or [int(best.alignment[: len(words), 1].argmax())]
    found = re.search("<b>(.*)</b>", best.text)
    assert found is not None
    assert re.sub(r"\s", "", found[1]) == "".join(words[inside[0] : inside[-1] + 1])
