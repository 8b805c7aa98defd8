"""Batches of sentences of similar length within a budget of tokens, in a resumable order divisible among ranks.

Large corpora are in sections that fit into memory.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.tasks.text.codec import UNPREDICTED, Marks

Integers = npt.NDArray[np.integer]
Indices = npt.NDArray[np.int64]

SECTION_ROWS = 2**20
"""The rows of a section. They bound the memory: about 100 bytes per row while their batches are planned."""
RUN_ROWS = 2**8
"""Neighbouring rows of a run, read from disk together."""


def sections(count: int, *, seed: int, epoch: int) -> Iterator[Indices]:
    """The rows 0 to count - 1 in sections, each row in one section. The random choice differs from epoch to epoch.

    Up to 2**20 rows are one section, in their order. If there are more, runs of 256 neighbours are shuffled, and a
    section consists of many such runs from all parts of the corpus. The memory holds one section, and 8 bytes for
    each run.
    """
    if count <= SECTION_ROWS:
        yield np.arange(count)
        return
    runs = np.random.default_rng([seed, epoch, 0, 1]).permutation(-(-count // RUN_ROWS))
    for chosen in np.array_split(runs, -(-len(runs) * RUN_ROWS // SECTION_ROWS)):
        rows = (chosen[:, None] * RUN_ROWS + np.arange(RUN_ROWS)).ravel()
        yield rows[rows < count]


OURS = Marks()


class Batch(NamedTuple):
    """B pairs as tensors of int64, padded at the end. S and T are the longest source and target."""

    source: Tensor
    """(B, S), each sentence followed by EOS."""
    source_lengths: Tensor
    """(B,), including EOS."""
    target_input: Tensor
    """(B, T): BOS, then the sentence. This is the input of the decoder."""
    target_output: Tensor
    """(B, T): the sentence, then EOS. The decoder has to predict this."""
    target_lengths: Tensor
    """(B,), including EOS."""

    @property
    def expected(self) -> Tensor:
        """target_output, with UNPREDICTED in place of padding, whose id may be that of a token."""
        places = torch.arange(self.target_output.shape[1], device=self.target_output.device)
        return self.target_output.masked_fill(places >= self.target_lengths[:, None], UNPREDICTED)

    @property
    def tokens(self) -> int:
        """Tokens of source and target_output without padding."""
        return int(self.source_lengths.sum() + self.target_lengths.sum())

    @property
    def padded_tokens(self) -> int:
        """All positions of source and target_output, including padding."""
        return self.source.numel() + self.target_output.numel()


def collate(
    sources: Sequence[Sequence[int]] | Sequence[Integers],
    targets: Sequence[Sequence[int]] | Sequence[Integers],
    *,
    source_marks: Marks = OURS,
    target_marks: Marks = OURS,
) -> Batch:
    """One batch of pairs of token lists. The lists have no special tokens; this function adds them.

    Raises:
        ArgumentError: there is no pair, or sources and targets differ in number.

    >>> batch = collate([[7, 8], [9]], [[5], [5, 6]])
    >>> batch.source.tolist(), batch.target_input.tolist(), batch.target_output.tolist()
    ([[7, 8, 2], [9, 2, 0]], [[1, 5, 0], [1, 5, 6]], [[5, 2, 0], [5, 6, 2]])
    >>> batch.tokens, batch.padded_tokens
    (10, 12)
    """
    if not len(sources) or len(sources) != len(targets):
        raise ArgumentError(f"expected as many sources as targets, got {len(sources)} and {len(targets)}")
    pad, begin, end = target_marks
    source, source_lengths = padded_rows(
        [[*sentence, source_marks.end_id] for sentence in sources], source_marks.pad_id
    )
    target_output, target_lengths = padded_rows([[*sentence, end] for sentence in targets], pad)
    target_input, _ = padded_rows([[begin, *sentence] for sentence in targets], pad)
    return Batch(source, source_lengths, target_input, target_output, target_lengths)


def plan_batches(
    source_lengths: Integers,
    target_lengths: Integers,
    *,
    max_tokens: int,
    seed: int,
    epoch: int,
    section: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> list[Indices]:
    """The batches of an epoch or of one section of it: each pair once, similar lengths together, batches shuffled.

    The result depends on the arguments alone, so an epoch and the number of finished batches are enough to resume.
    Pairs of the same lengths meet other pairs in every epoch. Padding grows with the spread of lengths in a batch: it
    is a few percent for a hundred batches or more an epoch, and far above for only a few.

    Args:
        source_lengths: the tokens of each source without special tokens, shape (pairs,).
        target_lengths: the same for each target.
        max_tokens: the most positions of a batch in source and target, including EOS and padding; with several ranks,
            of their batches together.
        seed: decides the shuffling, together with the epoch.
        epoch: the number of the pass over the data, from 0.
        section: the part of the pass with these pairs, from 0.
        rank: the share of every batch to return.
        world_size: the number of shares. Batch k of all ranks together equals batch k of a single rank.

    Returns:
        For each batch, the pairs of this rank, shape (pairs of the batch,).

    Raises:
        ArgumentError: one pair alone exceeds the budget, or a batch has fewer pairs than there are ranks.

    >>> lengths = np.array([5, 2, 5, 2])
    >>> [sorted(batch.tolist()) for batch in plan_batches(lengths, lengths, max_tokens=24, seed=0, epoch=0)]
    [[0, 2], [1, 3]]
    """
    source, target = _with_end(source_lengths), _with_end(target_lengths)
    _check_budget(source, target, max_tokens)
    generator = np.random.default_rng([seed, epoch, section] if section else [seed, epoch])
    order = _by_length(source, target, generator)
    cuts = _cuts(source[order], target[order], max_tokens)
    batches = np.split(order, cuts)
    shuffled = [batches[k] for k in generator.permutation(len(batches))]
    return _share(shuffled, rank, world_size)


def padded_rows(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    lengths = [len(row) for row in rows]
    filled = np.full((len(rows), max(lengths)), pad_id, np.int64)
    for place, row in zip(filled, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(filled), torch.tensor(lengths)


def _with_end(lengths: Integers) -> npt.NDArray[np.int64]:
    return lengths.astype(np.int64) + 1


def _check_budget(source: Integers, target: Integers, max_tokens: int) -> None:
    if not len(source):
        raise ArgumentError("expected at least one pair to make batches of, got none; give more text")
    longest = int(np.argmax(source + target))
    if source[longest] + target[longest] > max_tokens:
        raise ArgumentError(
            f"expected every pair to fit max_tokens={max_tokens}, but pair {longest} has {source[longest]} source "
            f"and {target[longest]} target tokens; raise max_tokens (--batch-tokens) or leave out such long pairs"
        )


def _by_length(source: Integers, target: Integers, generator: np.random.Generator) -> Indices:
    """Sorted by source length, longest first; within it by target length, ascending and descending in turn. The turns
    avoid jumps of the target length where the source length changes. Ties are in random order."""
    in_turn = np.where(source % 2 == 0, target, -target)
    return np.lexsort((generator.random(len(source)), in_turn, -source))


def _cuts(source: Integers, target: Integers, max_tokens: int) -> list[int]:
    cuts = []
    start, longest_source, longest_target = 0, 0, 0
    for i, (s, t) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        longest_source, longest_target = max(longest_source, s), max(longest_target, t)
        if (i + 1 - start) * (longest_source + longest_target) > max_tokens:
            cuts.append(i)
            start, longest_source, longest_target = i, s, t
    return cuts and _level_last(cuts, source, target, max_tokens)


def _level_last(cuts: list[int], source: Integers, target: Integers, max_tokens: int) -> list[int]:
    """Divide the last two batches evenly: a last batch of one pair could not be divided among ranks."""
    start = cuts[-2] if len(cuts) > 1 else 0
    middle = (start + len(source)) // 2
    places = (len(source) - middle) * (source[middle:].max() + target[middle:].max())
    return [*cuts[:-1], middle] if middle < cuts[-1] and places <= max_tokens else cuts


def _share(batches: list[Indices], rank: int, world_size: int) -> list[Indices]:
    smallest = min(map(len, batches))
    if not 0 <= rank < world_size or smallest < world_size:
        raise ArgumentError(
            f"expected rank {rank} to be one of {world_size} and each to get a pair of every batch, "
            f"but the smallest batch has {smallest} pairs; raise max_tokens (--batch-tokens) or start fewer ranks"
        )
    return [batch[rank::world_size] for batch in batches]
