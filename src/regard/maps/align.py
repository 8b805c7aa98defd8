"""Align queries and keys in one order by their weights: the frames of a sound by token.

`dtw` follows heads with monotonic attention, such as cross-attention in speech recognition.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.errors import ArgumentError, NonFiniteError, ShapeError
from regard.lazy import Displayed
from regard.maps.attention_map import AttentionMap
from regard.tensors.memory import widest_dtype

BLOCK_NUMBERS = 1 << 23
"""The most weights of all heads in memory at once: 32 MiB in float32."""
Costs = npt.NDArray[np.float32]
DIAGONAL, DOWN, RIGHT = 0, 1, 2
"""The previous step of a path: the query before and the key before, the query before, or the key before."""


@dataclass(frozen=True, slots=True, eq=False)
class Alignment(Displayed):
    """A monotonic path through a map: each query has a range of keys."""

    first: Tensor
    """The first key of each query, (batch..., T), int64. It never falls, and is 0 for query 0."""
    last: Tensor
    """The last key of each query, (batch..., T), int64; S - 1 for the last query."""

    def path(self) -> tuple[Tensor, Tensor]:
        """The queries and the keys along the path of one map, in order.

        Raises:
            ShapeError: there are the alignments of several maps.
        """
        if self.first.dim() != 1:
            raise ShapeError(
                f"path() is that of one map, and these are alignments {tuple(self.first.shape[:-1])}: index them first"
            )
        counts = self.last - self.first + 1
        queries = torch.arange(len(counts)).repeat_interleave(counts)
        before = (counts.cumsum(0) - counts)[queries]
        return queries, torch.arange(len(queries)) - before + self.first[queries]

    def __str__(self) -> str:
        if self.first.dim() != 1:
            return repr(self)
        ends = zip(self.first.tolist(), self.last.tolist(), strict=True)
        lines = [f"{query:>5}  {one}{f' to {other}' if other > one else ''}" for query, (one, other) in enumerate(ends)]
        return "\n".join(["query  keys", *lines])

    def __getitem__(self, index: int) -> "Alignment":
        if self.first.dim() < 2:
            raise ShapeError("this is the alignment of one map, which has no other to choose")
        return Alignment(self.first[index], self.last[index])


@dataclass(frozen=True, slots=True)
class Standardized:
    r"""The scores of Whisper: the weight of a query on a key relative to other queries.

    $z_{hij} = (P_{hij} - \mu_{hj}) / \sigma_{hj}$ with the mean and the standard deviation over queries; then the
    median over `median` neighbouring keys (reflected at both ends; without effect if there are no more than half as
    many keys); then the mean over heads. Where all queries have equal weights on a key, z is 0.

    Source: OpenAI's Whisper, `whisper/timing.py`, `find_alignment`; transformers, `_extract_token_timestamps`.
    """

    median: int = 7
    """The odd width of the median filter; 1 for none."""

    def __post_init__(self) -> None:
        if self.median < 1 or self.median % 2 == 0:
            raise ArgumentError(f"the median is over an odd number of neighbouring keys, got {self.median}")


def dtw(weights: AttentionMap | Tensor, scores: Standardized | None = Standardized()) -> Alignment:
    r"""Dynamic time warping: the path from the first query and key to the last with the largest sum of scores.

    $D_{ij} = -s_{ij} + \min(D_{i-1,j-1}, D_{i-1,j}, D_{i,j-1})$, with scores $s$ of the weights. Costs are summed in
    float32 and compared as in Whisper's own code, for the same path: ties go to the key before, also if the two from
    the query before are equal to one another and better.

    Args:
        weights: a map, or its rows, (batch..., H, T, S) or (T, S): heads with monotonic attention. Choose them
            beforehand (`map.only(heads=...)`, or `torch.stack` of heads of several layers), and leave out unordered
            queries and keys, such as prompts and padding (`rows=`, `columns=`).
        scores: from the heads to one matrix of scores; by default the mean of their weights.

    Returns:
        The first and the last key of each query, (batch..., T). No gradient flows to the weights.

    The time grows as T S; the memory as S sqrt(T), since rows are recomputed in the backtracking.

    Raises:
        ArgumentError: the weights are neither a map nor a tensor of floating-point numbers.
        ShapeError: there is no query or no key.
        NonFiniteError: weights are NaN or infinite.
        NotKeptError: the map has statistics only.

    Source: Sakoe & Chiba 1978, without a constraint of the slope; for the times of words: Radford et al. 2022 (Whisper,
    arXiv:2212.04356) and its code.

    >>> weights = torch.tensor([[0.9, 0.8, 0.1, 0.0], [0.1, 0.2, 0.9, 0.1], [0.0, 0.0, 0.0, 0.9]])
    >>> found = dtw(weights, Standardized(median=1))
    >>> found.first, found.last
    (tensor([0, 2, 3]), tensor([1, 2, 3]))
    """
    if not isinstance(weights, AttentionMap) and not (isinstance(weights, Tensor) and weights.is_floating_point()):
        kind = f"a tensor of {weights.dtype}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ArgumentError(f"dtw() aligns by a map, or by a tensor of weights, got {kind}")
    if len(weights.shape) < 2 or 0 in weights.shape:
        raise ShapeError(
            f"dtw() needs weights (batch..., H, T, S) or (T, S) with a query and a key, got {tuple(weights.shape)}"
        )
    batch = tuple(weights.shape[:-3])
    with torch.no_grad():
        found = [_aligned(weights[index] if batch else weights, scores) for index in product(*map(range, batch))]
    first, last = (torch.stack(ends).reshape(*batch, -1) for ends in zip(*found, strict=True))
    return Alignment(first, last)


def _aligned(weights: AttentionMap | Tensor, scores: Standardized | None) -> tuple[Tensor, Tensor]:
    queries, keys = weights.shape[-2:]
    heads = math.prod(weights.shape[:-2])
    step = min(queries, max(BLOCK_NUMBERS // (heads * keys), math.isqrt(queries - 1) + 1))
    blocks = [range(start, min(start + step, queries)) for start in range(0, queries, step)]
    costs_of = _costs(weights, scores, blocks)
    # The forward sweep stores only the costs at the borders of blocks.
    border = np.full(keys + 1, np.inf, dtype=np.float32)
    border[0] = 0.0
    borders = [border]
    costs = np.empty((0, keys))
    for rows in blocks:
        costs = costs_of(rows)
        if rows is not blocks[-1]:
            borders.append(_swept(costs, borders[-1], None))
    first, last = np.empty(queries, dtype=np.int64), np.empty(queries, dtype=np.int64)
    key = keys - 1
    for rows, above in zip(reversed(blocks), reversed(borders), strict=True):
        costs = costs if rows is blocks[-1] else costs_of(rows)
        origins = np.empty(costs.shape, dtype=np.uint8)
        _swept(costs, above, origins)
        key = _followed_back(origins, rows.start, key, first, last)
    return torch.from_numpy(first), torch.from_numpy(last)


def _costs(
    weights: AttentionMap | Tensor, scores: Standardized | None, blocks: list[range]
) -> Callable[[range], npt.NDArray[np.float64]]:
    """A function from rows to their costs (t, S)."""

    def heads_of(rows: range) -> Tensor:
        if isinstance(weights, AttentionMap):
            block = weights.block(rows, range(weights.shape[-1]))
        else:
            block = weights[..., rows.start : rows.stop, :]
        block = block.reshape(-1, *block.shape[-2:])
        if not block.isfinite().all():
            raise NonFiniteError(
                f"dtw() needs finite weights, and some of queries {rows.start} to {rows.stop - 1} are NaN or infinite"
            )
        return block.float() if block.dtype in (torch.float16, torch.bfloat16) else block

    if scores is None:
        return lambda rows: _costs_of(heads_of(rows))
    mean, deviation = _moments(heads_of, blocks)

    def costs_of(rows: range) -> npt.NDArray[np.float64]:
        block = heads_of(rows)
        standard = ((block - mean.to(block.dtype)) / deviation.to(block.dtype)).masked_fill(deviation == 0, 0.0)
        return _costs_of(_median_over_keys(standard, scores.median))

    return costs_of


def _costs_of(scores: Tensor) -> npt.NDArray[np.float64]:
    costs: npt.NDArray[np.float64] = -scores.mean(0).double().cpu().numpy()
    return costs


def _moments(heads_of: Callable[[range], Tensor], blocks: list[range]) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation over queries, (H, 1, S); of several blocks, in float64: the median filter
    makes equal neighbours, where the last bit of a score may decide, and one block is scored to the bit as in
    transformers."""
    if len(blocks) == 1:
        deviation, mean = torch.std_mean(heads_of(blocks[0]), dim=-2, keepdim=True, unbiased=False)
        return mean, deviation
    count = blocks[-1].stop
    sums = (wide.sum(-2, keepdim=True, dtype=widest_dtype(wide.device)) for wide in map(heads_of, blocks))
    mean = sum(sums, start=torch.zeros((), device="cpu")) / count
    squares = ((heads_of(rows) - mean).square().sum(-2, keepdim=True) for rows in blocks)
    return mean, (sum(squares, start=torch.zeros((), device="cpu")) / count).sqrt()


