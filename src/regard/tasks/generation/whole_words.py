"""A constraint for forced words: keeps them whole, and their number."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from regard.tasks.generation.filters import Progress


@dataclass(frozen=True, slots=True, eq=False)
class WholeWords:
    """Text after a forced prefix neither lengthens its last word nor repeats certain words.

    A word is complete when its tokens are consecutive and followed by a token that begins a word or sign. Where no
    token can lengthen a word, its last token is banned instead.

    >>> kinds = torch.tensor([[True, False, True], [False, True, False], [False] * 3])
    >>> rule = WholeWords([1], [True], [[]], [[]], *kinds)
    >>> rule.allowed(Progress(torch.tensor([0]), torch.tensor([[1]])), 3)
    tensor([[ True, False,  True]])
    """

    lengths: Sequence[int]
    """How many tokens the forced prefix of each source has."""
    is_word: Sequence[bool]
    """True for prefixes ending with a word that could be lengthened."""
    banned: Sequence[Sequence[Sequence[int]]]
    """For each source the words banned after its prefix, as tokens."""
    avoided: Sequence[Sequence[int]]
    """For each source the token sequence banned directly after its prefix; empty for none."""
    begins: Bool[Tensor, " V"]
    """Tokens that begin a word or sign, and the end mark."""
    lengthens: Bool[Tensor, " V"]
    """Tokens that continue the word before them. Control tokens are in neither set."""
    closes: Bool[Tensor, " V"]
    """Tokens that end a word: with a space or a sign."""

    def allowed(self, progress: Progress, vocab_size: int) -> Bool[Tensor, "N V"]:
        step, device = progress.tokens.shape[1], progress.sources.device
        begins = self.begins.to(device)
        free = torch.ones(len(progress.sources), vocab_size, dtype=torch.bool, device=device)
        for row, (source, tokens) in enumerate(zip(progress.sources.tolist(), progress.tokens.tolist(), strict=True)):
            length = self.lengths[source]
            if step == length and self.is_word[source]:
                free[row] &= begins
            if step < length:
                continue
            avoided = list(self.avoided[source])
            if avoided and tokens[length:] == avoided[:-1]:
                free[row, avoided[-1]] = False
            for word in self.banned[source]:
                self._ban(free[row], tokens[max(length - 1, 0) :], list(word), behind=length > 0)
        return free

    def _ban(self, free: Tensor, tokens: list[int], word: list[int], *, behind: bool) -> None:
        """Ban the end of a word; `tokens` are those generated, after one of the prefix if `behind`."""
        lengthens = self.lengthens.to(free.device)
        can_be_longer = bool(lengthens.any()) and not bool(self.closes[word[-1]])
        done = word if can_be_longer else word[:-1]
        at = len(tokens) - len(done)
        if at < int(behind) or tokens[at:] != done:
            return
        before = tokens[at - 1] if at else None
        is_apart = bool(self.begins[word[0]]) or before is None or bool(self.closes[before])
        if not is_apart:
            return
        if can_be_longer:
            free &= lengthens
        else:
            free[word[-1]] = False
