"""Terms with their place: found, forced once for each time they occur, where attention says, by any search."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import ArgumentError, DataError
from regard.tasks.generation.config import Beam
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.options import Request
from regard.tasks.translation.terms import Term, Terms, place_of, read_terms
from regard.tasks.translation.train import train_translation
from regard.tasks.translation.translator import Translator
from tests.conftest import Call
from tests.tasks.small_runs import PAIRS, changed
from tests.tasks.test_guided_alignment import with_links
from tests.tasks.test_translate_options import make

LINKS = "0-0 0-1 1-2 2-3 3-4"
"""Of `we see two cats` and `on y voit deux chats`."""
KNOWN = Terms([Term("cats", "fleuves"), Term("two", "sept"), Term("stars", "chats")])
"""The model has written all of these, but for other words."""


def count(word: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text))


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("the black cat, a cat", [("black cat", 4), ("cat", 17)]),
        ("cats concatenate Cat", []),
        ("(cat)", [("cat", 1)]),
        ("cat cat", [("cat", 0), ("cat", 4)]),
        ("C++ and C", [("C++", 0)]),
        ("大きな木々だ", [("木々", 3)]),
        ("", []),
    ],
)
def test_terms_are_found_as_whole_words(sentence: str, found: list[tuple[str, int]]) -> None:
    terms = Terms([Term(source, "x") for source in ("cat", "black cat", "C++", "木々")])
    assert [(one.term.source, one.begin) for one in terms.found_in(sentence)] == found


def test_a_file_of_terms(tmp_path: Path) -> None:
    path = tmp_path / "terms"
    path.write_text("cat\tminou\nblack cat\tpanthère noire\n")
    assert read_terms(path) == (Term("cat", "minou"), Term("black cat", "panthère noire"))
    for text, said in (
        ("cat\tminou\ncat minou\n", r"terms:2: expected a term, a tab and its translation, got b'cat minou'"),
        ("cat\t\n", r"terms:1: expected a term, a tab and its translation"),
        ("a\tb\tc\n", r"terms:1: expected a term, a tab and its translation"),
        ("\n", r"terms:1: expected a term"),
        ("cat\tminou\ndog\tchien\ncat\tchat\n", r"terms:3: the term 'cat' was given before, in line 1: keep one"),
        ("", r"expected terms in .*terms, got nothing"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            read_terms(path)
    path.write_bytes(b"cat\t\xff\n")
    with pytest.raises(DataError, match="terms:1: expected UTF-8"):
        read_terms(path)


def test_the_place_is_the_word_that_looks_at_the_term_most() -> None:
    pieces = ["un", " pe", "tit", " chat", ".", ""]
    alignment = torch.tensor(
        [[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.2, 0.6, 0.2], [0.1, 0.3, 0.6], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    )
    assert place_of(alignment, [1], pieces, 0) == (1, 3)
    assert place_of(alignment, [2], pieces, 0) == (3, 4)  # a sign is no word
    assert place_of(alignment, [1, 2], pieces, 0) == (1, 4)  # all words that look at it
    assert place_of(alignment, [0], pieces, 3) == (3, 4)
    assert place_of(alignment, [0], pieces, 4) == (4, 4)
    assert place_of(alignment[:1], [0], [""], 0) == (0, 0)


@pytest.mark.parametrize("kind", ["transformer", "rnn"])
@pytest.mark.parametrize("tokenizer", [Words, Characters, lambda: ByteLevelBPE(vocab_size=290)])
def test_any_model_writes_every_term_once_for_each_time(tokenizer: Any, kind: str) -> None:
    """Models that have learnt nothing, with terms in every place; the others are translated as without terms."""
    translator = make(kind, tokenizer=tokenizer, **({} if kind == "rnn" else {"max_length": 200}))
    dice = random.Random(4)
    words = ["we", "see", "cat", "dog", "Zoë", "trees", "red"]
    sentences = [" ".join(dice.choices(words, k=dice.randint(1, 6))) for _ in range(5)] + ["", "we see"]
    terms = Terms([Term("cat", "chien"), Term("dog", "trois arbres"), Term("red", "été")])
    for beam in (Beam(1), Beam(3, num_best=2)):
        found = list(translator.translate(sentences, beam=beam, terms=terms))
        plain = list(translator.translate(sentences, beam=beam))
        for sentence, one, without in zip(sentences, found, plain, strict=True):
            asked = [term for word in sentence.split() for term in terms.terms if term.source == word]
            if not asked:
                assert [c.text for c in one.candidates] == [c.text for c in without.candidates]
                continue
            for candidate in one.candidates:
                assert sorted((term.source, term.target) for term in candidate.terms or ()) == sorted(asked)
                for term in terms.terms:
                    if candidate.finished:
                        assert count(term.target, candidate.text) == asked.count(term), (sentence, candidate.text)
                labels = [candidate.labels[t.first : t.last + 1] for t in candidate.terms or ()]
                if tokenizer is Words:
                    texts = [" ".join(some).replace("<unk>", "été") for some in labels]
                    assert [re.sub(" +", " ", text).strip() for text in texts] == [
                        t.target for t in candidate.terms or ()
                    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator that knows its fifty pairs, with a head that was taught to align them."""
    folder = tmp_path_factory.mktemp("terms")
    config = with_links(folder, [LINKS] * len(PAIRS), tokenizer="bpe", alignment_weight=1.0)
    config = changed(config, steps=90, validate_every=90, save_every=90)
    train_translation(config)
    return config.out


