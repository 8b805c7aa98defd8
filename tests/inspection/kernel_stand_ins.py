"""The public functions of FlashAttention 2 and 3, xformers and TransformerEngine by their formula.

They have the signatures of these packages, whose kernels run on no CPU. `install` puts them into `sys.modules`.
"""

# mypy: disable-error-code="no-untyped-def"
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

CALLS: list[dict[str, Any]] = []
"""The weights of each call, a matrix (H, T, S) for each sequence."""


def one(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: Any = (-1, -1), causal: bool = False,
    first: bool = False, cap: float = 0.0, slopes: Tensor | None = None, sink: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of one sequence, (T, H, D) on (S, G, D): output (T, H, E), log-sum-exp (H, T), weights (H, T, S)."""
    queries, keys = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if not cap else cap * torch.tanh(scores / cap)
    i, j = torch.arange(queries)[:, None] + (0 if first else keys - queries), torch.arange(keys)
    scores = scores if slopes is None else scores - slopes[:, None, None] * (i - j).abs()
    scores = scores if bias is None else scores + bias
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    hidden = hidden if left is None or left < 0 else hidden | (j < i - left)
    hidden = hidden if right is None or right < 0 else hidden | (j > i + right)
    scores = scores.masked_fill(hidden, -torch.inf)
    more = scores if sink is None else torch.cat([scores, sink[:, None, None].expand(-1, queries, 1)], -1)
    weights = more.softmax(-1).nan_to_num()[..., :keys]
    lse = more.logsumexp(-1)
    return torch.einsum("hij,jhe->ihe", weights, v), lse.masked_fill(lse == -torch.inf, torch.inf), weights


def batch(
    q: Tensor, k: Tensor, v: Tensor, counts: Any = None, slopes: Any = None, **form: Any
) -> tuple[Tensor, Tensor]:
    counts = [k.shape[1]] * len(q) if counts is None else torch.as_tensor(counts).expand(len(q)).tolist()
    parts = [
        one(q[n], k[n, :s], v[n, :s], slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[n], **form)
        for n, s in enumerate(counts)
    ]
    CALLS.append({"weights": [part[2] for part in parts]})
    return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])


def packed(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, used: Any = None, slopes: Any = None, **form: Any
) -> tuple[Tensor, Tensor]:
    output, lse, weights = torch.zeros_like(q[..., : v.shape[-1]]), q.new_zeros(q.shape[1], len(q)), []
    for n, (a, b, c, d) in enumerate(zip(ends, ends[1:], key_ends, key_ends[1:], strict=False)):
        d = d if used is None else c + used[n]
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[n]
        output[a:b], lse[:, a:b], made = one(q[a:b], k[c:d], v[c:d], slopes=own, **form)
        weights.append(made)
    CALLS.append({"weights": weights})
    return output, lse


def formed(scale: Any, causal: bool, window: Any, cap: float, slopes: Any = None, sink: Any = None) -> dict[str, Any]:
    return {"scale": scale, "causal": causal, "window": window, "cap": cap, "slopes": slopes, "sink": sink}


def returned(found: tuple[Tensor, Tensor], is_asked: bool) -> Any:
    return (*found, None) if is_asked else found[0]


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    form = formed(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return returned(batch(q, k, v, **form), return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    form = formed(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return returned(batch(*qkv.unbind(2), **form), return_attn_probs)


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    form = formed(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return returned(batch(q, *kv.unbind(2), **form), return_attn_probs)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    form = formed(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if block_table is not None:
        k, v = (x[block_table.long()].flatten(1, 2) for x in (k, v))
        k, v = (torch.cat([one[:n] for one, n in zip(x, cu_seqlens_k.diff(), strict=True)]) for x in (k, v))
    return returned(packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **form), return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    form = formed(softmax_scale, causal, window_size, softcap, alibi_slopes)
    q, k, v = qkv.unbind(1)
    return returned(packed(q, k, v, cu_seqlens, cu_seqlens, **form), return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    form = formed(softmax_scale, causal, window_size, softcap, alibi_slopes)
    k, v = kv.unbind(1)
    return returned(packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **form), return_attn_probs)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    counts = torch.as_tensor(k_cache.shape[1] if cache_seqlens is None else cache_seqlens).expand(len(q))
    if k is not None:
        for n, begin in enumerate(counts.tolist()):
            k_cache[n, begin : begin + k.shape[1]] = k[n]
            v_cache[n, begin : begin + k.shape[1]] = v[n]
        counts = counts + k.shape[1]
    form = formed(softmax_scale, causal, window_size, softcap, alibi_slopes)
    found = batch(q, k_cache, v_cache, counts, **form)
    return found if return_softmax_lse else found[0]


class Three:
    """FlashAttention 3, with the sinks that its build in vLLM has."""

    @staticmethod
    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False, s_aux=None,
    ):  # fmt: skip
        form = formed(softmax_scale, causal, window_size, softcap, sink=s_aux)
        found = batch(q, k, v, **form)
        return found if return_attn_probs else found[0]

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False, s_aux=None,
    ):  # fmt: skip
        form = formed(softmax_scale, causal, window_size, softcap, sink=s_aux)
        found = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, **form)
        return found if return_attn_probs else found[0]


class SeqInfo:
    """xformers' `_SeqLenInfo`, and `_PaddedSeqLenInfo` if keys are padded."""

    def __init__(self, lengths: list[int], padding: int | None = None) -> None:
        widths = lengths if padding is None else [padding] * len(lengths)
        self.seqstart = torch.tensor([0, *widths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.max_seqlen = max(lengths)
        if padding is not None:
            self.seqlen = torch.tensor(lengths, dtype=torch.int32)


class LowerTriangularMask:
    form: ClassVar[dict[str, Any]] = {"causal": True, "first": True}


class LowerTriangularFromBottomRightMask:
    form: ClassVar[dict[str, Any]] = {"causal": True}


class LocalAttentionFromBottomRightMask:
    def __init__(self, window_left: int, window_right: int) -> None:
        self.window_left, self.window_right = window_left, window_right
        self.form = {"window": (window_left, window_right)}


class BlockDiagonalMask:
    form: ClassVar[dict[str, Any]] = {}

    def __init__(self, lengths: list[int], key_lengths: list[int] | None = None, padding: int | None = None) -> None:
        self.q_seqinfo = SeqInfo(lengths)
        self.k_seqinfo = self.q_seqinfo if key_lengths is None else SeqInfo(key_lengths, padding)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    form: ClassVar[dict[str, Any]] = {"causal": True, "first": True}


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    form: ClassVar[dict[str, Any]] = {"causal": True}


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalMask):
    form: ClassVar[dict[str, Any]] = {"causal": True}


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalMask):
    _window_size = 2
    form: ClassVar[dict[str, Any]] = {"causal": True, "first": True, "window": (1, -1)}


class UnknownMask:
    form: ClassVar[dict[str, Any]] = {}


MASKS = (
    LowerTriangularMask, LowerTriangularFromBottomRightMask, LocalAttentionFromBottomRightMask, BlockDiagonalMask,
    BlockDiagonalCausalMask, BlockDiagonalCausalFromBottomRightMask, BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalCausalLocalAttentionMask, UnknownMask,
)  # fmt: skip


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    shape = query.shape
    q, k, v = (x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x for x in (query, key, value))
    if (info := getattr(attn_bias, "q_seqinfo", None)) is not None:
        keys = attn_bias.k_seqinfo
        q, k, v = q[0], k[0], v[0]
        used = getattr(keys, "seqlen", None)
        return packed(q, k, v, info.seqstart, keys.seqstart, used, scale=scale, **attn_bias.form)[0].reshape(shape)
    if isinstance(attn_bias, Tensor):
        parts = [one(*x, scale=scale, bias=b) for *x, b in zip(q, k, v, attn_bias, strict=True)]
        CALLS.append({"weights": [part[2] for part in parts]})
        return torch.stack([part[0] for part in parts]).reshape(shape)
    form = {} if attn_bias is None else attn_bias.form
    return batch(q, k, v, scale=scale, **form)[0].reshape(shape)


class DotProductAttention(nn.Module):
    """TransformerEngine's, with the settings that it has as attributes."""

    def __init__(
        self, num_attention_heads: int, kv_channels: int, num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: Any = None, softmax_scale: float | None = None, softmax_offset: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.qkv_format, self.attn_mask_type, self.attention_dropout = qkv_format, attn_mask_type, attention_dropout
        self.window_size, self.softmax_offset = window_size or (-1, -1), softmax_offset
        self.unfused_attention = nn.Module()
        self.unfused_attention.softmax_scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale  # type: ignore[assignment]

    def forward(
        self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
        attn_mask_type=None, window_size=None, checkpoint_core_attention=False, core_attention_bias_type="no_bias",
        core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None,
    ):  # fmt: skip
        layout, kind = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        form: dict[str, Any] = {
            "scale": self.unfused_attention.softmax_scale, "window": window_size or self.window_size,
            "causal": "causal" in kind, "first": kind in ("causal", "padding_causal"), "sink": self.softmax_offset,
        }  # fmt: skip
        q, k, v = query_layer, key_layer, value_layer
        if layout == "thd":
            # Its kernel is FlashAttention's, which is no second call of the model.
            kernel = sys.modules["flash_attn"].flash_attn_varlen_func
            ends = cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
            return kernel(q, k, v, *ends, softmax_scale=form["scale"], causal=form["causal"]).flatten(-2)
        q, k, v = (x.transpose(0, 1) if layout == "sbhd" else x for x in (q, k, v))
        output = torch.zeros_like(q)
        counts = [q.shape[1]] * len(q)
        if kind == "arbitrary":
            form["bias"] = torch.zeros(attention_mask.shape[-2:]).masked_fill(attention_mask[0, 0], -torch.inf)
        elif attention_mask is not None:
            counts = (~attention_mask).sum(-1).flatten().tolist()
        weights = []
        for n, count in enumerate(counts):
            keys = count if kind.startswith("padding") else k.shape[1]
            output[n, :count], _, made = one(q[n, :count], k[n, :keys], v[n, :keys], **form)
            weights.append(made)
        CALLS.append({"weights": weights})
        return (output.transpose(0, 1) if layout == "sbhd" else output).flatten(-2)


FLASH = (
    flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func, flash_attn_with_kvcache,
)  # fmt: skip


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the packages into `sys.modules`, until the patch is undone."""
    CALLS.clear()
    two, three, engine = ModuleType("flash_attn"), ModuleType("flash_attn_interface"), ModuleType("transformer_engine")
    ops: Any = ModuleType("xformers.ops")
    two.__version__ = "2.8.3"  # type: ignore[attr-defined]
    for function in FLASH:
        setattr(two, function.__name__, function)
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        setattr(three, name, getattr(Three, name))
    ops.memory_efficient_attention, ops.fmha = memory_efficient_attention, ModuleType("xformers.ops.fmha")
    for mask in MASKS:
        setattr(ops.fmha, mask.__name__, mask)
    engine.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    for module in (two, three, ops, engine):
        module.__spec__ = ModuleSpec(module.__name__, None)
        patch.setitem(sys.modules, module.__name__, module)
