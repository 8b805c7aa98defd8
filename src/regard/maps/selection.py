"""Scores of keys for cache eviction and token pruning, from exact maps.

Each score has the shape (batch..., G, S) or (batch..., S): one value for each key, larger for a more important key;
`keep` turns scores into the indices of the remaining keys. The maps may come from `regard.attention`, from a watch or
from `regard.map_of`: the attention itself runs in a fused kernel.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.errors import ArgumentError, ShapeError
from regard.maps.attention_map import AttentionMap

NEVER_DROPPED = torch.inf
Pool = Callable[[Tensor, int, int, int], Tensor]
"""A pooling of torch over (N, 1, S), called with (scores, width, stride, padding)."""


def accumulated(weights: AttentionMap) -> Tensor:
    r"""H2O: the attention received by a key from all queries, $\sum_i P_{ij}$, for each key head.

    Returns (batch..., G, S): the mean over the query heads of each key head.

    Source: Zhang et al. 2023 (arXiv:2306.14048), section 4.

    >>> import regard
    >>> q = torch.zeros(1, 2, 3, 4)
    >>> accumulated(regard.map_of(q, q[:, :1], mask=regard.causal())).shape
    torch.Size([1, 1, 3])
    """
    return weights.per_key_head().received()


def last_query(weights: AttentionMap) -> Tensor:
    r"""TOVA: the weights of the newest query, $\frac1H \sum_h P_{h, T-1, j}$, one score for all heads of a layer.

    Returns (batch..., S).

    Source: Oren et al. 2024 (arXiv:2401.06104), section 3.2.

    >>> import regard
    >>> q = torch.zeros(1, 2, 4, 4)
    >>> last_query(regard.map_of(q, q))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return weights.with_heads().row(-1).mean(-2)


def observed(weights: AttentionMap, window: int = 32, width: int = 7, pool: Pool = F.avg_pool1d) -> Tensor:
    r"""SnapKV: the weights of the last queries, $\frac1w \sum_{i \ge T - w} P_{ij}$, pooled over neighbouring keys.

    Args:
        weights: the map of a prompt.
        window: w, the number of last queries; their own keys get the score inf, and so remain.
        width: the odd number of pooled neighbouring keys; 1 for none.
        pool: `F.avg_pool1d`, as in the authors' code, or `F.max_pool1d`, as in their experiments on LongBench.

    Returns (batch..., G, S): the pooled mean over the query heads of each key head.

    Source: Li et al. 2024 (arXiv:2404.14469), section 4.1 and listing 1.

    Raises:
        ArgumentError: the window is not in [1, T], or the width is not odd.

    >>> import regard
    >>> q = torch.zeros(1, 2, 6, 4)
    >>> observed(regard.map_of(q, q, mask=regard.causal()), window=2, width=1)[0, 0]
    tensor([0.1833, 0.1833, 0.1833, 0.1833,    inf,    inf])
    """
    queries, keys = weights.shape[-2:]
    if not 1 <= window <= queries or width < 1 or width % 2 == 0:
        raise ArgumentError(
            f"observed() needs a window in [1, {queries}], the number of queries, and an odd width; got {window} and "
            f"{width}"
        )
    received = weights.per_key_head().only(rows=slice(queries - window, None)).received("mean")
    before = received[..., : keys - window]
    flat = pool(before.reshape(-1, 1, before.shape[-1]), width, 1, width // 2) if before.shape[-1] else before
    return F.pad(flat.reshape(before.shape), (0, window), value=NEVER_DROPPED)


def class_token(weights: AttentionMap, query: int = 0) -> Tensor:
    r"""EViT and FastV: the weights of one query, $\frac1H \sum_h P_{h, c, j}$, to prune tokens of an image.

    Args:
        weights: the map of a layer.
        query: c: the class token for EViT (0), the last token for FastV (-1).

    Returns (batch..., S).

    Source: Liang et al. 2022 (arXiv:2202.07800), section 3.2; Chen et al. 2024 (arXiv:2403.06764), section 4.

    >>> import regard
    >>> q = torch.zeros(1, 2, 4, 4)
    >>> class_token(regard.map_of(q, q))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return weights.with_heads().row(query).mean(-2)


def pyramid(layers: int, budget: int, *, least: int | None = None, most: int | None = None) -> list[int]:
    r"""PyramidKV: the number of keys of each layer, falling in equal steps from the first layer to the last.

    The last layer has the least, and the first $2 b - \text{least}$, b being the budget. If a prompt has fewer keys,
    the first layer keeps all of them, and the last one the rest: $2 b - \text{most}$.

    Args:
        layers: the number of layers.
        budget: b, the mean number of keys of a layer; the sum over layers is layers times the budget.
        least: the keys of the last layer; by default a twentieth of the budget, as in the authors' code (there without
            the fixed window).
        most: the number of keys, as an upper limit.

    Source: Cai et al. 2024 (arXiv:2406.02069), section 3.2.

    Raises:
        ArgumentError: there is no layer, the last layer would keep more than the mean, or the mean is above `most`.

    >>> pyramid(4, 100, least=40)
    [160, 120, 80, 40]
    >>> pyramid(4, 100, least=40, most=130)
    [130, 110, 90, 70]
    """
    last = max(1, budget // 20) if least is None else least
    if layers < 1 or not 1 <= last <= budget or (most is not None and most < budget):
        raise ArgumentError(
            f"pyramid() needs at least one layer and 1 <= least <= budget <= most, got {layers} layers, least {last}, "
            f"budget {budget} and most {most}"
        )
    if most is not None:
        last = max(last, 2 * budget - most)
    if layers == 1:
        return [budget]
    step = 2 * (budget - last) / (layers - 1)
    ends = [round(sum(last + step * (layers - 1 - n) for n in range(count + 1))) for count in range(layers)]
    return [end - before for end, before in zip(ends, [0, *ends], strict=False)]


def keep(scores: Tensor, count: int, *, first: int = 0, recent: int = 0) -> Tensor:
    """The keys with the largest scores, in their order: (..., count) of int64.

    Args:
        scores: (..., S), larger for a more important key.
        count: the number of remaining keys, at most S.
        first: this many first keys always stay (attention sinks, Xiao et al. 2024, arXiv:2309.17453).
        recent: this many last keys always stay.

    Of equal scores the earlier key stays.

    Raises:
        ArgumentError: the count is not in [first + recent, S], or one of them is negative.
        ShapeError: there are no scores.

    >>> keep(torch.tensor([0.1, 0.9, 0.2, 0.8, 0.0]), 3, recent=1)
    tensor([1, 3, 4])
    """
    if scores.dim() < 1 or not scores.numel():
        raise ShapeError(f"keep() needs scores (..., S), got {tuple(scores.shape)}")
    keys = scores.shape[-1]
    if min(first, recent) < 0 or not max(1, first + recent) <= count <= keys:
        raise ArgumentError(
            f"keep() needs first + recent <= count <= {keys}, the number of keys; got {first} + {recent} and {count}"
        )
    chosen = scores.clone()
    chosen[..., :first] = NEVER_DROPPED
    chosen[..., keys - recent :] = NEVER_DROPPED
    order = torch.sort(chosen, dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(-1).values
