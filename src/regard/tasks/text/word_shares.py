"""How much of each token lies in each word of a text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.tasks.text.words import Span


def shares(places: Sequence[Span], spans: Sequence[Span]) -> Tensor:
    """How much of each stretch of a text lies in each of its units: (stretches, units), a row sums to 1 or is 0.

    >>> shares([(0, 3), (3, 9)], [(0, 3), (4, 9)])
    tensor([[1., 0.],
            [0., 1.]])
    """
    begin, end = torch.tensor(places).reshape(-1, 2, 1).unbind(1)
    first, last = torch.tensor(spans).reshape(-1, 2).unbind(1)
    common = (torch.minimum(end.maximum(begin + 1), last) - torch.maximum(begin, first)).clamp_min(0)
    return common / common.sum(1, keepdim=True).clamp_min(1)
