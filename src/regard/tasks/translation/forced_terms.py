"""Translations in which given terms stand where they are translated.

A sentence is translated; the attention says where its first term was translated; the words before that place stay, the
term's translation is forced behind them, and the search goes on from there, to the next term. Each place is chosen by
attention (as in Chatterjee et al. 2017, "Guiding neural machine translation decoding with external knowledge") over a
whole translation, so that any layer and head can choose, and there is always a place. The search behind forced words
is that of Wuebker et al. 2016, "Models and inference for prefix-constrained machine translation".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.text.codec import Codec
from regard.tasks.translation.results import TermLabels
from regard.tasks.translation.tags import stretches
from regard.tasks.translation.terms import Occurrence, PlacedTerm, begins_of_units, is_letter, is_spaced, place_of


class TokenKinds(NamedTuple):
    """The place of each target token in a word; see `regard.tasks.generation.whole_words`."""

    begins: Tensor
    lengthens: Tensor
    closes: Tensor

    @classmethod
    def of(cls, codec: Codec, size: int) -> "TokenKinds":
        """Those of a tokenizer, for a model that knows `size` tokens."""
        (anchor,) = codec.encode_batch(["a"])
        base = len(codec.decode(anchor))
        pieces = [codec.decode([*anchor, token])[base:] for token in range(min(len(codec), size))]
        pieces += [""] * (size - len(pieces))
        first, last = (torch.tensor([_is_in_word(piece, at) for piece in pieces]) for at in (0, -1))
        prints = torch.tensor([bool(piece) for piece in pieces])
        begins = prints & ~first
        begins[codec.marks.end_id] = True
        return cls(begins, first, prints & ~last)


def _is_in_word(piece: str, at: int) -> bool:
    """Whether a piece begins or ends within a word. A part of a character, U+FFFD, may be one of a letter."""
    return bool(piece) and (is_letter(piece[at]) or piece[at] == "\ufffd")


class Sentence(NamedTuple):
    """A sentence with terms, and its translations so far, with alignments."""

    text: str
    ids: Sequence[int]
    prefix: Sequence[int]
    """The tokens with which its translations had to begin."""
    occurrences: list[Occurrence]
    found: list[Hypothesis]


class Prefixed(NamedTuple):
    """A search that goes on behind given tokens."""

    text: str
    """The sentence, which may have words its tokens have not."""
    ids: Sequence[int]
    prefix: list[int]
    is_word: bool
    """Whether the prefix ends with a word that must not become longer."""
    banned: list[list[int]]
    """The tokens that must not be written again behind it."""
    avoided: list[int]
    """Tokens that must not come right behind it: with them the model would translate the last term again."""


class WithTerms(NamedTuple):
    """A translation with its terms."""

    hypothesis: Hypothesis
    placed: list[PlacedTerm]


Search = Callable[[Sequence[Prefixed]], list[Hypothesis]]
"""Finds the best continuation of each, with its alignment."""


def rules_of(searches: Sequence[Prefixed], kinds: TokenKinds) -> dict[str, Any]:
    """The fields of the `WholeWords` of some searches, as values for JSON."""
    return {
        "lengths": [len(one.prefix) for one in searches],
        "is_word": [one.is_word for one in searches],
        "banned": [one.banned for one in searches],
        "avoided": [one.avoided for one in searches],
        "begins": kinds.begins.tolist(),
        "lengthens": kinds.lengthens.tolist(),
        "closes": kinds.closes.tolist(),
    }


def labels_of(placed: PlacedTerm, spans: Sequence[tuple[int, int]]) -> TermLabels:
    """A placed term by the labels of its tokens."""
    owner = [label for label, (first, last) in enumerate(spans) for _ in range(first, last + 1)]
    return TermLabels(*placed.occurrence.term, owner[placed.first], owner[placed.last])


def force_terms(
    sentences: Sequence[Sentence], codecs: tuple[Codec, Codec], kinds: TokenKinds, search: Search, longest: int | None
) -> list[list[WithTerms] | None]:
    """For each sentence its translations with every term once for each occurrence, best first.

    Args:
        sentences: each with one translation or more, which are gone on with separately.
        codecs: the tokenizers of source and target.
        kinds: the place of each target token in a word.
        search: goes on behind given tokens.
        longest: the most tokens the model writes, the end mark counted; None for no limit.

    Returns:
        None for a sentence whose terms do not fit into so many tokens.
    """
    lanes = [
        _Lane(row, one, codecs, kinds, hypothesis) for row, one in enumerate(sentences) for hypothesis in one.found
    ]
    while due := [(lane, search_) for lane in lanes if (search_ := lane.next_search()) is not None]:
        running = [(lane, one) for lane, one in due if longest is None or len(one.prefix) < longest]
        for lane, _ in due:
            lane.has_failed = True
        answers = search([one for _, one in running]) if running else []
        for (lane, _), hypothesis in zip(running, answers, strict=True):
            lane.hypothesis, lane.has_failed = hypothesis, False
    answers_of: list[list[WithTerms] | None] = []
    for row in range(len(sentences)):
        mine = [lane for lane in lanes if lane.row == row and not lane.has_failed]
        by_tokens = {tuple(lane.hypothesis.tokens): WithTerms(lane.hypothesis, lane.placed) for lane in mine}
        end = codecs[1].marks.end_id
        ranked = sorted(
            by_tokens.values(), key=lambda one: (one.hypothesis.tokens[-1:] != [end], -one.hypothesis.score)
        )
        answers_of.append(ranked or None)
    return answers_of


@dataclass(slots=True)
class _Lane:
    """One translation of a sentence, with the terms it has so far in their places."""

    row: int
    sentence: Sentence
    codecs: tuple[Codec, Codec]
    kinds: TokenKinds
    hypothesis: Hypothesis
    has_failed: bool = False
    placed: list[PlacedTerm] = field(default_factory=list)

    @property
    def left(self) -> list[Occurrence]:
        done = [one.occurrence for one in self.placed]
        return [one for one in self.sentence.occurrences if one not in done]

    @property
    def fixed(self) -> int:
        """How many of the first tokens stay as they are."""
        return self.placed[-1].last + 1 if self.placed else len(self.sentence.prefix)

    def next_search(self) -> Prefixed | None:
        """Place terms, until one of them is not there yet: the search that puts it there. None if all are there."""
        while self.left and not self.has_failed:
            tokens = self._written()
            pieces = _pieces(tokens, self.codecs[1])
            places = [(*self._place(one, tokens, pieces), one) for one in self.left]
            place, form, replaced, occurrence = min(places, key=lambda one: one[0])
            is_there = self._stands(form, tokens, pieces, place)
            self.placed.append(PlacedTerm(occurrence, place, place + len(form) - 1))
            banned = self._banned()
            if is_there and not any(
                self._stands(word, tokens, pieces, n) for word in banned for n in range(self.fixed, len(tokens))
            ):
                continue
            prefix, avoided = [*tokens[:place], *form], self._beginning_of(replaced)
            text, ids, is_word = self.sentence.text, self.sentence.ids, is_spaced(occurrence.term.target)
            return Prefixed(text, ids, prefix, is_word, banned, avoided)
        return None

    def _written(self) -> list[int]:
        tokens, end = self.hypothesis.tokens, self.codecs[1].marks.end_id
        return tokens[:-1] if tokens[-1:] == [end] else tokens

    def _place(self, one: Occurrence, tokens: list[int], pieces: list[str]) -> tuple[int, list[int], str]:
        """Where a term belongs, its tokens as they are written there, and the words it replaces."""
        spaced, plain = _forms(one.term.target, self.codecs[1])
        for place in range(self.fixed, len(tokens)):
            for form in (spaced, plain):
                if self._stands(form, tokens, pieces, place):
                    return place, form, ""
        alignment = self.hypothesis.alignment
        assert alignment is not None
        place, end = place_of(alignment, self._columns(one), [*pieces, ""], self.fixed)
        text = "".join(pieces[:place])
        begins_word = place < len(tokens) and pieces[place][:1].isspace()
        at_end = place == len(tokens) and bool(text) and not text[-1].isspace() and _takes_space(text[-1])
        is_spaced_form = begins_word or at_end or is_spaced(text)
        return place, spaced if is_spaced_form else plain, "".join(pieces[place:end])

    def _beginning_of(self, words: str) -> list[int]:
        """The tokens of words behind a space, up to the first that has a letter."""
        codec = self.codecs[1]
        tokens = codec.encode_batch([f" {words.strip()}"])[0] if words.strip() else []
        letters = (n for n in range(len(tokens)) if codec.decode(tokens[: n + 1]).strip())
        return tokens[: next(letters, -1) + 1]

    def _columns(self, one: Occurrence) -> list[int]:
        """The tokens of the source that stand for a term, at least one."""
        places = stretches(self.codecs[0].surfaces(self.sentence.text), self.sentence.text)
        found = [n for n, (begin, end) in enumerate(places) if begin < one.end and one.begin < end]
        return found or [0]

    def _stands(self, form: Sequence[int], tokens: Sequence[int], pieces: Sequence[str], place: int) -> bool:
        """Whether a form of a term stands at a place, as whole words."""
        end = place + len(form)
        if list(tokens[place:end]) != list(form) or self.codecs[1].unknown_id in form:
            return False
        if place not in begins_of_units(pieces, self.fixed) and not pieces[place].isspace():
            return False
        is_word = is_spaced("".join(pieces[place:end]))
        return end == len(tokens) or not is_word or bool(self.kinds.begins[tokens[end]])

    def _banned(self) -> list[list[int]]:
        """The forms of the terms of which none is left to come."""
        coming = {one.term.target for one in self.left}
        done = {one.occurrence.term.target for one in self.placed} - coming
        forms = (form for target in sorted(done) for form in _forms(target, self.codecs[1]))
        unknown = self.codecs[1].unknown_id
        return [list(form) for form in dict.fromkeys(map(tuple, forms)) if unknown not in form]


def _forms(target: str, codec: Codec) -> list[list[int]]:
    """The tokens of a term behind a space, and those without one."""
    return codec.encode_batch([f" {target}", target])


def _pieces(tokens: Sequence[int], codec: Codec) -> list[str]:
    """The text each token adds; of tokens that share a character the first adds it."""
    unknown = ["a"] * len(tokens)  # they would print as U+FFFD, as parts of a character do
    whole = [codec.decode(tokens[:n], unknown=unknown[:n]).rstrip("\ufffd") for n in range(len(tokens) + 1)]
    pieces, waiting = [""] * len(tokens), None
    for number, (before, after) in enumerate(pairwise(whole)):
        waiting = number if waiting is None else waiting
        if len(after) > len(before):
            pieces[waiting], waiting = after[len(before) :], None
    return pieces


def _takes_space(character: str) -> bool:
    """Whether a space follows the character before the next word."""
    return is_spaced(character) or not is_letter(character)
