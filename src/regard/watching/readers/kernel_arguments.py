"""The arguments of the kernels of other packages, as their documentation has them.

Sources: FlashAttention 2.8, 3 and 4, xformers 0.0.35, torch 2.13's `torch.nn.attention.varlen`, TransformerEngine 2.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.tensors.torch_private import DisableTorchFunction
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.kernel_calls import Diagonal, Given, KernelCall, KernelForm, KernelRows, used_keys
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall
from regard.watching.running.thread_state import ThreadState

NO_WEIGHTS = (
    "deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "max_seqlen_q", "max_seqlen_k",
    "max_seqlen", "return_attn_probs", "return_softmax_lse", "return_lse", "return_aux", "enable_gqa", "op",
    "output_dtype", "out", "max_seqlen_kv", "checkpoint_core_attention", "fast_zero_fill", "pad_between_seqs",
    "rotary_interleaved",
)  # fmt: skip
"""Arguments that choose how a kernel computes, or what it returns."""


def _window(given: Given) -> tuple[int | None, int | None]:
    """The farthest keys to the left and to the right of (left, right); below 0, or None, is no limit."""
    left, right = (None if end is None or end < 0 else end for end in given("window_size") or (None, None))
    if given("causal", default=False):
        right = 0 if right is None else min(right, 0)
    return left, right


def _flash_form(given: Given) -> KernelForm:
    left, right = _window(given)
    return KernelForm(
        given("softmax_scale", "scale"), left, right, cap=given("softcap") or 0.0, slopes=given("alibi_slopes"),
        sink=given("s_aux", "learnable_sink"), dropout=given("dropout_p") or 0.0,
    )  # fmt: skip


def _flash(given: Given, result: Any) -> KernelCall:
    """`flash_attn_func` and all others of FlashAttention: packed vectors, packed sequences, or both."""
    given.passed_by(*NO_WEIGHTS)
    query, key, value = _unpacked(given)
    ends = given("cu_seqlens_q", "cu_seqlens")
    form, (output, lse) = _flash_form(given), _with_lse(result)
    used = given("seqused_q"), given("seqused_k")
    if ends is None:
        rows, columns = KernelRows.of_batch(query, used[0]), KernelRows.of_batch(key, used[1])
        return KernelCall.of(given.function, (query, key, value), (rows, columns), form, output=output, lse=lse)
    rows = KernelRows.packed(ends, given("max_seqlen_q", "max_seqlen"), used[0])
    pages, key_ends = given("block_table", "page_table"), given("cu_seqlens_k", "cu_seqlens")
    if pages is not None:
        counts = used[1] if key_ends is None else key_ends.diff()
        key, value = (x[pages.long()].flatten(1, 2) for x in (key, value))
        columns = KernelRows.of_batch(key, counts)
    elif key_ends is ends and used == (None, None):
        columns = rows
    else:
        columns = KernelRows.packed(key_ends, given("max_seqlen_k", "max_seqlen"), used[1])
    return KernelCall.of(given.function, (query, key, value), (rows, columns), form, output=output, lse=lse)


def _unpacked(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, which may be one tensor (..., 3, H, D), or two of which one is (..., 2, G, D)."""
    if (all_three := given("qkv")) is not None:
        if all_three.dim() > 3 and all_three.shape[-3] == 3:
            query, key, value = all_three.unbind(-3)
            return query, key, value
        raise ArgumentError(f"{given.function} with num_heads_q= is not read: which heads are keys is not known here")
    if (both := given("kv")) is not None:
        key, value = both.unbind(-3)
        return given("q"), key, value
    return given("q"), given("k"), given("v")


def _with_lse(result: Any) -> tuple[Tensor, Tensor | None]:
    """The output, and the log-sum-exp where a function returns it too."""
    if isinstance(result, Tensor):
        return result, None
    return result[0], result[1] if isinstance(result[1], Tensor) else None


