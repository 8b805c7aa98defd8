"""Layers of linear attention: gated delta net, Mamba-2, lightning attention."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from regard.call.masks.base import Mask
from regard.call.masks.basic import Causal, as_mask, causal
from regard.call.shapes import Sizes
from regard.errors import ArgumentError
from regard.functional import Attended
from regard.maps.sources.values import widened
from regard.nn.cache import Past, RecurrentState
from regard.nn.head_norms import normed
from regard.nn.linear_attention import Recurred, linear_attention
from regard.nn.short_convolution import ShortConvolution
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_sizes


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor | None
    gate: Tensor
    """(batch..., T, H E): the input of the output's gate."""


class RecurrentMixer(nn.Module):
    """A layer that mixes positions by a linear recurrence. Its state has one size, whatever the length.

    It reads from left to right: its mask may only be causal, and hide padding. A subclass has the projections.
    """

    inputs: nn.Linear
    sizes: tuple[int, int]
    """How many of its outputs are the input of the convolution, and how many are for the rest."""
    out: nn.Linear
    conv: ShortConvolution | None
    removal: ClassVar[Literal["delta"] | None] = None
    scale: ClassVar[float | None] = None

    def reset_parameters(self) -> None:
        """Glorot uniform for the matrices; rates in [1, 16] and steps in [0.001, 0.1], as Mamba-2's code."""
        for name, parameter in self.named_parameters(recurse=False):
            with torch.no_grad():
                if name == "log_rate":
                    nn.init.uniform_(parameter, 1, 16).log_()
                elif name == "step_bias":
                    steps = nn.init.uniform_(parameter, math.log(1e-3), math.log(0.1)).exp_()
                    parameter.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
        for linear in (self.inputs, self.out):
            nn.init.xavier_uniform_(linear.weight)

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        *,
        mask: Mask | Tensor | None = None,
        return_weights: bool = False,
        past: Past | None = None,
    ) -> Tensor | Attended:
        """Mix the positions of x, each with those before it.

        Args:
            x: (batch..., T, dim).
            mask: `causal()`, perhaps with a mask of keys that hides padding. None is causal.
            return_weights: also return the weights, an `AttentionMap` (batch..., H, T, T).
            past: the state of the earlier positions; see `extend`.

        Returns:
            (batch..., T, dim), or the named tuple (output, weights).

        Raises:
            ArgumentError: the mask hides more than padding.
        """
        cache: RecurrentState | None = None if past is None else past.cache
        length = 0 if cache is None else cache.length
        mixed, inputs = self._mixed(x, cache, _real(mask, x, length))
        found = self._attended(mixed, None if cache is None else cache.state, return_weights=return_weights)
        if past is not None:
            past.cache = RecurrentState(found.state, inputs, length + x.shape[-2])
        output = self.read_out(found.output, mixed)
        return output if found.weights is None else Attended(output, found.weights)

    def extend(
        self,
        x: Float[Tensor, "*batch T D"],
        cache: RecurrentState | None,
        *,
        mask: Mask | Tensor | None = causal(),  # noqa: B008  (frozen, without state)
        offset: int | Integer[Tensor, "*batch"] | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Mix the positions after those of a cache.

        Args:
            x: (batch..., T, dim), the new positions.
            cache: the state of the last call, None at first.
            mask: as in `forward`, over (batch..., H, T, S), where S counts the earlier and the new positions.
            offset: has no effect; attention has the argument too.

        Returns:
            (batch..., T, dim), and the state after the new positions.
        """
        past = Past(cache, offset)
        return self(x, mask=mask, past=past), past.cache

    def _attended(self, mixed: Mixed, state: Tensor | None, *, return_weights: bool = False) -> Recurred:
        return linear_attention(
            mixed.query, mixed.key, mixed.value, decay=mixed.decay, beta=mixed.beta, removal=self.removal,
            scale=self.scale, state=state, return_state=True, return_weights=return_weights,
        )  # fmt: skip

    def _mixed(self, x: Tensor, cache: RecurrentState | None, real: Tensor | None) -> tuple[Mixed, Tensor]:
        """The arguments of the recurrence, which padding leaves as it is; and the last inputs of the convolution."""
        mixed, rest = self.inputs(x).split(self.sizes, -1)
        inputs = mixed[..., :0, :]
        if self.conv is not None:
            mixed, inputs = self.conv(mixed, None if cache is None else cache.inputs, real)
        made = self.heads(mixed, rest)
        if real is None:
            return made, inputs
        here = real[..., None, :]
        beta = here.to(made.decay.dtype) if made.beta is None else made.beta * here
        return replace(made, decay=made.decay * here, beta=beta), inputs

    @abstractmethod
    def heads(self, mixed: Tensor, rest: Tensor) -> Mixed:
        """The arguments of the recurrence from the convolved and from the other projections."""

    @abstractmethod
    def read_out(self, output: Tensor, mixed: Mixed) -> Tensor:
        """The output of the layer from that of the recurrence, (batch..., H, T, E)."""


class GatedDeltaNet(RecurrentMixer):
    r"""$S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top$: writes replace the value of a key.

    Queries, keys and values pass a short convolution, and keys and queries have length 1. The decay is $\alpha_t =
    \exp(-e^{A}\,\mathrm{softplus}(w_\alpha x_t + d))$ and $\beta_t = \sigma(w_\beta x_t)$. The output is $W_o$ of
    $\mathrm{RMSNorm}(o_t) \odot \mathrm{SiLU}(W_g x_t)$.

    Args:
        dim: width of the input and of the output.
        num_heads: the heads of queries and keys.
        num_value_heads: a multiple of these, the heads of the values and of the map; by default as many.
        key_dim: the width of a head's queries and keys; by default dim / num_heads.
        value_dim: the width of a head's values; by default dim / num_value_heads.
        conv_size: the positions of the convolution.

    Raises:
        ArgumentError: a size is below 1, or the heads do not divide.

    Source: Yang et al. 2025 (arXiv:2412.06464), equation 10 and figure 1; Qwen3-Next.

    >>> attend = GatedDeltaNet(16, 2)
    >>> x = torch.randn(1, 9, 16)
    >>> output, weights = attend(x, return_weights=True)
    >>> output.shape, weights.shape
    (torch.Size([1, 9, 16]), torch.Size([1, 2, 9, 9]))
    >>> first, cache = attend.extend(x[:, :5], None)
    >>> last, cache = attend.extend(x[:, 5:], cache)
    >>> torch.allclose(torch.cat([first, last], 1), output, atol=1e-6), cache.state.shape
    (True, torch.Size([1, 2, 8, 8]))
    """

    removal = "delta"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 4,
    ) -> None:
        super().__init__()
        heads = num_heads if num_value_heads is None else num_value_heads
        require_sizes(dim=dim, num_heads=num_heads, num_value_heads=heads)
        key_dim = dim // num_heads if key_dim is None else key_dim
        value_dim = dim // heads if value_dim is None else value_dim
        require_sizes(key_dim=key_dim, value_dim=value_dim, conv_size=conv_size)
        if heads % num_heads:
            raise ArgumentError(f"num_value_heads must be a multiple of num_heads, got {heads} and {num_heads}")
        self.num_heads, self.num_value_heads, self.key_dim = num_heads, heads, key_dim
        channels = 2 * num_heads * key_dim + heads * value_dim
        self.sizes = (channels, heads * value_dim + 2 * heads)
        self.inputs = nn.Linear(dim, sum(self.sizes), bias=False)
        self.conv = ShortConvolution(channels, conv_size)
        self.log_rate, self.step_bias = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.norm = nn.RMSNorm(value_dim, eps=1e-6)
        self.out = nn.Linear(heads * value_dim, dim, bias=False)
        self.reset_parameters()

    def heads(self, mixed: Tensor, rest: Tensor) -> Mixed:
        width, heads = self.num_heads * self.key_dim, self.num_value_heads
        query, key, value = mixed.split((width, width, mixed.shape[-1] - 2 * width), -1)
        gate, step, strength = rest.split((rest.shape[-1] - 2 * heads, heads, heads), -1)
        query, key = (_unit(_heads(x, self.num_heads)) for x in (query, key))
        decay = -widened(self.log_rate).exp() * softplus(widened(step) + self.step_bias)
        return Mixed(query, key, _heads(value, heads), decay.mT, widened(strength).sigmoid().mT, gate)

    def read_out(self, output: Tensor, mixed: Mixed) -> Tensor:
        output = normed(self.norm, output).transpose(-3, -2).flatten(-2)
        return self.out(output * silu(mixed.gate))


class Mamba2(RecurrentMixer):
    r"""$S_t = \exp(-e^A \Delta_t) S_{t-1} + \Delta_t B_t x_t^\top$, $y_t = S_t^\top C_t + D\,x_t$.

    B are the keys, C the queries and the convolved inputs x the values: $\Delta_t = \mathrm{softplus}(w x_t + d)$ is
    the strength of a write, and with it the memory fades. The output is $W_o$ of $\mathrm{RMSNorm}(y_t \odot
    \mathrm{SiLU}(z_t))$.

    Args:
        dim: width of the input and of the output.
        num_heads: H.
        expand: the width of all heads' values, in multiples of dim.
        state_dim: the width of B and C.
        groups: the heads of B and C, a divisor of H.
        conv_size: the positions of the convolution.

    Raises:
        ArgumentError: a size is below 1, or the heads do not divide.

    Source: Dao and Gu 2024 (arXiv:2405.21060), section 7.1 and figure 6.

    >>> output, weights = Mamba2(16, 4, state_dim=8)(torch.randn(1, 9, 16), return_weights=True)
    >>> output.shape, weights.shape
    (torch.Size([1, 9, 16]), torch.Size([1, 4, 9, 9]))
    """

    scale = 1.0

    def __init__(
        self, dim: int, num_heads: int, *, expand: int = 2, state_dim: int = 64, groups: int = 1, conv_size: int = 4
    ) -> None:
        super().__init__()
        require_sizes(
            dim=dim, num_heads=num_heads, expand=expand, state_dim=state_dim, groups=groups, conv_size=conv_size
        )
        inner = expand * dim
        if num_heads % groups or inner % num_heads:
            raise ArgumentError(
                "num_heads must be a multiple of groups, and divide expand * dim; got "
                f"{num_heads}, {groups} and {inner}"
            )
        self.num_heads, self.groups = num_heads, groups
        self.sizes = (inner + 2 * groups * state_dim, inner + num_heads)
        self.inputs = nn.Linear(dim, sum(self.sizes), bias=False)
        self.conv = ShortConvolution(self.sizes[0], conv_size, bias=True)
        self.log_rate, self.step_bias = nn.Parameter(torch.empty(num_heads)), nn.Parameter(torch.empty(num_heads))
        self.skip = nn.Parameter(torch.empty(num_heads))
        self.norm = nn.RMSNorm(inner // groups, eps=1e-5)
        self.out = nn.Linear(inner, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As for the others; D begins at 1."""
        super().reset_parameters()
        nn.init.ones_(self.skip)

    def heads(self, mixed: Tensor, rest: Tensor) -> Mixed:
        gate, step = rest.split((rest.shape[-1] - self.num_heads, self.num_heads), -1)
        width = (mixed.shape[-1] - gate.shape[-1]) // 2
        value, key, query = mixed.split((gate.shape[-1], width, width), -1)
        strength = softplus(widened(step) + self.step_bias)
        decay = -widened(self.log_rate).exp() * strength
        query, key = (_heads(x, self.groups) for x in (query, key))
        return Mixed(query, key, _heads(value, self.num_heads), decay.mT, strength.mT, gate)

    def read_out(self, output: Tensor, mixed: Mixed) -> Tensor:
        output = output + self.skip[:, None, None].to(output.dtype) * mixed.value
        output = output.transpose(-3, -2).flatten(-2) * silu(mixed.gate)
        return self.out(normed(self.norm, output.unflatten(-1, (self.groups, -1))).flatten(-2))


@refuse_wrong_kinds
class LightningAttention(RecurrentMixer):
    r"""$S_t = \lambda S_{t-1} + k_t v_t^\top$ with a constant $\lambda$ a head: a memory that fades at its own rate.

    Queries, keys and values are SiLU of projections. Head h of H in layer l of L has $\lambda = \exp(-2^{-8h/H}
    (1 - l / (L - 1)))$, h from 1. The output is $W_o$ of $\sigma(W_g x_t) \odot \mathrm{RMSNorm}(o_t)$.

    Args:
        dim: width of the input and of the output.
        num_heads: H.
        layer: l, from 0.
        num_layers: L.

    Raises:
        ArgumentError: a size is below 1, dim is no multiple of H, or the layer is not one of L.

    Source: Qin et al. 2024 (arXiv:2401.04658), equation 3; MiniMax 2025 (arXiv:2501.08313), section 2.2.

    >>> output, weights = LightningAttention(16, 4)(torch.randn(1, 9, 16), return_weights=True)
    >>> output.shape, weights.shape
    (torch.Size([1, 9, 16]), torch.Size([1, 4, 9, 9]))
    """

    conv = None
    scale = 1.0
    decays: Tensor

    def __init__(self, dim: int, num_heads: int, *, layer: int = 0, num_layers: int = 1) -> None:
        super().__init__()
        require_sizes(dim=dim, num_heads=num_heads, num_layers=num_layers)
        if dim % num_heads or not 0 <= layer < num_layers:
            raise ArgumentError(
                f"dim must be a multiple of num_heads, and layer one of num_layers from 0; got {dim}, {num_heads}, "
                f"{layer} and {num_layers}"
            )
        self.num_heads, self.sizes = num_heads, (3 * dim, dim)
        share = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
        rates = 2.0 ** (-8 * torch.arange(1, num_heads + 1, dtype=torch.float32) / num_heads)
        self.register_buffer("decays", (-share * rates)[:, None], persistent=False)
        self.inputs, self.out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.reset_parameters()

    def heads(self, mixed: Tensor, rest: Tensor) -> Mixed:
        query, key, value = (_heads(x, self.num_heads) for x in silu(mixed).chunk(3, -1))
        return Mixed(query, key, value, self.decays.expand(*query.shape[:-2], 1), None, rest)

    def read_out(self, output: Tensor, mixed: Mixed) -> Tensor:
        return self.out(normed(self.norm, output.transpose(-3, -2).flatten(-2)) * mixed.gate.sigmoid())


def _real(mask: Mask | Tensor | None, x: Tensor, before: int) -> Tensor | None:
    """False for padding among the positions of x, (batch..., T); None if there is none."""
    given = as_mask(mask)
    others = [one for one in (() if given is None else given.factors()) if not isinstance(one, Causal)]
    if any(not one.depends_on() <= {"batch", "key"} for one in others):
        raise ArgumentError(
            f"a recurrence reads all positions before each: its mask may be causal and hide padding, got {mask}"
        )
    if not others:
        return None
    *batch, length, _ = x.shape
    sizes = Sizes(tuple(batch), 1, 1, length, before + length, True)
    keys = range(before, before + length)
    parts = [one.bind(sizes, x.device).block(range(1), keys, sizes=sizes, device=x.device)[:, 0, 0] for one in others]
    real = torch.stack(torch.broadcast_tensors(*parts)).all(0)
    return real.expand(sizes.flat_batch, length).reshape(*batch, length)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(batch..., T, H D) as (batch..., H, T, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1; short ones stay short."""
    return x * torch.rsqrt(widened(x).square().sum(-1, keepdim=True) + 1e-6).to(x.dtype)
