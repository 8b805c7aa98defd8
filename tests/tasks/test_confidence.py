"""Probability, entropy and coverage of the tokens of a translation, and words that were left out."""

import json
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.tasks.generation.config import Beam
from regard.tasks.pictures.token_maps import Axis
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.translation import confidence
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.confidence import confidence_of
from tests.conftest import Call
from tests.tasks.small_runs import run
from tests.tasks.test_translate_options import make

__all__ = ["run"]

SENTENCES = ["we see two", "a cat, a dog", "", "Zoë sees"]


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("tokenizer", [Words, Characters, lambda: ByteLevelBPE(vocab_size=280)])
def test_numbers_are_those_of_the_model(tokenizer: Any, beam: int) -> None:
    translator = make(tokenizer=tokenizer, max_length=18)
    search = Beam(beam, length_penalty=0.0)  # scores are sums
    for one in translator.translate(SENTENCES, beam=search, confidence=True, alignments=AlignmentOf(layer=1)):
        best = one.candidates[0]
        if not one.source:
            assert best.confidence == ([], [], [], [])
            continue
        sure = best.confidence
        assert sure is not None
        assert len(sure.probabilities) == len(sure.entropies) == len(best.labels)
        assert len(sure.coverage) == len(one.source_labels)
        assert sum(map(log, sure.probabilities)) == pytest.approx(best.score, rel=1e-3)
        if translator.target_tokenizer.unknown_id is not None:  # each token has a label of its own
            assert sum(sure.coverage) == pytest.approx(len(best.labels), rel=1e-4)
        assert all(0 <= entropy <= log(len(one.source) + 4) for entropy in sure.entropies)


def test_words_that_get_nothing_are_named() -> None:
    alignment = torch.tensor([[0.96, 0.01, 0.02, 0.0, 0.01], [0.5, 0.02, 0.01, 0.0, 0.47]])
    spans = [(n, n) for n in range(5)]
    found = confidence_of(
        torch.tensor([-0.5, -1.0]), alignment, Axis(["x", "y"], spans[:2]), "we see it !", ["we", " see", " it", " !"],
        Axis(["we", "see", "it", "!", "<eos>"], spans),
    )  # fmt: skip
    assert found.untranslated == ["see", "it"]  # the sign has no letter
    assert found.probabilities == pytest.approx([exp(-0.5), exp(-1.0)])
    row = [0.96, 0.01, 0.02, 0.01]
    assert found.entropies[0] == pytest.approx(-sum(p * log(p) for p in row), rel=1e-4)
    assert found.coverage == pytest.approx([1.46, 0.03, 0.03, 0.0, 0.48], abs=1e-6)


def test_the_command_prints_them(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["translate", str(run), "we see one cats", "--confidence", "--beam", "1"]
    status, out, err = call(*arguments)
    found = json.loads(out)
    best = found["translations"][0]
    assert status == 0
    assert len(best["probabilities"]) == len(best["entropies"]) == len(best["tokens"])
    assert len(best["coverage"]) == len(found["source"])
    assert best["alignment"] == []
    _, out, _ = call(*arguments[:2], *arguments[3:], "--bad-lines", "skip", stdin=b"\n\xff\nwe see\n")
    blank, bad, good = (json.loads(line)["translations"][0] for line in out.splitlines())
    assert blank.keys() == bad.keys() == good.keys()
    assert blank["probabilities"] == blank["entropies"] == blank["coverage"] == blank["untranslated"] == []
    monkeypatch.setattr(confidence, "LITTLE", 99.0)  # so that every word got less
    status, out, err = call(*arguments)
    assert json.loads(out)["translations"][0]["untranslated"] == ["we", "see", "one", "cats"]
    warning = "lines with words that were perhaps left untranslated: 1; the first: line 1: we, see, one, cats"
    assert err.splitlines()[-1] == warning
