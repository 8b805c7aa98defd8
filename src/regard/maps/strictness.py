"""`strict_maps`: an error for a dense matrix, with the line of its cause."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

from regard.errors import TooLargeError

_strict: ContextVar[bool] = ContextVar("strict maps", default=False)
_OURS = ("regard", "torch")
LAZILY = {
    **dict.fromkeys(("log", "log2", "entr", "xlogy"), "use map.entropy(), or regard.divergence(a, b, kind='kl')"),
    **dict.fromkeys(("mse_loss", "__sub__", "sub", "cosine_similarity", "kl_div"), "use regard.divergence(a, b, kind)"),
    **dict.fromkeys(("__mul__", "mul"), "use map.average(dim, weights=...), or multiply what map @ x gives"),
    "einsum": "use map @ x or map.mT @ x",
    **dict.fromkeys(("max", "amax", "min"), "use map.top_weight() or map.block_max(rows, columns)"),
    **dict.fromkeys(("sort", "argsort", "kthvalue"), "use map.top_keys(k) or map.top_p_count(p)"),
    **dict.fromkeys(("cumsum", "quantile"), "use map.top_p_count(p)"),
    **dict.fromkeys(("avg_pool2d", "max_pool2d", "interpolate"), "use map.pooled(rows, columns, how)"),
    **dict.fromkeys(("diagonal", "gather", "take"), "use map.at(rows, columns)"),
    **dict.fromkeys(("transpose", "swapaxes", "t"), "use map.mT"),
    **dict.fromkeys(("flatten", "view", "reshape", "unsqueeze", "select"), "use an index, or torch.cat of maps"),
    **dict.fromkeys(("float", "half", "double", "bfloat16", "type_as"), "use map.to(dtype)"),
    **dict.fromkeys(("tolist", "numpy", "numpy.asarray"), "read rows of it, or map.pooled(rows, columns)"),
    **dict.fromkeys(("svdvals", "svd", "matrix_norm"), "multiply: map @ x and map.mT @ x"),
}
"""Lazy alternatives of functions that need the matrix."""


@contextmanager
def strict_maps() -> Iterator[None]:
    """Inside `with regard.maps.strict_maps():` no function of torch or NumPy may turn a map into its dense matrix.

    Most functions of torch make the matrix (batch..., H, T, S) of a map, up to the limit of `dense()`. With strict maps
    such a call raises an error with the line instead. `map.dense()` itself is always allowed.

    >>> import torch, regard
    >>> x = torch.eye(3)
    >>> weights = regard.attention(x, x, x, return_weights=True).weights
    >>> with strict_maps():
    ...     weights.sum(-2)  # lazy: what each key gets
    tensor([1., 1., 1.])
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def refuse_if_strict(asked: str, shape: tuple[int, ...]) -> None:
    """Raise inside `strict_maps`."""
    if _strict.get():
        instead = LAZILY.get(asked.removesuffix("()"), "ask the map (docs/maps.md lists what it answers)")
        raise TooLargeError(
            f"{asked} would make the dense weights {shape} of a map, at {_line()}; maps are strict here: "
            f"{instead}, call .dense() where the matrix is wanted, or leave strict_maps()"
        )


def _line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in _OURS:
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
