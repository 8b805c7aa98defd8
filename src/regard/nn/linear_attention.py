"""`linear_attention`: attention by a recurrence over positions, with its exact weights."""

from typing import Literal, NamedTuple, overload

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import handle_torch_function

from regard.call.shapes import Dimensions, as_autocast, require_dense, without_autocast
from regard.errors import ArgumentError, ShapeError
from regard.functional import RECURRENT, Attended
from regard.kernels.recurrence import Recurrence, fault_of
from regard.lazy import displayed
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.linear_recurrent import GivenRecurrence
from regard.tensors.guards import is_overridden, is_recorded
from regard.tensors.kinds import refuse_wrong_kinds

Removal = Literal["delta"] | tuple[Tensor, Tensor]


@displayed
class Recurred(NamedTuple):
    """The result of `linear_attention(..., return_state=True)`."""

    output: Tensor
    state: Tensor
    """(batch..., H, D, E), float32 or float64: the state after the last position."""
    weights: AttentionMap | None
    """With `return_weights`: the map of these positions, without the state before them."""


@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor | None = ..., beta: Tensor | None = ...,
    removal: Removal | None = ..., scale: float | None = ..., state: Tensor | None = ...,
    return_weights: Literal[False] = ..., return_state: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor | None = ..., beta: Tensor | None = ...,
    removal: Removal | None = ..., scale: float | None = ..., state: Tensor | None = ...,
    return_weights: Literal[True], return_state: Literal[False] = ...,
) -> Attended: ...  # fmt: skip
@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor | None = ..., beta: Tensor | None = ...,
    removal: Removal | None = ..., scale: float | None = ..., state: Tensor | None = ...,
    return_weights: bool = ..., return_state: Literal[True],
) -> Recurred: ...  # fmt: skip
@overload
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor | None = ..., beta: Tensor | None = ...,
    removal: Removal | None = ..., scale: float | None = ..., state: Tensor | None = ...,
    return_weights: bool, return_state: bool = ...,
) -> Tensor | Attended | Recurred: ...  # fmt: skip
@refuse_wrong_kinds
def linear_attention(
    query: Float[Tensor, "..."],
    key: Float[Tensor, "..."],
    value: Float[Tensor, "..."],
    *,
    decay: Float[Tensor, "..."] | None = None,
    beta: Float[Tensor, "..."] | None = None,
    removal: Removal | None = None,
    scale: float | None = None,
    state: Float[Tensor, "..."] | None = None,
    return_weights: bool = False,
    return_state: bool = False,
) -> Tensor | Attended | Recurred:
    r"""Attend by a recurrence: $S_t = A_t S_{t-1} + \beta_t k_t v_t^\top$, $o_t = c\,S_t^\top q_t$.

    So $O = P V$ with $P_{tj} = c\,q_t^\top A_t \cdots A_{j+1} k_j \beta_j$ for $j \le t$. The weights have signs, and
    do not sum to 1. The transition is $A_t = \mathrm{diag}(w_t) - b_t a_t^\top$, with $w_t = \exp(\mathrm{decay}_t)$.

    Args:
        query: (batch..., H, T, D), (batch, T, D) or (T, D).
        key: (batch..., G, T, D) and so on, of the query's rank.
        value: (batch..., G', T, E). The most heads of the three are those of the map, and the other numbers divide it:
            head h reads head h // (H / G).
        decay: the logarithm of w, at most 0: (batch..., H, T) for one decay a head, or (batch..., H, T, D) for one a
            channel of the keys, each dimension full or 1. -inf forgets all. None is no decay.
        beta: the strength of each write, (batch..., H, T), each dimension full or 1: at least 0, and at most 2 with
            "delta". None is 1.
        removal: "delta" replaces the value of a key, $a_t = w_t k_t$ and $b_t = \beta_t k_t$, and expects keys of
            length 1; (a, b) are vectors of the key's shape, where a reads the state before its decay. None removes
            nothing.
        scale: c; by default $1 / \sqrt D$.
        state: $S_0$, (batch..., H, D, E): the state of earlier positions.
        return_weights: also return P as an `AttentionMap`. The output's bits stay.
        return_state: also return the last state, for the positions that follow.

    Returns:
        The output, (batch..., H, T, E) in the input's dtype; with `return_weights`, a named tuple (output, weights);
        with `return_state`, a named tuple (output, state, weights). States are float32, or float64 for float64.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit each other, or a sequence is empty.
        ArgumentError: a decay is above 0, a beta is outside its range, or the removal is unknown.
        NonFiniteError: an input has NaN or infinity.

    Source: Katharopoulos et al. 2020 (arXiv:2006.16236), linear attention. With a constant decay a head, retention (Sun
    et al. 2023, arXiv:2307.08621) and lightning attention (Qin et al. 2024, arXiv:2401.04658); with one a head and
    position, Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), whose step is beta; with one a channel, gated linear
    attention (Yang et al. 2024, arXiv:2312.06635). With "delta": delta net (Yang et al. 2024, arXiv:2406.06484), gated
    delta net (Yang et al. 2025, arXiv:2412.06464), Kimi delta attention (Kimi Team 2025, arXiv:2510.26692). With (a,
    b): RWKV-7 (Peng et al. 2025, arXiv:2503.14456).

    >>> q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    >>> k = torch.nn.functional.normalize(k, dim=-1)
    >>> output, weights = linear_attention(
    ...     q, k, v, decay=-torch.rand(2, 4, 9), beta=torch.rand(2, 4, 9), removal="delta", return_weights=True
    ... )
    >>> torch.allclose(weights @ v, output, atol=1e-5), bool(weights.dense().min() < 0)
    (True, True)

    A state goes on where it ended:

    >>> first = linear_attention(q[..., :5, :], k[..., :5, :], v[..., :5, :], return_state=True)
    >>> last = linear_attention(q[..., 5:, :], k[..., 5:, :], v[..., 5:, :], state=first.state)
    >>> torch.allclose(last, linear_attention(q, k, v)[..., 5:, :], atol=1e-5)
    True
    """
    if is_overridden(query, key, value):
        return handle_torch_function(
            linear_attention, (query, key, value), query, key, value, decay=decay, beta=beta, removal=removal,
            scale=scale, state=state, return_weights=return_weights, return_state=return_state,
        )  # fmt: skip
    query, key, value = as_autocast(query, key, value)
    layout = _Layout.of(query, key, value)
    with without_autocast(query.device):
        recurrence = layout.recurrence(query, key, decay, beta, removal, scale)
        values = layout.flat(value, "value", value.shape[-2:]).to(recurrence.dtype)
        before = None if state is None else layout.flat(state, "state", (query.shape[-1], value.shape[-1]))
        if (fault := fault_of(recurrence, values, before)) is not None:
            raise fault
        output, after = recurrence.chunked().product(values, before)
    output = output.to(query.dtype).view(*layout.leading, *output.shape[1:])
    if not (return_weights or return_state):
        return output
    weights = layout.map_of(recurrence) if return_weights else None
    if return_state:
        return Recurred(output, after.view(*layout.leading, *after.shape[1:]), weights)
    assert weights is not None
    return Attended(output, weights)


