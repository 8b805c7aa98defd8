"""Products with a map: P x, and P^T x."""

from torch import Tensor

from regard.errors import ShapeError
from regard.maps.sources.source import Source
from regard.maps.statistics import definitions as st
from regard.maps.statistics.tiles import ask


def product(source: Source, x: Tensor) -> Tensor:
    """P x for x (S, N) or (batch..., H, S, N), laid out as the map."""
    if x.dim() < 2 or x.shape[-2] != source.keys:
        raise ShapeError(
            f"map @ x needs x of shape (..., {source.keys}, N) for a map {tuple(source.shape)}, got {tuple(x.shape)}"
        )
    found = source.product(x)
    return source.laid_out(ask(source, st.Product(_by_flat_heads(source, x)))[0]) if found is None else found


def transposed_product(source: Source, x: Tensor) -> Tensor:
    """P^T x for x (T, N) or (batch..., H, T, N), laid out as the map."""
    if x.dim() < 2 or x.shape[-2] != source.queries:
        raise ShapeError(
            f"map.mT @ x needs x of shape (..., {source.queries}, N) for a map {tuple(source.shape)}, "
            f"got {tuple(x.shape)}"
        )
    return source.laid_out(ask(source, st.TransposedProduct(_by_flat_heads(source, x)))[0].mT)


def _by_flat_heads(source: Source, x: Tensor) -> Tensor:
    tail = x.shape[-2:]
    if x.dim() == 2:
        return x.to(source.dtype)[None]
    try:
        return x.expand(*source.leading, *tail).reshape(-1, *tail).to(source.dtype)
    except RuntimeError as error:
        raise ShapeError(f"values of shape {tuple(x.shape)} do not broadcast to {(*source.leading, *tail)}") from error
