"""Learning rates as pure functions of the step. They have no state, so a resumed run gets the same rates again. Steps
count from 1: the first update of the parameters is step 1."""

import math
from collections.abc import Callable

from regard.tensors.ranges import require_at_least

Schedule = Callable[[int], float]


def constant(peak: float) -> Schedule:
    """The same rate at every step.

    >>> constant(0.1)(1_000)
    0.1
    """
    return lambda step: peak


def inverse_square_root(peak: float, warmup_steps: int) -> Schedule:
    """Rise in a straight line to `peak`, then fall with the square root of the step.

    rate(n) = peak * min(n / warmup, sqrt(warmup / n))

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 5.3; there peak = (dim * warmup) ** -0.5.

    >>> rate = inverse_square_root(1.0, warmup_steps=100)
    >>> rate(50), rate(100), rate(400)
    (0.5, 1.0, 0.5)
    """
    require_at_least(1, warmup_steps=warmup_steps)
    return lambda step: peak * min(step / warmup_steps, math.sqrt(warmup_steps / step))


def cosine(peak: float, warmup_steps: int, total_steps: int) -> Schedule:
    """Rise in a straight line to `peak`, then fall along half a cosine to 0 at `total_steps`, and stay there.

    rate(n) = peak * (1 + cos(pi * (n - warmup) / (total - warmup))) / 2   for warmup <= n <= total

    If training ends before its warm-up, the rate only rises.

    Source: Loshchilov and Hutter 2017 (arXiv 1608.03983), equation 5, without restarts.

    >>> rate = cosine(1.0, warmup_steps=10, total_steps=110)
    >>> rate(5), rate(10), round(rate(60), 6), rate(110)
    (0.5, 1.0, 0.5, 0.0)
    """
    require_at_least(0, warmup_steps=warmup_steps)

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * step / warmup_steps
        done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        return peak * (1 + math.cos(math.pi * done)) / 2

    return rate