RECURRENT.add(linear_attention)


class _Layout(NamedTuple):
    batch: tuple[int, ...]
    heads: int
    has_heads: bool
    length: int
    width: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> "_Layout":
        named = {"query": query, "key": key, "value": value}
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise ShapeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
            require_dense(tensor, name)
        said = ", ".join(f"{name} {tuple(x.shape)} {x.dtype} on {x.device}" for name, x in named.items())
        if len({(x.dtype, x.device) for x in named.values()}) > 1 or not query.is_floating_point():
            raise ShapeError(f"query, key and value must share one floating-point dtype and one device, got {said}")
        rank = query.dim()
        if rank < 2 or not key.dim() == value.dim() == rank:
            raise ShapeError(
                f"query, key and value must share one rank: (batch..., heads, length, dim), (batch, length, dim) or "
                f"(length, dim); got {said}"
            )
        if not query.shape[-2] == key.shape[-2] == value.shape[-2] or query.shape[-1] != key.shape[-1]:
            raise ShapeError(f"query, key and value must have one length, and query and key one width; got {said}")
        has_heads = rank > 3
        counts = [x.shape[-3] if has_heads else 1 for x in named.values()]
        if 0 in (*counts, *query.shape[-2:], value.shape[-1]) or any(max(counts) % count for count in counts):
            raise ShapeError(
                f"heads, lengths and dims must be at least 1, and each number of heads must divide the largest; "
                f"got {said}"
            )
        lead = -3 if has_heads else -2
        try:
            batch = torch.broadcast_shapes(*(x.shape[:lead] for x in named.values()))
        except RuntimeError as error:
            raise ShapeError(f"the batch dimensions must be equal or 1, got {said}") from error
        return cls(tuple(batch), max(counts), has_heads, *query.shape[-2:])

    @property
    def leading(self) -> tuple[int, ...]:
        return (*self.batch, self.heads) if self.has_heads else self.batch

    def flat(self, tensor: Tensor, name: str, tail: tuple[int, ...]) -> Tensor:
        """A tensor (batch..., G, *tail) with each dimension full or 1, as (N, *tail)."""
        require_dense(tensor, name)
        given, lead = tuple(tensor.shape), len(self.leading)
        count = given[lead - 1] if self.has_heads and len(given) == lead + len(tail) else 1
        wanted = (*self.batch, count, *tail) if self.has_heads else (*self.batch, *tail)
        if (
            len(given) != len(wanted)
            or self.heads % max(count, 1)
            or any(n not in (1, m) for n, m in zip(given, wanted, strict=True))
        ):
            raise ShapeError(
                f"{name} must have the shape {(*self.leading, *tail)}, each dimension full or 1; got {given}"
            )
        tensor = tensor.expand(wanted)
        if self.has_heads and count < self.heads:
            tensor = tensor.repeat_interleave(self.heads // count, lead - 1)
        return tensor.reshape(-1, *tail) if tensor.numel() else tensor.new_zeros(0, *tail)

    def recurrence(
        self,
        query: Tensor,
        key: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        removal: Removal | None,
        scale: float | None,
    ) -> Recurrence:
        size, of_key = (self.length,), (self.length, self.width)
        by_channel = decay is not None and decay.dim() == query.dim()
        if decay is not None:
            decay = self.flat(decay, "decay", of_key if by_channel else size)
        if not (removal is None or removal == "delta" or (isinstance(removal, tuple) and len(removal) == 2)):
            raise ArgumentError(f'removal must be "delta", a pair (a, b) of tensors, or None; got {removal!r:.80}')
        pair = removal if isinstance(removal, tuple) else None
        return Recurrence(
            self.flat(query, "query", of_key),
            self.flat(key, "key", of_key),
            self.width**-0.5 if scale is None else scale,
            decay if decay is None or by_channel else decay[..., None],
            None if beta is None else self.flat(beta, "beta", size),
            None if pair is None else (self.flat(pair[0], "a", of_key), self.flat(pair[1], "b", of_key)),
            by_delta=removal == "delta",
        )

    def map_of(self, recurrence: Recurrence) -> AttentionMap:
        if not is_recorded():
            recurrence = recurrence.mapped(Tensor.detach)
        names = Dimensions.of_call(len(self.batch), has_heads=self.has_heads)
        return AttentionMap(GivenRecurrence(recurrence, self.leading, names))
