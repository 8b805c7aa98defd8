"""FlexAttention: torch compiles a kernel for the mask, the bias and the soft cap of a call."""

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.call.biases.base import Bias, DenseBias
from regard.call.normalizations import Softmax
from regard.call.scores.base import Score, SoftCapped
from regard.errors import BackendError
from regard.kernels.base import Backend, Call
from regard.tensors.guards import State, in_transform, is_recorded

MOST_KERNELS = 256
"""The most kernels compiled in one process; a call beyond them raises an error."""

HANDS_BACK_LSE = torch.__version__ >= "2.9"
"""Whether FlexAttention has the current interface for its log-sum-exp."""

COMPILERS = ("cl",) if os.name == "nt" else ("c++", "g++", "clang++")
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""The function (score, batch, head, query, key) -> score of FlexAttention, for each pair."""


class Flex(Backend):
    """Softmax of dot products, with or without a soft cap, by kernels of `torch.compile(flex_attention)`.

    Masks are passed as predicates, over blocks of 128 queries and keys; biases and the soft cap are compiled into the
    kernel. The first call of its kind compiles a kernel (seconds on the CPU), which lives as long as the process; other
    shapes need another kernel, other values do not. It allocates no T x S tensor, only a few integers for each block of
    a mask.

    On the CPU it runs without gradients only and returns no row state: the first read of a map computes the state by a
    second pass over the scores. On CUDA the state and its gradient come with the output. The CUDA path follows torch's
    documentation and has never been run.

    Source: Dong et al. 2024 (arXiv:2412.05496).
    """

    name = "flex"
    only_by_name = "it compiles a kernel for each kind of call and is taken by name only"

    def why_not(self, call: Call, state: State) -> str | None:
        if _dot_and_cap(call.score, call.query.shape[-1]) is None:
            return f"FlexAttention computes scaled dot products, soft-capped or not; the score here: {call.score}"
        if not isinstance(call.normalization, Softmax):
            return f"FlexAttention normalises by softmax, not by {call.normalization}"
        if not HANDS_BACK_LSE:
            return f"FlexAttention hands back its log-sum-exp from torch 2.9 on; this is {torch.__version__}"
        if state.is_compiling:
            return "it compiles its own kernels and is not traced into another graph"
        if state.has_tangents:
            return "FlexAttention has no forward-mode derivative"
        if state.is_transformed and in_transform("Vmap", "Grad"):
            return "torch.vmap and torch.func have no rule for compiled FlexAttention"
        if call.dropout > 0:
            return "FlexAttention has no dropout"
        if call.bias is not None and call.bias.reads_vectors:
            return "the bias reads the vectors of queries and keys, which FlexAttention does not hand to it"
        return _why_not_here(call)

    def remark(self, call: Call) -> str | None:
        if call.query.device.type == "cuda":
            return None
        return "its kernel returns no row state: a map computes it by a scores-only pass when it is first read"

    def run(self, call: Call, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the kernel for this kind of call; the first one compiles it."""
        on_cuda = call.query.device.type == "cuda"
        if not on_cuda and is_recorded() and value.requires_grad:
            raise BackendError(f"backend 'flex' cannot run this call: {_NO_GRADIENTS}; detach the values")
        tensors = tuple(t.to(call.query.dtype) for t in (call.query, call.key, value))
        if not on_cuda:
            # The kernel refuses tensors with requires_grad, even if no gradients are recorded.
            tensors = tuple(t.detach() for t in tensors)
        if not all(t.numel() for t in tensors):
            return _nothing(call, value)
        output, lse = _attend(call, *tensors, with_lse=on_cuda)
        return output.to(value.dtype), lse


_NO_GRADIENTS = "on the CPU FlexAttention has no gradient, and something here requires one"


def _why_not_here(call: Call) -> str | None:
    kind = call.query.device.type
    if kind not in ("cpu", "cuda"):
        return f"FlexAttention is used on the CPU and on CUDA, not on {kind}"
    if call.query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"FlexAttention has no {call.query.dtype} on {kind}"
    if kind == "cuda":
        return None
    if is_recorded() and any(t.requires_grad for t in (call.query, call.key, *call.learned())):
        return _NO_GRADIENTS
    if not _has_compiler():
        known = " or ".join(COMPILERS)
        return f"torch.compile needs a C++ compiler ({known}, or the one that CXX names), and finds none"
    return None


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS) if name)


def _dot_and_cap(score: Score, dim: int) -> tuple[float, float | None] | None:
    inner, cap = (score.score, score.cap) if isinstance(score, SoftCapped) else (score, None)
    scale = inner.dot_scale(dim)
    return None if scale is None else (scale, cap)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Shapes are not dynamic: with dynamic shapes torch 2.13 writes C++ that does not compile if a mask or a bias reads
    # a tensor.
    return torch.compile(  # type: ignore[call-overload]
        flex_attention, fullgraph=True, dynamic=False, recompile_limit=MOST_KERNELS, isolate_recompiles=True
    )


def _attend(call: Call, query: Tensor, key: Tensor, value: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest

    from regard.tensors.torch_private import TorchDynamoException

    found = _dot_and_cap(call.score, query.shape[-1])
    assert found is not None, "why_not has said so"
    scale, cap = found
    options: dict[str, Any] = {
        "score_mod": _score_mod(call.bias, cap),
        "block_mask": None if call.mask is None else call.mask.block_mask(call.sizes, query.device),
        "scale": scale,
        "enable_gqa": call.group > 1,
    }
    if with_lse:
        options["return_aux"] = AuxRequest(lse=True)
    try:
        answer = _compiled()(query, key, value, **options)
    except TorchDynamoException as error:
        raise BackendError(
            f"backend 'flex' cannot run this call: torch has not compiled it ({type(error).__name__}, above); "
            "backend=None runs every call"
        ) from error
    if not with_lse:
        return answer, None
    output, lse = answer[0], answer[1].lse
    dead = ~torch.isfinite(lse) & ~torch.isnan(lse)
    return output.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -torch.inf)


def _nothing(call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
    rows = call.query.shape[:-1]
    state = call.query.new_full(rows, -torch.inf, dtype=call.compute_dtype)
    return value.new_zeros(*rows, value.shape[-1]), state


def _score_mod(bias: Bias | None, cap: float | None) -> ScoreMod | None:
    if bias is None and cap is None:
        return None
    added = None if bias is None else _lookup(bias.tensor) if isinstance(bias, DenseBias) else _by_value(bias)

    # FlexAttention accepts only a plain function here.
    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = score if cap is None else cap * torch.tanh(score / cap)
        return score if added is None else score + added(batch, head, query, key).to(score.dtype)

    return score_mod


def _lookup(tensor: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def at(*index: Tensor) -> Tensor:
        return tensor[tuple(i if n > 1 else torch.zeros_like(i) for i, n in zip(index, tensor.shape, strict=True))]

    return at


def _by_value(bias: Bias) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A function from the head and the positions of query and key to a bias without vectors."""

    def at(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return bias.value(head, query, key, query, key)

    return at
