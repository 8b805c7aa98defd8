"""Translate sentences while they are being read: after each source word, as much is written as a policy allows."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import DataError
from regard.tasks.generation.filters import Progress
from regard.tasks.generation.protocol import log_probabilities, steps, worth_leaving
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.simultaneous.policies import ReadWritePolicy
from regard.tasks.translation.translator import Translator
from regard.tensors.topk import largest


@dataclass(frozen=True, slots=True)
class Interpreted:
    """One sentence in translation: the words read and written. It is handed on from word to word."""

    read: tuple[str, ...] = ()
    tokens_read: tuple[int, ...] = ()
    """How many tokens the source has up to each word."""
    has_ended: bool = False
    """Whether there are no more source words."""
    written: tuple[str, ...] = ()
    """The words of the translation; they never change again."""
    delays: tuple[int, ...] = ()
    """How many source words had been read when each of them was written."""
    tokens: tuple[int, ...] = ()
    """The tokens of these words."""
    is_cut_off: bool = False
    """Whether the translation reached the most tokens before its end."""

    @property
    def text(self) -> str:
        return " ".join(self.written)


class Interpreter:
    """Simultaneous translation by a policy; each word is the most probable one, given all words written before.

    A word of the translation is written only as a whole, and never taken back. After every source word the source is
    read again from its beginning (the encoder of a Transformer looks in both directions), and the translation goes on
    behind what was written.

    Args:
        translator: any translator; one trained on whole sentences will do.
        policy: says when to write.
        alignment: the attention that aligns words, for a policy that looks at it; that of the
            translator if None.
        max_length: the most tokens of a sentence, end mark counted; None means as many as the longest sentence in
            training had.

    Raises:
        ArgumentError: the model has no such layer.
    """

    def __init__(
        self,
        translator: Translator,
        policy: ReadWritePolicy,
        alignment: AlignmentOf | None = None,
        *,
        max_length: int | None = None,
    ) -> None:
        alignment = alignment or translator.alignment
        alignment.chosen(translator.model.alignment_names)
        self.translator, self.policy, self.alignment = translator, policy, alignment
        self.max_length = max_length

    def interpret(self, words: Iterable[str]) -> Iterator[Interpreted]:
        """Translate one sentence: its state after each of its words, and after its end.

        Raises:
            DataError: the sentence has more tokens than the model takes.
        """
        state = Interpreted()
        for word in words:
            (state,) = self.read([state], [word])
            yield state
        (state,) = self.finish([state])
        yield state

    def read(self, states: Sequence[Interpreted], words: Sequence[str]) -> list[Interpreted]:
        """Read one more word of each of several sentences, and write the words the policy accepts.

        Raises:
            DataError: a sentence has more tokens than the model takes.
        """
        longer = []
        for state, word in zip(states, words, strict=True):
            heard = (*state.read, word)
            (ids,) = self.translator.source_tokenizer.encode_batch([" ".join(heard)])
            if problem := self.translator.problem(ids, longest=self.max_length):
                raise DataError(f"the sentence has {problem}")
            longer.append(replace(state, read=heard, tokens_read=(*state.tokens_read, len(ids))))
        return self._write(longer)

    def finish(self, states: Sequence[Interpreted]) -> list[Interpreted]:
        """Say that several sentences have no more words, and write the rest of their translations."""
        return self._write([replace(state, has_ended=True) for state in states])

    # -- inside ------------------------------------------------------------------------------------------

    def _write(self, states: list[Interpreted]) -> list[Interpreted]:
        waiting = [n for n, state in enumerate(states) if state.read and self._may_write(state)]
        if not waiting:
            return states
        found = self._continued([states[n] for n in waiting])
        answers = list(states)
        for n, (tokens, aligned) in zip(waiting, found, strict=True):
            answers[n] = self._accepted(states[n], tokens, aligned)
        return answers

    def _may_write(self, state: Interpreted) -> bool:
        most = self.policy.most_words(len(state.read))
        return state.has_ended or most is None or len(state.written) < most

    def _continued(self, states: Sequence[Interpreted]) -> list[tuple[list[int], list[int]]]:
        """For each sentence the tokens that continue its translation, and the source word of each of these."""
        sources = self.translator.source_tokenizer.encode_batch([" ".join(state.read) for state in states])
        source, lengths, *_ = self.translator.collate(sources, [[] for _ in sources])
        with torch.inference_mode():
            written = self._greedy(states, source, lengths)
            aligned = self._aligned(states, source, lengths, written)
        return [
            (tokens[len(state.tokens) :], words[len(state.tokens) :])
            for state, tokens, words in zip(states, written, aligned, strict=True)
        ]

    def _greedy(self, states: Sequence[Interpreted], source: Tensor, lengths: Tensor) -> list[list[int]]:
        """The most probable tokens behind those written, and these too; an end mark ends them."""
        marks = self.translator.target_tokenizer.marks
        # A longer answer is surely wrong. The limit is a sentence's own, whatever is read beside it.
        own = [2 * length + 50 + len(state.tokens) for length, state in zip(lengths.tolist(), states, strict=True)]
        longest = max(own)
        limits: dict[str, Any] = {
            "bos_id": marks.begin_id,
            "eos_id": marks.end_id,
            "max_steps": min(longest, self.translator.model.max_length or longest),
        }
        found: list[list[int]] = [[] for _ in states]

        def take(logits: Tensor, progress: Progress) -> tuple[Tensor, Tensor]:
            gains = log_probabilities(logits, [], progress)
            rows = progress.sources.tolist()
            for place, row in enumerate(rows):
                # A limit on words says that one is due: then the end cannot be due before the source has ended.
                if not states[row].has_ended and self.policy.most_words(len(states[row].read)) is not None:
                    gains[place, marks.end_id] = -torch.inf
            best = largest(gains, 1)[:, 0].tolist()
            for place, row in enumerate(rows):
                given = states[row].tokens
                if len(found[row]) < len(given):
                    best[place] = given[len(found[row])]
                elif self._has_enough(states[row], found[row]):
                    best[place] = marks.end_id
            tokens = torch.tensor(best, device=logits.device)
            return tokens, gains.gather(1, tokens[:, None])[:, 0]

        model = self.translator.model
        state = model.start(source, lengths)
        for step in steps(model, state, source, **limits, choose=take, is_worth_leaving=worth_leaving):
            for row, token, ended in zip(step.rows.tolist(), step.tokens.tolist(), step.ended.tolist(), strict=True):
                if not ended:
                    found[row].append(token)
        return [tokens[:most] for tokens, most in zip(found, own, strict=True)]

    def _has_enough(self, state: Interpreted, ids: list[int]) -> bool:
        """Whether the words that may be written are there, with the token behind them, which shows that they end."""
        most = self.policy.most_words(len(state.read))
        if state.has_ended or most is None:
            return False
        return len(self.translator.target_tokenizer.decode(ids).split()) > most

    def _aligned(
        self, states: Sequence[Interpreted], source: Tensor, lengths: Tensor, written: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """The source word each token attends to most; marks are no words, however much they are attended to."""
        if not self.policy.looks_at_attention or all(state.has_ended for state in states):
            return [[0] * len(tokens) for tokens in written]
        target = self.translator.collate([[] for _ in written], [tokens[:-1] for tokens in written]).target_input
        maps = self.translator.model.attend(source, lengths, target)
        weights = self.alignment.of(maps, self.translator.model.alignment_names).cpu()
        answers = []
        for state, row, tokens in zip(states, weights, written, strict=True):
            best = row[: len(tokens), : state.tokens_read[-1]].argmax(-1).tolist()
            # A column belongs to the first word up to whose end it stands.
            answers.append([min(bisect_right(state.tokens_read, column), len(state.read) - 1) for column in best])
        return answers

    def _accepted(self, state: Interpreted, ids: list[int], aligned: list[int]) -> Interpreted:
        """Add the words that may be written to a sentence, up to the first that may not."""
        is_cut_off = state.has_ended and ids[-1:] != [self.translator.target_tokenizer.marks.end_id]
        state = replace(state, is_cut_off=is_cut_off)
        most = self.policy.most_words(len(state.read))
        for first, end, text in self._words(state, ids):
            is_free = state.has_ended
            within = most is None or len(state.written) < most
            if not is_free and not (within and self.policy.accepts(aligned[first:end], len(state.read))):
                break
            delays, kept = (*state.delays, len(state.read)), (*state.tokens, *ids[first:end])
            state = replace(state, written=(*state.written, text), delays=delays, tokens=kept)
        return state

    def _words(self, state: Interpreted, ids: list[int]) -> Iterator[tuple[int, int, str]]:
        """The complete words that tokens add to a translation: first token, token behind the last, and text.

        A word is complete where the next token begins with a space, and at the end mark. The end of a search that was
        cut off completes a word only if the source has ended.
        """
        codec, end_id = self.translator.target_tokenizer, self.translator.target_tokenizer.marks.end_id
        is_whole = ids[-1:] == [end_id]
        added = ids[:-1] if is_whole else ids
        begun = codec.decode(state.tokens)
        texts = [codec.decode([*state.tokens, *added[: n + 1]]) for n in range(len(added))]
        first, before = 0, begun
        for n, text in enumerate(texts):
            is_last = n + 1 == len(texts)
            if is_last:
                ends_here = is_whole or state.has_ended
            else:
                after = texts[n + 1]
                ends_here = after.startswith(text) and after[len(text) : len(text) + 1].isspace()
            word = text.removeprefix(before).strip()
            if ends_here and word:
                yield first, n + 1, word
                first, before = n + 1, text
