"""Maps of linear mixers: exact at each length, linear in memory, and the price of their statistics and of a watch."""

import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import regard
from benchmarks.harness import Row, compare, without_gradients

TITLE = "Maps of linear mixers"
COMMON: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
DELTA = HYBRID | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Next": DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
    "KimiLinear": DELTA | EXPERTS | {
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "linear_num_heads": 4,
        "linear_head_dim": 16, "num_local_experts": 4, "num_key_value_heads": 4,
    },
    "Bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "FalconH1": MAMBA2 | {"mamba_d_ssm": 128, "head_dim": 16},
    "MiniMax": HYBRID | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Jamba": EXPERTS | {
        "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
}  # fmt: skip
LENGTHS = (64, 1000, 4096)
HEADS, DIM = 16, 64


def run() -> tuple[list[Row], list[str]]:
    """The bars: errors of 1e-5, five statistics in 6 times a forward, a watch within 1.05, memory times 8."""
    return list(_rows()), [*_errors(), *_memory()]


def model_of(family: str) -> torch.nn.Module:
    """A small hybrid of random weights."""
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(**COMMON | FAMILIES[family])
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@torch.no_grad()
def _errors() -> Iterator[str]:
    """The largest |map @ v - output| of a layer's function, over the largest |v|, by family and length."""
    lines = [f"| largest error of map @ v | {' | '.join(f'T = {n:,}' for n in LENGTHS)} |", "|---" * 4 + "|"]
    for family in FAMILIES:
        model, found = model_of(family), []
        for length in LENGTHS:
            with regard.watch(model, verify=True) as seen:
                model(torch.randint(3, 50, (1, length)))
            call = next(one for one in seen.calls if one.kind not in ("attention", "cross-attention"))
            assert isinstance(call.error, float), (family, call.notes)
            found.append(f"{call.error:.0e}")
        lines.append(f"| {family}: {call.how} | {' | '.join(found)} |")
    yield "\n".join(lines)


def gated_delta(length: int) -> dict[str, Tensor]:
    """The factors of a layer of 16 heads, (B, H, T, ...)."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, length, DIM, generator=generator).unbind()
    gates = torch.rand(2, 1, HEADS, length, generator=generator)
    key = torch.nn.functional.normalize(k, dim=-1)
    return {"query": q, "key": key, "value": v, "decay": -gates[0] / 8, "beta": gates[1]}


def map_of(length: int) -> regard.AttentionMap:
    given = gated_delta(length)
    return regard.linear_attention(**given, removal="delta", return_weights=True).weights


def five(weights: regard.AttentionMap) -> Any:
    """The sums of rows; and received, the top 8 of each query, a mean and a max picture of 64 x 64, in one pass."""
    return weights.sum(-1), weights.summary("received", "top_keys", "pooled_mean", "pooled_max", k=8)


def _rows() -> Iterator[Row]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    given, weights = gated_delta(4096), map_of(4096)
    q, k, v, g, beta = (given[name].transpose(1, 2) for name in ("query", "key", "value", "decay", "beta"))
    forward = without_gradients(torch_chunk_gated_delta_rule, q, k, v, g, beta)
    statistics = without_gradients(lambda: five(weights))
    yield compare("T = 4,096, 16 heads of 64: the layer's forward, five statistics", forward, statistics,
                  target=1 / 6, seconds=20.0)  # fmt: skip
    model, ids = model_of("Qwen3Next"), torch.randint(3, 50, (4, 1024))

    def watched() -> None:
        with regard.watch(model):
            model(ids)

    yield compare("Qwen3-Next, hidden 64, 4 x 1,024 tokens: not watched, watched", without_gradients(model, ids),
                  without_gradients(watched), target=1 / 1.05, seconds=20.0)  # fmt: skip


def _memory() -> Iterator[str]:
    peaks = {length: _peak(lambda length=length: map_of(length).received()) for length in (4096, 32768)}  # type: ignore[misc]
    yield (
        f"Output, map and received() of 16 heads of 64 take {peaks[4096]:,} MiB at T = 4,096 and {peaks[32768]:,} MiB "
        f"at 32,768: times {peaks[32768] / peaks[4096]:.1f}."
    )


def _peak(compute: Callable[[], object]) -> int:
    """How far a computation raises the memory of a fork of this process, in MiB."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        torch.set_num_threads(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with torch.no_grad():
            compute()
        os.write(writing, str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return int(os.read(reading, 64))