@pytest.mark.parametrize("beam", [Beam(1), Beam(4)])
def test_a_term_stands_where_its_source_is_translated(run: Path, beam: Beam) -> None:
    translator = Translator.load(run, device="cpu")
    sentences = [source for source, _ in PAIRS]
    expected = []
    for source, target in PAIRS:
        words = target.split()
        if "two" in source:
            words[3] = "sept"
        if "cats" in source:
            words[4] = "fleuves"
        if "stars" in source:
            words[4] = "chats"
        expected.append(" ".join(words))
    plain = list(translator.translate(sentences, beam=beam))
    assert [one.text for one in plain] == [target for _, target in PAIRS]
    found = list(translator.translate(sentences, beam=beam, terms=KNOWN))
    assert [one.text for one in found] == expected


def test_scores_stay_the_models(run: Path) -> None:
    translator = Translator.load(run, device="cpu")
    for beam in (Beam(1), Beam(3)):
        (one,) = translator.translate(["we see two cats"], beam=beam, terms=KNOWN)
        best = one.candidates[0]
        (likelihood,) = translator.score([("we see two cats", best.text)])
        length = 1 if beam.size == 1 else likelihood.tokens
        assert best.score == pytest.approx(likelihood.log_probability / length, abs=1e-4)
    wanted = Terms([Term("cats", "chats")])  # what the model writes anyway changes nothing
    (same,) = translator.translate(["we see two cats"], terms=wanted)
    (plain,) = translator.translate(["we see two cats"])
    assert (same.text, same.candidates[0].score) == (plain.text, plain.candidates[0].score)


def test_other_options_go_with_terms(run: Path) -> None:
    translator = Translator.load(run, device="cpu")
    (tagged,) = translator.translate(["we see <b>two</b> cats"], terms=KNOWN, keep_tags=True)
    assert tagged.text == "on y voit <b>sept</b> fleuves"
    (begun,) = translator.translate([Request("we see two cats", "on voit")], terms=KNOWN)
    assert begun.text.startswith("on voit")
    assert count("fleuves", begun.text) == count("sept", begun.text) == 1
    (begun,) = translator.translate([Request("we see two cats", "on y voit deux")], terms=KNOWN)
    assert begun.text.startswith("on y voit deux")  # what was given stays, also where the term is translated
    assert count("fleuves", begun.text) == count("sept", begun.text) == 1
    (sure,) = translator.translate(["we see two cats"], terms=KNOWN, confidence=True, alignments=AlignmentOf(head=0))
    assert len(sure.candidates[0].confidence.probabilities) == len(sure.candidates[0].labels)
    assert sure.candidates[0].alignment is not None
    with pytest.raises(ArgumentError, match="give terms or vocabulary"):
        list(translator.translate(["x"], terms=KNOWN, vocabulary=translator.vocabulary(["on"])))


