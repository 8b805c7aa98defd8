"""The arguments of the kernels of other packages, as their documentation has them.

Sources: FlashAttention 2.8, 3 and 4, torch 2.13's `torch.nn.attention.varlen`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.tensors.fresh import copied
from regard.tensors.torch_private import DisableTorchFunction
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.kernel_calls import KernelCall, KernelForm, KernelRows
from regard.watching.readers.traced_calls import NamedFunction
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall
from regard.watching.running.thread_state import ThreadState

NO_WEIGHTS = (
    "deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "max_seqlen_q", "max_seqlen_k",
    "max_seqlen", "return_attn_probs", "return_softmax_lse", "return_lse", "return_aux", "enable_gqa", "out",
    "rotary_interleaved",
)  # fmt: skip


class KernelArguments:
    def __init__(self, function: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.function = function
        self._arguments, self._defaults = dict(arguments), defaults
        self._asked: set[str] = set()

    def __call__(self, *names: str, default: Any = None) -> Any:
        self._asked |= set(names)
        return next((self._arguments[name] for name in names if name in self._arguments), default)

    def passed_by(self, *names: str) -> None:
        self._asked |= set(names)

    def require_read(self) -> None:
        for name, value in self._arguments.items():
            default = self._defaults.get(name)
            is_default = value is default or (not isinstance(value, Tensor) and value == default)
            if name not in self._asked and not is_default and value is not None:
                raise ArgumentError(f"{self.function} with {name}= is not read: its effect on the weights is unknown")


def used_keys(cache: Tensor, counts: Tensor | None) -> Tensor:
    """The part of a cache (N, S, G, D) that is in use, as a copy: the next step writes to it."""
    return copied(cache if counts is None else cache[:, : int(counts.max())])


def _window(given: KernelArguments) -> tuple[int | None, int | None]:
    """The farthest keys to the left and to the right of (left, right); below 0, or None, is no limit."""
    left, right = (None if end is None or end < 0 else end for end in given("window_size") or (None, None))
    if given("causal", default=False):
        right = 0 if right is None else min(right, 0)
    return left, right


def _flash_form(given: KernelArguments) -> KernelForm:
    left, right = _window(given)
    return KernelForm(
        given("softmax_scale", "scale"), left, right, cap=given("softcap") or 0.0, slopes=given("alibi_slopes"),
        sink=given("s_aux", "learnable_sink"), dropout=given("dropout_p") or 0.0,
    )  # fmt: skip


def _flash(given: KernelArguments, result: Any) -> KernelCall:
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


def _unpacked(given: KernelArguments) -> tuple[Tensor, Tensor, Tensor]:
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
    if isinstance(result, Tensor):
        return result, None
    return result[0], result[1] if isinstance(result[1], Tensor) else None


def _flash_cached(given: KernelArguments, result: Any) -> KernelCall:
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


def _varlen(given: KernelArguments, result: Any) -> KernelCall:
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


def _not_read(function: str, given: KernelArguments, result: Any) -> NoReturn:
    given.function = function
    raise ArgumentError(
        f"{function} is not read, so that its weights are not seen: use FlashAttention, varlen_attn, "
        "F.scaled_dot_product_attention or flex_attention"
    )


ReadKernel = Callable[[KernelArguments, Any], KernelCall]
"""From the arguments by name and the result of a function to the call."""


@dataclass(slots=True, eq=False)
class UnreadKernel(ObservedCall):
    how: str
    error: ArgumentError
    has_scores: ClassVar[bool] = False

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        raise self.error

    def query_key_value(self) -> CallVectors:
        return CallVectors(None, None, None)


def observe_kernel(read: ReadKernel, thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
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
    given = KernelArguments(function.__name__, bound.arguments, defaults)
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


XFORMERS = (
    "memory_efficient_attention", "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
)  # fmt: skip

_READERS: tuple[tuple[str, str, ReadKernel], ...] = (
    ("flash_attn_func", "q k v", _flash),
    ("flash_attn_qkvpacked_func", "qkv", _flash),
    ("flash_attn_kvpacked_func", "q kv", _flash),
    ("flash_attn_varlen_func", "q k v cu_seqlens_q", _flash),
    ("flash_attn_varlen_qkvpacked_func", "qkv cu_seqlens", _flash),
    ("flash_attn_varlen_kvpacked_func", "q kv cu_seqlens_q", _flash),
    ("flash_attn_with_kvcache", "q k_cache v_cache", _flash_cached),
    ("varlen_attn", "query key value cu_seq_q", _varlen),
    *((name, "query key value attn_bias", partial(_not_read, f"{name} of xformers")) for name in XFORMERS),
)


def _named(parameters: str, read: ReadKernel) -> NamedFunction:
    return NamedFunction(frozenset(parameters.split()), partial(observe_kernel, read))


KERNELS = {name: _named(parameters, read) for name, parameters, read in _READERS}
ENGINE = _named(
    "query_layer key_layer value_layer qkv_format", partial(_not_read, "DotProductAttention of TransformerEngine")
)
