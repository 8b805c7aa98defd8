"""Tokenizers: nothing is lost, special tokens cannot be written by a user, files are checked."""

import json
import pickle
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from regard.errors import ArgumentError, DataError, MissingExtraError, RegardError, RunFolderError
from regard.tasks.text.codec import Marks, byte_values, printed
from regard.tasks.text.tokenizer_recipes import PIECES, ByteLevelBPE, Characters, Words, recipe
from regard.tasks.text.tokenizers import BOS, EOS, PAD, SPECIAL_TOKENS, UNK, Tokenizer
from regard.tasks.text.unicode import is_word, normalise, segments
from tests.tasks.test_pretrained import byte_level

CORPUS = ["the cat sat on the mat", "die Katze saß auf der Matte", "", "猫が座った", "<pad> <eos>"] * 20
RECIPES: list[Any] = [ByteLevelBPE(vocab_size=320), Words(), Characters()]
BPE, WORDS, CHARACTERS = TRAINED = [made.train(CORPUS) for made in RECIPES]
each_kind = pytest.mark.parametrize("tokenizer", TRAINED, ids=["bpe", "words", "characters"])


@given(st.text())
@example("e\u0301\u0323")
@example("\ufeff\u2028\x00\r\n \u202f")
@example("\U0001f469\u200d\U0001f680 <pad>")
def test_byte_level_text_comes_back_as_nfc(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == unicodedata.normalize("NFC", text)


@given(st.text(alphabet="thecatsonmat saßKz<pad>"))
def test_characters_come_back(text: str) -> None:
    assert CHARACTERS.decode(CHARACTERS.encode(text)) == text


@given(st.lists(st.sampled_from(["the", "cat", "sat", "Katze", "猫が座った"]), max_size=8).map(" ".join))
def test_known_words_come_back_with_their_spaces(text: str) -> None:
    assert WORDS.decode(WORDS.encode(text)) == text


@each_kind
@given(text=st.text())
@example(text="".join(SPECIAL_TOKENS))
@example(text=" ".join(SPECIAL_TOKENS))
def test_no_text_becomes_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    forbidden = {PAD, BOS, EOS} | ({UNK} if tokenizer is BPE else set())
    assert not forbidden & set(tokenizer.encode(text))


def test_names_of_special_tokens_in_the_training_text_do_not_merge_into_them() -> None:
    tokenizer = ByteLevelBPE(vocab_size=400).train([*SPECIAL_TOKENS] * 100)
    assert all(min(tokenizer.encode(name)) > UNK for name in SPECIAL_TOKENS)


@each_kind
@given(texts=st.lists(st.text(), max_size=5))
def test_a_batch_gives_what_single_texts_give(tokenizer: Tokenizer, texts: list[str]) -> None:
    ids = tokenizer.encode_batch(texts)
    assert ids == [tokenizer.encode(text) for text in texts]


def test_two_ways_to_write_a_letter_are_one() -> None:
    for tokenizer in TRAINED:
        assert tokenizer.encode("Katze sa\u0301ß") == tokenizer.encode("Katze s\u00e1ß")


@each_kind
def test_decoding_drops_special_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat")
    assert tokenizer.decode([BOS, *ids, EOS, PAD, PAD]) == "the cat"
    assert tokenizer.decode([]) == ""


def test_unknown_tokens_print_as_a_replacement_character() -> None:
    assert WORDS.decode(WORDS.encode("the dog sat, mat")) == "the � sat � mat"
    assert CHARACTERS.decode(CHARACTERS.encode("the dog!")) == "the do��"
    assert BPE.decode([UNK]) == ""


def test_half_a_character_from_a_model_prints_as_a_replacement_character() -> None:
    assert BPE.decode(BPE.encode("日")[:1]) == "�"


@each_kind
@pytest.mark.parametrize("wrong", [-1, 10_000])
def test_ids_of_another_vocabulary_are_refused(tokenizer: Tokenizer, wrong: int) -> None:
    for use in (tokenizer.decode, tokenizer.labels):
        with pytest.raises(ArgumentError, match=f"0 to {len(tokenizer) - 1}, got .*{wrong}"):
            use([5, wrong])


@pytest.mark.parametrize("name", ["bpe", "words", "characters"])
def test_lower_case_is_all_that_is_read(name: str, tmp_path: Path) -> None:
    lower = recipe(name, 320, lowercase=True).train(text.upper() for text in CORPUS)
    lower.save(tmp_path / "tokenizer.json")
    assert lower.lowercases
    assert not recipe(name, 320).train(CORPUS).lowercases
    for tokenizer in (lower, Tokenizer.load(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(lower))):
        assert tokenizer.lowercases
        assert tokenizer.encode("The CAT saß") == lower.encode("the cat saß")
        assert tokenizer.decode(tokenizer.encode("The CAT sat")) == "the cat sat"
        # What a token stands for is shown as the user wrote it.
        assert "".join(tokenizer.surfaces("The CAT sat")) == "The CAT sat"


def test_half_a_surrogate_pair_is_refused() -> None:
    for use in (BPE.encode, lambda text: BPE.encode_batch([text]), lambda text: ByteLevelBPE().train([text])):
        with pytest.raises(DataError, match="U\\+D83D\\) at character 3"):
            use("ab\ud83d")


@given(st.text(min_size=1))
@example("日本")
@example("a日\ufffd b")
def test_labels_cover_all_tokens_in_order_and_spell_the_text(text: str) -> None:
    ids = [*BPE.encode(text), EOS]
    labels = BPE.labels(ids)
    covered = [i for label in labels for i in range(label.pieces[0], label.pieces[1] + 1)]
    assert covered == list(range(len(ids)))
    assert labels[-1] == ("<eos>", (len(ids) - 1, len(ids) - 1))
    for label, (first, last) in labels[:-1]:
        piece = BPE.decode(ids[first : last + 1])
        assert label == printed(piece)
        assert "\ufffd" not in piece or "\ufffd" in text
    assert "".join(BPE.decode(ids[a : b + 1]) for _, (a, b) in labels) == normalise(text)


def test_labels_of_cut_characters_end_where_the_cut_is() -> None:
    """The first two of the three bytes of a character, then the end: the end is never merged."""
    plain = ByteLevelBPE(vocab_size=260).train(["a"])
    labels = plain.labels([*plain.encode("日")[:2], EOS, *plain.encode("日")[:1]])
    assert [tuple(label) for label in labels] == [("�", (0, 1)), ("<eos>", (2, 2)), ("�", (3, 3))]


SPACES = st.text("".join(chr(code) for code in range(0x3001) if chr(code).isspace()), min_size=1)


@given(SPACES, SPACES, st.text(min_size=1))
@example(" ", "\u00a0", "a")
@example("\n", "\t", " a")
@example("    ", " ", "a")
@example("\u202f", "\u00a0", "\u3000a")
def test_different_white_space_has_different_labels(one: str, other: str, text: str) -> None:
    assert (printed(one) == printed(other)) == (one == other)
    assert not any(char.isspace() and char != " " for char in printed(text))
    seen = CHARACTERS.labels(CHARACTERS.encode(" \n\t"))  # of a vocabulary without them they are unknown
    assert [label.text for label in seen] == ["␣", "<unk>", "<unk>"]


def test_labels_of_words_and_characters() -> None:
    assert [label.text for label in WORDS.labels(WORDS.encode("the cat, dog"))] == ["the", "cat", "<unk>", "<unk>"]
    assert [label.text for label in CHARACTERS.labels(CHARACTERS.encode("a t"))] == ["a", "␣", "t"]


def test_the_byte_alphabet_is_the_one_of_the_library() -> None:
    from tokenizers import pre_tokenizers

    assert set(byte_values()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_values().values()) == list(range(256))


@each_kind
def test_saved_and_loaded_and_pickled_it_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    for copy in (Tokenizer.load(tmp_path / "tokenizer.json"), pickle.loads(pickle.dumps(tokenizer))):
        text = "the cat <pad> 猫, Matte"
        assert copy.encode(text) == tokenizer.encode(text)
        assert copy.fingerprint() == tokenizer.fingerprint()
        assert (len(copy), copy.labels([5, EOS])) == (len(tokenizer), tokenizer.labels([5, EOS]))
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_training_is_deterministic_and_fingerprints_tell_tokenizers_apart() -> None:
    again = [made.train(iter(CORPUS)) for made in RECIPES]
    assert [one.fingerprint() for one in again] == [one.fingerprint() for one in TRAINED]
    assert len({one.fingerprint() for one in [*TRAINED, Characters().train(["x"])]}) == 4


def test_a_file_that_is_not_our_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(RunFolderError, match="No such file"):
        Tokenizer.load(path)
    with pytest.raises(RunFolderError, match="directory"):
        Tokenizer.load(tmp_path)
    BPE.save(path)
    foreign = {"added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    for content in (b"\xff\xfe", json.dumps(json.loads(path.read_bytes()) | foreign).encode()):
        path.write_bytes(content)
        with pytest.raises(RunFolderError, match=r"tokenizer\.json is not a tokenizer that regard saved"):
            Tokenizer.load(path)


def test_vocabularies_have_the_size_asked_for_or_what_the_text_offers() -> None:
    assert len(ByteLevelBPE(vocab_size=280).train(CORPUS)) == 280
    assert len(ByteLevelBPE(vocab_size=100_000).train(["ab ab"])) == 261
    assert len(Words(vocab_size=6).train(CORPUS)) == 6
    assert len(Characters(vocab_size=7).train(CORPUS)) == 7


@pytest.mark.parametrize(
    ("name", "size", "least"), [("bpe", 259, 260), ("words", 4, 5), ("characters", 0, 5), ("bpe", -1, 260)]
)
def test_too_small_a_vocabulary_is_refused(name: str, size: int, least: int) -> None:
    with pytest.raises(ArgumentError, match=f"at least {least}, got {size}"):
        recipe(name, size)


def test_recipes_by_name() -> None:
    assert [recipe(name, 300) for name in ("bpe", "words", "characters")] == [
        ByteLevelBPE(vocab_size=300),
        Words(vocab_size=300),
        Characters(vocab_size=300),
    ]
    with pytest.raises(ArgumentError, match="'wordpiece'"):
        recipe("wordpiece", 300)


@pytest.mark.parametrize("made", RECIPES, ids=["bpe", "words", "characters"])
@pytest.mark.parametrize("texts", [[], [""], ["  ", "\n"]])
def test_no_text_to_train_on_is_refused(made: Words, texts: list[str]) -> None:
    with pytest.raises(DataError, match="got none"):
        made.train(texts)


def test_errors_of_the_text_pass_through_the_library() -> None:
    def texts() -> Iterator[str]:
        yield "a"
        raise DataError("x:2: bad")

    with pytest.raises(DataError, match="x:2"):
        Words().train(texts())


def test_the_text_package_loads_no_optional_package() -> None:
    code = (
        "import sys, regard.tasks.text, regard.tasks.text.dates; "
        "print([n for n in ('tokenizers', 'babel') if n in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'regard\[train\]'"):
        Words().train(["a"])


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
    backend = byte_level([*HINDI, *CHINESE], 600, *SPECIAL_TOKENS)
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


READERS: dict[str, Callable[[Path], Any]] = {
    "our own": Tokenizer.load,
    "downloaded": lambda path: Tokenizer.downloaded(path, Marks()),
}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    ByteLevelBPE(vocab_size=300).train(["some text to learn from"]).save(path)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def written(folder: Path, described: dict[str, Any], **changes: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**described, **changes}), encoding="utf-8")
    return path


