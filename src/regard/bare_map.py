"""`map_of`: the map of queries and keys that somebody holds, without values and without a call of attention."""

from torch import Tensor

from regard.errors import ArgumentError, ShapeError
from regard.functional import AnyScore, make_call
from regard.maps.attention_map import AttentionMap
from regard.maps.call_source import CallSource, GivenFactors
from regard.mechanisms.biases.base import Bias
from regard.mechanisms.masks.base import Mask
from regard.mechanisms.normalizations import Normalization, Softmax
from regard.mechanisms.scores.base import ScaledDot
from regard.mechanisms.shapes import without_autocast
from regard.mechanisms.transforms import has_values

TOLERANCE = 0.05
"""How far from 1 a row may sum with a given log-sum-exp; half precision leaves some per cent where scores are large."""


def map_of(
    query: Tensor,
    key: Tensor,
    *,
    score: AnyScore = ScaledDot(),  # noqa: B008  (frozen, without state)
    normalization: Normalization = Softmax(),  # noqa: B008
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    lse: Tensor | None = None,
) -> AttentionMap:
    r"""The weights of queries on keys, such as those of a cache or of another library; nothing is computed yet.

    Args:
        query: (batch..., H, T, D), (batch, T, D) or (T, D), as the kernel got it: rotated and normalised.
        key: (batch..., G, S, D) and so on; G divides H.
        score: as `attention` takes it; so are the normalization, the mask and the bias.
        normalization: see `attention`.
        mask: see `attention`; True = keep.
        bias: see `attention`.
        lse: the log-sum-exp (batch..., H, T) that the kernel returned, natural logarithms. None computes it from one
            pass over the scores when the first weight is read.

    Returns:
        The map (batch..., H, T, S). It carries gradients to query and key.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit each other.
        ArgumentError: a log-sum-exp was given to a normalization that is no softmax, or does not belong to these
            queries and keys: the last row of weights would not sum to 1.

    >>> import torch
    >>> x = torch.eye(3)
    >>> map_of(x, x).row(0)
    tensor([0.4711, 0.2645, 0.2645])
    """
    call, _ = make_call(
        query, key, key, score=score, normalization=normalization, mask=mask, bias=bias, dropout=0.0
    )  # fmt: skip
    if lse is None:
        with without_autocast(query):
            return AttentionMap(CallSource(GivenFactors(call, None), call.sizes.leading))
    expected = tuple(call.sizes.map_shape[:-1])
    if tuple(lse.shape) != expected or lse.device != query.device:
        raise ShapeError(
            f"map_of() needs a log-sum-exp of shape {expected} on {query.device}, one for each query; got "
            f"{tuple(lse.shape)} on {lse.device}"
        )
    if not isinstance(normalization.base, Softmax):
        raise ArgumentError(
            f"only a softmax has a log-sum-exp, and the normalization is {normalization}: leave lse out"
        )
    state = lse.to(call.compute_dtype).reshape(call.query.shape[:-1])
    weights = AttentionMap(CallSource(GivenFactors(call, state), call.sizes.leading))
    if normalization.base is normalization and has_values(query):
        _check_last_row(weights)
    return weights


def _check_last_row(weights: AttentionMap) -> None:
    """Raise unless the last row sums to 1 or is 0, in every head.

    Raises:
        ArgumentError: a row does not.
    """
    sums = weights.detach().row(-1).sum(-1)
    if bool(((sums - 1).abs().le(TOLERANCE) | (sums == 0)).all()):
        return
    worst = sums.flatten()[(sums - 1).abs().nan_to_num(nan=float("inf")).argmax()].item()
    raise ArgumentError(
        f"the log-sum-exp does not belong to these queries and keys: the last row of weights sums to {worst:.3g} "
        "in place of 1; look at the scale, the base of the logarithm (e, not 2), the mask and the order of heads"
    )
