"""The public functions of FlashAttention 2 and 3, xformers and TransformerEngine by their formula.

They have the signatures of these packages, whose kernels run on no CPU. `install` puts them into `sys.modules`.
"""

# mypy: disable-error-code="no-untyped-def"
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CALLS: list[dict[str, Any]] = []
"""The weights of each call, a matrix (H, T, S) for each sequence."""


def one(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: Any = (-1, -1), causal: bool = False,
    cap: float = 0.0, slopes: Tensor | None = None, sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of one sequence, (T, H, D) on (S, G, D): output (T, H, E), log-sum-exp (H, T), weights (H, T, S)."""
    queries, keys = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if not cap else cap * torch.tanh(scores / cap)
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    scores = scores if slopes is None else scores - slopes[:, None, None] * (i - j).abs()
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


def stand_in(name: str, run: Callable[[dict[str, Any]], Any], required: str, **defaults: Any) -> Callable[..., Any]:
    """A function of this name and these parameters, which runs another with its arguments by name."""
    parameters = [Parameter(one, Parameter.POSITIONAL_OR_KEYWORD) for one in required.split()]
    parameters += [Parameter(one, Parameter.POSITIONAL_OR_KEYWORD, default=of) for one, of in defaults.items()]

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = Signature(parameters).bind(*args, **kwargs)
        bound.apply_defaults()
        return run(dict(bound.arguments))

    function.__name__, function.__signature__ = name, Signature(parameters)  # type: ignore[attr-defined]
    return function


def flash(given: dict[str, Any]) -> Any:
    form = {
        "scale": given["softmax_scale"], "causal": given["causal"], "window": given["window_size"],
        "cap": given["softcap"], "slopes": given.get("alibi_slopes"), "sink": given.get("s_aux"),
    }  # fmt: skip
    pair = given["kv"].unbind(-3) if "kv" in given else (given.get("k"), given.get("v"))
    q, k, v = given["qkv"].unbind(-3) if "qkv" in given else (given["q"], *pair)
    ends = given.get("cu_seqlens_q", given.get("cu_seqlens"))
    if ends is None:
        found = batch(q, k, v, **form)
    else:
        key_ends = given.get("cu_seqlens_k", ends)
        if given.get("block_table") is not None:
            k, v = (x[given["block_table"].long()].flatten(1, 2) for x in (k, v))
            k, v = (torch.cat([one[:n] for one, n in zip(x, key_ends.diff(), strict=True)]) for x in (k, v))
        found = packed(q, k, v, ends, key_ends, given.get("seqused_k"), **form)
    return (*found, None)[: 2 + ("dropout_p" in given)] if given["return_attn_probs"] else found[0]


def flash_cached(given: dict[str, Any]) -> Any:
    q, cache, values, k, counts = (given[name] for name in ("q", "k_cache", "v_cache", "k", "cache_seqlens"))
    counts = torch.as_tensor(cache.shape[1] if counts is None else counts).expand(len(q))
    if k is not None:
        for n, begin in enumerate(counts.tolist()):
            cache[n, begin : begin + k.shape[1]] = k[n]
            values[n, begin : begin + k.shape[1]] = given["v"][n]
        counts = counts + k.shape[1]
    if (pages := given["block_table"]) is not None:
        cache, values = (x[pages.long()].flatten(1, 2) for x in (cache, values))
    elif (chosen := given["cache_batch_idx"]) is not None:
        cache, values = cache[chosen], values[chosen]
    found = batch(q, cache, values, counts, causal=given["causal"])
    return found if given["return_softmax_lse"] else found[0]


TWO: dict[str, Any] = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
THREE: dict[str, Any] = {
    "softmax_scale": None, "causal": False, "qv": None, "q_descale": None, "k_descale": None, "v_descale": None,
    "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 1, "pack_gqa": None,
    "deterministic": False, "sm_margin": 0, "return_attn_probs": False, "s_aux": None,
}  # fmt: skip
CACHE: dict[str, Any] = {
    "k": None, "v": None, "rotary_cos": None, "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None,
    "cache_leftpad": None, "block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
    "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip
ENDS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
FLASH = (
    stand_in("flash_attn_func", flash, "q k v", **TWO),
    stand_in("flash_attn_qkvpacked_func", flash, "qkv", **TWO),
    stand_in("flash_attn_kvpacked_func", flash, "q kv", **TWO),
    stand_in("flash_attn_varlen_func", flash, f"q k v {ENDS}", **TWO, block_table=None),
    stand_in("flash_attn_varlen_qkvpacked_func", flash, "qkv cu_seqlens max_seqlen", **TWO),
    stand_in("flash_attn_varlen_kvpacked_func", flash, f"q kv {ENDS}", **TWO),
    stand_in("flash_attn_with_kvcache", flash_cached, "q k_cache v_cache", **CACHE),
)
FLASH_3 = (  # with the sinks of its build in vLLM
    stand_in("flash_attn_func", flash, "q k v", **THREE),
    stand_in("flash_attn_varlen_func", flash, f"q k v {ENDS}", seqused_q=None, seqused_k=None, **THREE),
)


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    return batch(query, key, value, scale=scale)[0]


class DotProductAttention(nn.Module):
    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None):
        return sys.modules["flash_attn"].flash_attn_func(query_layer, key_layer, value_layer)


def install(patch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    two, three, engine = ModuleType("flash_attn"), ModuleType("flash_attn_interface"), ModuleType("transformer_engine")
    ops: Any = ModuleType("xformers.ops")
    two.__version__ = "2.8.3"  # type: ignore[attr-defined]
    for home, functions in ((two, FLASH), (three, FLASH_3)):
        for function in functions:
            setattr(home, function.__name__, function)
    ops.memory_efficient_attention = memory_efficient_attention
    engine.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    for module in (two, three, ops, engine):
        module.__spec__ = ModuleSpec(module.__name__, None)
        patch.setitem(sys.modules, module.__name__, module)
