"""Hold one copy of the keys for all steps of a generation."""

import torch
from torch import Tensor

from regard.watching.kept.factors import Factors, Keys


def share_keys(before: Factors | None, after: Factors) -> None:
    """If the keys of a step begin with those of the step before, keep only the longer ones, for both."""
    if before is None or before.is_stale:
        return
    longer = after.call.key
    if not _begins_with(longer, before.call.key):
        return
    keys = before.keys or Keys(longer, after.held[1])
    keys.tensor, keys.kept = longer, after.held[1]
    if before.keys is None:
        before.follow(keys)
    after.follow(keys)


def _begins_with(longer: Tensor, key: Tensor) -> bool:
    same = key.shape[:2] == longer.shape[:2] and key.shape[3] == longer.shape[3] and key.shape[2] <= longer.shape[2]
    same = same and key.dtype == longer.dtype
    return same and bool(torch.equal(longer[:, :, : key.shape[2]], key))