def _flash_cached(given: Given, result: Any) -> KernelCall:
    """`flash_attn_with_kvcache`: the keys of the cache, and the new ones that the kernel has written to it."""
    given.passed_by(*NO_WEIGHTS, "v")
    query, cache, values, new = (given(name) for name in ("q", "k_cache", "v_cache", "k"))
    before, pages, chosen = given("cache_seqlens"), given("block_table", "page_table"), given("cache_batch_idx")
    if pages is not None:
        cache, values = (x[pages.long()].flatten(1, 2) for x in (cache, values))
    elif chosen is not None:
        cache, values = (x[chosen.long()] for x in (cache, values))
    counts = None
    if before is not None:
        before = torch.as_tensor(before, device=query.device).long().expand(len(query))
        counts = before + (0 if new is None else new.shape[1])
    key, value = used_keys(cache[: len(query)], counts), used_keys(values[: len(query)], counts)
    output, lse = _with_lse(result)
    rows, columns = KernelRows.of_batch(query), KernelRows.of_batch(key, counts)
    return KernelCall.of(
        given.function, (query, key, value), (rows, columns), _flash_form(given), output=output, lse=lse
    )


def _varlen(given: Given, result: Any) -> KernelCall:
    """torch's `varlen_attn`; a window of (-1, 0) is causal."""
    given.passed_by(*NO_WEIGHTS)
    query, key, value = (given(name) for name in ("query", "key", "value"))
    ends, key_ends, used, pages = (given(name) for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"))
    rows = KernelRows.packed(ends, given("max_q"))
    if pages is not None:
        key, value = (x[pages.long()].flatten(1, 2) for x in (key, value))
        columns = KernelRows.of_batch(key, used)
    elif key_ends is ends and used is None:
        columns = rows
    else:
        columns = KernelRows.packed(key_ends, given("max_k"), used)
    given.passed_by("max_k")
    output, lse = _with_lse(result)
    # The operator has the log-sum-exp as (H, total), the documentation as (total, H).
    is_turned = lse is not None and lse.shape == query.shape[:2] and lse.shape != query.shape[1::-1]
    lse = lse.mT if lse is not None and is_turned else lse
    return KernelCall.of(
        given.function, (query, key, value), (rows, columns), _flash_form(given), output=output, lse=lse
    )


XFORMERS: dict[str, tuple[Diagonal, bool]] = {
    "LowerTriangularMask": ("first", True),
    "LowerTriangularFromBottomRightMask": ("last", True),
    "LowerTriangularFromBottomRightLocalAttentionMask": ("last", True),
    "LocalAttentionFromBottomRightMask": ("last", False),
    "BlockDiagonalMask": ("last", False),
    "BlockDiagonalCausalMask": ("first", True),
    "BlockDiagonalCausalFromBottomRightMask": ("last", True),
    "BlockDiagonalPaddedKeysMask": ("last", False),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ("last", True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ("last", False),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": ("last", True),
    "BlockDiagonalGappyKeysMask": ("last", False),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": ("last", True),
    "BlockDiagonalCausalLocalAttentionMask": ("first", True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": ("last", True),
}
"""The attention biases of xformers by their classes: where they are aligned, and whether they are causal."""


def _xformers(given: Given, result: Any) -> KernelCall:
    """`memory_efficient_attention`: (B, M, H, K), (B, M, K) of one head, or (B, M, G, H, K) of grouped heads."""
    given.passed_by(*NO_WEIGHTS)
    output, lse = _with_lse(result)
    rank = output.dim()
    query, key, value = (_of_heads(given(name)) for name in ("query", "key", "value"))
    if rank == 5 and given("key").stride(3) == given("value").stride(3) == 0:
        key, value = (given(name)[:, :, :, 0] for name in ("key", "value"))
    bias, scale, dropout = given("attn_bias"), given("scale"), given("p") or 0.0
    form = _of_bias(bias, scale, dropout, given.function)
    queries: Any = getattr(bias, "q_seqinfo", None)
    keys: Any = getattr(bias, "k_seqinfo", None)
    if queries is None:
        rows, columns = KernelRows.of_batch(query), KernelRows.of_batch(key)
        lse = None if lse is None or lse.dim() != 3 else lse
        return KernelCall.of(
            given.function, (query, key, value), (rows, columns), form, output=output, lse=lse, in_rows=_of_heads
        )  # fmt: skip
    rows = KernelRows.packed(queries.seqstart.to(query.device), queries.max_seqlen)
    columns = rows
    if keys is not queries:
        counts = getattr(keys, "seqlen", None)
        counts = None if counts is None else counts.to(query.device)
        columns = KernelRows.packed(keys.seqstart[: rows.number + 1].to(query.device), keys.max_seqlen, counts)

    def in_rows(x: Tensor) -> Tensor:
        return _of_heads(x).flatten(0, 1)

    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    lse = None if lse is None else lse.flatten(0, 1) if lse.dim() == 3 and len(lse) == 1 else None
    return KernelCall.of(
            given.function, (query, key, value), (rows, columns), form, output=output, lse=lse, in_rows=in_rows
        )  # fmt: skip


def _of_heads(x: Tensor) -> Tensor:
    return x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x


def _of_bias(bias: Any, scale: float | None, dropout: float, function: str) -> KernelForm:
    if bias is None:
        return KernelForm(scale, dropout=dropout)
    if isinstance(bias, Tensor):
        return KernelForm(scale, added=bias.flatten(1, 2) if bias.dim() == 5 else bias, dropout=dropout)
    kind = type(bias)
    home = vars(sys.modules[kind.__module__])
    known = next((form for name, form in XFORMERS.items() if home.get(name) is kind), None)
    if known is None:
        raise ArgumentError(
            f"{function} with attn_bias={kind.__name__} is not read: which pairs it hides is not known here"
        )
    diagonal, is_causal = known
    has = {one.name.strip("_"): getattr(bias, one.name) for one in fields(bias)} if is_dataclass(bias) else {}
    size = has.get("window_size")
    left = has.get("window_left") if size is None else size - 1
    right = 0 if is_causal else has.get("window_right")
    return KernelForm(scale, left, right, diagonal, dropout=dropout)


def _engine(given: Given, result: Any) -> KernelCall:
    """TransformerEngine's `DotProductAttention`: settings of the module, which its forward may override."""
    module = given("self")
    given.function = "DotProductAttention"
    given.passed_by(*NO_WEIGHTS)
    layout = given("qkv_format") or module.qkv_format
    kind = (
        (given("attn_mask_type") or module.attn_mask_type).replace(",", "_").replace("causal_padding", "padding_causal")
    )
    query, key, value = (given(f"{name}_layer") for name in ("query", "key", "value"))
    heads, output = query.shape[-2], result[0] if isinstance(result, tuple) else result

    def in_rows(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (heads, -1))
        return x.transpose(0, 1) if layout == "sbhd" else x

    if layout == "sbhd":
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    elif layout not in ("bshd", "thd"):
        raise ArgumentError(f"DotProductAttention with qkv_format={layout!r} is not read: it is of another layout")
    rows, columns = _engine_rows(given, query, key, layout, kind)
    form = _engine_form(given, module, kind)
    return KernelCall.of(given.function, (query, key, value), (rows, columns), form, output=output, in_rows=in_rows)


def _engine_rows(given: Given, query: Tensor, key: Tensor, layout: str, kind: str) -> tuple[KernelRows, KernelRows]:
    ends = given("cu_seqlens_q"), given("cu_seqlens_kv")
    padded = given("cu_seqlens_q_padded"), given("cu_seqlens_kv_padded")
    mask = given("attention_mask")
    if layout == "thd":
        made = [
            KernelRows.packed(end if wide is None else wide, longest, None if wide is None else end.diff())
            for end, wide, longest in zip(ends, padded, (given("max_seqlen_q"), given("max_seqlen_kv")), strict=True)
        ]
        return made[0], made[1]
    if not kind.startswith("padding"):
        return KernelRows.of_batch(query), KernelRows.of_batch(key)
    if mask is not None:
        both = mask if isinstance(mask, tuple) else (mask, mask)
        counts = [(~one).reshape(len(one), -1).sum(-1) for one in both]
    else:
        counts = [end.diff() for end in ends]
    return KernelRows.of_batch(query, counts[0]), KernelRows.of_batch(key, counts[1])


def _engine_form(given: Given, module: Any, kind: str) -> KernelForm:
    left, right = (None if end < 0 else end for end in given("window_size") or module.window_size or (-1, -1))
    right = 0 if "causal" in kind else right
    from_last = given("bottom_right_diagonal")
    from_last = getattr(module, "bottom_right_diagonal", None) if from_last is None else from_last
    if "bottom_right" in kind or "causal" in kind or from_last is None:
        from_last = kind not in ("causal", "padding_causal")
    sort, added, slopes = given("core_attention_bias_type"), given("core_attention_bias"), given("alibi_slopes")
    if sort == "pre_scale_bias":
        raise ArgumentError("DotProductAttention with core_attention_bias_type='pre_scale_bias' is not read")
    if sort == "alibi" and slopes is None:
        raise ArgumentError("DotProductAttention with ALiBi is read with alibi_slopes= only")
    if kind == "arbitrary":
        if added is not None:
            raise ArgumentError("DotProductAttention with a mask and core_attention_bias= is not read")
        added = ~given("attention_mask")
    scale = getattr(getattr(module, "unfused_attention", module), "softmax_scale", None)
    return KernelForm(
        scale, left, right, "last" if from_last else "first", slopes=slopes if sort == "alibi" else None,
        sink=getattr(module, "softmax_offset", None), added=added,
        dropout=module.attention_dropout if module.training else 0.0,
    )  # fmt: skip


ReadKernel = Callable[[Given, Any], KernelCall]
"""From the arguments by name and the result of a function to the call."""


class KernelFunction(NamedTuple):
    """The parameters that tell a kernel's function from others of its name, and its reader."""

    takes: frozenset[str]
    read: ReadKernel


KERNELS = {
    name: KernelFunction(frozenset(takes.split()), read)
    for name, takes, read in (
        ("flash_attn_func", "q k v", _flash),
        ("flash_attn_qkvpacked_func", "qkv", _flash),
        ("flash_attn_kvpacked_func", "q kv", _flash),
        ("flash_attn_varlen_func", "q k v cu_seqlens_q", _flash),
        ("flash_attn_varlen_qkvpacked_func", "qkv cu_seqlens", _flash),
        ("flash_attn_varlen_kvpacked_func", "q kv cu_seqlens_q", _flash),
        ("flash_attn_with_kvcache", "q k_cache v_cache", _flash_cached),
        ("memory_efficient_attention", "query key value attn_bias", _xformers),
        ("memory_efficient_attention_forward", "query key value attn_bias", _xformers),
        ("memory_efficient_attention_forward_requires_grad", "query key value attn_bias", _xformers),
        ("varlen_attn", "query key value cu_seq_q", _varlen),
    )
}
"""The functions of attention kernels by name."""
ENGINE = KernelFunction(frozenset({"query_layer", "key_layer", "value_layer", "qkv_format"}), _engine)
"""The forward of TransformerEngine's `DotProductAttention`."""


@dataclass(slots=True, eq=False)
class UnreadKernel(ObservedCall):
    """A call with an argument that is not read."""

    how: str
    error: ArgumentError
    has_scores: ClassVar[bool] = False

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        raise self.error

    def query_key_value(self) -> CallVectors:
        return CallVectors(None, None, None)


def observe_kernel(read: ReadKernel, thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a kernel's function, and hand it to the thread's watches as one call."""
    thread.is_reading = True  # The parts of a kernel are no calls of the model.
    try:
        result = func(*args, **kwargs)
    finally:
        thread.is_reading = False
    thread.try_to(_give, read, thread, func, args, kwargs, result)
    return result


def _give(read: ReadKernel, thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    function = func.func if isinstance(func, partial) else func
    of: Signature = signature(func)
    bound = of.bind(*args, **kwargs)
    bound.apply_defaults()
    defaults = {name: one.default for name, one in of.parameters.items() if one.default is not Parameter.empty}
    given = Given(function.__name__, bound.arguments, defaults)
    try:
        with DisableTorchFunction():
            call = read(given, result)
            given.require_read()
    except ArgumentError as error:
        thread.give(UnreadKernel(given.function, error))
        return
    call.origins = thread.streams.origins(call.query, call.key)
    thread.streams.follow(call.output, call.query)
    thread.give(call)
