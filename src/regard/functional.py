"""`attention`: the one function for every score, mask and backend; and `explain`, its dry run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

from jaxtyping import Float
from torch import Size, Tensor
from torch.overrides import handle_torch_function

from regard.call.biases.base import Bias, as_bias
from regard.call.checks import IS_CHECKING, check_values
from regard.call.masks.base import Mask
from regard.call.masks.basic import as_mask
from regard.call.normalizations import Normalization, Softmax, as_normalization
from regard.call.scores.base import ScaledDot, Score
from regard.call.scores.custom import as_score
from regard.call.shapes import as_autocast, canonical, restore, without_autocast
from regard.errors import ArgumentError, ShapeError
from regard.kernels import BACKENDS, choose_backend, execute, run
from regard.kernels.base import Backend, BackendName, Call, row_sum_error
from regard.kernels.fused import as_sdpa
from regard.lazy import Displayed, displayed
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.call import CallSource
from regard.maps.sources.factors import Factors, needs_gradient, tensors_of_call
from regard.maps.statistics.tiles import explained
from regard.tensors.guards import State, has_values, is_overridden, is_recorded, run_state
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.tensor_tree import tensors_mapped

ScoreName = Literal[
    "scaled dot", "dot", "cosine", "gaussian", "laplacian", "boxcar", "epanechnikov", "triangular", "constant"
]
NormalizationName = Literal["softmax", "sparsemax", "entmax15", "sigmoid", "unnormalized", "softpick"]
AnyScore = Score | Callable[[Tensor, Tensor], Tensor] | type[Score] | ScoreName
AnyNormalization = Normalization | type[Normalization] | NormalizationName
RECURRENT: set[object] = set()
"""`linear_attention`, once it is loaded: a watch looks for it here."""
TOLERANCE = 0.05
"""The tolerance of ln(row sum) with a given log-sum-exp; half precision leaves some per cent where scores are large."""


@displayed
class Attended(NamedTuple):
    """The result of `attention(..., return_weights=True)`."""

    output: Tensor
    weights: AttentionMap


_attended = Attended.__new__


def _of_parts(kind: type[Attended], output: Any, weights: Any = None) -> Attended:
    """Take both parts in one too: of a subclass of Tensor, torch makes the result again as `type(result)(parts)`."""
    return _attended(kind, *output) if weights is None else _attended(kind, output, weights)


Attended.__new__ = _of_parts  # type: ignore[method-assign, assignment]


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, score: AnyScore = ..., normalization: AnyNormalization = ...,
    mask: Mask | Tensor | None = ..., bias: Bias | Tensor | None = ..., dropout: float = ...,
    backend: BackendName | None = ..., return_weights: Literal[False] = ...,
    keep_values: bool = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, score: AnyScore = ..., normalization: AnyNormalization = ...,
    mask: Mask | Tensor | None = ..., bias: Bias | Tensor | None = ..., dropout: float = ...,
    backend: BackendName | None = ..., return_weights: Literal[True],
    keep_values: bool = ...,
) -> Attended: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, score: AnyScore = ..., normalization: AnyNormalization = ...,
    mask: Mask | Tensor | None = ..., bias: Bias | Tensor | None = ..., dropout: float = ...,
    backend: BackendName | None = ..., return_weights: bool,
    keep_values: bool = ...,
) -> Tensor | Attended: ...  # fmt: skip
def attention(
    query: Float[Tensor, "..."],
    key: Float[Tensor, "..."],
    value: Float[Tensor, "..."],
    *,
    score: AnyScore = ScaledDot(),  # noqa: B008  (frozen, without state)
    normalization: AnyNormalization = Softmax(),  # noqa: B008
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    dropout: float = 0.0,
    backend: BackendName | None = None,
    return_weights: bool = False,
    keep_values: bool = False,
) -> Tensor | Attended:
    r"""Attend: $O = P V$ with $P = \mathrm{normalize}(s(Q, K) + b)$ where the mask allows.

    Args:
        query: (batch..., H, T, D), (batch, T, D) or (T, D).
        key: (batch..., G, S, D) and so on, of the query's rank. G divides H: query head h reads
            key/value head h // (H / G).
        value: (batch..., G, S, E). Under autocast all three are cast, as in `F.scaled_dot_product_attention`.
        score: a function of a query and a key: `ScaledDot()`, `Additive(...)`, `Gaussian(...)`, a name without
            arguments ("dot"), or any function from a block of queries and a block of keys to scores.
        normalization: from a row of scores to weights: `Softmax()`, `Sparsemax()`, `Sigmoid()`, ..., or "sparsemax".
        mask: the visible keys of each query: a mask (`causal() & lengths(n)`) or a bool tensor, True = keep, with the
            input's rank and each dimension full or 1, or (T, S). A row without keys is exactly 0.
        bias: an additive term of the scores: a tensor with the shape of a tensor mask, or a `Bias`. -inf excludes a
            pair. If a whole row is near -1e9, scores are rounded to steps of 64, and the keys count alike: use a mask
            to hide keys.
        dropout: the probability of dropping a weight, in [0, 1); the output is drop(P) V. It applies whenever it is
            above 0: pass 0 in evaluation.
        backend: "fused", "tiled", "reference", or None to choose among them. A named backend runs or
            raises.
        return_weights: also return P as an `AttentionMap`, before dropout. Neither the bits of the output nor the
            kernel change.
        keep_values: store the values in the map, for `value_norms()`, `gradient()` and `relevance()`; the same as
            `weights.with_values(value)`.
    Returns:
        The output, (batch..., H, T, E) in the input's dtype; with `return_weights`, a named tuple
        `(output, weights)`.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit each other.
        ArgumentError: the dropout is outside [0, 1), the backend is unknown, or `keep_values` is without
            `return_weights`.
        BackendError: the named backend cannot run this call.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1.

    >>> import torch
    >>> q, k, v = torch.randn(2, 8, 5, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 16)
    >>> attention(q, k, v).shape
    torch.Size([2, 8, 5, 16])
    >>> output, weights = attention(q, k, v, return_weights=True)
    >>> weights.shape, weights[0, :, 4].sum(-1).round(decimals=3).unique()
    (torch.Size([2, 8, 5, 7]), tensor([1.]))
    """
    if is_overridden(query, key, value):
        # F.scaled_dot_product_attention does the same: tensor subclasses and modes (regard.watch) see the whole call.
        return handle_torch_function(
            attention, (query, key, value), query, key, value, score=score, normalization=normalization, mask=mask,
            bias=bias, dropout=dropout, backend=backend, return_weights=return_weights, keep_values=keep_values,
        )  # fmt: skip
    if not (isinstance(return_weights, bool) and isinstance(keep_values, bool)):
        raise ArgumentError(
            f"return_weights and keep_values must be True or False, got {return_weights!r:.80} and {keep_values!r:.80}"
        )
    if keep_values and not return_weights:
        raise ArgumentError("keep_values=True is for the map that return_weights=True asks for")
    state = run_state(query)
    if state.is_cast:
        query, key, value = as_autocast(query, key, value)
    call, values = make_call(
        query, key, value, score=score, normalization=normalization, mask=mask, bias=bias, dropout=dropout, state=state
    )
    if not state.is_compiling and IS_CHECKING.get():
        check_values(query, key, value, score=score, normalization=normalization, mask=mask, bias=bias)
    options: dict[str, Any] = {"return_weights": return_weights, "keep_values": keep_values, "state": state}
    if not state.is_cast:
        return run_call(call, values, value, backend, **options)
    with without_autocast(query.device):  # Casting is done by now: our kernels compute in the dtypes of their inputs.
        return run_call(call, values, value, backend, **options)


def run_call(
    call: Call,
    values: Tensor,
    value: Tensor,
    backend: BackendName | None,
    *,
    return_weights: bool,
    keep_values: bool,
    state: State | None = None,
) -> Tensor | Attended:
    at = run_state(call.query) if state is None else state
    chosen = choose_backend(call, backend, at)
    is_graph = (at.is_compiling and chosen.name == "fused") or (at.is_traced and backend is None)
    if is_graph and not return_weights:
        # Other tools can read, optimise and export this graph: it is the same kernel under torch's own name.
        plain = as_sdpa(call, values)
        if plain is not None:
            return restore(plain, call.sizes)
    if (return_weights or at.is_recorded) and not at.is_compiling:
        call = _with_snapshot(call)
    output, rows = run(chosen, call, values)
    if not (call.sizes.has_heads and len(call.sizes.batch) == 1):
        output = restore(output, call.sizes)
    if not return_weights:
        return output
    if not at.is_recorded and not at.is_compiling:
        call = _without_gradient(call)
    factors = Factors.given(call, rows if chosen.has_exact_state(call) else None)
    weights = AttentionMap(CallSource(factors, Size(call.sizes.map_shape), chosen))
    return Attended(output, weights.with_values(value) if keep_values else weights)


def _with_snapshot(call: Call) -> Call:
    if call.holds_own_parts:
        return call
    from regard.kernels.snapshot import with_snapshot

    return with_snapshot(call)


def _without_gradient(call: Call) -> Call:
    """The call where none is recorded: the row state has no graph, and one for the scores alone would be wrong."""
    if not needs_gradient(tensors_of_call(call)):
        return call
    return tensors_mapped(call, lambda t: t.detach() if t.requires_grad else t)


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: AnyScore,
    normalization: AnyNormalization,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    dropout: float,
    state: State | None = None,
) -> tuple[Call, Tensor]:
    if not isinstance(dropout, float | int) or not 0.0 <= dropout < 1.0:
        raise ArgumentError(f"dropout must be a number in [0, 1), got {dropout!r}")
    state = run_state(query) if state is None else state
    query, key, value, sizes = canonical(query, key, value, state=state)
    chosen = score if isinstance(score, Score) else as_score(score)
    weighing = normalization if isinstance(normalization, Normalization) else as_normalization(normalization)
    query, key = chosen.prepare(query, key)
    if state.is_cast:
        query, key = as_autocast(query, key)
    allowed = mask if mask is None or isinstance(mask, Mask) else as_mask(mask)
    added = None if bias is None else as_bias(bias)
    call = Call(
        query=query,
        key=key,
        score=chosen,
        normalization=weighing,
        mask=None if allowed is None else allowed.bind(sizes, query.device),
        bias=None if added is None else added.bind(sizes, query.device),
        dropout=dropout,
        sizes=sizes,
    )
    return call, value


@dataclass(frozen=True, slots=True)
class Explanation(Displayed):
    backend: str
    reason: str
    flops: int
    """Multiplications and additions of the two products, over every pair of query and key."""
    extra_bytes: int
    """The memory that grows with T x S; 0 for backends without any."""
    refused: dict[str, str]
    statistics: str
    """The reader of several statistics of the weights together."""
    not_read_by: dict[str, str]
    """The readers before it, and the reasons against them."""

    def __str__(self) -> str:
        lines = [
            f"{self.backend}: {self.reason}",
            f"  {self.flops:.3g} FLOPs, {self.extra_bytes:.3g} bytes for T x S weights",
        ]
        lines += [f"  not {name}: {why}" for name, why in self.refused.items()]
        lines += [f"  statistics of its weights together: by {self.statistics}"]
        return "\n".join(lines + [f"  not by {name}: {why}" for name, why in self.not_read_by.items()])


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: AnyScore = ScaledDot(),  # noqa: B008
    normalization: AnyNormalization = Softmax(),  # noqa: B008
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    dropout: float = 0.0,
    backend: BackendName | None = None,
) -> Explanation:
    """The plan of `attention` for the same arguments, without computing it.

    Raises:
        ShapeError, ArgumentError, BackendError: in the same cases as `attention`.

    >>> import torch
    >>> print(explain(torch.ones(4, 8), torch.ones(4, 8), torch.ones(4, 8), dropout=0.1))
    tiled: chosen: the first that runs this call
      512 FLOPs, 0 bytes for T x S weights
      not fused: the fused kernels have no dropout whose weights could be read
      not reference: 'tiled' came first
      statistics of its weights together: by tiles
      not by kernels of our own (Triton): it runs on cuda
      not by calls of the attention's kernel: several statistics share a pass
      not by one loop over each row (numba): its 16 weights are fewer than 1,048,576
    """
    state = run_state(query)
    call, value = make_call(
        query, key, value, score=score, normalization=normalization, mask=mask, bias=bias, dropout=dropout, state=state
    )
    chosen = choose_backend(call, backend, state)
    refused = {name: why for name, other in BACKENDS.items() if (why := _why_not(other, chosen, call, state))}
    pairs = call.sizes.flat_batch * call.sizes.heads * call.sizes.queries * call.sizes.keys
    reason = "named by the caller" if backend else "chosen: the first that runs this call"
    reader, not_read_by = explained(CallSource(Factors.given(call, None), Size(call.sizes.map_shape), chosen))
    return Explanation(
        backend=chosen.name,
        reason=reason,
        flops=2 * pairs * (call.query.shape[-1] + value.shape[-1]),
        extra_bytes=pairs * call.compute_dtype.itemsize if chosen.name == "reference" else 0,
        refused=refused,
        statistics=reader,
        not_read_by=not_read_by,
    )


def _why_not(other: Backend, chosen: Backend, call: Call, state: State) -> str | None:
    if other.name == chosen.name:
        return None
    return other.why_not(call, state) or f"{chosen.name!r} came first"


@refuse_wrong_kinds
def map_of(
    query: Tensor,
    key: Tensor,
    *,
    score: AnyScore = ScaledDot(),  # noqa: B008
    normalization: AnyNormalization = Softmax(),  # noqa: B008
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    lse: Tensor | None = None,
) -> AttentionMap:
    r"""The weights of queries on keys, such as those of a cache or of another library; computed on demand.

    Args:
        query: (batch..., H, T, D), (batch, T, D) or (T, D), as the kernel's input: rotated and normalised.
        key: (batch..., G, S, D) and so on; G divides H.
        score: as in `attention`; so are the normalization, the mask and the bias.
        normalization: see `attention`.
        mask: see `attention`; True = keep.
        bias: see `attention`.
        lse: the kernel's log-sum-exp (batch..., H, T), natural logarithms. By default the first read computes it by one
            pass over the scores.

    Returns:
        The map (batch..., H, T, S). It carries gradients to query and key; if these need any, the pass over the scores
        runs at once, also with a log-sum-exp without its own gradient.

    Raises:
        ShapeError: shapes, dtypes or devices do not fit each other.
        ArgumentError: a log-sum-exp was given to a normalization other than softmax, or does not belong to these
            queries and keys: the last row of weights would not sum to 1.

    >>> import torch
    >>> x = torch.eye(3)
    >>> map_of(x, x)[0]
    tensor([0.4711, 0.2645, 0.2645])
    """
    call, _ = make_call(
        query, key, key, score=score, normalization=normalization, mask=mask, bias=bias, dropout=0.0
    )  # fmt: skip
    # A given log-sum-exp gets its graph where the map is read.
    call = _with_snapshot(call if is_recorded() or lse is not None else _without_gradient(call))
    shape = Size(call.sizes.map_shape)
    if lse is None:
        with without_autocast(query.device):
            return AttentionMap(CallSource(Factors.given(call, _state_with_graph(call)), shape))
    expected = tuple(shape[:-1])
    if tuple(lse.shape) != expected or lse.device != query.device:
        raise ShapeError(
            f"map_of() needs a log-sum-exp of shape {expected} on {query.device}, one for each query; got "
            f"{tuple(lse.shape)} on {lse.device}"
        )
    if not isinstance(call.normalization.base, Softmax):
        raise ArgumentError(
            f"only a softmax has a log-sum-exp, and the normalization is {call.normalization}: leave lse out"
        )
    given = lse.to(call.compute_dtype).reshape(call.query.shape[:-1])
    if call.normalization.base is call.normalization and has_values(query):
        with without_autocast(query.device):
            miss = row_sum_error(call, given)
        if not miss <= TOLERANCE:
            raise ArgumentError(
                "the log-sum-exp does not belong to these queries and keys: the sum of the last row of weights is a "
                f"factor of exp({miss:.3g}) away from 1; look at the scale, the base of the logarithm (e, not 2), the "
                "mask and the order of heads"
            )
    anew = None if given.requires_grad else _state_with_graph(call)
    factors = Factors.given(call, anew) if anew is not None else Factors.given(call, given, lse=given)
    return AttentionMap(CallSource(factors, shape))


def _state_with_graph(call: Call) -> Tensor | None:
    if not (is_recorded() and any(t.requires_grad for t in (call.query, call.key, *call.learned()))):
        return None
    return execute(choose_backend(call, None), call, call.key.new_zeros(*call.key.shape[:-1], 1))[1]
