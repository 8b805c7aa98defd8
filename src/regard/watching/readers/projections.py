"""Queries, keys or values as linear maps of an input: input and weights are saved, and projected on demand. Rows of a
layer that torch ran fused are rebuilt from them, where queries and keys were never seen.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regard.call.masks.base import Mask
from regard.call.normalizations import Softmax
from regard.call.shapes import Sizes, take
from regard.maps.sources.factors import Factors
from regard.tensors.fresh import Fresh
from regard.tensors.guards import is_function_observed, is_overridden
from regard.watching.kept.mask_reading import GivenMask
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt, rounding_of, weighted
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.kernel_lse import KernelLse, run_with_lse, sdpa_arguments


class Layer(NamedTuple):
    num_heads: int
    weights: tuple[Tensor | None, ...]
    is_packed: bool
    biases: Tensor | None
    rows: tuple[Tensor | None, ...]
    """Learned rows (1, 1, E) appended to query, key and value; None for the query."""
    has_zero_row: bool
    """True if keys and values end with a row of zeros."""
    out: tuple[Tensor, Tensor | None]
    dropout: float
    """0 in evaluation mode."""
    static: tuple[Tensor | None, ...] = (None, None, None)
    """Keys and values (N * H, S, D) in place of projected ones."""


def layer_of_call(given: Mapping[str, Any]) -> Layer:
    is_packed = not given["use_separate_proj_weight"]
    names = ("in_proj_weight",) * 3 if is_packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return Layer(
        num_heads=given["num_heads"],
        weights=tuple(given[name] for name in names),
        is_packed=is_packed,
        biases=given["in_proj_bias"],
        rows=(None, given["bias_k"], given["bias_v"]),
        has_zero_row=given["add_zero_attn"],
        out=(given["out_proj_weight"], given["out_proj_bias"]),
        dropout=given["dropout_p"] if given["training"] else 0.0,
        static=(None, given["static_k"], given["static_v"]),
    )


def layer_of_module(module: nn.MultiheadAttention) -> Layer:
    is_packed = module.in_proj_weight is not None
    packed, apart = module.in_proj_weight, (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    return Layer(
        num_heads=module.num_heads,
        weights=(packed,) * 3 if is_packed else apart,
        is_packed=is_packed,
        biases=module.in_proj_bias,
        rows=(None, module.bias_k, module.bias_v),
        has_zero_row=module.add_zero_attn,
        out=(module.out_proj.weight, module.out_proj.bias),
        dropout=module.dropout if module.training else 0.0,
    )


class LayerNormArguments(NamedTuple):
    shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """How query, key or value is made: a linear map of an input, cut into heads, with rows appended."""

    input: Tensor
    weight: Tensor | None
    """None for a static projection."""
    bias: Tensor | None
    part: int
    is_packed: bool
    norm: "LayerNormArguments | None" = None
    """The layer norm the input goes through first."""
    row: Tensor | None = None
    """A learned row (1, 1, E) after the rows of the input."""
    zero: bool = False
    static: Tensor | None = None
    """Given heads (N * H, S, D) in place of the projection."""

    @property
    def is_extended(self) -> bool:
        """True if its rows are not those of the input alone: it is static, or has rows appended."""
        return self.static is not None or self.row is not None or self.zero

    def keep(
        self, policy: RetentionPolicy, what: str, fresh: Fresh, beside: "SavedProjection | None" = None
    ) -> "Projection":
        shared = {} if beside is None else dict(zip(map(id, beside[0].tensors()), beside[1].tensors(), strict=True))

        def saved(tensor: Any, save: Callable[[Tensor, str, Fresh], Tensor], name: str) -> Any:
            if tensor is None or id(tensor) in shared:
                return None if tensor is None else shared[id(tensor)]
            return save(tensor, f"{name} of {what}", fresh)

        weight = partial(saved, save=policy.keep_weight, name="weights")
        return replace(
            self, input=saved(self.input, policy.keep, "input"), weight=weight(self.weight), bias=weight(self.bias),
            row=weight(self.row), static=saved(self.static, policy.keep, "keys"),
            norm=None if self.norm is None else self.norm._replace(
                weight=weight(self.norm.weight), bias=weight(self.norm.bias)
            ),
        )  # fmt: skip

    def tensors(self) -> tuple[Tensor | None, ...]:
        norm = () if self.norm is None else (self.norm.weight, self.norm.bias)
        return self.input, self.weight, self.bias, *norm

    def parts(self) -> tuple[Tensor, Tensor | None]:
        assert self.weight is not None, "a static projection has none"
        weight = self.weight.chunk(3)[self.part] if self.is_packed else self.weight
        return weight, None if self.bias is None else self.bias.chunk(3)[self.part]

    def normed(self) -> Tensor:
        return self.input if self.norm is None else F.layer_norm(self.input, *self.norm)

    def heads(self, num_heads: int, *, batch_first: bool) -> Tensor:
        """Compute the heads (N, H, L, D)."""
        if self.static is not None:
            return self.static.unflatten(0, (-1, num_heads))
        x = self.normed()
        x = x if x.dim() == 3 else x.unsqueeze(1)
        x = F.linear(x, *self.parts())
        x = x if batch_first else x.transpose(0, 1)
        if self.row is not None:
            x = torch.cat([x, self.row.to(x.dtype).expand(x.shape[0], 1, -1)], dim=1)
        if self.zero:
            x = torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], dim=1)
        return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


SavedProjection = tuple[Projection, Projection]


@dataclass(frozen=True, slots=True, eq=False)
class ProjectedHeads:
    query: Tensor
    """(N, H, T, D)."""
    key: Tensor
    """(N, H, S, D)."""
    value: Tensor
    """(N, H, S, D)."""
    scale: float | None
    """Multiplies the dot products; None for 1 / sqrt(D)."""
    is_causal: bool
    output: Tensor | None
    """(N, H, T, D), or with N and H as one dimension; None before the call ran."""
    kernel: KernelLse


class _InnerCalls(TorchFunctionMode):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self._scores: tuple[Tensor, Tensor] | None = None
        self.heads: ProjectedHeads | None = None

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            output, kernel = run_with_lse(func, args, kwargs or {})
            given = sdpa_arguments(*args, **(kwargs or {}))
            query, key, value = (given[name] for name in ("query", "key", "value"))
            self.heads = ProjectedHeads(query, key, value, given["scale"], given["is_causal"], output, kernel)
            return output
        result = func(*args, **(kwargs or {}))
        if func is torch.baddbmm or (func is torch.bmm and self._scores is None):
            self._scores = args[-2], args[-1].mT
        elif func is torch.bmm and self._scores is not None:
            query, key, value = (t.unflatten(0, (-1, self._num_heads)) for t in (*self._scores, args[1]))
            self.heads = ProjectedHeads(query, key, value, 1.0, False, result, KernelLse())
        return result


def run_with_heads(func: Func, args: Args, kwargs: Kwargs, given: dict[str, Any]) -> tuple[Any, ProjectedHeads | None]:
    """Run F.multi_head_attention_forward, and return its projected heads too.

    Its body runs under a mode that sees the attention inside, F.scaled_dot_product_attention or two products around a
    softmax. So nothing is computed twice, and the map holds no weights of the layer, which an optimizer may change.
    The heads are None where other modes or tensor classes have a say in the call: these see the function itself.
    """
    tensors = [given[name] for name in ("query", "key", "value", "in_proj_weight", "in_proj_bias", "out_proj_weight")]
    if is_function_observed() or is_overridden(*tensors) or not isinstance(func, FunctionType):
        return func(*args, **kwargs), None
    # The function hands itself to modes first; its inner calls are wanted here, so this question is answered no.
    body = FunctionType(
        func.__code__, {**func.__globals__, "has_torch_function": lambda tensors: False}, closure=func.__closure__
    )
    body.__defaults__, body.__kwdefaults__ = func.__defaults__, func.__kwdefaults__
    with _InnerCalls(given["num_heads"]) as inner:
        output = body(*args, **kwargs)
    return output, inner.heads


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayerRest:
    """An nn.TransformerEncoderLayer that ran fused, after its attention: shortcut, norms and feed-forward network."""

    layer: nn.TransformerEncoderLayer
    source: Tensor
    """The input (N, T, E)."""
    output: Tensor
    """(N, T, E)."""

    def after(self, attended: Tensor, rows: range) -> Tensor:
        """The output of the layer in a few rows, from that of its attention (N, t, E)."""
        x = take(self.source, rows).to(attended.dtype) + attended
        if self.layer.norm_first:
            return x + self._feed_forward(_norm(self.layer.norm2, x))
        x = _norm(self.layer.norm1, x)
        return _norm(self.layer.norm2, x + self._feed_forward(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        # The functions in place of the modules: a hook of the model must not run for a row of a proof.
        inner = F.gelu if self.layer.activation_relu_or_gelu == 2 else F.relu
        return _linear(self.layer.linear2, inner(_linear(self.layer.linear1, x)))


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    weight = None if norm.weight is None else norm.weight.to(x.dtype)
    bias = None if norm.bias is None else norm.bias.to(x.dtype)
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.to(x.dtype), None if linear.bias is None else linear.bias.to(x.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedRebuilding(Rebuilding):
    r"""A few rows cost no projection of all keys: $q_i \cdot (W_K x_j + b_K)$ is $(W_K^\top q_i) \cdot x_j$ and a
    constant of the row, which softmax ignores; and $\sum_j P_{ij} W_V x_j$ is $W_V \sum_j P_{ij} x_j$."""

    projections: tuple[Projection, Projection, Projection]
    """Those of queries, keys and values, of inputs (N, L, E)."""
    num_heads: int
    out: tuple[Tensor, Tensor | None]
    output: Tensor
    """(N, T, E)."""
    sizes: Sizes
    mask: Mask | None
    given: GivenMask
    factors: Factors
    rest: EncoderLayerRest | None = None
    """The steps after the attention, if `output` is that of an encoder layer."""
    dtype: torch.dtype = field(init=False)
    """That of the computed rows."""
    lengths: Tensor | None = None
    """The lengths (N,) of a nested batch, whose rows beyond them are padding that torch never computed."""

    def some(self, rows: range) -> Rebuilt:
        scores, values = self._scores(rows), self.projections[2].input.to(self.dtype)
        weights = Softmax().normalize(scores)[0].to(values.dtype)
        mixed = (weights.transpose(1, 2).flatten(1, 2) @ values).unflatten(1, (len(rows), -1))
        weight, bias = self._weights(2)
        heads = torch.einsum("nthe,hde->nthd", mixed, weight)
        if bias is not None:
            heads = heads + bias * weights.sum(-1).mT[..., None]
        return self._through_out(heads, rows)

    def whole(self) -> Rebuilt:
        value = self.projections[2].heads(self.num_heads, batch_first=True)
        return self._through_out(weighted(*self.factors.read(), value).transpose(1, 2), range(self.queries))

    def rounding(self, rows: range) -> Tensor:
        return rounding_of(self._scores(rows), self.output.dtype)

    def _through_out(self, heads: Tensor, rows: range) -> Rebuilt:
        weight, bias = self.out
        bias = None if bias is None else bias.to(heads.dtype)
        rebuilt, output = F.linear(heads.flatten(2), weight.to(heads.dtype), bias), take(self.output, rows)
        if self.rest is not None:
            rebuilt = self.rest.after(rebuilt, rows)
        if self.lengths is not None:
            row = torch.arange(rows.start, rows.stop, device=output.device)
            rebuilt = torch.where((row < self.lengths[:, None])[..., None], rebuilt, output)
        return Rebuilt(rebuilt, output, output)

    def _scores(self, rows: range) -> Tensor:
        query, key = take(self.projections[0].input, rows).to(self.dtype), self.projections[1].input.to(self.dtype)
        weight, bias = self._weights(0)
        query = torch.einsum("nte,hde->nthd", query, weight)
        query = query if bias is None else query + bias
        through = torch.einsum("nthd,hde->nthe", query * query.shape[-1] ** -0.5, self._weights(1)[0])
        scores = (through.flatten(1, 2) @ key.mT).unflatten(1, (len(rows), -1)).transpose(1, 2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        columns, even = range(self.sizes.keys), self.given.even
        if even is not None:
            even = even.expand(*even.shape[:-1], self.queries)[..., None]
            scores = scores.masked_fill(take(even, rows), 0.0)
        if self.given.bias is not None:
            scores = scores + self.given.bias.block(rows, columns, query=query, key=key, sizes=self.sizes)
        if self.mask is None:
            return scores
        allowed = self.mask.block(rows, columns, sizes=self.sizes, device=self.output.device)
        return scores.masked_fill(~allowed, -torch.inf)

    def _weights(self, part: int) -> tuple[Tensor, Tensor | None]:
        """The matrix (H, D, E) and the bias (H, D) of one projection."""
        weight, bias = self.projections[part].parts()
        split = (self.num_heads, -1)
        return weight.to(self.dtype).unflatten(0, split), None if bias is None else bias.to(self.dtype).unflatten(
            0, split
        )

    def __post_init__(self) -> None:
        # Casts of all weights would be half the cost of a row; bfloat16 has the range of float32, float16 has not.
        given = self.output.dtype
        dtype = given if given == torch.bfloat16 else torch.promote_types(given, torch.float32)
        object.__setattr__(self, "dtype", dtype)
