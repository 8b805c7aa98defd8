"""The directive `in-models`: which models of the installed transformers have a feature, counted in their source files.

A feature is a regular expression over the files of a model's folder. The table names the models that most readers know,
and as many others as fit a line.
"""

import importlib.metadata
import re
from functools import cache
from pathlib import Path

from sphinx.application import Sphinx

FEATURES = {
    "keys without a bias": (
        r"self\.k_proj = nn\.Linear\([^)\n]*bias=False\)[\s\S]{0,300}"
        r"self\.[qv]_proj = nn\.Linear\((?![^)\n]*bias=False)[^)\n]*\)"
    ),
    "queries, keys and values by one matrix": (
        r"\bself\.(qkv|query_key_value|c_attn|Wqkv|qkv_proj) = (nn\.)?(Linear|Conv1D)"
    ),
    "a scale of its own": r"query_pre_attn_scalar|attention_multiplier",
    "grouped heads": r"num_key_value_heads",
    "rotary positions": r"apply_rotary_pos_emb|apply_multimodal_rotary",
    "part of a head rotated": r"partial_rotary_factor|rotary_pct",
    "sinusoidal positions": r"[Ss]inusoidal",
    "learned positions": r"self\.(position_embeddings?|wpe|embed_positions) = "
    r"(nn\.(Embedding|Parameter)|\w*LearnedPositionalEmbedding)",
    "layers without positions": r"no_rope|nope_layer",
    "relative positions as a bias": r"relative_attention_bias|relative_position_bias|rel_pos|alibi",
    "sliding windows": r"sliding_window",
    "sliding and full layers": r"layer_types[\s\S]{0,4000}sliding_attention",
    "causal masks": r"create_causal_mask|is_causal = True",
    "packed rows": r"cu_seqlens",
    "norms of queries and keys": r"self\.(q_norm|query_norm|q_layernorm)\b",
    "soft caps": r"softcap",
    "sinks": r"\bsinks\b",
    "output gates": r"attn_output_gate|attn_output \* torch\.sigmoid",
    "latent keys": r"kv_lora_rank",
    "linear layers": (
        r"delta_rule|kimi_delta|DeltaAttention|LightningAttention|Rwkv\w*Attention|"
        r"selective_scan|ssm_state|[Mm]amba\w*Mixer"
    ),
    "mixtures of experts": r"num_experts|n_routed_experts|num_local_experts",
    "cross-attention": r"encoder_attn\b|EncDecAttention|self\.cross_attn\b",
    "an encoder and a decoder": r"is_encoder_decoder\b[^=\n]{0,20}= ?True",
    "recurrent layers": r"nn\.(LSTM|GRU)\(",
    "norm before attention": r"input_layernorm|layer_norm1|norm1|ln_1",
    "a head that predicts the next token": r"class \w+ForCausalLM",
    "a head that fills masks": r"class \w+ForMaskedLM",
    "fused kernels": r"_supports_sdpa = True|ALL_ATTENTION_FUNCTIONS",
    "weights handed back": r"output_attentions",
}
# fmt: off
KNOWN = (
    "llama", "qwen3", "gemma3", "mistral", "deepseek_v3", "gpt_oss", "qwen2", "gemma2", "olmo3", "glm4", "smollm3",
    "phi3", "mixtral", "qwen3_next", "qwen3_5", "minimax", "kimi_linear", "mamba2", "jamba", "gpt2", "bert",
    "roberta", "modernbert", "deberta_v2", "t5", "bart", "marian", "whisper", "vit", "dinov2", "clip", "esm",
    "bloom", "mpt",
)
# fmt: on


@cache
def sources() -> dict[str, str]:
    """The source of each model of the installed transformers."""
    home = Path(str(importlib.metadata.distribution("transformers").locate_file("transformers")))
    folders = [path for path in (home / "models").iterdir() if any(path.glob("modeling_*.py")) and path.name != "auto"]
    return {
        folder.name: "\n".join(
            file.read_text(encoding="utf-8")
            for pattern in ("modeling_*.py", "configuration_*.py")
            for file in sorted(folder.glob(pattern))
        )
        for folder in sorted(folders)
    }


def table(features: list[str]) -> str:
    """A Markdown table of features, counts and examples."""
    texts = sources()
    lines = [
        f"Counted in the sources of transformers {importlib.metadata.version('transformers')}, {len(texts)} models:",
        "",
        "| feature | models | among them |",
        "|---|---|---|",
    ]
    for feature in features:
        found = {name for name, text in texts.items() if re.search(FEATURES[feature], text)}
        known = [name for name in KNOWN if name in found]
        shown = (known + sorted(found - set(known)))[:7]
        lines.append(f"| {feature} | {len(found)} | {', '.join(f'`{name}`' for name in shown)} |")
    return "\n".join(lines)


def expanded(text: str) -> str:
    """The text of a page with each directive replaced by its table."""
    return re.sub(
        r"```\{in-models\}\n(.*?)```\n",
        lambda found: table([line.strip() for line in found[1].splitlines() if line.strip()]) + "\n",
        text,
        flags=re.DOTALL,
    )


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Expand the directive as a page is read."""
    source[0] = expanded(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
