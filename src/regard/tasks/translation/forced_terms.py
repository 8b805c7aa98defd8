"""Translations in which given terms stand where they are translated.

A sentence is translated; the attention says where its first term was translated; the words before that place stay, the
term's translation is forced behind them, and the search goes on from there, to the next term. Each place is chosen by
attention (as in Chatterjee et al. 2017, "Guiding neural machine translation decoding with external knowledge") over a
whole translation, so that any layer and head can choose, and there is always a place. The search behind forced words
is that of Wuebker et al. 2016, "Models and inference for prefix-constrained machine translation".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.text.codec import Codec
from regard.tasks.text.unicode import normalise
from regard.tasks.text.words import is_spaced, is_word, stretches, units
from regard.tasks.translation.aligning import Align
from regard.tasks.translation.options import Draft, Written
from regard.tasks.translation.searching import Begun, Search, WordRule
from regard.tasks.translation.terms import Occurrence, PlacedTerm, Terms, added_texts, begins_of_units, place_of
from regard.tasks.translation.translation_model import TranslationModel


def force_terms(drafts: Sequence[Draft], terms: Terms, search: Search, align: Align) -> None:
    """Put translations with every term, once for each occurrence and best first, in the place of those without."""
    found = [(draft, terms.found_in(normalise(draft.text))) for draft in drafts if draft.found]
    due = [(draft, some) for draft, some in found if some]
    aligned = align([draft.begun for draft, _ in due], [[one.hypothesis for one in draft.found] for draft, _ in due])
    lanes = [
        _Lane(draft, search.model, some, hypothesis)
        for (draft, some), best in zip(due, aligned, strict=True)
        for hypothesis in best
    ]
    while waiting := [(lane, begun) for lane in lanes if (begun := lane.next_search()) is not None]:
        running = [(lane, begun) for lane, begun in waiting if len(begun.prefix) < search.limit_of(begun)]
        for lane, _ in waiting:
            lane.has_failed = True
        for (lane, _), best in zip(running, search([begun for _, begun in running]), strict=True):
            lane.hypothesis, lane.has_failed = best[0], False
    end = search.model.target_tokenizer.marks.end_id
    for draft, _ in due:
        mine = [lane for lane in lanes if lane.draft is draft and not lane.has_failed]
        by_tokens = {tuple(lane.hypothesis.tokens): Written(lane.hypothesis, lane.placed) for lane in mine}
        draft.found = sorted(
            by_tokens.values(), key=lambda one: (one.hypothesis.tokens[-1:] != [end], -one.hypothesis.score)
        )
        if not draft.found:
            most = search.limit_of(draft.begun)
            draft.problem = f"terms that do not fit into the {most} tokens that the model writes"


@dataclass(slots=True)
class _Lane:
    """One translation of a sentence, with the terms it has so far in their places."""

    draft: Draft
    model: TranslationModel
    occurrences: list[Occurrence]
    hypothesis: Hypothesis
    has_failed: bool = False
    placed: list[PlacedTerm] = field(default_factory=list)

    @property
    def left(self) -> list[Occurrence]:
        done = [one.occurrence for one in self.placed]
        return [one for one in self.occurrences if one not in done]

    @property
    def fixed(self) -> int:
        """How many of the first tokens stay as they are."""
        return self.placed[-1].last + 1 if self.placed else len(self.draft.prefix)

    def next_search(self) -> Begun | None:
        """Place terms, until one of them is not there yet: the search that puts it there. None if all are there."""
        while self.left and not self.has_failed:
            tokens = self._written()
            # Unknown tokens would print as U+FFFD, as parts of a character do.
            pieces = added_texts(self.model.target_tokenizer, tokens, ["a"] * len(tokens))
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
            rule = WordRule(is_spaced(occurrence.term.target), banned, avoided)
            return self.draft.begun._replace(prefix=prefix, rule=rule)
        return None

    def _written(self) -> list[int]:
        tokens, end = self.hypothesis.tokens, self.model.target_tokenizer.marks.end_id
        return tokens[:-1] if tokens[-1:] == [end] else tokens

    def _place(self, one: Occurrence, ids: list[int], pieces: list[str]) -> tuple[int, list[int], str]:
        """Where a term belongs, its tokens as they are written there, and the words it replaces."""
        spaced, plain = _forms(one.term.target, self.model.target_tokenizer)
        for place in range(self.fixed, len(ids)):
            for form in (spaced, plain):
                if self._stands(form, ids, pieces, place):
                    return place, form, ""
        alignment = self.hypothesis.alignment
        assert alignment is not None
        place, end = place_of(alignment, self._columns(one), [*pieces, ""], self.fixed)
        text = "".join(pieces[:place])
        begins_word = place < len(ids) and pieces[place][:1].isspace()
        at_end = place == len(ids) and bool(text) and not text[-1].isspace() and _takes_space(text)
        is_spaced_form = begins_word or at_end or is_spaced(text)
        return place, spaced if is_spaced_form else plain, "".join(pieces[place:end])

    def _beginning_of(self, words: str) -> list[int]:
        """The tokens of words behind a space, up to the first that has a letter."""
        codec = self.model.target_tokenizer
        tokens = codec.encode_batch([f" {words.strip()}"])[0] if words.strip() else []
        letters = (n for n in range(len(tokens)) if codec.decode(tokens[: n + 1]).strip())
        return tokens[: next(letters, -1) + 1]

    def _columns(self, one: Occurrence) -> list[int]:
        """The tokens of the source that stand for a term, at least one."""
        text = self.draft.begun.text
        places = stretches(self.model.source_tokenizer.surfaces(text), text)
        found = [n for n, (begin, end) in enumerate(places) if begin < one.end and one.begin < end]
        return found or [0]

    def _stands(self, form: Sequence[int], ids: Sequence[int], pieces: Sequence[str], place: int) -> bool:
        """Whether a form of a term stands at a place, as whole words."""
        end = place + len(form)
        if list(ids[place:end]) != list(form) or self.model.target_tokenizer.unknown_id in form:
            return False
        if place not in begins_of_units(pieces, self.fixed) and not pieces[place].isspace():
            return False
        is_word = is_spaced("".join(pieces[place:end]))
        return end == len(ids) or not is_word or bool(self.model.token_kinds.begins[ids[end]])

    def _banned(self) -> list[list[int]]:
        """The forms of the terms of which none is left to come."""
        coming = {one.term.target for one in self.left}
        done = {one.occurrence.term.target for one in self.placed} - coming
        forms = (form for target in sorted(done) for form in _forms(target, self.model.target_tokenizer))
        unknown = self.model.target_tokenizer.unknown_id
        return [list(form) for form in dict.fromkeys(map(tuple, forms)) if unknown not in form]


def _forms(target: str, codec: Codec) -> list[list[int]]:
    """The tokens of a term behind a space, and those without one."""
    return codec.encode_batch([f" {target}", target])


def _takes_space(text: str) -> bool:
    """Whether a space follows a text before the next word: not behind words of scripts without spaces."""
    begin, end = units(text)[-1]
    return is_spaced(text) or not is_word(text[begin:end])
