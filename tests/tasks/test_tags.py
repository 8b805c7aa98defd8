"""Tags of the source in the translation: each once, well-formed, and where the alignment says."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.tasks.generation.config import Beam
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.text.words import units
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.markup import marks_of, pieces_of
from regard.tasks.translation.options import Request
from regard.tasks.translation.tags import between_units, put_back, taken_out
from tests.conftest import Call
from tests.tasks.small_runs import run
from tests.tasks.test_translate_options import make

__all__ = ["run"]


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
        ("is un<b>believ</b>able now", "is unbelievable now", "est inouï là", [0, 1, 2], "est <b>inouï</b> là"),
        ("<p>a <b>b</p> c</b>", "a b c", "A B C", [0, 1, 2], "<p>A <b>B</p> C</b>"),
        ("$name!", "!", "voir", [0], "$name voir"),  # or the placeholder would be another
        ("我今天<b>喜欢</b>茶。", "我今天喜欢茶。", "I like tea today.", [0, 2, 3, 1, 4], "I <b>like</b> tea today."),
        ("I <b>like</b> tea today.", "I like tea today.", "我今天喜欢茶。", [0, 3, 1, 2, 4], "我今天<b>喜欢</b>茶。"),
        ("ผม<b>รัก</b>คุณ", "ผมรักคุณ", "I love you", [0, 1, 2], "I <b>love</b> you"),
        ("<b>हिन्दी</b> पढ़ना", "हिन्दी पढ़ना", "read Hindi", [1, 0], "read <b>Hindi</b>"),
        ('a <a title="x > y" href="u">cat</a>', "a cat", "un chat", [0, 1], 'un <a title="x > y" href="u">chat</a>'),
        ("cold <!-- <b> a note --> now", "cold now", "froid ici", [0, 1], "froid <!-- <b> a note --> ici"),
        ("I have %.2f euros", "I have euros", "j'ai euros", [0, 0, 1, 2], "j'ai %.2f euros"),
        ("{n, plural, one {# cat} other {# cats}}!", "!", "!", [0], "{n, plural, one {# cat} other {# cats}}!"),
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


WORDS = [
    "see",
    "l'été",
    "हिन्दी",
    "पढ़ना",
    "我今天",
    "喜欢茶",
    "大きな木々",
    "ผมรักคุณ",
    "می\u200cخواهم",
    "안녕",
    "3.14",
    "100%",
    "!",
    "。",
]
ALONE = [
    "{n}", "$name", "%.2f", "%(k)s", "%1$s", "${x.y}", "{{ a b }}", "<br/>", '<img alt="5 > 3"/>', "<!-- <b> -->",
    "<![CDATA[ > ]]>", "{n, plural, one {# cat} other {# cats}}", "<?php a ?>", "%5d", "%{k}",
]  # fmt: skip
spaces = st.sampled_from(["", " "])
leaves = st.one_of(st.sampled_from(WORDS), st.sampled_from(WORDS), st.sampled_from(ALONE))


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds(lambda space, some: space.join(some), spaces, st.lists(parts, min_size=1, max_size=4))


def in_pair(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    openings = st.sampled_from([("<b>", "</b>"), ('<a title="x > y" href="u">', "</a>"), ("<x:i>", "</x:i>")])
    return st.builds(lambda text, pair: text.join(pair), joined(parts), openings)


sentences = joined(st.recursive(leaves, lambda parts: st.one_of(parts, in_pair(parts)), max_leaves=8))


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(sentences, st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join), st.integers(0, 2**20))
def test_whatever_the_alignment_every_tag_comes_back_once_and_well_formed(
    source: str, translation: str, seed: int
) -> None:
    found, some = taken_out(source), torch.Generator().manual_seed(seed)
    weights = torch.rand(len(units(translation)), max(len(units(found.plain)), 1), generator=some) ** 8
    answer = put_back(translation, found.tags, weights)
    assert sorted(marks_of(answer)) == sorted(marks_of(source)), (source, answer)
    assert without_marks(answer) == re.sub(r"\s", "", translation)
    names = 'xmlns:x="x"'
    tree = [ElementTree.fromstring(f"<all {names}>{PROLOGUE.sub('', text)}</all>") for text in (source, answer)]
    in_source, in_answer = ([has_text(element) for element in one.iter()] for one in tree)
    if units(translation):  # no pair lost its words
        assert sum(in_source) <= sum(in_answer), (source, answer)


PROLOGUE = re.compile(r"<\?.*?\?>")


def has_text(element: ElementTree.Element) -> bool:
    return bool(units(without_marks(" ".join(element.itertext()))))


def without_marks(text: str) -> str:
    return re.sub(r"\s", "", "".join(piece.text for piece in pieces_of(text) if piece.kind == "text"))


@pytest.mark.parametrize("tokenizer", [Words, Characters, lambda: ByteLevelBPE(vocab_size=280)])
def test_a_translator_translates_without_the_tags_and_puts_them_back(tokenizer: Any) -> None:
    translator = make(tokenizer=tokenizer, max_length=24)
    sources = ["<b>we</b> see {n} two", "{name}", "", "we see", "<i>Zoë sees <b>Oslo</b></i>"]
    plain = ["we see two", "", "", "we see", "Zoë sees Oslo"]
    tagged = list(translator.translate(sources, beam=Beam(2), keep_tags=True))
    without = [one.text for one in translator.translate(plain, beam=Beam(2))]
    for source, one, text in zip(sources, tagged, without, strict=True):
        assert one.source == source
        assert sorted(marks_of(one.text)) == sorted(marks_of(source))
        assert without_marks(one.text) == re.sub(r"\s", "", text)
    assert tagged[1].text == "{name}"


def test_a_unit_is_aligned_with_the_unit_that_its_tokens_look_at_most() -> None:
    """The source is "so nice here", whose second word has two tokens; the third token of the translation is a mark."""
    source_places, target_places = [(0, 2), (2, 5), (5, 7), (7, 12)], [(0, 3), (3, 7), (7, 7)]
    alignment = torch.tensor([[0.1, 0.2, 0.1, 0.6, 0.0], [0.4, 0.3, 0.2, 0.1, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    weights = between_units(alignment, source_places, target_places, "so nice here", "ici bon")
    assert weights.argmax(-1).tolist() == [2, 1]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.3, 0.6], [0.4, 0.5, 0.1]]))


def test_words_look_at_words_and_signs_at_signs() -> None:
    """Attention rests on the full stop, and a full stop on the word before it."""
    alignment, places = torch.tensor([[0.3, 0.1, 0.6], [0.1, 0.3, 0.6], [0.1, 0.7, 0.2]]), [(0, 2), (2, 7), (7, 8)]
    found = between_units(alignment, places, places, "so nice.", "si beau.")
    assert found.argmax(-1).tolist() == [0, 1, 2]
    assert put_back("si beau.", taken_out("so <b>nice</b>.").tags, found) == "si <b>beau</b>."
    assert between_units(alignment, places, places, "so nicer", "si beau.").argmax(-1).tolist() == [1, 1, 1]


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


@pytest.mark.parametrize("tokenizer", [Words, Characters, lambda: ByteLevelBPE(vocab_size=280)])
def test_a_line_whose_tags_would_not_come_back_once_is_left_as_it_is(tokenizer: Any) -> None:
    """Here a given prefix brings a placeholder that the source has once."""
    translator = make(tokenizer=tokenizer, max_length=24)
    lines = [Request("we  see {n}", "on {n}"), Request("<b>we</b> see", "on"), Request("we see", "on {n}")]
    left, *others = translator.translate(lines, keep_tags=True, beam=Beam(2, num_best=2))
    assert [(best.text, best.left) for best in left.candidates] == [("we  see {n}", True)] * len(left.candidates)
    for one in others:
        assert not any(best.left for best in one.candidates)
        assert all(best.text.startswith(("on", "<b>on")) for best in one.candidates)


def test_the_command_counts_lines_that_it_leaves(run: Path, call: Call, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("we see two\twe {n}\nwe %s two\twe %s\n{n}\twe {n}\n<b>see</b>\t<b>\n", encoding="utf-8")
    base = ["translate", str(run), "--input", str(lines), "--keep-tags", "--prefix-column", "--device", "cpu"]
    status, out, err = call(*base)
    assert status == 0
    left = "lines left as they are, because a tag would not come back once: 2; the first: line 2"
    assert err.splitlines()[-1:] == [left], (out, err)
    assert out.splitlines()[0].startswith("we {n}")
    assert out.splitlines()[1:] == ["we %s two", "{n}", "<b>see</b>"]
    assert call(*base, "--output", str(tmp_path / "out"))[2].splitlines()[-1] == left
    assert (tmp_path / "out").read_text() == out


def test_a_line_without_tags_is_translated_as_without_the_flag() -> None:
    translator = make(tokenizer=Characters, max_length=40)
    for line in ("we  see\u00a0two", " we see 100 % < 3", "we see {two of them"):
        texts = [next(translator.translate([line], keep_tags=keep, beam=Beam(1))).text for keep in (True, False)]
        assert texts[0] == texts[1], line
