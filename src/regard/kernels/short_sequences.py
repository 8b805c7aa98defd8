"""Compiled CPU kernel for short sequences, in training and for the sources of a file."""

import numpy as np
import torch
from torch import Tensor

from regard.kernels.base import Call
from regard.kernels.fused_kernels import CpuFlash, Extras, Gradients, OneBlock, Residuals
from regard.kernels.short_attention_work import AXES, BACKWARD, FORWARD, TENSORS, WORK
from regard.tensors.guards import State, in_transform, is_compiling, is_observed, is_readable
from regard.tensors.readable import DTYPES, is_installed
from regard.tensors.thread_team import run_in_threads

LONGEST = 128
"""The most queries and keys: beyond, torch's kernel is as fast."""
WIDEST = 128
"""The widest heads: beyond, the data of one head exceeds the cache."""
LEAST = 1 << 16
"""Queries with fewer elements are left to torch's kernel: loading numba takes longer."""
STEP = 16
"""The width of the heads is a multiple of this, the elements of one vector."""


class ShortSequences(CpuFlash):
    """Compiled code for batches of short sequences, and torch's kernel for all others.

    It computes in float32, so half precision is rounded once where torch's kernel also rounds the weights.
    """

    name = "short sequences, CPU"
    reads_output = False

    def why_not(self, call: Call, state: State) -> str | None:
        """The reason why torch's kernel is as fast as this one; None for batches of many short sequences."""
        return why_not_vectors(call.query, call.key)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: OneBlock) -> tuple[Tensor, Tensor, Extras]:
        if not _takes(query, key, value, block.added.tensor):
            return super().forward(query, key, value, block)
        output = _memory_like(query)
        lse = torch.empty(query.shape[:-1], dtype=torch.float32, device="cpu")
        _run(FORWARD, block, query=query, key=key, value=value, output=output, lse=lse)
        return output, lse, ()

    def backward(self, grad: Tensor, saved: Residuals, extras: Extras, block: OneBlock) -> Gradients:
        query, key, value, output, lse = saved
        # A saved-tensor hook may have changed the dtype.
        is_known = lse.dtype == torch.float32 and grad.dtype == output.dtype == query.dtype
        if not is_known or not _takes(query, key, value, block.added.tensor, output, lse, grad):
            return super().backward(grad, saved, extras, block)
        of_query, of_key, of_value = map(_memory_like, (query, key, value))
        _run(
            BACKWARD, block, query=query, key=key, value=value, output=output, lse=lse, grad=grad,
            grad_query=of_query, grad_key=of_key, grad_value=of_value,
        )  # fmt: skip
        return of_query, of_key, of_value


SHORT_SEQUENCES = ShortSequences()


def why_not_vectors(query: Tensor, key: Tensor) -> str | None:
    """The same for the vectors of a call.

    >>> why_not_vectors(torch.ones(1, 1, 8, 16), torch.ones(1, 1, 8, 16))
    'the kernel for short sequences takes queries of at least 65536 elements'
    """
    if max(query.shape[-2], key.shape[-2]) > LONGEST:
        return f"the kernel for short sequences takes at most {LONGEST} queries and keys"
    if query.numel() < LEAST:
        return f"the kernel for short sequences takes queries of at least {LEAST} elements"
    if not query.is_cpu or query.dtype not in DTYPES:
        return f"the kernel for short sequences knows no {query.dtype} on {query.device.type}"
    if is_compiling():
        return "torch.compile cannot trace the kernel for short sequences"
    return None if is_installed() else "the kernel for short sequences needs numba: pip install 'regard[fast]'"


def _takes(query: Tensor, key: Tensor, value: Tensor, additive: Tensor | None, *others: Tensor) -> bool:
    given = [t for t in (query, key, value, additive, *others) if t is not None]
    return (
        min(query.shape[-2], key.shape[-2]) > 0
        and query.shape[-1] % STEP == 0
        and query.shape[-1] <= WIDEST
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.dtype == key.dtype == value.dtype
        # Scores are stored key by key: additions may differ between keys, not between queries.
        and (additive is None or additive.shape[-2] == 1)
        and not in_transform("Grad", "Jvp")
        # A mode that counts torch's operators would miss compiled code.
        and not is_observed()
        and is_readable(*given)
        and all(t.stride(-1) == 1 for t in given)  # The record has all other strides.
    )


def _memory_like(heads: Tensor) -> Tensor:
    """New memory for (B, H, T, D), with the heads of a position adjacent, as in the products around it."""
    batch, count, length, width = heads.shape
    return torch.empty(batch, length, count, width, dtype=heads.dtype, device="cpu").transpose(1, 2)


def _run(kind: int, block: OneBlock, **given: Tensor) -> None:
    from regard.kernels.short_attention_loop import attend  # numba compiles here, or loads its cache

    query, key, additive = given["query"], given["key"], block.added.tensor
    batch, heads, queries, width = query.shape
    if additive is not None:
        given["added"] = additive.float().expand(batch, heads, 1, key.shape[-2])
    counter = np.zeros(1, np.int64)
    work = np.zeros(1, WORK)
    work["kind"], work["counter"], work["scale"] = kind, counter.ctypes.data, block.scale
    work["batch"], work["heads"], work["queries"], work["keys"] = batch, heads, queries, key.shape[-2]
    work["width"], work["is_causal"], work["is_half"] = width, block.is_causal, query.dtype == torch.bfloat16
    for name in TENSORS:
        if name in given:
            work[name] = given[name].data_ptr()
            for axis, stride in zip(AXES, given[name].stride(), strict=False):
                work[f"{name}_{axis}"] = stride
    run_in_threads(attend, work.ctypes.data, torch.get_num_threads())
