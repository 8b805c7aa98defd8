"""torch's fused kernels, with the log-sum-exp, a by-product of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.call.biases.base import Bias
from regard.call.masks.base import And, Mask
from regard.call.masks.basic import causal_offset
from regard.call.normalizations import Normalization, Softmax, any_coarse
from regard.call.scores.base import ScaledDot
from regard.call.shapes import Sizes
from regard.errors import BackendError
from regard.kernels.base import BACKWARD, Backend, Call, Snapshot
from regard.kernels.cuda_kernels import cuda_kernel
from regard.kernels.fused_kernels import (
    CPU_FLASH,
    NOTHING_ADDED,
    Buffer,
    Kernel,
    OneBlock,
    one_width,
    with_positive_scale,
)
from regard.kernels.fused_plan import Block, Plan, excluding_factors, plan
from regard.kernels.tiled import Tiled
from regard.tensors.guards import State, can_look, in_transform, is_compiling, is_recorded
from regard.tensors.torch_private import Missing, missing


class Fused(Backend):
    """Softmax of scaled dot products at the speed of the kernels, without any T x S tensor.

    The row state is the log-sum-exp, -inf for rows without keys, and it has a gradient. The kernels have no second
    derivative: without a named backend, the tiles compute it.
    """

    name = "fused"

    def __init__(self, second: Backend | None = None) -> None:
        self._second = second
        """The backend of second derivatives, which the kernels lack; None to refuse them."""

    def unnamed(self) -> Backend:
        return _WITH_SECOND

    def why_not(self, call: Call, state: State) -> str | None:
        width = call.query.shape[-1]
        if call.score.dot_scale(width) is None:
            return f"torch's fused kernels compute scaled dot products; the score here: {call.score}"
        if not isinstance(call.normalization, Softmax):
            return f"torch's fused kernels normalise by softmax, not by {call.normalization}"
        if state.has_tangents:
            return "torch's fused kernels have no forward-mode derivative"
        if state.is_traced:
            return "torch.jit.trace would keep the blocks of this call's lengths for calls of other lengths"
        if state.is_transformed and in_transform("Vmap", "Grad"):
            return "torch.vmap and torch.func have no rule for torch's fused kernels"
        if call.dropout > 0:
            return "the fused kernels have no dropout whose weights could be read"
        if call.bias is not None and call.bias.reads_vectors:
            return "the bias reads the vectors of queries and keys, which torch's fused kernels do not let it"
        if call.bias is not None and state.is_recorded and any(t.requires_grad for t in call.bias.learned()):
            return "torch's fused kernels give no gradient to a bias"
        kernel = kernel_for(call.query, width=width, covering=None)
        if kernel is None:
            return f"torch has no fused kernel for {call.query.dtype} on {call.query.device.type}"
        for operator in kernel.operators:
            if isinstance(operator, Missing):
                return missing(operator)
        return kernel.refuses(call.sizes)

    def has_exact_state(self, call: Call) -> bool:
        """False for half precision on the CPU, whose kernel approximates exponentials: the log-sum-exp errs by 7e-5.

        CUDA kernels err by 2e-6; but their gradient is rounded to half precision.
        """
        takes_gradient = call.query.requires_grad or call.key.requires_grad
        return call.query.dtype == call.compute_dtype or (call.query.is_cuda and not takes_gradient)

    def run(self, call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
        covering = plan(call)
        width = max(call.query.shape[-1], value.shape[-1])
        kernel = kernel_for(call.query, width=width, covering=covering)
        scale = call.score.dot_scale(call.query.shape[-1])
        assert kernel is not None, "why_not has said so"
        assert scale is not None, "why_not has said so"
        query, key, value_, scale = kernel.arguments(call.query, call.key, value, scale)
        again = None
        needs_gradient = is_recorded() and (query.requires_grad or key.requires_grad or value_.requires_grad)
        if needs_gradient and not is_compiling() and (self._second is not None or call.snapshot is not None):
            parts = call.normalization, call.mask, call.bias, call.sizes, call.snapshot
            again = DoubleBackward(self._second, scale, *parts)
        whole = covering.whole
        if whole is not None and not (needs_gradient and covering.bias is not None):
            is_bare = len(whole.factors) == 0 and covering.bias is None
            added = NOTHING_ADDED if is_bare else covering.additive(whole)
            one = OneBlock(kernel, scale, whole.is_causal, added)
            if needs_gradient:
                output, lse = _WholeCall.apply(one, again, query, key, value_)
            else:
                output, lse, _ = one.forward(query, key, value_)
        elif needs_gradient:
            output, lse = _FusedBlocks.apply(kernel, covering, scale, again, query, key, value_)
        else:
            output, lse, _ = _forward_blocks(kernel, covering, scale, query, key, value_)
        if query.is_cpu and can_look(lse) and not bool(lse.all()):
            output, lse = _with_lost_nan(call, output, lse)
        if covering.per_row is not None:
            lse = lse + covering.per_row.to(lse.dtype)
        if output.shape[-1] != value.shape[-1] or output.dtype != value.dtype:
            output = output[..., : value.shape[-1]].to(value.dtype)
        return output, lse


def _with_lost_nan(call: Call, output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The results with the NaN that torch's CPU kernel loses: of a row whose scores are all NaN, over fewer keys than a
    vector register holds, it makes zeros and the log-sum-exp 0."""
    lost = lse.detach() == 0
    rows = lost.any(1).any(0).nonzero()[:, 0]
    with torch.no_grad():
        is_nan = torch.zeros_like(lost).index_copy(-1, rows, call.few_scores(rows).isnan().any(-1))
    return output.masked_fill(is_nan[..., None], torch.nan), lse.masked_fill(is_nan, torch.nan)


