"""The factors of a map: queries and keys from which a page computes any weight.

They are carried only where the weights are exactly exp(scale * q . k - lse), under a mask of one key range per query,
and after a comparison of the page's arithmetic with the map.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from regard.call.masks.basic import Causal, Lengths, Padding
from regard.call.masks.patterns import Window
from regard.call.normalizations import Softmax
from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.call import CallSource
from regard.views.html.arrays import Floats

CHECKED_ROWS = 1024
"""Queries whose weights are compared before factors are written: all of a shorter map."""
KNOWN = (Causal, Lengths, Padding, Window)
TOLERANCE = 2e-5


class PageFactors(NamedTuple):
    """exp(scale * query . key - lse) of each head, in float32."""

    scale: float
    query: Floats
    """(H, T, D)."""
    key: Floats
    """(H, S, D)."""
    lse: Floats
    """(H, T): the log-sum-exp of each query's scores; 0 where it has no key."""


def why_no_softmax(heads: AttentionMap) -> str:
    """Why a map is not one softmax of scaled dot products without a bias; "" if it is."""
    source = heads.source
    if not isinstance(source, CallSource):
        return f"it is {source}, not one call"
    call = source.factors.form
    if not isinstance(call.normalization, Softmax) or call.score.dot_scale(call.query.shape[-1]) is None:
        return f"it is {source}, not a softmax of scaled dot products"
    return "" if call.bias is None else "it has a bias"


def why_none(heads: AttentionMap) -> str:
    reason, source = why_no_softmax(heads), heads.source
    if reason or not isinstance(source, CallSource):
        return reason
    mask = source.call.mask
    others = [m for m in (() if mask is None else mask.factors()) if not isinstance(m, KNOWN)]
    return f"its mask is {mask}, not causal, a length or a window" if others else ""


@torch.no_grad()
def factors_of(name: str, heads: AttentionMap, spans: npt.NDArray[np.integer[Any]] | None) -> PageFactors:
    """The factors of a map (H, T, S); raises ArgumentError if they do not reproduce it, or are missing."""
    reason = why_none(heads)
    source = heads.source
    if reason or not isinstance(source, CallSource):
        raise ArgumentError(f"map {name!r} has no factors that a page can compute with: {reason}")
    call = source.call
    scale = call.score.dot_scale(call.query.shape[-1])
    assert scale is not None
    query = call.query.flatten(0, 1).float()
    key = call.key.float().repeat_interleave(call.query.shape[1] // call.key.shape[1], 1).flatten(0, 1)
    lse = source.state.flatten(0, 1).float()
    lse = lse.where(lse.isfinite(), 0.0)
    found = PageFactors(float(scale), *(one.cpu().numpy() for one in (query, key, lse)))
    apart = _apart(heads, found, spans)
    if not apart <= TOLERANCE:
        raise ArgumentError(f"map {name!r}: its factors give weights that are off by {apart:.1e}: they are not written")
    return found


def _apart(heads: AttentionMap, found: PageFactors, spans: npt.NDArray[np.integer[Any]] | None) -> float:
    queries, keys = heads.shape[-2:]
    rows = np.unique(np.linspace(0, queries - 1, min(queries, CHECKED_ROWS)).round().astype(np.int64))
    places, worst = np.arange(keys), 0.0
    for some in np.array_split(rows, max(1, len(rows) * len(heads) * keys // 2**22)):
        logs = found.scale * (found.query[:, some] @ found.key.transpose(0, 2, 1)) - found.lse[:, some, None]
        weights = np.exp(np.minimum(logs, 1.0))
        if spans is not None:
            weights *= (places >= spans[some, :1]) & (places < spans[some, 1:])
        exact = heads.block(torch.from_numpy(some).to(heads.device), range(keys)).cpu().numpy()
        worst = max(worst, float(np.abs(weights - exact).max()))
    return worst
