"""How far a translation written word by word lags behind its source, in words of the source.

The delay of a target word is the number of source words that had been read when it was written.
"""

from collections.abc import Sequence

from regard.errors import ArgumentError


def average_lagging(delays: Sequence[int], source_length: int, target_length: int) -> float:
    r"""AL: the mean number of words by which a translation lags behind an ideal one that writes at an even pace.

    $$\mathrm{AL} = \frac{1}{\tau} \sum_{i=1}^{\tau} d_i - (i - 1) \frac{|x|}{|y|}$$

    where $\tau$ is the first word written after the whole source was read (the last word, if none is).

    Args:
        delays: the delay $d_i$ of each written word, at least one; they never fall.
        source_length: $|x|$, words of the source.
        target_length: $|y|$, words of the reference, as in SimulEval; in the paper those written.

    Returns:
        A number of source words. It may be below 0 if far more words are written than the reference has.

    Source: Ma et al. 2019 (arXiv:1810.08398), equation 8; SimulEval 1.1, latency metric AL.

    >>> average_lagging([2, 3, 4, 4], source_length=4, target_length=4)  # wait-2
    2.0
    """
    if not delays or source_length < 1 or target_length < 1:
        raise ArgumentError(
            f"lagging needs a written word, a source and a target, got {len(delays)} delays and lengths "
            f"{source_length} and {target_length}"
        )
    counted = next((i for i, delay in enumerate(delays, start=1) if delay >= source_length), len(delays))
    pace = source_length / target_length
    return sum(delay - i * pace for i, delay in enumerate(delays[:counted])) / counted


def length_adaptive_average_lagging(delays: Sequence[int], source_length: int, target_length: int) -> float:
    r"""LAAL: AL whose ideal translation is as long as the longer of the reference and the translation.

    AL rewards translations that are too long; this does not: $|y|$ becomes $\max(|y|, \text{words written})$.
    Arguments and errors are those of `average_lagging`.

    Source: Papi et al. 2022 (arXiv:2206.05807), equation 3; Polak et al. 2022 (arXiv:2204.06028); SimulEval's LAAL.

    >>> delays = [1, 1, 1, 1, 2]
    >>> [round(of(delays, 2, 2), 6) for of in (average_lagging, length_adaptive_average_lagging)]
    [-0.8, 0.4]
    """
    return average_lagging(delays, source_length, max(target_length, len(delays)))
