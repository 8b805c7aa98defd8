"""SnapKV: a prompt whose cache is cut to 256 keys of each layer, by what its last 32 queries attend to."""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.consumers.eviction import NOTE, eager_by, ours_by
from benchmarks.consumers.frame import Report, measure
from benchmarks.harness import Run
from regard.maps import selection

TITLE = "Consumers: eviction of keys by SnapKV"
WINDOW = 32


def votes(weights: Tensor) -> Tensor:
    """The authors' code, on the weights (B, G, T, S) of key heads."""
    window = min(WINDOW, weights.shape[-2])
    before = weights[:, :, -window:, : weights.shape[-1] - window].mean(2)
    pooled = F.avg_pool1d(before, 7, 1, 3) if before.shape[-1] else before
    return F.pad(pooled, (0, window), value=torch.inf)


def eager(length: int) -> Run:
    return eager_by(votes, length)


def ours(length: int) -> Run:
    return ours_by(partial(selection.observed, window=WINDOW), length)


def run() -> Report:
    return measure(__name__, eager_up_to=2048, note=NOTE)
