"""`regard align`: links between the words of pairs, from the attention of a forced translation."""

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.main import run_command
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.translation.aligned_words import as_line, word_numbers, words_aligned
from regard.tasks.translation.translation_model import AlignmentOf
from regard.tasks.translation.translator import Translator
from tests.conftest import Call
from tests.tasks.small_runs import PAIRS, write_pairs
from tests.tasks.test_read_once import fed
from tests.tasks.test_translate_options import make

SENTENCES = ["we see two cats", "they see two stars", "Zoë sees 日本", "one cat, two cats"]
TEXTS = [("we see two", "on voit une"), ("they see", "elles en voient deux")]


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


@pytest.mark.parametrize("tokenizer", [Words, Characters, lambda: ByteLevelBPE(vocab_size=280)])
def test_tokens_belong_to_words(tokenizer: Any) -> None:
    trained = tokenizer().train(SENTENCES)
    for sentence in ("we see  two cats, 日本 too", " Zoë\u0301 sees!"):
        surfaces = trained.surfaces(sentence)
        numbers = word_numbers(surfaces)
        assert max(numbers) + 1 == len(sentence.split())
        for surface, number in zip(surfaces, numbers, strict=True):
            assert (
                number == -1
                or surface.strip() in trained.decode(trained.encode(sentence)).split()[number]
                or (trained.unknown_id is not None)
            )


def test_align_prints_a_line_for_each_pair_that_training_reads(run_of_words: Path, call: Call) -> None:
    from regard.tasks.translation.translator import Translator

    data = run_of_words.parent / "to_align.tsv"
    write_pairs(data, PAIRS[:40])
    translator = Translator.load(run_of_words, device="cpu")
    for flags, which in (([], AlignmentOf()), (["--alignment-head", "0"], AlignmentOf(head=0))):
        status, out, err = call("align", str(run_of_words), "--data", str(data), "--device", "cpu", *flags)
        alone = [next(words_aligned(translator, [pair], which)) for pair in PAIRS[:40]]
        assert (status, err) == (0, "")
        assert out.splitlines() == [as_line(links) for links in alone]
        with fed(run_of_words.parent / f"once{len(flags)}.tsv", data.read_bytes()):
            assert call(
                "align", str(run_of_words), "--data", str(run_of_words.parent / f"once{len(flags)}.tsv"), *flags
            )[:2] == (0, out)


def test_a_pupil_learns_from_what_a_run_writes(run_of_words: Path, tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("".join(f"{source}\n" for source, _ in PAIRS), encoding="utf-8")
    distilled, pupil = tmp_path / "distilled.fr", tmp_path / "pupil"
    made = (
        f"translate {run_of_words} --input {tmp_path / 'train.en'} --output {distilled} --max-length 1000 --device cpu"
    )
    made += " --engine regard"  # a beam of CTranslate2 ends earlier
    assert run_command(made.split()) == 0
    written = distilled.read_text(encoding="utf-8").splitlines()
    assert written == [one.text for one in Translator.load(run_of_words, device="cpu").translate(s for s, _ in PAIRS)]
    sizes = "--transformer.dim 8 --transformer.num-heads 2 --vocab-size 300 --steps 1 --pictures 0 --device cpu"
    learn = f"train --out {pupil} --data {tmp_path / 'train.en'} {distilled} {sizes}"
    assert run_command(learn.split()) == 0
    assert "40 pairs to train on, 10 held out" in (pupil / "train.log").read_text()