def kernel_for(query: Tensor, *, width: int, covering: Plan | None) -> Kernel | None:
    if query.is_cpu:
        return CPU_FLASH if query.dtype in CPU_DTYPES else None
    return cuda_kernel(query, width=width, covering=covering) if query.device.type == "cuda" else None


CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WITH_SECOND = Fused(Tiled())


@dataclass(frozen=True, slots=True, eq=False)
class DoubleBackward:
    """Gradients by another backend, differentiable again. It holds neither query nor key: autograd saves them."""

    backend: Backend | None
    """None to refuse second derivatives."""
    scale: float
    normalization: Normalization
    mask: Mask | None
    bias: Bias | None
    sizes: Sizes
    snapshot: Snapshot | None

    def call(self, query: Tensor, key: Tensor) -> Call:
        return Call(
            query=query, key=key, score=ScaledDot(self.scale), normalization=self.normalization, mask=self.mask,
            bias=self.bias, dropout=0.0, sizes=self.sizes, snapshot=self.snapshot,
        )  # fmt: skip

    def require_same(self, vectors: Sequence[Tensor], lse: Tensor) -> None:
        if self.snapshot is not None:
            self.call(*vectors).require_same(BACKWARD, lse)

    def gradients(
        self, vectors: Sequence[Tensor], grad_output: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if self.backend is None:
            raise BackendError(NO_SECOND)
        query, key, value = vectors
        call = self.call(query, key)
        output, lse = self.backend.run(call, value)
        assert lse is not None, "it has a row state"
        call.guard(output, lse)
        outputs, grads = ((output,), (grad_output,)) if grad_lse is None else ((output, lse), (grad_output, grad_lse))
        inputs = [t for t in vectors if t.requires_grad]
        found = iter(torch.autograd.grad(outputs, inputs, grads, create_graph=True, allow_unused=True))
        return tuple(next(found) if t.requires_grad else None for t in vectors)


NO_SECOND = "backend 'fused' has no second derivative; backend='tiled' has, in linear memory"


class _WholeCall(torch.autograd.Function):
    """A call in one block, with its additive mask, so that lengths may change in place before the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, block: OneBlock, again: DoubleBackward | None, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        output, lse, extras = block.forward(query, key, value)
        ctx.block, ctx.again, ctx.extras = block, again, extras
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(saved[3])
        if is_recorded():
            if ctx.again is None:
                raise BackendError(NO_SECOND)
            ctx.again.require_same(saved[:2], saved[4])
            return None, None, *ctx.again.gradients(saved[:3], grad_output, grad_lse)
        (grad_output,) = ctx.block.kernel.laid_out(grad_output)
        return None, None, *ctx.block.backward(saved, ctx.extras, grad_output, grad_lse)


class _FusedBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        covering: Plan,
        scale: float,
        again: DoubleBackward | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        output, lse, extras = _forward_blocks(kernel, covering, scale, query, key, value)
        ctx.kernel, ctx.covering, ctx.scale, ctx.extras, ctx.again = kernel, covering, scale, extras, again
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if is_recorded() and ctx.again is None:
            raise BackendError(NO_SECOND)
        query, key, value, output, lse = ctx.saved_tensors
        if ctx.again is not None:
            per_row = ctx.covering.per_row
            ctx.again.require_same((query, key), lse if per_row is None else lse + per_row.to(lse.dtype))
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        if is_recorded() or _lost_sums(ctx, lse):
            with torch.enable_grad():
                found = ctx.again.gradients((query, key, value), grad_output, grad_lse)
            return None, None, None, None, *found
        (grad_output,) = ctx.kernel.laid_out(grad_output)
        blocks = ctx.covering.every
        is_whole = len(blocks) == 1 and blocks[0].count * len(blocks[0].columns) == key.shape[2]
        grads = () if is_whole else tuple(torch.zeros_like(t) for t in (query, key, value))
        buffer = Buffer()
        for number, block in enumerate(blocks):
            if not block.columns:
                continue
            rows, columns = block.rows, block.columns
            its = (lse, grad_output, grad_lse)
            lse_, grad_output_, grad_lse_ = its if number >= len(ctx.covering.blocks) else _without(ctx.covering, *its)
            places = ((query, rows), (key, columns), (value, columns), (output, rows), (lse_, rows))
            saved = tuple(_part(tensor, where, block) for tensor, where in places)
            grad_rows = None if grad_lse_ is None else _part(grad_lse_, block.rows, block)
            one = OneBlock(ctx.kernel, ctx.scale, block.is_causal, ctx.covering.additive(block, buffer))
            pieces = one.backward(saved, ctx.extras[number], _part(grad_output_, block.rows, block), grad_rows)
            if is_whole:
                return None, None, None, None, *(_whole(piece, block) for piece in pieces)
            for grad, where, piece in zip(grads, (rows, columns, columns), pieces, strict=True):
                _add_part(grad, where, block, piece)
        return None, None, None, None, *grads


def _lost_sums(ctx: Any, lse: Tensor) -> bool:
    """Whether biases far from 0 cost the log-sum-exp of a row all digits of its sum, of which the kernels compute the
    weights of the backward pass: torch's own gradients are wrong there. Only on the CPU: a GPU would synchronise."""
    can = ctx.again is not None and ctx.again.backend is not None
    return can and ctx.covering.bias is not None and can_look(lse) and any_coarse(lse)


def _without(
    covering: Plan, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same without the queries that run anew: lse = +inf makes their weights 0, and no gradient comes in."""
    if not covering.anew:
        return lse, grad_output, grad_lse
    gone = torch.zeros(lse.shape[-1], dtype=torch.bool, device=lse.device)
    for block in covering.anew:
        gone[block.rows.start : block.rows.stop] = True
    grad_lse = None if grad_lse is None else grad_lse.masked_fill(gone, 0.0)
    return lse.masked_fill(gone, torch.inf), grad_output.masked_fill(gone[:, None], 0.0), grad_lse


def _part(tensor: Tensor, where: range, block: Block) -> Tensor:
    if block.count == 1:
        return tensor[:, :, where.start : where.stop]
    end = where.stop + len(block.rows) * (block.count - 1)
    # This is a view (B, H, count, ..., rows). For one sequence the result below is a view too.
    parts = tensor[:, :, where.start : end].unfold(2, len(where), len(block.rows))
    return parts.movedim(-1, 3).transpose(1, 2).flatten(0, 1)


def _whole(tensor: Tensor, block: Block) -> Tensor:
    """The rows (B * count, H, rows, ...) of joined blocks, put back in order as (B, H, count * rows, ...)."""
    if block.count == 1:
        return tensor
    return tensor.unflatten(0, (-1, block.count)).transpose(1, 2).flatten(2, 3)


def _add_part(total: Tensor, where: range, block: Block, piece: Tensor) -> None:
    """Add `piece` to the rows of `_part`. Joined blocks may share keys, so one row may get several terms."""
    step = len(block.rows)
    if len(where) <= step:
        end = where.stop + step * (block.count - 1)
        rows = total[:, :, where.start : end].unfold(2, len(where), step).movedim(-1, 3)
        rows += piece.unflatten(0, (-1, block.count)).transpose(1, 2)
        return
    for number, part in enumerate(piece.unflatten(0, (-1, block.count)).unbind(1)):
        total[:, :, where.start + number * step : where.stop + number * step] += part


def _forward_blocks(
    kernel: Kernel, covering: Plan, scale: float, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    blocks, buffer, end = covering.every, Buffer(), 0
    results: tuple[Tensor, ...] = ()
    extras: list[tuple[Any, ...]] = []
    for number, block in enumerate(blocks):
        *pieces, extra = _forward_block(kernel, covering, block, scale, query, key, value, buffer)
        extras.append(extra)
        if len(covering.blocks) == 1 and not number:
            results = (pieces[0], pieces[1])
            continue
        # Small tensors left by each block would keep the allocator from reusing the memory of masks between them.
        results = results or tuple(t.new_empty(*t.shape[:2], query.shape[2], *t.shape[3:]) for t in pieces)
        start, end = end, end + pieces[0].shape[2]
        if number >= len(covering.blocks):
            start, end = block.rows.start, block.rows.stop
        for result, piece in zip(results, pieces, strict=True):
            result[:, :, start:end] = piece
    return results[0], results[1], tuple(extras)


def _forward_block(
    kernel: Kernel,
    covering: Plan,
    block: Block,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buffer: Buffer,
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    query = _part(query, block.rows, block)
    if not block.columns:
        dtype = torch.promote_types(query.dtype, torch.float32)
        return torch.zeros_like(query), query.new_full(query.shape[:-1], -torch.inf, dtype=dtype), ()
    key, value = _part(key, block.columns, block), _part(value, block.columns, block)
    one = OneBlock(kernel, scale, block.is_causal, covering.additive(block, buffer))
    output, lse, extras = one.forward(query, key, value)
    return _whole(output, block), _whole(lse, block), extras


def as_sdpa(call: Call, value: Tensor) -> Tensor | None:
    """The output (B, H, T, E) by torch's own function, in compiled and exported graphs; None if it would compute
    something else.

    It is equivalent for dot products under softmax without dropout, if the call either is causal from the first key on
    or has only masks and biases by key (lengths, padding, one bias per key), but not both. torch runs the same kernel
    as the backend `fused`, so the bits are equal.
    """
    scale = call.score.dot_scale(call.query.shape[-1])
    if scale is None or type(call.normalization) is not Softmax or call.dropout > 0:
        return None
    factors = excluding_factors(call)
    others = tuple(m for m in factors if causal_offset(m) != 0)
    is_causal = len(others) < len(factors)
    if any("query" in m.depends_on() for m in others) or (is_causal and (others or call.bias is not None)):
        return None
    additive = None
    if others:
        # A range would fix the number of keys in an exported graph.
        keys = torch.arange(call.sizes.keys, device=call.query.device)
        additive = call.allowed(And(others), range(1), keys)
    if call.bias is not None:
        per_key = call.bias.per_key
        # torch's kernels give no gradient to a bias.
        if per_key is None or per_key.requires_grad:
            return None
        bias = per_key.to(call.query.dtype).expand(*per_key.shape[:-1], call.sizes.keys)
        additive = bias if additive is None else bias.masked_fill(~additive, -torch.inf)
    dtype, width = value.dtype, value.shape[-1]
    # For unequal widths, torch's function computes the weights in full.
    query, key, value = one_width(call.query, call.key, value.to(call.query.dtype))
    query, scale = with_positive_scale(query, scale)
    # A comparison of symbolic sizes is no bool, which torch's function takes; a branch on it is.
    grouped = {"enable_gqa": True} if call.group > 1 else {}
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=additive, is_causal=is_causal, scale=scale, **grouped
    )
    return output[..., :width].to(dtype)
