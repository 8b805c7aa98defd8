"""Lists of adjacent keys, so a nearest-neighbour search reads a few lists and not every key.

Source: inverted lists of a coarse quantizer without compression, Jégou, Douze and Schmid 2011 (Product quantization for
nearest neighbor search, section IV); the centres are those of Lloyd's algorithm (Lloyd 1982).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from regard.errors import ShapeError
from regard.tensors.topk import WIDE, largest

LISTS_PER_ROOT = 1.5
"""The number of lists is this times the square root of the number of keys."""
LOOKED_AT = 32
"""The lists read for a query, those with the nearest centres."""
LLOYD_ROUNDS = 6
"""The iterations of Lloyd's algorithm."""
SAMPLED_PER_LIST = 64
"""The keys it reads for each list."""
KEYS_TOGETHER = 1 << 12
"""The keys compared with all centres at a time."""
SCORES_HELD = 1 << 23
"""The most scores in memory at a time."""


class KeyLists(NamedTuple):
    """L lists of keys, one after the other."""

    centres: Float[Tensor, "L D"]
    sizes: Integer[Tensor, " L"]
    """The keys of each list, at least 1; their sum is E."""


def listed(keys: Float[Tensor, "E D"], *, seed: int = 0) -> tuple[Integer[Tensor, " E"], KeyLists]:
    """Sort keys into lists by their nearest centre.

    Returns:
        The order of the keys in their lists, and the lists.

    >>> keys = torch.tensor([[0.0], [9.0], [0.1], [9.1]])
    >>> order, lists = listed(keys)
    >>> sorted(order.tolist()), int(lists.sizes.sum())  # each key stands in one list
    ([0, 1, 2, 3], 4)
    """
    generator = torch.Generator().manual_seed(seed)
    count = min(max(round(LISTS_PER_ROOT * len(keys) ** 0.5), 1), len(keys))
    order = torch.randperm(len(keys), generator=generator)[: SAMPLED_PER_LIST * count].to(keys.device)
    sample = keys[order].float()
    centres = sample[:count].clone()
    for _ in range(LLOYD_ROUNDS):
        nearest = _nearest_centres(sample, centres)
        sizes = nearest.bincount(minlength=count)
        centres = torch.zeros_like(centres).index_add_(0, nearest, sample) / sizes.clamp_min(1)[:, None]
        empty = (sizes == 0).nonzero()[:, 0]
        again = torch.randint(len(sample), (len(empty),), generator=generator)
        centres[empty] = sample[again.to(keys.device)]
    nearest = _nearest_centres(keys, centres)
    sizes = nearest.bincount(minlength=count)
    return nearest.argsort(stable=True), KeyLists(centres[sizes > 0], sizes[sizes > 0])


def _nearest_centres(keys: Tensor, centres: Tensor) -> Tensor:
    half = 0.5 * centres.square().sum(-1)
    return torch.cat(
        [torch.addmm(half, some.float(), centres.mT, beta=-1).argmax(-1) for some in keys.split(KEYS_TOGETHER)]
    )


def nearest_in_lists(
    query: Float[Tensor, "N D"],
    keys: Float[Tensor, "E D"],
    half_squares: Float[Tensor, " E"],
    lists: KeyLists,
    count: int,
    *,
    looked_at: int = LOOKED_AT,
) -> tuple[Float[Tensor, "N K"], Integer[Tensor, "N K"]]:
    """The keys with the largest q . k - |k|^2 / 2 in the lists read for a query, and these values.

    Args:
        query: N queries.
        keys: in the order of their lists.
        half_squares: |k|^2 / 2 of each key.
        lists: the lists.
        count: K; if the lists have fewer keys, values of -inf with arbitrary indices follow.
        looked_at: the number of lists read for a query; with all of them the search is exact.
    """
    if count > len(keys) or int(lists.sizes.sum()) != len(keys):
        raise ShapeError(
            f"expected lists of all keys, and as many keys as are wanted; got {len(keys)} keys, {count} wanted, "
            f"and lists of {int(lists.sizes.sum())}"
        )
    looked_at = min(looked_at, len(lists.sizes))
    together = max(SCORES_HELD // (looked_at * int(lists.sizes.max())), 1)
    found = [_looked_for(rows, keys, half_squares, lists, count, looked_at) for rows in query.split(together)]
    scores, places = zip(*found, strict=True)
    return torch.cat(scores), torch.cat(places)


def _looked_for(
    query: Tensor, keys: Tensor, half_squares: Tensor, lists: KeyLists, count: int, looked_at: int
) -> tuple[Tensor, Tensor]:
    ends = lists.sizes.cumsum(0)
    half = 0.5 * lists.centres.square().sum(-1)
    # Entry n of `near` is for query n // looked_at. Those of one list take one product.
    near = largest(torch.addmm(half, query, lists.centres.mT, beta=-1), looked_at).flatten()
    order = near.argsort()
    which, how_often = near[order].unique_consecutive(return_counts=True)
    # Whole chunks: the remainder of `largest` at the end of a row would pass for more than -inf.
    widest = -(-max(int(lists.sizes[which].max()), -(-count // looked_at)) // WIDE) * WIDE
    scores = query.new_full((len(near), widest), -torch.inf)
    bounds = zip((ends - lists.sizes)[which].tolist(), ends[which].tolist(), strict=True)
    for (first, end), slots in zip(bounds, order.split(how_often.tolist()), strict=True):
        part = torch.addmm(half_squares[first:end], query[slots // looked_at], keys[first:end].mT, beta=-1)
        scores[slots, : end - first] = part
    flat = scores.view(len(query), -1)
    chosen = largest(flat, count)
    begins = (ends - lists.sizes)[near].view(len(query), looked_at)
    places = begins.gather(1, chosen // widest) + chosen % widest
    return flat.gather(-1, chosen), places.clamp_max(len(keys) - 1)
