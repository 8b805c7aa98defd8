"""One cutting of words: Unicode's with marks, dictionaries where no spaces are, and the tokenizers that keep to it."""

import unicodedata
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from regard.tasks.text.tokenizer_recipes import PIECES, ByteLevelBPE, Words
from regard.tasks.text.tokenizers import SPECIAL_TOKENS, Tokenizer
from regard.tasks.text.unicode import is_word, segments

HINDI = ["मैं हिन्दी पढ़ना चाहता हूँ।", "वह किताब ख़रीदना पसंद करता है।", "हम प्रतिदिन दूध देखते हैं।"] * 4
CHINESE = ["我今天喜欢茶。", "他们明天喜欢鱼。", "今天我在北京。"] * 4
JOINERS = "\u200c\u200d"
mixed = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé 'िं्हन今天木สวัีดA\u200d\u0301\U0001f469")))


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("हिन्दी, पढ़ना", "हिन्दी|,| |पढ़ना"),
        ("可以喝茶了GPU的", "可以|喝茶|了|GPU|的"),
        ("大きな木々だ", "大きな|木々|だ"),
        ("ผมรักคุณ", "ผม|รัก|คุณ"),
        ("می\u200cخواهم بروم", "می\u200cخواهم| |بروم"),
        ("l'homme d’été cat's", "l|'|homme| |d|’|été| |cat|'|s"),
        ("3.14 a_b C++", "3.14| |a_b| |C|+|+"),
        ("e\u0301a \U0001f600b", "e\u0301a| |\U0001f600|b"),
        ("안녕하세요 세계", "안녕하세요| |세계"),
    ],
)
def test_words_of_many_scripts(text: str, cut: str) -> None:
    assert segments(text) == cut.split("|")


@given(mixed)
@example("'\u0301a\r\n\x00")
def test_the_segments_of_a_text_are_the_text(text: str) -> None:
    found = segments(text)
    assert "".join(found) == text
    assert all(found)


@given(mixed)
def test_no_mark_is_cut_from_its_letter(text: str) -> None:
    """Not by the words, and not by the pieces in which a BPE merges."""
    cutter = ByteLevelBPE(vocab_size=260).train(["a"])._backend.pre_tokenizer
    begins = {begin for _, (begin, _) in cutter.pre_tokenize_str(text)}
    for place in {*accumulate(map(len, segments(text))), *begins} - {0, len(text)}:
        is_mark = unicodedata.category(text[place])[0] == "M"
        assert not (is_mark and unicodedata.category(text[place - 1])[0] in "LN"), (text, place)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Mn", "Mc", "Me"], exclude_characters=JOINERS)))
@example("don't l'été 3.14  x\n\t  y \u00a0 z...")
def test_text_without_marks_is_cut_as_by_gpt_2(text: str) -> None:
    ours = ByteLevelBPE(vocab_size=260).train(["a"])._backend.pre_tokenizer
    assert ours.pre_tokenize_str(text) == pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert r"\p{M}" in PIECES


def test_a_word_with_marks_can_become_one_token() -> None:
    bpe, words = ByteLevelBPE(vocab_size=600).train(HINDI), Words().train(HINDI)
    for text in HINDI[:3]:
        assert len(bpe.encode(text)) == len(words.encode(text)) == len(text.split()) + 1  # and the danda
    assert words.encode("می\u200cخواهم") == [3]  # an unknown word is one word


def test_no_merge_joins_two_words_without_a_space() -> None:
    bpe = ByteLevelBPE(vocab_size=600).train(CHINESE)
    for text in CHINESE[:3]:
        assert [label.text for label in bpe.labels(bpe.encode(text))] == segments(text)


def test_a_tokenizer_of_before_encodes_as_before(tmp_path: Path) -> None:
    """Its file has its cutter."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([*HINDI, *CHINESE], trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded, new = Tokenizer.load(tmp_path / "tokenizer.json"), ByteLevelBPE(vocab_size=600).train([*HINDI, *CHINESE])
    for text in (*HINDI[:3], *CHINESE[:3]):
        ids = loaded.encode(text)
        assert ids == backend.encode(text).ids
        assert loaded.decode(ids) == new.decode(new.encode(text)) == text
    assert len(loaded.encode(HINDI[0])) > 2 * len(new.encode(HINDI[0]))
    loaded.save(tmp_path / "again.json")
    assert Tokenizer.load(tmp_path / "again.json").encode(HINDI[0]) == loaded.encode(HINDI[0])


def test_words_have_a_letter_or_a_digit() -> None:
    assert [*map(is_word, ("हि", "5", "…", " "))] == [True, True, False, False]
