"""Alignments of any layer and head, copied words, prefixes, vocabularies and several references."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError, DataError
from regard.models.config import RNNConfig, TransformerConfig
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.tasks.generation.config import Beam
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Characters, Words
from regard.tasks.text.tokenizers import EOS, UNK
from regard.tasks.training.metrics import exact_match
from regard.tasks.translation.results import copies
from regard.tasks.translation.translation_model import AlignmentOf, Request
from regard.tasks.translation.translator import Translator

SOURCES = ["we see one red house", "they see two", "a cat, a dog and three trees!", "we", "", "Zoë sees Oslo"]
TARGETS = ["on voit une maison rouge", "elles en voient deux", "un chat, un chien et trois arbres !", "on"]


def shaken(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def make(kind: str = "transformer", tokenizer: Any = Words, **changes: Any) -> Translator:
    source, target = tokenizer().train(SOURCES[:4]), tokenizer().train(TARGETS)
    sizes: dict[str, Any] = {"source_vocab_size": len(source), "target_vocab_size": len(target)}
    model: Any
    if kind == "rnn":
        model = RNNSeq2Seq(RNNConfig(embedding_dim=8, hidden_dim=8, attention_dim=8), **sizes)
    else:
        settings: dict[str, Any] = {
            "dim": 16,
            "num_heads": 4,
            "encoder_layers": 1,
            "decoder_layers": 3,
            "feed_forward_dim": 16,
        }
        settings |= {"positions": "learned", "max_length": 16}
        model = Transformer(TransformerConfig(**settings | changes), **sizes)
    translator = Translator(shaken(model), source, target)
    favour(translator, EOS, 4.0)  # so that translations end
    return translator


def favour(translator: Translator, token: int, by: float) -> None:
    output = translator.model.output
    bias = torch.zeros(output.out_features) if output.bias is None else output.bias.detach().clone()
    bias[token] += by
    output.bias = torch.nn.Parameter(bias, requires_grad=False)


@pytest.fixture(params=["transformer", "rnn"])
def translator(request: pytest.FixtureRequest) -> Translator:
    return make(request.param)


def maps_of(translator: Any, source: str, tokens: Sequence[str]) -> dict[str, Tensor]:
    ids = torch.tensor([[*translator.source_tokenizer.encode(source), 2]])
    target = torch.tensor([[1, *tokens[:-1]]])
    with torch.no_grad():
        return {
            name: weights.dense()[0]
            for name, weights in translator.model.attend(ids, torch.tensor([ids.shape[1]]), target).items()
        }


@pytest.mark.parametrize(
    ("which", "beam_size"),
    [
        (AlignmentOf(), 1),
        (AlignmentOf(layer=0), 3),
        (AlignmentOf(layer=-1, head=0), 1),
        (AlignmentOf(head=-1), 3),
        (AlignmentOf(layer=None), 3),
    ],
    ids=str,
)
def test_an_alignment_is_the_map_of_that_layer_and_head(translator: Any, which: AlignmentOf, beam_size: int) -> None:
    """That of the sentence alone, although it was translated among others and beams crossed."""
    names = translator.model.alignment_names
    found = list(translator.translate(SOURCES, beam=Beam(beam_size, num_best=beam_size), alignments=which))
    for one in found:
        if not one.source:
            assert one.candidates[0].alignment is None
            continue
        assert len(one.candidates) == beam_size
        for candidate in one.candidates:
            tokens = [translator.target_tokenizer._backend.token_to_id(" " + t) for t in candidate.labels]
            tokens = [
                plain if (plain := translator.target_tokenizer._backend.token_to_id(label)) is not None else spaced
                for spaced, label in zip(tokens, candidate.labels, strict=True)
            ]
            maps = maps_of(translator, one.source, tokens)
            layers = names if which.layer is None else [names[which.layer]]
            heads = slice(None) if which.head is None else slice(which.head % maps[names[0]].shape[0], None)
            heads = heads if which.head is None else slice(heads.start, heads.start + 1)
            expected = torch.stack([maps[name][heads].mean(0) for name in layers]).mean(0)
            torch.testing.assert_close(candidate.alignment, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(candidate.alignment.sum(-1), torch.ones(len(tokens)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_scores_are_divided_by_the_length_to_the_power_of_the_penalty(translator: Translator, penalty: float) -> None:
    favour(translator, translator.target_tokenizer.marks.end_id, 2.0)
    how: dict[str, Any] = {"beam": Beam(4, num_best=4, length_penalty=penalty), "alignments": AlignmentOf()}
    ended = 0
    for one in translator.translate([source for source in SOURCES if source], **how):
        for candidate in one.candidates:
            if candidate.labels[-1] == "<eos>":
                (found,) = translator.score([(one.source, candidate.text)])
                if found.tokens == len(candidate.labels):
                    ended += 1
                    assert candidate.score == pytest.approx(found.log_probability / found.tokens**penalty, rel=1e-4)
    assert ended > len(SOURCES)


def test_layers_and_heads_differ_and_must_exist() -> None:
    translator = make()
    read = lambda which: next(translator.translate(SOURCES[:1], alignments=which)).candidates[0].alignment  # noqa: E731
    maps: list[Any] = [read(AlignmentOf(layer=layer, head=head)) for layer in range(3) for head in range(4)]
    assert all((a - b).abs().max() > 1e-3 for n, a in enumerate(maps) for b in maps[:n])
    torch.testing.assert_close(read(AlignmentOf(layer=None)), torch.stack(maps).mean(0))
    with pytest.raises(ArgumentError, match="expected a layer from -3 to 2, as the model has 3, got 3"):
        read(AlignmentOf(layer=3))
    with pytest.raises(ArgumentError, match="expected a head from -4 to 3, as the model has 4, got -5"):
        read(AlignmentOf(head=-5))
    assert next(translator.translate(SOURCES[:1])).candidates[0].alignment is None


def test_marks_and_spaces_are_not_copied() -> None:
    alignment = torch.tensor([[0.0, 0.9, 0.0, 0.1, 0.0], [0.2, 0.1, 0.3, 0.0, 0.4], [0.1, 0.5, 0.2, 0.1, 0.1]])
    surfaces = ["", " ", "Zoë", " sings"]  # a mark of the template, a space; the last column is the end mark
    assert copies([UNK, UNK, 7], UNK, alignment, surfaces) == [" sings", "Zoë"]
    assert copies([UNK], UNK, alignment, ["", " "]) == []


@pytest.mark.parametrize("beam_size", [1, 3])
def test_unknown_words_are_the_words_that_are_looked_at_most(translator: Translator, beam_size: int) -> None:
    favour(translator, UNK, 9.0)
    how: dict[str, Any] = {"beam": Beam(beam_size), "alignments": AlignmentOf()}
    plain = list(translator.translate(SOURCES, **how))
    copied = list(translator.translate(SOURCES, **how, copy_unknown=True))
    unseen = translator.translate(SOURCES, beam=Beam(beam_size), copy_unknown=True)
    assert [(one.text, one.candidates[0].alignment) for one in unseen] == [(one.text, None) for one in copied]
    assert plain[-1].text.count("\N{REPLACEMENT CHARACTER}") > 1
    for one, other in zip(plain, copied, strict=True):
        assert "\N{REPLACEMENT CHARACTER}" not in other.text
        best = one.candidates[0]
        assert best.labels == other.candidates[0].labels
        words, written = one.source.split(), [label for label in best.labels if label != "<eos>"]
        if (
            best.alignment is None
            or len(other.text.split()) != len(written)
            or len(words) != len(one.source_labels) - 1
        ):
            continue  # punctuation: here words are what spaces set apart
        for word, label, row in zip(other.text.split(), written, best.alignment, strict=False):
            assert label != "<unk>" or word == words[int(row[: len(words)].argmax())]


def test_a_byte_level_tokenizer_has_nothing_to_copy() -> None:
    translator = make(tokenizer=ByteLevelBPE)
    with pytest.raises(ArgumentError, match="there are no unknown words to copy"):
        next(translator.translate(["we"], copy_unknown=True))


def test_characters_are_copied_too() -> None:
    translator = make(tokenizer=Characters)
    favour(translator, UNK, 9.0)
    (found,) = translator.translate(["we ß"], beam=Beam(1), copy_unknown=True)
    assert set(found.text) <= set("weß")
    assert found.text


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_translation_begins_with_its_prefix(translator: Translator, beam_size: int) -> None:
    prefixes = ["", "on voit deux", "Zoë et", "un chat,", "on", "elles"]
    asked = [Request(source, prefix) for source, prefix in zip(SOURCES, prefixes, strict=True)]
    found = list(translator.translate(asked, beam=Beam(beam_size)))
    free = list(translator.translate(SOURCES, beam=Beam(beam_size)))
    assert found[0].text.split()[:9] == free[0].text.split()[:9]
    assert found[4].text == ""  # a blank line stays one
    for one, prefix in zip(found, prefixes, strict=True):
        assert not one.source or one.text.startswith(prefix)  # and a word outside the vocabulary is printed as given
    assert any(not one.text.startswith(prefix) for one, prefix in zip(free, prefixes, strict=True))


@pytest.mark.parametrize("prefix", ["ON  voit,  DEUX", "Zoe\u0308 et", "  on voit ", "un\tchat"])
@pytest.mark.parametrize("tokenizer", [Words, Characters, partial(ByteLevelBPE, vocab_size=280)])
def test_what_was_given_is_printed_as_it_was_given(tokenizer: Any, prefix: str) -> None:
    """Tokens may write it in lower case, in another form of Unicode, without its spaces, or not know it."""
    translator = make(tokenizer=partial(tokenizer, lowercase=True), max_length=30)
    asked = [Request("we see two", prefix), Request("we", prefix)]
    for copy_unknown in (False, tokenizer is Words):
        for one in translator.translate(asked, beam=Beam(1), copy_unknown=copy_unknown):
            assert one.text.startswith((prefix.strip(), prefix)), one.text


@pytest.mark.parametrize("line", ["", " ", "\t \t", "\u00a0", "\u3000\u2003", "\u200b\ufeff"])
@pytest.mark.parametrize("tokenizer", [Words, Characters, partial(ByteLevelBPE, vocab_size=280)])
def test_a_line_without_words_stays_as_it_is(tokenizer: Any, line: str) -> None:
    translator = make(tokenizer=tokenizer, max_length=20)
    for beam in (Beam(1), Beam(2, num_best=2)):
        (one,) = translator.translate([Request(line, "on")], beam=beam)
        assert (one.text, len(one.candidates)) == (line, 1)


def test_what_is_too_long_stops_or_stays_empty() -> None:
    translator = make(positions="learned", max_length=6)
    favour(translator, EOS, -99.0)  # what is translated is not empty
    lines: list[str | Request] = [
        "we see",
        "we see one red house we see",
        "they see two",
        Request("we", "on voit une maison rouge et"),
    ]
    found = list(translator.translate(lines, bad_lines="skip"))
    problems = [one.problem for one in found]
    assert problems[::2] == [None, None]
    assert problems[1] == "8 tokens, and the model takes 6 at most"
    assert problems[3] == "a prefix of 7 tokens, and the model writes 6 at most"
    assert [len(one.candidates[0].labels) if one.text else 0 for one in found] == [6, 0, 6, 0]
    together = translator.translate(lines)
    assert next(together).text == found[0].text
    with pytest.raises(DataError, match="line 2: 8 tokens"):
        next(together)


@pytest.mark.parametrize("kind", ["transformer", "rnn"])
def test_several_references(kind: str) -> None:
    translator = make(kind, max_length=128)  # more than an answer has
    favour(translator, EOS, -99.0)  # no answer is empty, or too short for BLEU
    found = [one.text for one in translator.translate(SOURCES[:3])]
    pairs = [(source, ["x y z", text]) for source, text in zip(SOURCES, found, strict=False)]
    pairs[1] = (SOURCES[1], [found[1]])  # a sentence may have fewer
    scores = translator.evaluate(pairs)
    assert scores.exact_match == 100.0
    assert scores.bleu.value == pytest.approx(100)
    assert "nrefs:var" in scores.bleu.signature
    flat = [(source, target) for source, targets in pairs for target in targets]
    assert scores.loss == pytest.approx(translator.loss(flat))
    alone = translator.evaluate([(source, texts[0]) for source, texts in pairs])
    assert alone.exact_match == pytest.approx(100 / 3)
    assert exact_match(["a", "b"], ["x", "b"], ["a", None]) == 100.0
