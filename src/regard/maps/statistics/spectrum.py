"""The largest singular values of a map, from products with it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError, NonFiniteError
from regard.lazy import displayed
from regard.maps.indexing import is_integer
from regard.maps.sources.cast import CastSource
from regard.maps.sources.source import Source
from regard.maps.statistics import definitions as st
from regard.maps.statistics.products import product, transposed_product
from regard.maps.statistics.tiles import ask
from regard.tensors.guards import has_values

OVERSAMPLING = 4
"""The columns of the random block beyond k."""
PROBES = 8
"""The random vectors of the bound; it fails with a probability of 10^-8."""
POWERS = 3
"""Products of each vector with the residual and its transpose; more make the bound tighter."""


@displayed
class Spectrum(NamedTuple):
    r"""Singular values $\hat\sigma_1 \ge \ldots \ge \hat\sigma_k$, and bounds of their errors."""

    values: Tensor
    """(batch..., H, k). Up to rounding, never too large."""
    error: Tensor
    r"""(batch..., H, k): $\hat\sigma_i \le \sigma_i \le \hat\sigma_i + \mathrm{error}_i$, with a probability of at
    least 1 - 10^-8 over the random probes."""


@torch.no_grad()
def singular_values(of: Source, k: int, *, iterations: int, seed: int) -> Spectrum:
    r"""Randomised block Krylov iteration (Musco & Musco 2015, arXiv:1504.05477, algorithm 2), with a bound.

    With an orthonormal basis Q of the Krylov space and B = Q^T P, $\hat\sigma_i = \sigma_i(B)$. Of the residual
    E = P - Q B, $\sigma_i^2 \le \hat\sigma_i^2 + \lVert E \rVert_2^2$. The norm of E is at most its Frobenius norm,
    $\lVert P \rVert_F^2 - \lVert B \rVert_F^2$, which is exact here; and, with probability 1 - 10^-r, at most
    $(10 \sqrt{2/\pi} \max_{l \le r} \lVert (E E^T)^p E \omega_l \rVert)^{1/(2p+1)}$ for Gaussian $\omega_l$ (Halko,
    Martinsson & Tropp 2011, arXiv:0909.4061, equation 4.3, for the power of E). The smaller of the two is taken.
    """
    queries, keys, answer = of.queries, of.keys, of.answer_dtype
    if not is_integer(k) or not 1 <= k <= min(queries, keys):
        raise ArgumentError(f"singular_values needs k in [1, {min(queries, keys)}], got {k!r}")
    if not is_integer(iterations) or iterations < 0:
        raise ArgumentError(f"singular_values needs iterations of at least 0, got {iterations!r}")
    # For half precision they are computed in the map's own dtype, and rounded at the end.
    of = CastSource.of_dtype(of, of.dtype)
    # A meta device has no data and no generator.
    generator = None if of.device.type == "meta" else torch.Generator(of.device).manual_seed(seed)

    def normal(columns: int) -> Tensor:
        shape = (*of.leading, keys, columns)
        return torch.randn(shape, generator=generator, device=of.device, dtype=of.dtype)

    basis = _krylov(of, normal(min(k + OVERSAMPLING, queries, keys)), iterations)
    rest = transposed_product(of, basis)
    if has_values(rest) and not bool(rest.isfinite().all()):
        raise NonFiniteError("singular_values needs finite weights, and this map has NaN or infinity among them")
    values = torch.linalg.svdvals(rest)[..., :k]
    (squares,) = ask(of, st.Squares())
    total = of.laid_out(squares).sum(-1)
    frobenius = total - rest.square().sum((-2, -1))
    norm = torch.minimum(frobenius.clamp_min(0.0).sqrt(), _norm_of_residual(of, basis, normal(PROBES)))
    # Rounding may have lowered the values and the difference of squares by this much: the errors of a sum of n terms
    # grow as the root of n (Higham and Mary 2019, doi:10.1137/18M1226312).
    rounding = (8 + math.sqrt(queries + keys)) * torch.finfo(of.dtype).eps
    # Squares of weights may vanish. Each of them is less than the smallest normal element then.
    slack = norm.square() + rounding * total + queries * keys * torch.finfo(of.dtype).tiny
    # The difference of the largest and the found values, without the cancellation of a difference.
    slack = slack[..., None]
    error = slack / (torch.hypot(values, slack.sqrt()) + values)
    return Spectrum(values.to(answer), error.to(answer))


def _krylov(of: Source, start: Tensor, iterations: int) -> Tensor:
    """An orthonormal basis of P X, (P P^T) P X, ..., each block made orthogonal to the earlier ones."""
    blocks = [torch.linalg.qr(product(of, start)).Q]
    room = of.queries - blocks[0].shape[-1]
    for _ in range(iterations):
        if room <= 0:
            break
        block = product(of, transposed_product(of, blocks[-1]))
        basis = torch.cat(blocks, -1)
        for _ in range(2):  # once is not enough if the block is almost in the space already
            block = torch.linalg.qr(block - basis @ (basis.mT @ block)).Q
        blocks.append(block[..., :room])
        room -= block.shape[-1]
    return torch.linalg.qr(torch.cat(blocks, -1)).Q


def _norm_of_residual(of: Source, basis: Tensor, probes: Tensor) -> Tensor:
    """An upper bound of the spectral norm of E = (I - Q Q^T) P, with a probability of 1 - 10^-PROBES."""

    def residual(x: Tensor) -> Tensor:
        x = product(of, x)
        return x - basis @ (basis.mT @ x)

    def transposed(x: Tensor) -> Tensor:
        return transposed_product(of, x - basis @ (basis.mT @ x))

    x, logs = residual(probes), torch.zeros(of.leading, device=of.device, dtype=of.dtype)
    for _ in range(POWERS):
        # The powers of a small norm would underflow: sum its logarithm.
        scale = torch.linalg.vector_norm(x, dim=-2).amax(-1).clamp_min(torch.finfo(of.dtype).tiny)
        logs = logs + scale.log()
        x = residual(transposed(x / scale[..., None, None]))
    largest = torch.linalg.vector_norm(x, dim=-2).amax(-1)
    return torch.exp((logs + (10 * (2 / torch.pi) ** 0.5 * largest).log()) / (2 * POWERS + 1))