PADDING = {
    "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "<pad>",
}  # fmt: skip
TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}


@pytest.mark.parametrize("reader", READERS)
def test_padding_and_truncation_are_switched_off(reader: str, described: dict[str, Any], tmp_path: Path) -> None:
    """In a process of its own: a fixed length of 10^12 aborts the process that encodes with it."""
    path = written(tmp_path, described, padding=PADDING, truncation=TRUNCATION)
    program = (
        "import sys; from pathlib import Path; from regard.tasks.text.codec import Marks\n"
        "from regard.tasks.text.tokenizers import Tokenizer\n"
        "path = Path(sys.argv[2])\n"
        "tokenizer = Tokenizer.load(path) if sys.argv[1] == 'our own' else Tokenizer.downloaded(path, Marks())\n"
        "print([len(ids) for ids in tokenizer.encode_batch(['abc', 'some more'])])"
    )
    ran = subprocess.run([sys.executable, "-c", program, reader, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    expected = READERS[reader](written(tmp_path, described)).encode_batch(["abc", "some more"])
    assert ran.stdout.strip() == str([len(ids) for ids in expected])


@pytest.mark.parametrize("reader", READERS)
def test_a_pattern_that_gives_up_on_a_text(reader: str, described: dict[str, Any], tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = READERS[reader](written(tmp_path, described, pre_tokenizer=pattern))
    for use in (tokenizer.surfaces, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(DataError, match="the tokenizer cannot cut a text into tokens"):
            use("a" * 40 + "!")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 5_000}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "x" * 10**6}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}},
        {"model": None},
        {"version": {}},
    ],
    ids=["long prefix", "long list", "long affix", "no pattern", "an id of 2^32", "no model", "no version"],
)
def test_what_is_refused(reader: str, changes: dict[str, Any], described: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"tokenizer\.json is not a tokenizer"):
        READERS[reader](written(tmp_path, described, **changes))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\ufeff{}", "", "null"])
def test_files_that_are_no_tokenizer(reader: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(RegardError, match=r"tokenizer\.json is not a tokenizer"):
        READERS[reader](tmp_path / "tokenizer.json")


@pytest.mark.parametrize("lowercase", [False, True])
def test_lower_case_is_found_among_steps_within_steps(lowercase: bool, tmp_path: Path) -> None:
    described = json.loads(Words(lowercase=lowercase).train(["to be"]).to_json())
    steps = {"type": "Sequence", "normalizers": [{"type": "NFC"}, described["normalizer"]]}
    assert Tokenizer.downloaded(written(tmp_path, described, normalizer=steps), Marks()).lowercases == lowercase
