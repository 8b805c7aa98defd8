"""Which map is which of a model's own weights, and how far it is from them."""

from collections import Counter
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from regard.maps.attention_map import AttentionMap

TOLERANCE = 1e-5


def distance(weights: AttentionMap, own: Tensor, keep: Tensor | None) -> tuple[float, int]:
    """The largest error of a map outside rows that have no key or are padding, and how many others have no key."""
    dense = weights.dense()
    if dense.numel() > own.numel():
        dense = dense[..., -own.shape[-2] :, -own.shape[-1] :]
    if own.dim() == 4 and dense.numel() == own.numel() and bool((own == own[:, :1]).all()):
        dense = dense.mean(1, keepdim=True).expand(own.shape)  # WavLM reports the mean of its heads in each
    # Hiera and Reformer have heads of windows where a map has windows of heads.
    orders = [(0, *order) for order in permutations(range(1, dense.dim() - 2))] if dense.dim() > 4 else []
    alike = [one for order in orders if (one := dense.permute(*order, -2, -1)).shape == own.shape]
    dense = min(alike or [dense.reshape(own.shape)], key=lambda one: float((one - own).abs().nan_to_num(9.0).max()))
    if keep is not None and own.dim() == 4 and (own.shape[0], own.shape[-2]) == keep.shape:
        # What such a query is made of may differ: a row without keys is even in eager, and 0 in other kernels.
        dense, own = dense * keep[:, None, :, None], own * keep[:, None, :, None]
    dead = (dense == 0).all(-1) & (own != 0).any(-1)
    return float((dense - own).abs().masked_fill(dead[..., None], 0).nan_to_num(9.0).max()), int(dead.sum())


def compared(maps: list[AttentionMap], own: list[Tensor], keep: Tensor | None) -> dict[str, Any]:
    """Each of a model's own weights with the map that equals it; what equals none, with the nearest of its shape.

    Args:
        maps: the maps, in any order.
        own: the weights (B, H, T, S) that the model shows.
        keep: (B, T), which queries are no padding.
    """
    left, rest, found = list(maps), list(own), list[tuple[float, int]]()

    def take(weights: list[Tensor], of: Tensor, candidates: list[AttentionMap], limit: float) -> None:
        nearest = min(((*distance(m, of, keep), n) for n, m in enumerate(candidates)), default=None)
        if nearest is not None and nearest[0] <= limit:
            left[:] = [m for m in left if m is not candidates[nearest[2]]]
            rest[:] = [x for x in rest if not any(x is w for w in weights)]
            found.extend([nearest[:2]] * len(weights))

    for weights in own:
        take([weights], weights, _alike(left, weights), TOLERANCE)
    # T5Gemma 2 attends to its own tokens and the encoder's in one softmax, and reports two parts of it.
    for one, other in permutations(list(rest), 2):
        if one.shape[:-1] == other.shape[:-1] and all(any(x is r for r in rest) for x in (one, other)):
            whole = torch.cat([one, other], -1)
            take([one, other], whole, _alike(left, whole), TOLERANCE)
    # CPM-Ant reports what is left without the queries and keys of its prompt.
    for weights in list(rest):
        larger = [m for m in left if m.shape[:-2] == weights.shape[:-2] and m.shape[-1] > weights.shape[-1]]
        take([weights], weights, [m for m in larger if m.shape[-2] >= weights.shape[-2]], TOLERANCE)
    for weights in list(rest):
        take([weights], weights, _alike(left, weights), torch.inf)
    errors = [error for error, _ in found]
    return {
        "matched": len(errors),
        "error": max(errors, default=None),
        "wrong": sum(error > TOLERANCE for error in errors),
        "rows_without_a_key": sum(dead for _, dead in found),
        "without_a_map": dict(Counter(str(list(x.shape)) for x in rest)),
        "maps_unreported": len(left),
    }


def _alike(maps: list[AttentionMap], weights: Tensor) -> list[AttentionMap]:
    return [m for m in maps if m.shape[-2:] == weights.shape[-2:] and m.shape.numel() == weights.numel()]
