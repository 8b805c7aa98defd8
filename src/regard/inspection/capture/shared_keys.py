"""The steps of a generation: one copy of the keys for all of them."""

import torch
from torch import Tensor

from regard.inspection.capture.factors import Keys
from regard.inspection.maps import WatchedMap
from regard.weights import AttentionMap


def share_keys(before: AttentionMap | None, after: WatchedMap) -> None:
    """Where a step's keys are those of the step before and more, keep the longer ones for both."""
    if not isinstance(before, WatchedMap) or before._factors.is_stale:
        return
    longer = after._call.key
    if not _begins_with(longer, before._call.key):
        return
    keys = before._factors.keys or Keys(longer, after._factors.held[1])
    keys.tensor, keys.kept = longer, after._factors.held[1]
    if before._factors.keys is None:
        before._factors.follow(keys)
    after._factors.follow(keys)


def _begins_with(longer: Tensor, key: Tensor) -> bool:
    same = key.shape[:2] == longer.shape[:2] and key.shape[3] == longer.shape[3] and key.shape[2] <= longer.shape[2]
    same = same and key.dtype == longer.dtype
    return same and bool(torch.equal(longer[:, :, : key.shape[2]], key))
