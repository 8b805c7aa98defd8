"""The choice of a search by one call of compiled code, with numba: see `regard.compiled.choice_loop`."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.compiled.choice_work import WORK
from regard.compiled.thread_team import run_in_threads
from regard.mechanisms.readable import row_contiguous

Chooser = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""A function that chooses among logits (N, V), with offsets (G, M), k numbers: see `best_of_groups`."""


def best_of_groups(
    logits: Float[Tensor, "N V"], offsets: Float[Tensor, "G M"], k: int
) -> tuple[Float[Tensor, "G C"], Int[Tensor, "G C"]]:
    r"""The k most probable continuations of each group of hypotheses, best first.

    The score of continuation v of row n is $o_n + \log p(v \mid n)$, where the probabilities are the softmax of the
    row's logits. Of equal scores the first place is better. What has the score -inf may be missing; in its
    place stands another place, with the score -inf. A row with NaN makes the scores of its group NaN.

    Args:
        logits: float32 on the CPU; M rows make a group.
        offsets: what is added to the log-probabilities of each row, in nats.
        k: how many, at least 1.

    Returns:
        Their scores, and their places among the M * V continuations of the group. C is k, or M * V if that is less.

    >>> logits = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).log_softmax(-1)
    >>> scores, places = best_of_groups(logits, torch.tensor([[0.0, -5.0]]), 2)
    >>> scores.exp(), places
    (tensor([[0.5000, 0.5000]]), tensor([[0, 1]]))
    """
    from regard.compiled.choice_loop import choose  # numba compiles here, or takes what the disk has

    (groups, members), (_, columns) = offsets.shape, logits.shape
    k = min(k, members * columns)
    logits, offsets = row_contiguous(logits), offsets.float().contiguous()
    values = torch.empty(groups, k, dtype=torch.float32, device="cpu")
    places = torch.empty(groups, k, dtype=torch.int64, device="cpu")
    counter, work = np.zeros(1, np.int64), np.zeros(1, WORK)
    work[0] = (
        *(counter.ctypes.data, groups, members, columns, logits.stride(0), k),
        *(logits.data_ptr(), offsets.data_ptr(), values.data_ptr(), places.data_ptr()),
    )
    run_in_threads(choose, work.ctypes.data, max(1, min(torch.get_num_threads(), groups)))
    return values, places
