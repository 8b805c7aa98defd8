"""The alignment error rate, with links that are read, found and refused."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import DataError
from regard.tasks.text.links import GoldLinks, Links, as_line, read_links
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.translation.alignment_error import alignment_error_rate, error_of, symmetrised, words_aligned
from regard.tasks.translation.alignments import AlignmentOf
from tests.conftest import Call
from tests.tasks.small_runs import PAIRS, run, write_pairs
from tests.tasks.test_read_once import fed
from tests.tasks.test_translate_options import make

__all__ = ["run"]
TEXTS = [("we see two", "on voit une"), ("they see", "elles en voient deux")]


def drawn(dice: random.Random) -> Links:
    return frozenset((dice.randrange(4), dice.randrange(4)) for _ in range(dice.randint(1, 6)))


def test_the_rate_is_one_minus_the_f_measure_where_all_links_are_sure() -> None:
    """With S = P, AER is 1 - F1 (Fraser and Marcu 2007, section 2)."""
    dice = random.Random(1)
    for _ in range(100):
        found, gold = drawn(dice), drawn(dice)
        both = len(found & gold)
        precision, recall = both / len(found), both / len(gold)
        f1 = 2 * precision * recall / (precision + recall) if both else 0.0
        assert alignment_error_rate([found], [GoldLinks(gold, gold, "x:1")]) == pytest.approx(100 * (1 - f1))


def test_possible_links_are_not_wrong_and_not_missed() -> None:
    sure, possible = frozenset({(0, 0)}), frozenset({(0, 0), (1, 1), (2, 2)})
    gold = [GoldLinks(sure, possible, "x:1")]
    assert alignment_error_rate([sure], gold) == alignment_error_rate([frozenset({(0, 0), (1, 1)})], gold) == 0.0
    assert alignment_error_rate([frozenset({(0, 0), (0, 1)})], gold) == pytest.approx(100 / 3)


def test_links_are_read(tmp_path: Path) -> None:
    path = tmp_path / "links"
    path.write_text("0-0 1-2 3?4\n\n2p1\n")
    first, empty, third = read_links(path)
    assert first.sure == {(0, 0), (1, 2)}
    assert first.possible == {(0, 0), (1, 2), (3, 4)}
    assert not empty.possible
    assert not third.sure
    assert third.possible == {(2, 1)}
    path.write_text("0-0\n0:1\n")
    with pytest.raises(DataError, match=r"links:2: expected links like 0-0 or 3\?4 .*, got '0:1'"):
        read_links(path)


@pytest.mark.parametrize("tokenizer", [Words, Characters, lambda: ByteLevelBPE(vocab_size=280)])
def test_words_are_linked_to_what_they_look_at_most(tokenizer: Any) -> None:
    """By a pass of each pair alone, summed by hand over the tokens of words."""
    translator, which = make(tokenizer=tokenizer, max_length=40), AlignmentOf(layer=1, head=2)
    found = list(words_aligned(translator, TEXTS, which))
    for links, (source, target) in zip(found, TEXTS, strict=True):
        codecs = translator.source_tokenizer, translator.target_tokenizer
        ids, written = (codec.encode_batch([text])[0] for codec, text in zip(codecs, (source, target), strict=True))
        with torch.no_grad():
            maps = translator.model.attend(
                torch.tensor([[*ids, 2]]), torch.tensor([len(ids) + 1]), torch.tensor([[1, *written]])
            )
        weights = which.of(maps, translator.model.alignment_names)[0]
        ends = [[0], [0]]
        for codec, text, end in zip(codecs, (source, target), ends, strict=True):
            words = text.split()
            end += [len(codec.encode_batch([" ".join(words[: n + 1])])[0]) for n in range(len(words))]
        expected = set()
        for of in range(len(target.split())):
            # In characters the space before a word is a token of its own, which belongs to no word.
            skip = int(tokenizer is Characters)
            rows = weights[ends[1][of] + skip * (of > 0) : ends[1][of + 1]].sum(0)
            sums = [rows[ends[0][n] + skip * (n > 0) : ends[0][n + 1]].sum().item() for n in range(len(source.split()))]
            expected.add((sums.index(max(sums)), of))
        assert links == expected


def test_links_that_do_not_fit_are_refused() -> None:
    translator = make()
    link = frozenset({(0, 0)})
    with pytest.raises(DataError, match="got 1 lines and 2 pairs"):
        error_of(translator, TEXTS, [GoldLinks(link, link, "x:1")], AlignmentOf())
    far = frozenset({(3, 0)})
    with pytest.raises(DataError, match="x:1: expected words from 0 to 2 and 0 to 2, got 3-0"):
        error_of(translator, TEXTS[:1], [GoldLinks(far, far, "x:1")], AlignmentOf())


def test_evaluate_prints_the_rate(run: Path, call: Call) -> None:
    data, links = run.parent / "aligned.tsv", run.parent / "links"
    write_pairs(data, PAIRS[:3])
    links.write_text("0-0 1-2\n2-2\n3-3 1?1\n")
    status, out, _ = call("evaluate", str(run), "--data", str(data), "--alignment-data", str(links))
    cells = dict(line.split("\t")[:2] for line in out.splitlines())
    from regard.tasks.translation.translator import Translator

    expected = error_of(Translator.load(run, device="cpu"), PAIRS[:3], read_links(links), AlignmentOf())
    assert status == 0
    assert cells["AER"] == f"{expected:.2f}"
    assert "BLEU" in cells
    with fed(run.parent / "pipe", data.read_bytes()):  # the pairs are read once
        piped = call("evaluate", str(run), "--data", str(run.parent / "pipe"), "--alignment-data", str(links))
    assert piped[:2] == (0, out)
    links.write_text("0-0\n")
    before = sorted(run.parent.rglob("*"))
    status, out, err = call("evaluate", str(run), "--data", str(data), "--alignment-data", str(links))
    assert (status, out) == (2, "")
    said = f"regard: {links} ends after line 1, before the pairs: expected a line of links for each"
    assert err.splitlines()[-1] == said
    assert sorted(run.parent.rglob("*")) == before


def test_symmetrised_links_are_between_intersection_and_union() -> None:
    """And hold whatever touches them and has a word without a link: asked of every link, one by one."""
    dice = random.Random(3)
    for _ in range(300):
        forward, backward = drawn(dice), drawn(dice)
        found = symmetrised(forward, backward)
        assert forward & backward <= found <= forward | backward
        for source, target in (forward | backward) - found:
            touches = any(abs(source - s) <= 1 and abs(target - t) <= 1 for s, t in found)
            is_free = source not in {s for s, _ in found} or target not in {t for _, t in found}
            assert not (touches and is_free)


def test_align_prints_a_line_for_each_pair_that_training_reads(run: Path, call: Call) -> None:
    from regard.tasks.translation.translator import Translator

    data = run.parent / "to_align.tsv"
    write_pairs(data, PAIRS[:40])
    status, out, err = call("align", str(run), "--data", str(data), "--device", "cpu")
    translator = Translator.load(run, device="cpu")
    alone = [next(words_aligned(translator, [pair], AlignmentOf())) for pair in PAIRS[:40]]
    assert (status, err) == (0, "")
    assert out.splitlines() == [as_line(links) for links in alone]
    (run.parent / "found").write_text(out)
    assert error_of(translator, PAIRS[:40], read_links(run.parent / "found"), AlignmentOf()) == 0.0
    flags = ["--reverse", str(run), "--reverse-head", "0", "--device", "cpu"]
    status, both, _ = call("align", str(run), "--data", str(data), *flags)
    turned = words_aligned(translator, [(target, source) for source, target in PAIRS[:40]], AlignmentOf(head=0))
    expected = [
        as_line(symmetrised(one, frozenset((s, t) for t, s in other))) for one, other in zip(alone, turned, strict=True)
    ]
    assert both.splitlines() == expected
    with fed(run.parent / "once", data.read_bytes()):
        assert call("align", str(run), "--data", str(run.parent / "once"), *flags)[:2] == (0, both)
    status, out, err = call("align", str(run), "--data", str(data), "--reverse-head", "0")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == "regard: --reverse-layer and --reverse-head go with --reverse"