def _median_over_keys(scores: Tensor, width: int) -> Tensor:
    half = width // 2
    if half == 0 or scores.shape[-1] <= half:
        return scores
    return torch.nn.functional.pad(scores, (half, half), mode="reflect").unfold(-1, width, 1).median(-1).values


def _swept(costs: npt.NDArray[np.float64], above: Costs, origins: npt.NDArray[np.uint8] | None) -> Costs:
    """Accumulate the costs (t, S) of some rows along the best paths, one antidiagonal at a time.

    `above` are the sums (S + 1,) of the row before them, the first that of no key; the result are those of the last
    row. `origins` (t, S) takes the best previous steps.
    """
    rows, keys = costs.shape
    costs, step = np.ascontiguousarray(costs).reshape(-1), max(keys - 1, 1)
    trace = None if origins is None else origins.reshape(-1)
    below = np.full(keys + 1, np.inf, dtype=np.float32)
    # Sums by row, where row 0 is the one above: of this antidiagonal, and of the two before it.
    now, before, earlier = (np.full(rows + 1, np.inf, dtype=np.float32) for _ in range(3))
    for diagonal in range(rows + keys + 1):
        now, before, earlier = earlier, now, before
        now.fill(np.inf)
        if diagonal <= keys:
            now[0] = above[diagonal]
        low, high = max(1, diagonal - keys), min(rows, diagonal - 1)  # rows with keys in 1..S
        if low > high:
            continue
        here, up = slice(low, high + 1), slice(low - 1, high)
        both, from_query, from_key = earlier[up], before[up], before[here]
        # These are the comparisons of Whisper's code: where the two from the query before are equal, neither is taken.
        is_diagonal = (both < from_query) & (both < from_key)
        start = (low - 1) * keys + diagonal - low - 1
        places = slice(start, start + (high - low) * step + 1, step)
        is_down = (from_query < both) & (from_query < from_key)
        now[here] = costs[places] + np.where(is_diagonal, both, np.where(is_down, from_query, from_key))
        if trace is not None:
            trace[places] = np.where(is_diagonal, DIAGONAL, np.where(is_down, DOWN, RIGHT))
        if high == rows:
            below[diagonal - rows] = now[rows]
    return below


def _followed_back(
    origins: npt.NDArray[np.uint8], start: int, key: int, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
) -> int:
    for row in range(len(origins) - 1, -1, -1):
        last[start + row] = key
        while origins[row, key] == RIGHT and key > 0:
            key -= 1
        first[start + row] = key
        key -= int(origins[row, key] == DIAGONAL)
    return key
