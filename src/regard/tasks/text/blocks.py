"""Blocks of running text for language models, in a resumable order divisible among ranks."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.tasks.text.batches import Integers, sections
from regard.tasks.text.codec import UNPREDICTED
from regard.tasks.text.tokenizers import BOS, PAD

BEGIN_ONE_IN = 16
"""Of the blocks within a document, one in this many has BOS in place of its first token. The model thus learns to begin
anywhere: a generated text need not begin like a document of the corpus."""


class TextBatch(NamedTuple):
    """B rows of running text as tensors of int64."""

    tokens: Tensor
    """(B, T), padded at the end."""
    targets: Tensor
    """(B, T): the token to be predicted at each position; UNPREDICTED where none is."""


class TextWindow(NamedTuple):
    """A stretch of text and the tokens to be predicted in it, as arrays of the same length."""

    tokens: Integers
    targets: Integers


class TextBlocks(NamedTuple):
    tokens: npt.NDArray[np.int64]
    """(B, T)."""
    seeds: npt.NDArray[np.int64]
    """(B,), from 0 to 2**32 - 1."""


class BlockPlan:
    """Blocks of `length + overlap` tokens, split anew and shuffled in every epoch, with a share for each rank.
    `batch_tokens` are those of all ranks together.

    An epoch splits the text from a random position, so that no token is always last in a block. The rest at both ends
    is unused in that epoch, and so is an incomplete last batch. More than a million blocks are shuffled in sections
    (`regard.tasks.text.batches`), each with its own last batch.
    """

    def __init__(
        self,
        ids: Integers,
        *,
        length: int,
        overlap: int,
        batch_tokens: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(ids) < length + overlap:
            raise ArgumentError(
                f"the text has {len(ids)} tokens, and a block needs {length + overlap}: give more text or lower "
                "--block-length"
            )
        self.tokens, self.length, self.overlap = ids, length, overlap
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.rows = min(max(batch_tokens // length, 1), (len(ids) - overlap) // length)
        if not 0 <= rank < world_size or self.rows < world_size:
            raise ArgumentError(
                f"expected rank {rank} to be one of {world_size} and each to get a block of every batch, but a batch "
                f"has {self.rows}: raise --batch-tokens or start fewer ranks"
            )

    def epoch(self, epoch: int, start: int) -> Iterator[TextBlocks]:
        """The blocks of this rank in each batch, beginning with the batch at index `start`."""
        generator, phase, count = self._cut(epoch)
        for number, blocks in enumerate(sections(count, seed=self.seed, epoch=epoch)):
            batches = len(blocks) // self.rows
            if start < batches:
                drawing = np.random.default_rng([self.seed, epoch, number]) if number else generator
                yield from self._of_section(phase + self.length * blocks, start, drawing)
            start = max(start - batches, 0)

    def count(self) -> int:
        _, _, count = self._cut(0)
        return sum(len(blocks) // self.rows for blocks in sections(count, seed=self.seed, epoch=0))

    def _cut(self, epoch: int) -> tuple[np.random.Generator, int, int]:
        generator = np.random.default_rng([self.seed, epoch])
        spare = len(self.tokens) - self.overlap - self.rows * self.length
        phase = int(generator.integers(min(self.length, spare + 1)))
        return generator, phase, (len(self.tokens) - self.overlap - phase) // self.length

    def _of_section(
        self, begins: npt.NDArray[np.int64], start: int, generator: np.random.Generator
    ) -> Iterator[TextBlocks]:
        order = generator.permutation(begins)
        seeds = generator.integers(2**32, size=len(begins))
        for at in range(start * self.rows, len(begins) - self.rows + 1, self.rows):
            mine = slice(at + self.rank, at + self.rows, self.world_size)
            tokens = [self.tokens[begin : begin + self.length + self.overlap] for begin in order[mine]]
            yield TextBlocks(np.stack(tokens).astype(np.int64), seeds[mine])


def next_tokens(blocks: TextBlocks) -> TextBatch:
    """All tokens but the last as input, and the token after each of them as target; one block in sixteen gets BOS."""
    tokens = blocks.tokens[:, :-1].copy()
    tokens[blocks.seeds % BEGIN_ONE_IN == 0, 0] = BOS
    return TextBatch(torch.from_numpy(tokens), torch.from_numpy(_without_marks(blocks.tokens[:, 1:], BOS)))


def next_token_windows(ids: Integers, *, length: int, stride: int, begin_id: int | None = None) -> Iterator[TextWindow]:
    """Windows of at most `length` tokens that predict every token but the first exactly once.

    A window begins `stride` tokens after the last one, and predicts the tokens after the last one's end. A smaller
    stride gives each predicted token more context. `begin_id` is the mark that begins each document in a row of
    several, and that is not predicted; None predicts every token.
    """
    if not 1 <= stride <= length:
        raise ArgumentError(f"the stride must be from 1 to {length}, the length of a window, got {stride}")
    done = 1
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids) - 1)
        if end < done:
            return
        targets = np.asarray(ids[begin + 1 : end + 1]).astype(np.int64)
        targets[: done - begin - 1] = UNPREDICTED
        yield TextWindow(np.asarray(ids[begin:end]).astype(np.int64), _without_marks(targets, begin_id))
        done = end + 1


def window_batches(windows: Iterable[TextWindow], *, places: int) -> Iterator[TextBatch]:
    """Windows in their order, padded at the end; as many in one batch as `places` allows, but at least one."""
    iterator = iter(windows)
    rows: list[TextWindow] = []
    for window in iterator:
        longest = max([len(window.tokens), *(len(row.tokens) for row in rows)])
        if rows and (len(rows) + 1) * longest > places:
            yield _padded(rows)
            rows = []
        rows.append(window)
    if rows:
        yield _padded(rows)


def _padded(rows: list[TextWindow]) -> TextBatch:
    width = max(len(row.tokens) for row in rows)
    tokens, targets = (np.full((len(rows), width), value, np.int64) for value in (PAD, UNPREDICTED))
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens)], targets[place, : len(row.targets)] = row
    return TextBatch(torch.from_numpy(tokens), torch.from_numpy(targets))


def _without_marks(targets: Integers, begin_id: int | None) -> Integers:
    # The place where a document begins follows from the end of the last document, so there is nothing to learn.
    return targets if begin_id is None else np.where(targets == begin_id, UNPREDICTED, targets)