def test_terms_that_do_not_fit_are_a_bad_line() -> None:
    translator = make(max_length=16)
    terms = Terms([Term("cat", " ".join(["chien"] * 20))])
    with pytest.raises(DataError, match="line 2: terms that do not fit into the 16 tokens that the model writes"):
        list(translator.translate(["we", "a cat"], terms=terms))
    found = list(translator.translate(["we", "a cat", "we"], terms=terms, bad_lines="skip"))
    assert found[1].text == ""
    assert found[0].text == found[2].text


def test_the_command(run: Path, call: Call, tmp_path: Path) -> None:
    terms, lines, out = tmp_path / "terms", tmp_path / "lines", tmp_path / "out"
    terms.write_text("cats\tfleuves\ntwo\tsept\n")
    lines.write_text("we see two cats\nwe see one trees\n\n")
    base = ["translate", str(run), "--terms", str(terms), "--device", "cpu"]
    assert call(*base, "we see two cats")[:2] == (0, "on y voit sept fleuves\n")
    assert call(*base, "--input", str(lines), "--output", str(out))[0] == 0
    assert out.read_text() == "on y voit sept fleuves\non y voit un 木々\n\n"
    status, text, _ = call(*base, "--alignments", "we see two cats")
    (best,) = json.loads(text)["translations"]
    told = [("".join(best["tokens"][first : last + 1]).strip(), source, target) for source, target, first, last in
            ((t["source"], t["target"], *t["tokens"]) for t in best["terms"])]  # fmt: skip
    assert (status, told) == (0, [("sept", "two", "sept"), ("fleuves", "cats", "fleuves")])
    status, text, _ = call(*base, "--nbest", "2", "--beam", "3", "we see two cats")
    assert all("sept" in row and "fleuves" in row for row in text.splitlines())
    # A file that was begun with other terms is not gone on with.
    (tmp_path / "part").write_text("we see two cats\nwe see \xff\n", encoding="latin-1")
    half = [*base, "--input", str(tmp_path / "part"), "--output", str(tmp_path / "half")]
    assert call(*half)[0] == 2
    terms.write_text("cats\tmatous\n")
    status, _, err = call(*half, "--resume")
    assert status == 2
    assert "terms" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--terms", "{bad}"], "bad:1: expected a term, a tab and its translation, got b'cat minou'"),
        (["--terms", "{none}"], "--terms: "),
        (["--terms", "{bad}", "--vocabulary", "{bad}"], "--terms may have words that --vocabulary leaves out"),
    ],
)
def test_wrong_terms_are_told_in_one_line(run: Path, call: Call, tmp_path: Path, flags: list[str], said: str) -> None:
    (tmp_path / "bad").write_text("cat minou\n")
    given = [flag.format(bad=tmp_path / "bad", none=tmp_path / "none") for flag in flags]
    status, out, err = call("translate", str(run), "a", "--device", "cpu", *given)
    assert (status, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("term", "sentence", "places"),
    [
        ("हिन", "मैं हिन्दी हिन", [11]),  # also where a mark follows
        ("हिन्दी", "हिन्दी, हिन्दीभाषी", [0]),
        ("京都", "東京都と京都", [4]),
        ("喜欢", "我今天喜欢茶。", [3]),
        ("机器学习", "他喜欢机器学习吗", [3]),
        ("รัก", "ผมรักคุณ", [2]),
        ("كتاب", "كتاب كتابي", [0]),
        ("사과", "사과 사과나무", [0]),
        ("homme", "l'homme, d’homme hommes", [2, 11]),
        ("cat", "the cat's cat5 cat_ cat-like", [4, 20]),
        ("3", "3.14 and 3.", [9]),
    ],
)
def test_terms_are_whole_words_in_any_script(term: str, sentence: str, places: list[int]) -> None:
    assert [one.begin for one in Terms([Term(term, "x")]).found_in(sentence)] == places
