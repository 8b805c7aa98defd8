"""The k largest elements of each row, faster than `torch.topk`, which reads a row element by element.

The k largest elements lie in the k chunks with the largest maxima. So the chunks are chosen first, by vectorized
maxima, and then the elements among them, in the same way. Few short rows end in `torch.topk`, many in NumPy's
vectorized sort, with each element and its index packed into one float64.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.tensors.guards import can_look

MANY = 64
"""From this number of rows on, a further choice of chunks saves more than its calls of torch cost."""
CHUNKS = {1024: 32, 128: 8}
"""Chunk sizes for many rows (powers of 2), by the shortest row length for each."""
WIDE = 64
"""Chunk size for few rows, for rows in groups, and for k = 1."""
FEW = 1 << 16
"""From this number of elements on, wide chunks save more than their calls of torch cost."""
FEW_IN_GROUPS = 3 << 13
"""The same for rows in groups with k > 1: 5 rows of 8,000 take 67 us, not 114."""
SORTED = 256
ABOVE = 2.0**128
"""Above any finite float32."""
PLACE = (1 << 29) - 1
"""The bits of a float64 left free by a float32: they hold an index."""


class Candidates(NamedTuple):
    """Chunks of neighbours that hold the k largest elements of each row."""

    values: Tensor
    """(rows, chunks * c): their elements."""
    first: Tensor
    """(rows, chunks): the index of each chunk's first element."""


def largest(values: Tensor, k: int) -> Tensor:
    """The indices of the k largest along the last dimension, the largest first. Exact, without gradient.

    For k = 1, the first of equal elements.

    >>> largest(torch.tensor([[3.0, 1.0, 4.0, 1.5]]), 2)
    tensor([[2, 0]])
    """
    rows = values.detach().reshape(-1, values.shape[-1])
    return _places(rows, k).view(*values.shape[:-1], k)


def largest_of_groups(
    values: Float[Tensor, "N V"], offsets: Float[Tensor, "G M"], k: int
) -> tuple[Float[Tensor, "G C"], Int[Tensor, "G C"]]:
    """The k largest of the M * V elements of each group, the largest first, and their indices in the group.

    A group has M rows, each with an offset added to all its elements; only candidates are summed. C is k, or M * V if
    less.

    >>> values, places = largest_of_groups(torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([[0.0, 4.0]]), 2)
    >>> values, places
    (tensor([[7., 6.]]), tensor([[3, 2]]))
    """
    (groups, members), length = offsets.shape, values.shape[-1]
    k, count = min(k, members * length), length // WIDE
    if values.numel() < FEW_IN_GROUPS or members * count < 2 * k:
        return _top(torch.add(values.view(groups, members, -1), offsets[..., None]).view(groups, -1), k)
    chunks, offset = values[:, : count * WIDE].unflatten(1, (count, WIDE)), offsets.reshape(-1, 1)
    _, chosen = _top((chunks.amax(-1) + offset).view(groups, -1), k)
    member, chunk = chosen // count, chosen % count
    row = torch.arange(0, groups * members, members, device=values.device)[:, None] + member
    found = (chunks[row, chunk] + offsets.gather(1, member)[..., None]).view(groups, -1)
    rest, first = length % WIDE, member * length + chunk * WIDE
    if rest:
        # The remainder after the last full chunk is always a candidate.
        found = torch.cat([found, (values[:, -rest:] + offset).view(groups, -1)], 1)
    top, where = _top(found, k)
    places = first.gather(1, (where // WIDE).clamp(max=k - 1)) + where % WIDE
    if rest:
        behind = where - k * WIDE
        places = torch.where(behind < 0, places, (behind // rest + 1) * length - rest + behind % rest)
    return top, places


def candidates(rows: Tensor, k: int) -> Candidates:
    """The k chunks of each row (rows, n) with the largest maxima; a short row is one chunk."""
    length, chunk = rows.shape[-1], _chunk_size(rows.shape[0], rows.shape[-1], k)
    if not chunk:
        return Candidates(rows, torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device))
    count = length // chunk
    chosen = _places(_chunk_maxima(rows[:, : count * chunk], chunk), k)
    values, first = _chunks(rows, chunk, chosen), chosen * chunk
    if rest := length - count * chunk:
        # The remainder after the last full chunk is always a candidate.
        tail = torch.nn.functional.pad(rows[:, -rest:], (0, chunk - rest), value=torch.finfo(rows.dtype).min)
        first = torch.nn.functional.pad(first, (0, 1), value=length - rest)
        values = torch.cat([values, tail], -1)
    return Candidates(values, first)


def places_of(found: Candidates, where: Tensor) -> Tensor:
    """The indices in the original rows of the candidates `where` (rows, k)."""
    if found.first.shape[-1] == 1:
        return found.first + where
    bits = (found.values.shape[-1] // found.first.shape[-1]).bit_length() - 1
    return found.first.gather(-1, where >> bits) + (where & (1 << bits) - 1)


def _places(rows: Tensor, k: int) -> Tensor:
    if not _chunk_size(rows.shape[0], rows.shape[-1], k):
        return _sorted(rows, k) if _is_sortable(rows, k) else _top(rows, k)[1]
    found = candidates(rows, k)
    return places_of(found, _places(found.values, k))


def _chunk_size(rows: int, length: int, k: int) -> int:
    """Chunk size for these rows; 0 to read whole rows."""
    if rows < MANY or k == 1:
        return WIDE if rows * length >= FEW and length // WIDE >= 2 * k else 0
    return next((chunk for above, chunk in CHUNKS.items() if length > above and length // chunk >= 2 * k), 0)


def _chunk_maxima(rows: Tensor, chunk: int) -> Tensor:
    """The maximum of each chunk, by pooling: `amax` along a short dimension is slow."""
    if chunk < 32:
        return torch.nn.functional.max_pool1d(rows[None], chunk)[0]
    return rows.unflatten(-1, (-1, chunk)).amax(-1)


def _chunks(rows: Tensor, chunk: int, chosen: Tensor) -> Tensor:
    count = rows.shape[-1] // chunk
    if rows.shape[-1] == count * chunk and rows.is_contiguous():
        starts = torch.arange(0, len(rows) * count, count, device=rows.device)[:, None]
        return rows.view(-1, chunk).index_select(0, (starts + chosen).view(-1)).view(len(rows), -1)
    # Slower, but without a copy of all rows.
    each = torch.arange(len(rows), device=rows.device)[:, None]
    return rows[:, : count * chunk].unflatten(-1, (count, chunk))[each, chosen].flatten(1)


def _top(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return rows.max(-1, keepdim=True) if k == 1 else rows.topk(k, -1)


def _is_sortable(rows: Tensor, k: int) -> bool:
    """Whether `_sorted` can order the rows, and faster than `_top`."""
    is_short = rows.shape[-1] <= SORTED and rows.dtype == torch.float32
    return k > 1 and is_short and len(rows) >= MANY and can_look(rows)


def _sorted(rows: Tensor, k: int) -> Tensor:
    # Infinity has no free bits for an index.
    packed = rows.double().nan_to_num_(nan=ABOVE, posinf=ABOVE, neginf=-ABOVE)
    packed.view(torch.int64).bitwise_or_(torch.arange(rows.shape[-1]))
    packed.numpy().sort(-1)
    return packed[:, -k:].flip(-1).view(torch.int64).bitwise_and_(PLACE)
